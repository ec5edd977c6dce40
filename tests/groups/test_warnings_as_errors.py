"""Under ``-W error``, rank 0 raises a warning only when its peers no longer wait for it, and the
group goes on."""

from __future__ import annotations

import contextlib
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import faults
from tests.support.cases import RanksFixture
from tpkernels.planning import store
from tpkernels.planning.table import Table
from tpkernels.symm import colocation, host

WORLD = 2
LARGE = 1 << 20  # elements, for which a workspace must grow


def warned_job(what: str) -> tuple[list[str], float]:
    """The errors of a call that warns and of the next one, and the sum of the latter."""
    group = faults.group_of(dist.new_group())
    doings = {
        "init": lambda: tpkernels.init(group, faults.PATIENCE, 8 << 20),
        "op": lambda: tpkernels.all_reduce(torch.ones(LARGE), group),
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        first = "init" if what == "init" else "op"
        if what in ("init", "first op"):
            stack.enter_context(
                mock.patch.object(colocation, "unsupported", lambda: "pretends to lack memfds")
            )
        else:
            doings["init"]()
        if what == "growth":
            stack.enter_context(mock.patch.object(host, "short_of_memory", lambda *_: "simulated"))
        if what == "tuning":
            ignored = Table(), "the tuning cache is ignored"
            stack.enter_context(mock.patch.object(store, "load", lambda machine: ignored))
        warnings.simplefilter("error")
        errors = [faults.ending_of(doings[first])]
        errors += [faults.ending_of(doings["op"])]
        result = tpkernels.all_reduce(torch.ones(3), group)
    assert all(one.seconds < faults.PATIENCE / 2 for one in errors), errors
    return [one.error for one in errors], result.sum().item()


@pytest.mark.parametrize("what", ["init", "first op", "growth", "tuning"])
def test_a_warning_that_is_an_error_breaks_nothing(ranks: RanksFixture, what: str) -> None:
    first, *others = ranks(WORLD).run(warned_job, what)
    assert first == (["RuntimeWarning", ""], 3.0 * WORLD)
    assert others == [(["", ""], 3.0 * WORLD)] * (WORLD - 1)
