"""Assignment of sweep cases to test tiers.

`make test` runs the unmarked cases, `make test-thorough` also the cases marked ``thorough``, and
`make test-slow` the cases marked ``slow``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def thorough(*values: Any) -> Any:
    """Create a case of ``parametrize`` that only `make test-thorough` runs."""
    return pytest.param(*values, marks=pytest.mark.thorough)


def sweep(cases: Iterable[Any], count: int = 1, num_thorough: int = 0) -> list[Any]:
    """Assign cases of ``parametrize`` to tiers.

    `make test` runs the first ``count`` cases, `make test-thorough` ``num_thorough`` more. A tuple
    holds one value per parameter.
    """
    return _mark_rest(list(cases), set(range(count)), num_thorough)


def covering(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Select cases for `make test` that cover every value of each parameter.

    Greedy: each step selects the case with the most missing values.
    """
    case_values = [(case, set(enumerate(case))) for case in cases]
    missing = set().union(*(values for _, values in case_values))
    chosen: set[int] = set()
    while missing:
        best = max(range(len(case_values)), key=lambda i: len(case_values[i][1] & missing))
        chosen.add(best)
        missing -= case_values[best][1]
    return _mark_rest([case for case, _ in case_values], chosen, 0)


def _mark_rest(cases: list[Any], chosen: set[int], num_thorough: int) -> list[Any]:
    """Mark all cases except the chosen ones.

    ``num_thorough`` of them, evenly spread, are thorough, the rest slow.
    """
    rest = [i for i in range(len(cases)) if i not in chosen]
    thorough_indices = (
        {rest[i * len(rest) // num_thorough] for i in range(num_thorough)} if rest else set()
    )
    marked = []
    for i, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        mark = pytest.mark.thorough if i in thorough_indices else pytest.mark.slow
        marked.append(case if i in chosen else pytest.param(*values, marks=mark))
    return marked
