"""Which cases of a sweep `make test` runs. Some of the others are marked ``thorough``, for `make
test-thorough`, and the rest ``slow``, for `make test-slow`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def thorough(*values: Any) -> Any:
    """The values of one case of ``parametrize``, left to `make test-thorough`."""
    return pytest.param(*values, marks=pytest.mark.thorough)


def sweep(cases: Iterable[Any], count: int = 1, later: int = 0) -> list[Any]:
    """Cases of ``parametrize``, of which `make test` runs the first ``count`` and `make
    test-thorough` ``later`` more. A tuple has a value for each of several parameters."""
    return _left(list(cases), set(range(count)), later)


def covering(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Cases of several parameters, of which `make test` runs a few that have every value of each
    parameter. The next to be chosen has the most values that are still missing."""
    given = [(case, set(enumerate(case))) for case in cases]
    missing = set().union(*(values for _, values in given))
    chosen: set[int] = set()
    while missing:
        most = max(range(len(given)), key=lambda i: len(given[i][1] & missing))
        chosen.add(most)
        missing -= given[most][1]
    return _left([case for case, _ in given], chosen, 0)


def _left(cases: list[Any], chosen: set[int], count: int) -> list[Any]:
    """The cases; all but the chosen ones are marked, ``count`` of them, evenly spread, as thorough
    and the rest as slow."""
    left = [i for i in range(len(cases)) if i not in chosen]
    some = {left[i * len(left) // count] for i in range(count)} if left else set()
    marked = []
    for i, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        mark = pytest.mark.thorough if i in some else pytest.mark.slow
        marked.append(case if i in chosen else pytest.param(*values, marks=mark))
    return marked
