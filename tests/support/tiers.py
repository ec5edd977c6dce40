"""Which cases of a sweep `make test` runs. The others are marked ``thorough``: `make test-thorough`
runs them too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def thorough(*values: Any) -> Any:
    """The values of one case of ``parametrize``, left to `make test-thorough`."""
    return pytest.param(*values, marks=pytest.mark.thorough)


def sweep(cases: Iterable[Any], count: int = 1) -> list[Any]:
    """Cases of ``parametrize``, of which `make test` runs the first ``count``. A tuple has a value
    for each of several parameters."""
    return [case if i < count else _left(case) for i, case in enumerate(cases)]


def covering(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Cases of several parameters, of which `make test` runs a few that have every value of each
    parameter. The next to be chosen has the most values that are still missing."""
    given = [(case, set(enumerate(case))) for case in cases]
    missing = set().union(*(values for _, values in given))
    chosen = set()
    while missing:
        most = max(range(len(given)), key=lambda i: len(given[i][1] & missing))
        chosen.add(most)
        missing -= given[most][1]
    return [case if i in chosen else _left(case) for i, (case, _) in enumerate(given)]


def _left(case: Any) -> Any:
    return thorough(*case) if isinstance(case, tuple) else thorough(case)
