"""Litmus tests of single stores and signals between all ordered pairs of ranks at once, by the
kernels of csrc/cuda/litmus.cuh, and of copy engines.

Zero wrong values of N do not prove that there are none: with 95 % confidence the rate is below 3/N,
which the report says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

import tpkernels
from tpkernels import _C, cuda, groups
from tpkernels.common.integers import ceil_div
from tpkernels.cuda.image import launch
from tpkernels.cuda.layouts import MOST_BLOCKS, PACK_BYTES, ll_words
from tpkernels.cuda.operands import space_of
from tpkernels.launch.session import rank_device, synchronizer
from tpkernels.planning.qualification import Failure
from tpkernels.qualification.checks import TIMEOUT_S, Failed, StageReport, reporting
from tpkernels.symm.device import DeviceWorkspace

_RECORDS = 16
# Packs of each pair and round, and rounds: more than 2^23 packs of each pair.
_SIZES = {"cpu": (280, 20), "cuda": (7 << 13, 160)}
_COPY_ROUNDS = 20


def check(name: str, device: str, repeats: int = 1) -> StageReport:
    """Run a litmus test on this rank; report how many packs of 16 bytes arrived right."""
    with reporting(dist.get_rank()) as report, _space(rank_device(device)) as space:
        report.call = name
        if name == "copies":
            _copies(space, repeats, report)
        else:
            _stores(name, space, device, repeats, report)
    return report


@contextlib.contextmanager
def _space(device: torch.device) -> Iterator[DeviceWorkspace]:
    """Make a group with a workspace that holds a round; its kernels' failures are raised."""
    group = dist.new_group()
    assert group is not None  # all ranks are in it
    tpkernels.init(group, timeout=TIMEOUT_S, autotune=False)
    own = groups.get(group.group_name)
    try:
        reason = own.unsupported_kernels(device, "CUDA", cuda.unsupported(device))
        if reason is not None or own.workspace is None:
            raise NotImplementedError(reason or f"share no memory: {own.why_not_shared}")
        nbytes = _SIZES[device.type][0] * PACK_BYTES
        sizes = ll_words(nbytes), own.world * nbytes
        yield own.workspace.cuda(device, *sizes, "a litmus test").current
        tpkernels.check(group)
        own.exchange_in_turn("end of the stage", 0, "cpu")  # nobody leaves before all have looked
    finally:
        dist.destroy_process_group(group)


def _stores(
    name: str, space: DeviceWorkspace, device: str, repeats: int, report: StageReport
) -> None:
    """Run the rounds of a kernel."""
    packs, rounds = _SIZES[device]
    nbytes = packs * PACK_BYTES
    found = torch.zeros(2 + 4 * _RECORDS, dtype=torch.int64, device=space.regions.device)
    blocks = min(MOST_BLOCKS, ceil_div(packs, 512))
    for number in range(rounds * repeats):
        arguments = _C.cuda.Litmus(found.data_ptr(), _RECORDS, number, nbytes)
        words = space_of(space, 1 + number)
        launch(f"litmus_{name}", found.device, words, arguments, blocks=blocks)
    if (wait := synchronizer(device)) is not None:
        wait()
    report.checks, wrong, *records = found.tolist()
    if not wrong:
        return
    taken = [records[i : i + 4] for i in range(0, 4 * min(wrong, _RECORDS), 4)]
    first = tuple((at, f"{got:#x}", f"{want:#x}") for _, at, got, want in taken)
    call = f"litmus test of {name}, all pairs of ranks simultaneously"
    text = "the flag arrived, but the values differ from those that were sent"
    raise Failed(Failure("wrong", call, space.rank, taken[0][0], text, report.checks, wrong, first))


def _copies(space: DeviceWorkspace, repeats: int, report: StageReport) -> None:
    """Fetch, by copy engines, what each peer has put into its memory and announced."""
    count, device = 1 << 10, space.regions.device
    peers = [(space.rank + i) % space.world for i in range(1, space.world)]
    own, theirs = (torch.empty(count, dtype=torch.int64, device=device) for _ in range(2))
    for number in range(_COPY_ROUNDS * repeats):
        fetched = {}
        with cuda.CopyCall(space, 1 + number) as call:
            torch.arange(count, out=own).add_(_value(number, space.rank))
            call.put(own, 0)
            call.publish(1)
            for peer in peers:
                call.fetch(peer, 1, theirs, 0)
                fetched[peer] = theirs.clone()
        for peer, values in fetched.items():
            want = torch.arange(count, device=device) + _value(number, peer)
            wrong = (values != want).nonzero().flatten().tolist()
            if wrong:
                first = tuple((i, str(int(values[i])), str(int(want[i]))) for i in wrong[:_RECORDS])
                call_text, counts = f"litmus test of copies, round {number}", (count, len(wrong))
                raise Failed(Failure("wrong", call_text, space.rank, peer, "", *counts, first))
        report.checks += count * len(peers)


def _value(number: int, rank: int) -> int:
    return (number * 1000 + rank) * 1_000_003
