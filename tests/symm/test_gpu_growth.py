"""How the workspaces of kernels on GPUs grow."""

from __future__ import annotations

import pytest
import torch

from tests.support.cases import RanksFixture
from tests.support.cuda_rehearsal import pretending
from tests.support.ranked import fresh_group, report
from tests.support.tiers import sweep
from tpkernels import groups
from tpkernels.cuda.layouts import LL_BYTES, ll_words
from tpkernels.symm import host

CPU = torch.device("cpu")


def growth_job() -> list[str]:
    """Calls that need ever more words, then ever more bytes, then more of both."""
    failures = []
    with pretending(), fresh_group() as group:
        workspace = groups.get(group.group_name).workspace
        assert workspace is not None
        workspace.open_cuda(CPU, "fused", None)
        needs = [(1 << n, 1) for n in range(3, 12)] + [(1, 1 << n) for n in range(12, 20)]
        needs += [(1 << 15, 1 << 21), (1, 1)]
        for words, nbytes in needs:
            before = workspace.on_gpus[CPU].current
            memory = workspace.cuda(CPU, words, nbytes, "a call")
            after = memory.current
            case = f"{words} words, {nbytes} bytes"
            if not after.holds(words, nbytes):
                failures.append(f"{case}: too small")
            if before.holds(words, nbytes) and after is not before:
                failures.append(f"{case}: it grew")
            if after is not before:
                kept = before.words >= words, before.buffer_bytes >= nbytes
                if kept[0] and after.words != before.words:
                    failures.append(f"{case}: its words grew from {before.words} to {after.words}")
                if kept[1] and after.buffer_bytes != before.buffer_bytes:
                    failures.append(f"{case}: its buffers grew to {after.buffer_bytes}")
                if after.nbytes < 2 * before.nbytes:
                    failures.append(f"{case}: {before.nbytes} and {after.nbytes} bytes")
        total = sum(space.nbytes for space in memory.spaces)
        if len(memory.spaces) < 5 or total >= 2 * memory.current.nbytes:
            failures.append(f"{len(memory.spaces)} workspaces of {total} bytes")
    return failures


@pytest.mark.parametrize("world", sweep([2, 3]))
def test_what_is_too_small_grows(ranks: RanksFixture, world: int) -> None:
    """All workspaces together take less than twice the largest."""
    report(failure for rank in ranks(world).run(growth_job) for failure in rank)


def test_calls_by_ll_fit_at_first() -> None:
    assert ll_words(LL_BYTES) <= host._FIRST_WORDS
