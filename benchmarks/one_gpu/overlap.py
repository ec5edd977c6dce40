"""How much of the communication the fused kernels hide.

All-gather: rank 0 of 8 runs alone. A small kernel copies the peers' chunks at the pace of a link
and raises the flags that copy engines raise. E_overlap = 1 - (fused - GEMM) / link. The GEMM is
the tile loop on the multiprocessors that the small kernel leaves: copy engines need none.

Matmul and reduce-scatter, or all-reduce: 2 virtual ranks, each on half of the GPU, compared with
the same two GEMMs on the same halves. Their traffic is within one GPU's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from benchmarks.one_gpu.machine import Machine, failed_wait, ranks_of, run_once
from benchmarks.one_gpu.stages import Case, Row
from benchmarks.one_gpu.tiles import MAX_ERROR
from tpkernels.kernels import all_gather_matmul, configs, matmul
from tpkernels.kernels.words import clock, pause_for
from tpkernels.qualification.checks import CheckedCall
from tpkernels.qualification.virtual import Launch, Results, VirtualRanks
from tpkernels.symm.device import FLAGS_AT
from tpkernels.symm.streams import SideStream

LINK = 450e9  # bytes per second in one direction: NVLink of an H100
_WORLD = 8
_ITEM_BYTES = 2
_PACERS, _BLOCK = 16, 32768  # programs that play the link, and elements that each has in flight
GATHERS = ((4096, 3584, 8192), (8192, 3584, 8192), (4096, 6144, 12288), (8192, 1376, 4096))
SUMS = ((4096, 8192, 3584), (8192, 8192, 3584), (4096, 4096, 1792))
_GRAPH_CALLS = 5


@triton.jit
def pace_kernel(  # type: ignore[no-untyped-def]
    source, to, chunks, flags, arrived, count, ns, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr
):  # fmt: skip
    """Copy ``count`` chunks (first element, elements, flag), each in at least ``ns`` nanoseconds,
    and raise their flags. Chunks are made of whole vectors of 16 bytes."""
    program, begin = tl.program_id(0), clock()
    for i in range(count):
        first = tl.multiple_of(tl.load(chunks + 3 * i), 8)
        size = tl.multiple_of(tl.load(chunks + 3 * i + 1), 8)
        for at in range(program * BLOCK, size, PROGRAMS * BLOCK):
            offsets = at + tl.arange(0, BLOCK)
            values = tl.load(source + first + offsets, mask=offsets < size)
            tl.store(to + first + offsets, values, mask=offsets < size)
        pause_for(tl.maximum(tl.cast((i + 1) * ns, tl.int64) - (clock() - begin), 0))
        tl.debug_barrier()
        if tl.atomic_add(arrived + i, 1, sem="acq_rel", scope="gpu") == PROGRAMS - 1:
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
    """What the peers' rows arrive through."""

    chunks: torch.Tensor  # first element, elements, index of the flag
    arrived: torch.Tensor  # programs that have copied their share of each chunk
    flags: torch.Tensor
    nanoseconds: int  # of a chunk

    def reset(self) -> None:
        """Begin again."""
        self.arrived.zero_()
        self.flags.zero_()

    def copy(self, source: torch.Tensor, to: torch.Tensor) -> None:
        """Copy all chunks and raise their flags."""
        args: Any = source, to, self.chunks, self.flags, self.arrived, len(self.chunks)
        pace_kernel[(_PACERS, 1, 1)](*args, self.nanoseconds, _BLOCK, _PACERS, num_warps=32)


def _gather(machine: Machine, m: int, n: int, k: int) -> Row:
    """Time rank 0, which has its own rows; those of the peers arrive through the link."""
    x, w = machine.random(m, k, seed=1), machine.random(n, k, seed=2).t()
    gathered, out, rows = torch.full_like(x, torch.nan), machine.empty(m, n), m // _WORLD
    gathered[:rows] = x[:rows]
    config = configs.config_for(machine.device, x.dtype, m, n)
    fewer = replace(config, programs=config.programs - machine.choose(_PACERS, 1))
    arriving = all_gather_matmul.prepare_arriving(fewer, w, gathered, x.dtype, (rows,) * _WORLD)
    space = VirtualRanks(_WORLD, machine.device, 256, forked=False).spaces[0]
    launch = arriving.prepared.bind(space, 7)
    link = _link(arriving, rows, k, space.state[FLAGS_AT:])
    side = SideStream(machine.device)

    def fused() -> None:
        side.fork()
        with side.current():
            link.copy(x, gathered)
        launch(gathered, w, None, out)
        side.join()

    link.reset()
    fused()
    machine.synchronize()
    error = machine.relative_error(out, x, w)
    runs: dict[str, Callable[[], object]] = {
        "torch.mm": machine.mm(x, w, out),
        "tile loop": partial(matmul.bind_matmul(config, x, w, x.dtype), x, w, None, out),
        "tile loop beside it": partial(matmul.bind_matmul(fewer, x, w, x.dtype), x, w, None, out),
        "link": partial(link.copy, x, gathered),
        "fused": fused,
    }
    us = {name: machine.microseconds(run, before=link.reset) for name, run in runs.items()}
    return {
        "bad": not error < MAX_ERROR or space.has_failed,
        "error": float(f"{error:.1e}"),
        "us": {name: round(value, 1) for name, value in us.items()},
        "E_overlap": round(1 - (us["fused"] - us["tile loop beside it"]) / us["link"], 3),
    }


def _link(
    arriving: all_gather_matmul.ArrivingLaunch, rows: int, k: int, flags: torch.Tensor
) -> _Link:
    """Return the link for rows [rows, k] of every peer of rank 0."""
    step, chunks = arriving.chunk_rows, []
    for owner in range(1, _WORLD):
        for i, top in enumerate(range(0, rows, step)):
            size = min(step, rows - top) * k
            chunks.append([(owner * rows + top) * k, size, owner * arriving.chunks + i])
    table = torch.tensor(chunks, dtype=torch.int64, device=flags.device)
    arrived = torch.zeros(len(chunks), dtype=torch.int32, device=flags.device)
    return _Link(table, arrived, flags, int(table[:, 1].max() * _ITEM_BYTES / LINK * 1e9))


def _halves(machine: Machine, op: str, shape: tuple[int, int, int]) -> Row:
    """Time both ranks of an op, and their two GEMMs alone."""
    call = CheckedCall(op, shape, torch.bfloat16, False, False, 1)
    with ranks_of(machine, f"fused/{op.removeprefix('matmul_')}", call, 2) as given:
        ranks, launches, operands = given
        row: Row = {"error": run_once(ranks, launches, operands)}
        gemms = [_gemm(*one.factors) for one in operands]
        if machine.kind == "stub":
            ranks.load(gemms)
        if machine.is_gpu and not row["error"]:
            us = {
                name: machine.microseconds(ranks.capture(each, _GRAPH_CALLS)) / _GRAPH_CALLS
                for name, each in (("fused", launches), ("tile loop", gemms))
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
