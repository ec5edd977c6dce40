"""The Triton kernels compiled for GPUs that need not be here: tensor cores, registers, ordering;
how the tile loop stores tiles and publishes them; and warps with parts of their own on sm_100."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton.language as tl

from tests.conftest import RankPools
from tests.support import kernel_builds
from tests.support.kernel_builds import (
    COMMUNICATING,
    KERNELS,
    UNSPECIALIZED,
    Build,
    build,
    lower,
)
from tests.support.tiers import sweep, thorough
from tpkernels.kernels import all_gather_matmul, configs
from tpkernels.kernels.all_gather_matmul import BLOCK, RING_BYTES, fetching_of
from tpkernels.kernels.configs import SMALLER_TILES, TABLE, MatmulConfig
from tpkernels.symm.device import SCRATCH_BYTES, DeviceWorkspace

DTYPES = {2: (tl.bfloat16, tl.float16), 4: (tl.float32,)}
THOROUGH = {(80, tl.bfloat16, False), (100, tl.bfloat16, False)}


SMALLER = (86, 89, 120)  # GPUs with less shared memory, which take the blocks of 80
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # that a block may have
SHARED_BYTES |= dict.fromkeys(SMALLER, 99 << 10)


def entries() -> Iterator[Any]:
    """The table's configs, also for GPUs with less shared memory."""
    found = list(TABLE.items())
    for (arch, size, few), config in TABLE.items():
        if arch == 80:
            found += [((smaller, size, few), config) for smaller in SMALLER]
    for (arch, size, few), config in found:
        for dtype in DTYPES[size]:
            key = arch, dtype, few
            marks = [pytest.mark.thorough if key in THOROUGH else pytest.mark.slow]
            if key == (90, tl.bfloat16, False):
                marks = []
            what = f"sm_{arch}-{dtype}-{'few' if few else 'many'}"
            yield pytest.param(arch, dtype, config, id=what, marks=marks)


REGISTERS = 1 << 16  # of a multiprocessor
OLD_TRITON = configs.TRITON < (3, 7)
needs_specialization = pytest.mark.skipif(
    OLD_TRITON, reason="the tile loop has specialized warps from Triton 3.7 on"
)
TENSOR_CORES = dict.fromkeys((80, *SMALLER), r"mma\.sync")
TENSOR_CORES |= {90: r"wgmma\.mma_async", 100: r"tcgen05\.mma"}
ACQUIRE = r"ld\.global\.sys\.acquire|atom\.global\.sys\.acquire"
RELEASE = r"st\.release\.sys\.global\.u64"
POLL = r"(?m)^\s*ld\.acquire\.sys\.global\.u64"
LOOK = r"@p ld\.acquire\.sys"
GATHERS = ("all_gather_matmul", "multiply_arriving")
PROXY_FENCE = r"fence\.proxy\.async\.global"


def builds_job(wanted: list[dict[str, Any]]) -> None:
    for params in wanted[dist.get_rank() :: dist.get_world_size()]:
        with contextlib.suppress(Exception):  # the test has it again
            build(**params)


@pytest.fixture(scope="module", autouse=True)
def _compiled_in_parallel(request: pytest.FixtureRequest, _pools: RankPools) -> None:
    """Into Triton's cache, by a rank for each core."""
    found = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    wanted = [params for params in found if {"name", "arch", "dtype", "config"} <= params.keys()]
    if len(wanted) > 1:
        _pools(min(8, len(os.sched_getaffinity(0)))).run(builds_job, wanted, timeout=3600)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("arch", "dtype", "config"), list(entries()))
def test_kernel_compiles(name: str, arch: int, dtype: Any, config: MatmulConfig) -> None:
    found = build(name, dtype, arch, config)
    assert found.stack == 0 and found.local == 0, found
    assert found.shared <= SHARED_BYTES[arch]
    assert found.registers * found.threads <= REGISTERS
    assert 512 * found.scratch <= SCRATCH_BYTES  # more programs than GPUs run at a time
    assert (found.count(TENSOR_CORES[arch]) > 0) == (dtype is not tl.float32 and name != "shard")
    assert (found.count(ACQUIRE) > 0) == (name in COMMUNICATING)
    assert (found.count(RELEASE) > 0) == (name in COMMUNICATING)
    assert (found.count(PROXY_FENCE) > 0) == (name in GATHERS and config.tma)
    parts = config.specialize and name in SPECIALIZED and config.num_warps == 8 and not OLD_TRITON
    assert found.specialized == parts
    assert found.threads == 32 * config.num_warps + (WORKING if parts else 0)


