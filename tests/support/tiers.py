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
    """Cases of several parameters, of which `make test` runs every value of each parameter once."""
    seen: set[tuple[int, Any]] = set()
    chosen = []
    for case in cases:
        new = set(enumerate(case)) - seen
        seen |= new
        chosen.append(case if new else _left(case))
    return chosen


def _left(case: Any) -> Any:
    return thorough(*case) if isinstance(case, tuple) else thorough(case)
