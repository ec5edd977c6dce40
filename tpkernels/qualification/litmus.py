"""Litmus tests of stores and signals (csrc/cuda/litmus.cuh) and of copy engines. A round runs on
all ordered pairs of ranks concurrently.

Zero wrong values out of N do not prove correctness. With 95 % confidence the error rate is below
3/N. The report contains this bound.
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
from tpkernels.cuda.layouts import MAX_BLOCKS, PACK_BYTES, ll_signals
from tpkernels.cuda.operands import kernel_workspace
from tpkernels.launch.session import rank_device, synchronizer
from tpkernels.planning.qualification import Failure
from tpkernels.qualification.checks import TIMEOUT_S, StageFailed, StageReport, collect_report
from tpkernels.symm.device import DeviceWorkspace

_RECORDS = 16
# Packs per pair and round, number of rounds. In total more than 2^23 packs per pair on GPUs.
_SIZES = {"cpu": (280, 20), "cuda": (7 << 13, 160)}
_COPY_ROUNDS = 20


def check(name: str, device: str, repeats: int = 1) -> StageReport:
    """Run a litmus test on this rank. Report the number of correct values: 16-byte packs, or
    8-byte elements of "copies"."""
    with (
        collect_report(dist.get_rank()) as report,
        _create_workspace(rank_device(device)) as workspace,
    ):
        report.call = name
        if name == "copies":
            _run_copies(workspace, repeats, report)
        else:
            _run_stores(name, workspace, device, repeats, report)
    return report


@contextlib.contextmanager
def _create_workspace(device: torch.device) -> Iterator[DeviceWorkspace]:
    """Create a group whose workspace holds a round. Raise the failures of its kernels."""
    group = dist.new_group()
    assert group is not None  # the group contains all ranks
    tpkernels.init(group, timeout=TIMEOUT_S, autotune=False)
    tp_group = groups.get(group.group_name)
    try:
        reason = tp_group.unsupported_kernels(device, "CUDA", cuda.unsupported(device))
        if reason is not None or tp_group.workspace is None:
            raise NotImplementedError(reason or f"share no memory: {tp_group.unshared_reason}")
        nbytes = _SIZES[device.type][0] * PACK_BYTES
        sizes = ll_signals(nbytes), tp_group.world * nbytes
        yield tp_group.workspace.cuda_workspace(device, *sizes, "a litmus test").current
        tpkernels.check(group)
        # Keep the group alive until all ranks have checked their results.
        tp_group.lock_and_exchange("end of the stage", 0, "cpu")
    finally:
        dist.destroy_process_group(group)


def _run_stores(
    name: str, workspace: DeviceWorkspace, device: str, repeats: int, report: StageReport
) -> None:
    """Run the rounds of a litmus kernel."""
    packs, rounds = _SIZES[device]
    nbytes = packs * PACK_BYTES
    result = torch.zeros(2 + 4 * _RECORDS, dtype=torch.int64, device=workspace.regions.device)
    blocks = min(MAX_BLOCKS, ceil_div(packs, 512))
    for number in range(rounds * repeats):
        arguments = _C.cuda.Litmus(result.data_ptr(), _RECORDS, number, nbytes)
        workspace_args = kernel_workspace(workspace, 1 + number)
        launch(f"litmus_{name}", result.device, workspace_args, arguments, blocks=blocks)
    if (wait := synchronizer(device)) is not None:
        wait()
    report.checks, wrong, *records = result.tolist()
    if not wrong:
        return
    errors = [records[i : i + 4] for i in range(0, 4 * min(wrong, _RECORDS), 4)]
    first = tuple((index, f"{got:#x}", f"{want:#x}") for _, index, got, want in errors)
    call = f"litmus test of {name}, all pairs of ranks simultaneously"
    message = "the flag arrived, but the values differ from those that were sent"
    raise StageFailed(
        Failure("wrong", call, workspace.rank, errors[0][0], message, report.checks, wrong, first)
    )


def _run_copies(workspace: DeviceWorkspace, repeats: int, report: StageReport) -> None:
    """Copy the published buffer of each peer with copy engines, and check the values."""
    count, device = 1 << 10, workspace.regions.device
    peers = [(workspace.rank + i) % workspace.world for i in range(1, workspace.world)]
    source, received = (torch.empty(count, dtype=torch.int64, device=device) for _ in range(2))
    for number in range(_COPY_ROUNDS * repeats):
        fetched = {}
        with cuda.CopyCall(workspace, 1 + number) as call:
            torch.arange(count, out=source).add_(_value(number, workspace.rank))
            call.put(source, 0)
            call.publish(1)
            for peer in peers:
                call.fetch(peer, 1, received, 0)
                fetched[peer] = received.clone()
        for peer, values in fetched.items():
            expected = torch.arange(count, device=device) + _value(number, peer)
            wrong = (values != expected).nonzero().flatten().tolist()
            if wrong:
                first = tuple(
                    (i, str(int(values[i])), str(int(expected[i]))) for i in wrong[:_RECORDS]
                )
                name, counts = f"litmus test of copies, round {number}", (count, len(wrong))
                raise StageFailed(Failure("wrong", name, workspace.rank, peer, "", *counts, first))
        report.checks += count * len(peers)


def _value(number: int, rank: int) -> int:
    return (number * 1000 + rank) * 1_000_003