# An option of a launch, its other value, and the arguments of kernels that have the option.
OPTIONS: list[tuple[str, Any, set[str]]] = [
    ("bias", None, {"bias"}),
    ("residual", None, {"residual"}),
    ("even", False, {"segments"}),
    ("before", kernel_builds.do_nothing, {"before"}),
    ("b_major", "n", {"b"}),
    ("WIRE", tl.float32, {"WIRE"}),
    ("delays", True, {"seed"}),
    ("divisible", False, {"N", "count"}),
]


def options() -> Iterator[Any]:
    """For each kernel all options at once, and in the thorough tier each option alone."""
    for name, (kernel, _) in KERNELS.items():
        found = {option: value for option, value, args in OPTIONS if args & {*kernel.arg_names}}
        yield pytest.param(name, found, id=f"{name}-all")
        for option, value in found.items():
            marks = pytest.mark.thorough
            yield pytest.param(name, {option: value}, id=f"{name}-{option}", marks=marks)


@pytest.mark.parametrize(("name", "changed"), list(options()))
@pytest.mark.parametrize("arch", sweep([90, 80, 100]))
@pytest.mark.parametrize("run", [lower, pytest.param(build, marks=pytest.mark.slow)])
def test_every_option_of_a_launch_compiles(
    run: Callable[..., Any], arch: int, name: str, changed: dict[str, Any]
) -> None:
    """Versions of Triton differ in what they refuse, most of it before code is generated."""
    config = TABLE[arch, 2, False]
    assert run(name, tl.bfloat16, arch, config, **changed)


def test_the_table_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """And gives GPUs with less shared memory the blocks of 80."""
    assert set(TABLE) == set(itertools.product((80, 90, 100), (2, 4), (True, False)))
    monkeypatch.setattr(configs, "INTERPRETED", False)
    for arch, few in itertools.product(SMALLER, (True, False)):
        with configs.assuming(arch, 84):
            chosen = configs.config_for(
                torch.device("cpu"), torch.bfloat16, 1 if few else 4096, 4096
            )
        assert replace(chosen, programs=0) == TABLE[80, 2, few]


def test_smaller_tiles_where_the_last_wave_would_be_nearly_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As measured on an H200, by rows and columns."""
    monkeypatch.setattr(configs, "INTERPRETED", False)
    blocks = {}
    with configs.assuming(90, 132):
        for size in ((4096, 1376), (4096, 3584), (1024, 8192), (8192, 8192), (4096, 6144)):
            chosen = configs.config_for(torch.device("cpu"), torch.bfloat16, *size)
            blocks[size] = chosen.block_n, chosen.num_stages
    smaller, table = (128, 5), (256, 3)
    assert list(blocks.values()) == [smaller, smaller, table, table, table], blocks


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(KERNELS) - {"shard"}))
def test_smaller_tiles_compile(name: str) -> None:
    found = build(name, tl.bfloat16, 90, SMALLER_TILES)
    assert found.stack == 0 and found.count(TENSOR_CORES[90]) > 0
    assert found.shared <= SHARED_BYTES[90] and 512 * found.scratch <= SCRATCH_BYTES


@pytest.mark.parametrize("name", COMMUNICATING)
@pytest.mark.parametrize("arch", sweep([90, 80, 100]))
def test_a_word_follows_the_data_and_one_thread_polls_and_tells(name: str, arch: int) -> None:
    """Before each release there is a barrier, and between the two no store of data. A word is
    stored and polled, and the host's memory is read, by one thread; nothing at system scope that
    stores into a peer's memory is an atomic, which PCIe may not have."""
    stores = r"st\.global|cp\.async\.bulk\.tensor\S*global\.shared"
    found = build(name, tl.bfloat16, arch, TABLE[arch, 2, False])
    lines = found.ptx.splitlines()
    releases = [at for at, line in enumerate(lines) if re.search(RELEASE, line)]
    for at in releases:
        before = (line for line in reversed(lines[:at]) if re.search(rf"bar\.sync|{stores}", line))
        assert "bar.sync" in next(before), "\n".join(lines[at - 20 : at + 1])
    assert releases
    assert found.count(r"ld\.volatile") == 0
    assert found.count(POLL) == found.count(r"nanosleep\.u32") > 0
    assert found.count(r"atom\.\S*sys\S*\.release|atom\.\S*release\S*\.sys") == 0
    alone = [line for line in lines if re.search(rf"{RELEASE}|ld\.relaxed\.sys", line)]
    assert alone and all(re.match(r"\s*@first ", line) for line in alone), alone
    for at, line in enumerate(lines):
        if re.search(POLL, line):  # all but thread 0 have left
            assert "bra DONE" in "".join(lines[at - 4 : at]), "\n".join(lines[at - 6 : at + 1])
        if re.search(LOOK, line):  # by a thread for each rank, before all threads read data
            after = (line for line in lines[at:] if re.search(r"bar\.sync|ld\.global", line))
            assert "bar.sync" in next(after), "\n".join(lines[at : at + 20])


