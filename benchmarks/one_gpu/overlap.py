"""Fraction of the communication that the fused kernels hide.

All-gather: only rank 0 of 8 runs. A small kernel plays the link: it copies the chunks of the peers
at the bandwidth of a link and sets the flags that copy engines would set. E_overlap = 1 - (fused -
GEMM) / link. The GEMM is the tile loop on the remaining multiprocessors, because copy engines would
not occupy any.

Matmul and reduce-scatter, or all-reduce: 2 virtual ranks, each on half of the GPU, compared with
two equal GEMMs on these halves. All traffic stays in the memory of one GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from benchmarks.one_gpu.machine import Machine, failed_wait, open_virtual_ranks, run_once
from benchmarks.one_gpu.stages import Case, Row
from benchmarks.one_gpu.tiles import MAX_ERROR
from tpkernels.kernels import all_gather_matmul, configs, matmul
from tpkernels.kernels.signals import clock, pause_for
from tpkernels.qualification.checks import CheckedCall
from tpkernels.qualification.virtual import Launch, Results, VirtualRanks
from tpkernels.symm.device import FLAGS_OFFSET
from tpkernels.symm.streams import SideStreams

LINK = 450e9  # bytes per second in one direction: NVLink of an H100
_WORLD = 8
_ITEM_BYTES = 2
_LINK_PROGRAMS, _BLOCK = 16, 32768  # programs of the link kernel; elements in flight per program
GATHERS = ((4096, 3584, 8192), (8192, 3584, 8192), (4096, 6144, 12288), (8192, 1376, 4096))
SUMS = ((4096, 8192, 3584), (8192, 8192, 3584), (4096, 4096, 1792))
_GRAPH_CALLS = 5


@triton.jit
def pace_kernel(  # type: ignore[no-untyped-def]
    source, dst, chunks, flags, done, count, ns, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr
):  # fmt: skip
    """Copy ``count`` chunks (first element, elements, flag) and set their flags.

    A chunk lasts at least ``ns`` nanoseconds. Its size is a multiple of 16 bytes.
    """
    program, begin = tl.program_id(0), clock()
    for i in range(count):
        first = tl.multiple_of(tl.load(chunks + 3 * i), 8)
        size = tl.multiple_of(tl.load(chunks + 3 * i + 1), 8)
        for start in range(program * BLOCK, size, PROGRAMS * BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            values = tl.load(source + first + offsets, mask=offsets < size)
            tl.store(dst + first + offsets, values, mask=offsets < size)
        pause_for(tl.maximum(tl.cast((i + 1) * ns, tl.int64) - (clock() - begin), 0))
        tl.debug_barrier()
        if tl.atomic_add(done + i, 1, sem="acq_rel", scope="gpu") == PROGRAMS - 1:
            tl.atomic_xchg(flags + tl.load(chunks + 3 * i + 2), 1, sem="release", scope="sys")


def cases(machine: Machine) -> Iterator[Case]:
    """Yield a case for each op and shape."""
    for shape in machine.choose(GATHERS, ((64, 32, 64),)):
        yield _name("all_gather_matmul", shape), partial(_gather, machine, *shape)
    for shape in machine.choose(SUMS, ((64, 32, 64),)):
        for op in ("matmul_reduce_scatter", "matmul_all_reduce"):
            yield _name(op, shape), partial(_halves, machine, op, shape)


def _name(op: str, shape: tuple[int, ...]) -> str:
    return f"{op} {'x'.join(map(str, shape))}"


class _Link(NamedTuple):
    """Simulated link that delivers the rows of the peers."""

    chunks: torch.Tensor  # first element, elements, index of the flag
    done: torch.Tensor  # number of finished programs, per chunk
    flags: torch.Tensor
    nanoseconds: int  # minimum time of a chunk

    def reset(self) -> None:
        """Clear the counters and flags."""
        self.done.zero_()
        self.flags.zero_()

    def copy(self, source: torch.Tensor, dst: torch.Tensor) -> None:
        """Copy all chunks and set their flags."""
        args: Any = source, dst, self.chunks, self.flags, self.done, len(self.chunks)
        pace_kernel[(_LINK_PROGRAMS, 1, 1)](
            *args, self.nanoseconds, _BLOCK, _LINK_PROGRAMS, num_warps=32
        )


def _gather(machine: Machine, m: int, n: int, k: int) -> Row:
    """Time rank 0. It holds its rows; the link delivers the rows of the peers."""
    x, w = machine.random(m, k, seed=1), machine.random(n, k, seed=2).t()
    gathered, out, rows = torch.full_like(x, torch.nan), machine.empty(m, n), m // _WORLD
    gathered[:rows] = x[:rows]
    config = configs.config_for(machine.device, x.dtype, m, n)
    shared_config = replace(config, programs=config.programs - machine.choose(_LINK_PROGRAMS, 1))
    gather = all_gather_matmul.prepare_with_copy_engines(
        shared_config, w, gathered, x.dtype, (rows,) * _WORLD
    )
    workspace = VirtualRanks(_WORLD, machine.device, 256, forked=False).workspaces[0]
    launch = gather.prepared.bind(workspace, 7)
    link = _link(gather, rows, k, workspace.state[FLAGS_OFFSET:])
    side_streams = SideStreams(machine.device)

    def fused() -> None:
        side_streams.fork()
        with side_streams.current():
            link.copy(x, gathered)
        launch(gathered, w, None, out)
        side_streams.join()

    link.reset()
    fused()
    machine.synchronize()
    error = machine.relative_error(out, x, w)
    runs: dict[str, Callable[[], object]] = {
        "torch.mm": machine.mm(x, w, out),
        "tile loop": partial(matmul.bind_matmul(config, x, w, x.dtype), x, w, None, out),
        "tile loop beside it": partial(
            matmul.bind_matmul(shared_config, x, w, x.dtype), x, w, None, out
        ),
        "link": partial(link.copy, x, gathered),
        "fused": fused,
    }
    us = {name: machine.microseconds(run, before=link.reset) for name, run in runs.items()}
    return {
        "bad": not error < MAX_ERROR or workspace.has_failed,
        "error": float(f"{error:.1e}"),
        "us": {name: round(value, 1) for name, value in us.items()},
        "E_overlap": round(1 - (us["fused"] - us["tile loop beside it"]) / us["link"], 3),
    }


def _link(
    gather: all_gather_matmul.CopyEngineLaunch, rows: int, k: int, flags: torch.Tensor
) -> _Link:
    """Make the link that delivers [rows, k] from every peer of rank 0."""
    step, chunks = gather.chunk_rows, []
    for owner in range(1, _WORLD):
        for i, top in enumerate(range(0, rows, step)):
            size = min(step, rows - top) * k
            chunks.append([(owner * rows + top) * k, size, owner * gather.chunks + i])
    table = torch.tensor(chunks, dtype=torch.int64, device=flags.device)
    done = torch.zeros(len(chunks), dtype=torch.int32, device=flags.device)
    return _Link(table, done, flags, int(table[:, 1].max() * _ITEM_BYTES / LINK * 1e9))


def _halves(machine: Machine, op: str, shape: tuple[int, int, int]) -> Row:
    """Time both ranks of an op, and their two GEMMs without communication."""
    call = CheckedCall(op, shape, torch.bfloat16, False, False, 1)
    with open_virtual_ranks(
        machine, f"fused/{op.removeprefix('matmul_')}", call, 2
    ) as virtual_ranks:
        ranks, launches, operands = virtual_ranks
        row: Row = {"error": run_once(ranks, launches, operands)}
        gemms = [_gemm(*inputs.tensor_args) for inputs in operands]
        if machine.kind == "stub":
            ranks.load(gemms)
        if machine.is_gpu and not row["error"]:
            us = {
                name: machine.microseconds(ranks.capture(runs, _GRAPH_CALLS)) / _GRAPH_CALLS
                for name, runs in (("fused", launches), ("tile loop", gemms))
            }
            row["us"] = {name: round(value, 1) for name, value in us.items()}
            row["fused / GEMM"] = round(us["fused"] / us["tile loop"], 3)
            row["error"] = failed_wait(ranks)
        return row | {"bad": bool(row["error"])}


def _gemm(x: torch.Tensor, w: torch.Tensor) -> Launch:
    out = torch.empty(x.shape[0], w.shape[1], dtype=x.dtype, device=x.device)
    config = configs.config_for(x.device, x.dtype, *out.shape)
    run = matmul.bind_matmul(config, x, w, x.dtype)

    def launch() -> Results:
        run(x, w, None, out)
        return [out]

    return launch