@pytest.mark.parametrize("b_major", sweep(["k", "n"]))
@pytest.mark.parametrize("tma", sweep([True, False]))
def test_other_layouts_of_the_weight(b_major: str, tma: bool) -> None:
    config = replace(TABLE[90, 2, False], tma=tma)
    found = build("matmul", tl.bfloat16, 90, config, b_major=b_major)
    assert found.stack == 0 and found.count(TENSOR_CORES[90]) > 0
    assert (found.count(r"cp\.async\.bulk\.tensor") > 0) == tma


_KEYS = """
import sys
from tpkernels.kernels import matmul, matmul_all_reduce, matmul_reduce_scatter
from tpkernels.kernels.bound import BoundKernel
kernels = {
    "matmul": matmul.matmul_kernel,
    "reduce_scatter": matmul_reduce_scatter.matmul_reduce_scatter_kernel,
    "all_reduce": matmul_all_reduce.matmul_all_reduce_kernel,
}
for name in sys.argv[1:]:
    BoundKernel(kernels[name], 1, (), {})
    kernels[name].cache_key
print(sorted((name, kernels[name].cache_key) for name in kernels))
"""


@pytest.mark.thorough
def test_cache_keys_do_not_depend_on_the_order_of_launches() -> None:
    """Otherwise another process compiles the kernels again."""
    names = "matmul", "reduce_scatter", "all_reduce"
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    found = [
        subprocess.check_output([sys.executable, "-c", _KEYS, *order], env=environment)
        for order in (names, names[::-1])
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("name", KERNELS)
def test_flattened_loops_carry_no_value(name: str) -> None:
    """Triton 3.6 and 3.7 flatten a loop wrongly if its inner loop reads what it carries: on a GPU,
    tiles were published too early or not at all."""
    module = str(lower(name, tl.bfloat16, 90, TABLE[90, 2, False]))
    ends = list(re.finditer(r"(?m)^( *)\} \{.*tt\.flatten", module))
    assert ends or name not in ("matmul", "matmul_reduce_scatter")
    for end in ends:
        *_, begin = re.finditer(rf"(?m)^{end[1]}(?:%\S+ = )?scf\.for .*$", module[: end.start()])
        assert "iter_args" not in begin[0]


@pytest.mark.parametrize("arch", sweep([90, 80, 100]))
def test_loads_of_the_next_tile_wait_for_a_hook_only(arch: int) -> None:
    """One loop over all tiles and K, in which loads run ahead of the epilogue. Loads that ran ahead
    of a hook would overtake its wait: then there is a loop over K within the loop over tiles."""
    config = TABLE[arch, 2, False]
    plain, hooked = (
        build("matmul", tl.bfloat16, arch, config, before=before)
        for before in (None, kernel_builds.do_nothing)
    )
    instructions = TENSOR_CORES[arch]
    same = plain.count(instructions) == hooked.count(instructions)
    assert plain.count(instructions) > 0 and (same or plain.specialized)
    assert (plain.depth(instructions), hooked.depth(instructions)) == (1, 2)
    for name in COMMUNICATING:
        found = build(name, tl.bfloat16, arch, config)
        assert found.depth(instructions) == (1 if name in PUSHES else 2), name


@pytest.mark.parametrize("name", sweep(["two_shot", *sorted({*COMMUNICATING} - {"two_shot"})]))
@pytest.mark.parametrize("arch", sweep([90, 80, 100]))
def test_even_segments_and_descriptors_are_not_read_by_kernels(name: str, arch: int) -> None:
    """The table of rows is what all threads read as 32-bit numbers. Kernels make the descriptors of
    what TMA stores, whose address depends on the epoch."""
    even, uneven = (
        build(name, tl.bfloat16, arch, TABLE[arch, 2, False], even=even) for even in (True, False)
    )
    number = r"(?m)^\s+ld\.global\.b32 "
    stored_by_tma = arch >= 90 and name in ("matmul_reduce_scatter", "two_shot")
    assert even.count(number) == 0 and (even.count("tensormap") > 0) == stored_by_tma
    assert uneven.count(number) > 0 and uneven.stack == 0


@pytest.mark.thorough
def test_delays_are_there_only_when_asked_for() -> None:
    config = TABLE[90, 2, True]
    off, on = (
        build("matmul_reduce_scatter", tl.bfloat16, 90, config, delays=delays)
        for delays in (False, True)
    )
    clock = r"%globaltimer"
    assert 0 < off.count(clock) < on.count(clock)


def test_every_kernel_is_compiled_here() -> None:
    modules = "matmul", "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
    found = set()
    for module in modules:
        names = vars(importlib.import_module(f"tpkernels.kernels.{module}"))
        found |= {kernel for name, kernel in names.items() if name.endswith("_kernel")}
    assert found == {kernel for kernel, _ in KERNELS.values()}


def test_a_product_leaves_room_for_the_kernels_that_bring_its_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are not resident beside a program that has all registers of its multiprocessor, and it
    waits for them."""
    grids = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return lambda *_, **__: None

    monkeypatch.setattr(all_gather_matmul, "all_gather_matmul_kernel", Kernel())
    region = torch.zeros(1 << 16, dtype=torch.uint8)
    space = DeviceWorkspace([region.data_ptr()] * 2, region, 0, 64, 64, 1.0)
    config = replace(TABLE[90, 2, False], programs=132, tma=False)
    sizes = (1 << 15, 8), (8, 256), (1 << 15, 256)
    gathered, w, out = (torch.empty(size, dtype=torch.bfloat16) for size in sizes)
    sizes_of_ranks = (1 << 14,) * 2
    arriving = all_gather_matmul.prepare_arriving(config, w, gathered, out.dtype, sizes_of_ranks)
    arriving.prepared.bind(space, 1)(gathered, w, None, out)
    assert grids == [(132 - all_gather_matmul._ROOM, 1, 1)] and all_gather_matmul._ROOM >= 1


# How tiles are stored, when they are published, and how sums load them.

PUSHES = ("matmul_reduce_scatter", "two_shot")
EVENTS = {
    "product": r"mma\.sync|wgmma\.mma_async|tcgen05\.mma",
    "bulk store": r"cp\.async\.bulk\.tensor\S*global\.shared",
    "store": r"st\.global\.v4",
    "complete": r"cp\.async\.bulk\.wait_group 0",
    "read": r"cp\.async\.bulk\.wait_group\.read",
    "release": r"st\.release\.sys",
    "branch": r"\n\$L__BB",
}


def events_of(found: Build) -> list[str]:
    """What the loop over tiles does, in the order of the PTX, repetitions left out."""
    loop = re.split(LOOK, found.ptx)[0]  # sums follow
    kinds = (re.compile(pattern) for pattern in EVENTS.values())
    named = "|".join(f"({kind.pattern})" for kind in kinds)
    names = list(EVENTS)
    found_events = (names[match.lastindex - 1] for match in re.finditer(named, loop))
    return [event for event, _ in itertools.groupby(found_events)]


@pytest.mark.parametrize("name", PUSHES)
@pytest.mark.parametrize("arch", sweep([90, 100]))
def test_bulk_stores_are_complete_before_the_word(name: str, arch: int) -> None:
    """Complete, not only read from shared memory. Once in the loop, once for the last tile."""
    events = events_of(build(name, tl.bfloat16, arch, TABLE[arch, 2, False]))
    assert "bulk store" in events and "store" not in events
    _entered, *tiles = (at for at, event in enumerate(events) if event == "release")
    assert len(tiles) >= 2 and all(events[at - 1] == "complete" for at in tiles), events


@pytest.mark.parametrize("name", [*PUSHES, pytest.param("one_shot", marks=pytest.mark.slow)])
@pytest.mark.parametrize("wire", [tl.bfloat16, thorough(tl.float32)])
@pytest.mark.parametrize("arch", sweep([90, 80, 100]))
def test_a_tile_is_published_within_the_product_of_the_next(
    name: str, wire: tl.dtype, arch: int
) -> None:
    """Under a condition of its own, in the loop over K. A release right behind the stores would
    wait for all of them to arrive. Wide partials do not spill: an accumulator that is converted at
    once takes 192 to 328 bytes of stack on sm_100. Loads of the next tile still have room."""
    found = build(name, tl.bfloat16, arch, TABLE[arch, 2, False], WIRE=wire)
    assert found.stack == found.local == 0 and found.shared <= SHARED_BYTES[arch], found
    assert found.depth(TENSOR_CORES[arch]) == (1 if name in PUSHES else 2)
    events = [event for event in events_of(found) if event not in ("complete", "read")]
    assert ("bulk store" in events) == (arch >= 90 and wire == tl.bfloat16 and name in PUSHES)
    pairs = set(itertools.pairwise(events))
    assert not pairs & {("store", "release"), ("bulk store", "release")}, events
    if name in PUSHES:  # one loop over tiles and K
        entered, tile, *_ = re.split(EVENTS["release"], found.ptx)
        assert int(re.findall(r"Depth=(\d)", entered + tile)[-1]) == 1


def test_tma_stores_where_a_whole_tile_has_room() -> None:
    config = TABLE[90, 2, False]
    assert config.stores_by_tma(16, 16, 64)
    assert not config.stores_by_tma(16, 16, 63)  # rows that are not aligned
    assert not config.stores_by_tma(16, 32, 64)
    assert not replace(config, num_stages=4).stores_by_tma(16, 16, 64)
    assert not TABLE[80, 2, False].stores_by_tma(16, 16, 64)
    assert TABLE[90, 2, True].stores_by_tma(16, 32, 64)


# Warps with parts of their own.

CONFIG = TABLE[100, 2, False]
STORING, WORKING = 256, 128  # threads
SPECIALIZED = ["matmul_reduce_scatter", "matmul", "two_shot", "one_shot"]
SIDE_EFFECTS = r"inline_asm|atomic_|tt\.store|gpu\.barrier"


@needs_specialization
@pytest.mark.parametrize("name", sweep(SPECIALIZED, count=2))
@pytest.mark.parametrize("wire", [tl.bfloat16, thorough(tl.float32)])
def test_registers_are_divided_and_suffice(name: str, wire: tl.dtype) -> None:
    """The next tile has an accumulator of its own: it is multiplied while a tile is stored."""
    found = build(name, tl.bfloat16, 100, CONFIG, WIRE=wire)
    assert found.threads == STORING + WORKING
    storing, working = sorted(set(map(int, re.findall(r"setmaxnreg\S+\s+(\d+)", found.ptx))))[::-1]
    assert storing * STORING + working * WORKING <= REGISTERS and storing > found.registers
    assert found.registers * found.threads <= REGISTERS
    assert found.stack == found.local == 0 and found.shared <= SHARED_BYTES[100], found
    assert 512 * found.scratch <= SCRATCH_BYTES  # more programs than GPUs run at a time
    assert found.count(r"tcgen05\.mma") > 0
    assert re.search(r"tmem_alloc.*memdesc<2x128x256xf32", found.ttgir)


@needs_specialization
@pytest.mark.parametrize("name", sweep(SPECIALIZED, count=2))
@pytest.mark.parametrize("delays", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_hooks_run_in_the_warps_that_store(name: str, delays: bool) -> None:
    """They signal from thread 0, and pass barriers that the other warps never reach: a barrier that
    does not say how many threads it is for would wait for those too."""
    found = build(name, tl.bfloat16, 100, CONFIG, delays=delays)
    begin, end = found.ttgir.index("partition0("), found.ttgir.rindex("ttg.warp_return")
    parts = found.ttgir[begin:end]
    assert "tc_gen5_mma" in parts and "async_tma_copy_global_to_local" in parts
    assert not re.findall(SIDE_EFFECTS, parts)
    assert found.count(r"bar\.sync\s+0, 256;") > 0
    assert found.count(r"bar(rier)?\.sync\s+\d+;") == found.count(r"barrier\.sync\s+1;")


def test_where_the_tile_loop_is_specialized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where tiles wait for their rows, where threads load operands, for four warps, or before
    Triton 3.7."""
    monkeypatch.setattr(configs, "TRITON", (3, 7))
    x, w = (torch.empty(256, 64, dtype=torch.bfloat16) for _ in range(2))
    odd = torch.empty(256, 65, dtype=torch.bfloat16)

    def found(config: configs.MatmulConfig, *given: torch.Tensor, waits: bool = False) -> bool:
        operands = config.operands(*given, torch.bfloat16, waits=waits)
        assert ("maxnreg" in operands.launch) != operands.tiling.specialized
        return operands.tiling.specialized

    assert found(CONFIG, x, w.t()) and not found(CONFIG, x, w.t(), waits=True)
    assert not found(CONFIG, odd[:, :64], w.t()) and not found(CONFIG, x, odd[:, :64].t())
    assert not found(replace(CONFIG, num_warps=4), x, w.t())
    assert [key for key, each in TABLE.items() if each.specialize] == [(100, 2, False)]
    assert {*SPECIALIZED, *UNSPECIALIZED} == set(KERNELS)
    monkeypatch.setattr(configs, "TRITON", (3, 6))
    assert not found(CONFIG, x, w.t())


# How fetchers bring the peers' rows: what is in flight, and which words a tile waits for.


F32, BF16 = torch.float32, torch.bfloat16


def in_flight(found: Build, blocks: int, threads: int) -> int:
    """Bytes that a fetcher loads before it waits for the first block of them."""
    before, _, loop = found.ptx.partition(f"cp.async.wait_group \t{blocks - 1};")
    assert loop, "no ring"
    loads = re.findall(r"cp\.async\.c[ag]\.shared\.global [^,]*, [^,]*, 0x(\w+)", before)
    return sum(int(size, 16) for size in loads) * threads


@pytest.mark.parametrize("divisible", sweep([True, False], later=1))
@pytest.mark.parametrize(("arch", "dtype"), sweep([(90, tl.bfloat16), (80, tl.float32)]))
def test_a_ring_is_in_flight(arch: int, dtype: Any, divisible: bool) -> None:
    """Also where rows are not a multiple of 16 bytes. Its memory is also the tile loop's."""
    itemsize = dtype.primitive_bitwidth // 8
    config = TABLE[arch, itemsize, False]
    found = build("all_gather_matmul", dtype, arch, config, divisible=divisible)
    blocks = RING_BYTES // (BLOCK * itemsize)
    assert in_flight(found, blocks, 32 * config.num_warps) == RING_BYTES == 64 << 10
    alone = build("multiply_arriving", dtype, arch, config, divisible=divisible)
    assert found.shared == max(alone.shared, RING_BYTES)


def test_a_captured_gather_by_copy_engines_runs_the_kernel_of_the_eager_call() -> None:
    """A capture cannot compile. Its chunks are larger; Triton would specialize kernels on a 1 among
    their numbers."""
    kernel = all_gather_matmul.all_gather_matmul_kernel
    params = {param.name: param for param in kernel.params}
    assert all(params[name].do_not_specialize for name in ("chunks", "chunk_tiles"))


def test_all_fetchers_have_a_piece() -> None:
    config = TABLE[90, 2, False]
    for most, world, programs in ((1, 2, 1), (1, 8, 7), (3 << 16, 4, 9), (1 << 20, 8, 12)):
        assert fetching_of(config, 2, most, world).programs == programs
    assert fetching_of(config, 2, 1 << 20, 1).programs == 0
