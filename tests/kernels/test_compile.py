"""The Triton kernels, compiled for GPUs that this machine need not have.

Covers tensor cores, registers and memory ordering, the stores and signals of the tile loop, and
warp specialization on sm_100.
"""

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
from tpkernels.kernels.all_gather_matmul import BLOCK, RING_BYTES, plan_copies
from tpkernels.kernels.configs import SMALLER_TILES, TABLE, MatmulConfig
from tpkernels.symm.device import SCRATCH_BYTES, DeviceWorkspace

DTYPES = {2: (tl.bfloat16, tl.float16), 4: (tl.float32,)}
THOROUGH = {(80, tl.bfloat16, False), (100, tl.bfloat16, False)}


SMALLER = (86, 89, 120)  # GPUs with less shared memory. They use the configs of sm_80.
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # limit per block
SHARED_BYTES |= dict.fromkeys(SMALLER, 99 << 10)


def entries() -> Iterator[Any]:
    """Yield the configs of the table, also for GPUs with less shared memory."""
    table_entries = list(TABLE.items())
    for (arch, size, few), config in TABLE.items():
        if arch == 80:
            table_entries += [((smaller, size, few), config) for smaller in SMALLER]
    for (arch, size, few), config in table_entries:
        for dtype in DTYPES[size]:
            key = arch, dtype, few
            marks = [pytest.mark.thorough if key in THOROUGH else pytest.mark.slow]
            if key == (90, tl.bfloat16, False):
                marks = []
            case_id = f"sm_{arch}-{dtype}-{'few' if few else 'many'}"
            yield pytest.param(arch, dtype, config, id=case_id, marks=marks)


REGISTERS = 1 << 16  # per multiprocessor
OLD_TRITON = configs.TRITON < (3, 7)
needs_specialization = pytest.mark.skipif(
    OLD_TRITON, reason="the tile loop has specialized warps from Triton 3.7 on"
)
TENSOR_CORES = dict.fromkeys((80, *SMALLER), r"mma\.sync")
TENSOR_CORES |= {90: r"wgmma\.mma_async", 100: r"tcgen05\.mma"}
ACQUIRE = r"ld\.global\.sys\.acquire|atom\.global\.sys\.acquire"
RELEASE = r"st\.release\.sys\.global\.u64"
POLL = r"(?m)^\s*ld\.acquire\.sys\.global\.u64"
RANK_WAIT = r"@p ld\.acquire\.sys"
GATHERS = ("all_gather_matmul", "multiply_arriving")
PROXY_FENCE = r"fence\.proxy\.async\.global"


def builds_job(kernel_params: list[dict[str, Any]]) -> None:
    for params in kernel_params[dist.get_rank() :: dist.get_world_size()]:
        with contextlib.suppress(Exception):  # the test raises it again
            build(**params)


@pytest.fixture(scope="module", autouse=True)
def _compiled_in_parallel(request: pytest.FixtureRequest, _pools: RankPools) -> None:
    """Compile all kernels into the Triton cache, with one rank per core, at most 8."""
    all_params = [
        item.callspec.params for item in request.session.items if hasattr(item, "callspec")
    ]
    kernel_params = [
        params for params in all_params if {"name", "arch", "dtype", "config"} <= params.keys()
    ]
    if len(kernel_params) > 1:
        _pools(min(8, len(os.sched_getaffinity(0)))).run(builds_job, kernel_params, timeout=3600)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("arch", "dtype", "config"), list(entries()))
def test_kernel_compiles(name: str, arch: int, dtype: Any, config: MatmulConfig) -> None:
    compiled = build(name, dtype, arch, config)
    assert compiled.stack == 0 and compiled.local == 0, compiled
    assert compiled.shared <= SHARED_BYTES[arch]
    assert compiled.registers * compiled.threads <= REGISTERS
    assert 512 * compiled.scratch <= SCRATCH_BYTES  # more programs than GPUs run at a time
    assert (compiled.count(TENSOR_CORES[arch]) > 0) == (dtype is not tl.float32 and name != "shard")
    assert (compiled.count(ACQUIRE) > 0) == (name in COMMUNICATING)
    assert (compiled.count(RELEASE) > 0) == (name in COMMUNICATING)
    assert (compiled.count(PROXY_FENCE) > 0) == (name in GATHERS and config.tma)
    specialized = (
        config.specialize and name in SPECIALIZED and config.num_warps == 8 and not OLD_TRITON
    )
    assert compiled.specialized == specialized
    assert compiled.threads == 32 * config.num_warps + (WORKING if specialized else 0)


# Launch options: name, non-default value, arguments of the kernels that have the option.
OPTIONS: list[tuple[str, Any, set[str]]] = [
    ("bias", None, {"bias"}),
    ("residual", None, {"residual"}),
    ("even", False, {"segments"}),
    ("prologue", kernel_builds.do_nothing, {"prologue"}),
    ("b_major", "n", {"b"}),
    ("WIRE", tl.float32, {"WIRE"}),
    ("delays", True, {"seed"}),
    ("divisible", False, {"N", "count"}),
]


def options() -> Iterator[Any]:
    """Yield all options of each kernel together. The thorough tier adds each option separately."""
    for name, (kernel, _) in KERNELS.items():
        supported = {option: value for option, value, args in OPTIONS if args & {*kernel.arg_names}}
        yield pytest.param(name, supported, id=f"{name}-all")
        for option, value in supported.items():
            marks = pytest.mark.thorough
            yield pytest.param(name, {option: value}, id=f"{name}-{option}", marks=marks)


@pytest.mark.parametrize(("name", "overrides"), list(options()))
@pytest.mark.parametrize("arch", sweep([90, 80, 100]))
@pytest.mark.parametrize("run", [lower, pytest.param(build, marks=pytest.mark.slow)])
def test_every_option_of_a_launch_compiles(
    run: Callable[..., Any], arch: int, name: str, overrides: dict[str, Any]
) -> None:
    """Compile each kernel with its options.

    Triton versions differ in the code that they reject, mostly before code generation.
    """
    config = TABLE[arch, 2, False]
    assert run(name, tl.bfloat16, arch, config, **overrides)


def test_the_table_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table covers all keys. GPUs with less shared memory use the configs of sm_80."""
    assert set(TABLE) == set(itertools.product((80, 90, 100), (2, 4), (True, False)))
    monkeypatch.setattr(configs, "INTERPRETED", False)
    for arch, few in itertools.product(SMALLER, (True, False)):
        with configs.assume_device(arch, 84):
            chosen = configs.config_for(
                torch.device("cpu"), torch.bfloat16, 1 if few else 4096, 4096
            )
        assert replace(chosen, programs=0) == TABLE[80, 2, few]


def test_smaller_tiles_fill_the_last_wave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Select tiles by rows and columns.

    The expected tiles were measured on an H200.
    """
    monkeypatch.setattr(configs, "INTERPRETED", False)
    blocks = {}
    with configs.assume_device(90, 132):
        for size in ((4096, 1376), (4096, 3584), (1024, 8192), (8192, 8192), (4096, 6144)):
            chosen = configs.config_for(torch.device("cpu"), torch.bfloat16, *size)
            blocks[size] = chosen.block_n, chosen.num_stages
    smaller, table = (128, 5), (256, 3)
    assert list(blocks.values()) == [smaller, smaller, table, table, table], blocks


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(KERNELS) - {"shard"}))
def test_smaller_tiles_compile(name: str) -> None:
    compiled = build(name, tl.bfloat16, 90, SMALLER_TILES)
    assert compiled.stack == 0 and compiled.count(TENSOR_CORES[90]) > 0
    assert compiled.shared <= SHARED_BYTES[90] and 512 * compiled.scratch <= SCRATCH_BYTES


@pytest.mark.parametrize("name", COMMUNICATING)
@pytest.mark.parametrize("arch", sweep([90, 80, 100]))
def test_signal_follows_data_and_one_thread_polls(name: str, arch: int) -> None:
    """Inspect the order of signals and data in the PTX.

    A barrier precedes each release, without a data store between them. One thread stores and polls
    a signal and reads host memory. No system-scope store to a peer is an atomic: PCIe may not
    support atomics.
    """
    stores = r"st\.global|cp\.async\.bulk\.tensor\S*global\.shared"
    compiled = build(name, tl.bfloat16, arch, TABLE[arch, 2, False])
    lines = compiled.ptx.splitlines()
    releases = [index for index, line in enumerate(lines) if re.search(RELEASE, line)]
    for index in releases:
        before = (
            line for line in reversed(lines[:index]) if re.search(rf"bar\.sync|{stores}", line)
        )
        assert "bar.sync" in next(before), "\n".join(lines[index - 20 : index + 1])
    assert releases
    assert compiled.count(r"ld\.volatile") == 0
    assert compiled.count(POLL) == compiled.count(r"nanosleep\.u32") > 0
    assert compiled.count(r"atom\.\S*sys\S*\.release|atom\.\S*release\S*\.sys") == 0
    guarded = [line for line in lines if re.search(rf"{RELEASE}|ld\.relaxed\.sys", line)]
    assert guarded and all(re.match(r"\s*@first ", line) for line in guarded), guarded
    for index, line in enumerate(lines):
        if re.search(POLL, line):  # only thread 0 remains
            assert "bra DONE" in "".join(lines[index - 4 : index]), "\n".join(
                lines[index - 6 : index + 1]
            )
        if re.search(RANK_WAIT, line):  # one thread per rank, before all threads read data
            after = (line for line in lines[index:] if re.search(r"bar\.sync|ld\.global", line))
            assert "bar.sync" in next(after), "\n".join(lines[index : index + 20])


@pytest.mark.parametrize("b_major", sweep(["k", "n"]))
@pytest.mark.parametrize("tma", sweep([True, False]))
def test_weight_layouts(b_major: str, tma: bool) -> None:
    config = replace(TABLE[90, 2, False], tma=tma)
    compiled = build("matmul", tl.bfloat16, 90, config, b_major=b_major)
    assert compiled.stack == 0 and compiled.count(TENSOR_CORES[90]) > 0
    assert (compiled.count(r"cp\.async\.bulk\.tensor") > 0) == tma


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
    """Bind kernels in two orders and compare the keys.

    With different keys, a second process would compile the kernels again.
    """
    names = "matmul", "reduce_scatter", "all_reduce"
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    outputs = [
        subprocess.check_output([sys.executable, "-c", _KEYS, *order], env=environment)
        for order in (names, names[::-1])
    ]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("name", KERNELS)
def test_flattened_loops_carry_no_value(name: str) -> None:
    """Inspect flattened loops in Triton IR. They must not carry values.

    Triton 3.6 and 3.7 flatten a loop incorrectly if its inner loop reads a carried value. On a GPU,
    tiles were then published too early or never.
    """
    module = str(lower(name, tl.bfloat16, 90, TABLE[90, 2, False]))
    ends = list(re.finditer(r"(?m)^( *)\} \{.*tt\.flatten", module))
    assert ends or name not in ("matmul", "matmul_reduce_scatter")
    for end in ends:
        *_, begin = re.finditer(rf"(?m)^{end[1]}(?:%\S+ = )?scf\.for .*$", module[: end.start()])
        assert "iter_args" not in begin[0]


@pytest.mark.parametrize("arch", sweep([90, 80, 100]))
def test_loads_of_the_next_tile_wait_only_for_a_prologue(arch: int) -> None:
    """Compare loop depths with and without a prologue.

    Without a prologue, one loop runs over tiles and K, and loads of the next tile overtake the
    epilogue. With a prologue, the K loop is nested in the loop over tiles, because loads must not
    overtake its wait.
    """
    config = TABLE[arch, 2, False]
    plain, hooked = (
        build("matmul", tl.bfloat16, arch, config, prologue=prologue)
        for prologue in (None, kernel_builds.do_nothing)
    )
    instructions = TENSOR_CORES[arch]
    equal_counts = plain.count(instructions) == hooked.count(instructions)
    assert plain.count(instructions) > 0 and (equal_counts or plain.specialized)
    assert (plain.depth(instructions), hooked.depth(instructions)) == (1, 2)
    for name in COMMUNICATING:
        compiled = build(name, tl.bfloat16, arch, config)
        assert compiled.depth(instructions) == (1 if name in PUSHES else 2), name


@pytest.mark.parametrize("name", sweep(["two_shot", *sorted({*COMMUNICATING} - {"two_shot"})]))
@pytest.mark.parametrize("arch", sweep([90, 80, 100]))
def test_even_segments_and_descriptors_are_not_read_by_kernels(name: str, arch: int) -> None:
    """Compile with and without equal segments.

    Only uneven segments read the row table, as 32-bit values by all threads. Kernels create the
    descriptors of TMA stores, because the address depends on the epoch.
    """
    even, uneven = (
        build(name, tl.bfloat16, arch, TABLE[arch, 2, False], even=even) for even in (True, False)
    )
    number = r"(?m)^\s+ld\.global\.b32 "
    stored_by_tma = arch >= 90 and name in ("matmul_reduce_scatter", "two_shot")
    assert even.count(number) == 0 and (even.count("tensormap") > 0) == stored_by_tma
    assert uneven.count(number) > 0 and uneven.stack == 0


@pytest.mark.thorough
def test_delays_are_compiled_only_on_request() -> None:
    config = TABLE[90, 2, True]
    off, on = (
        build("matmul_reduce_scatter", tl.bfloat16, 90, config, delays=delays)
        for delays in (False, True)
    )
    clock = r"%globaltimer"
    assert 0 < off.count(clock) < on.count(clock)


def test_every_kernel_is_covered() -> None:
    modules = "matmul", "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
    kernels = set()
    for module in modules:
        names = vars(importlib.import_module(f"tpkernels.kernels.{module}"))
        kernels |= {kernel for name, kernel in names.items() if name.endswith("_kernel")}
    assert kernels == {kernel for kernel, _ in KERNELS.values()}


def test_matmul_leaves_multiprocessors_for_copy_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Launch a matmul that waits for copy kernels.

    The grid must leave multiprocessors free. A copy kernel cannot share a multiprocessor with a
    program that uses all registers.
    """
    grids = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return lambda *_, **__: None

    monkeypatch.setattr(all_gather_matmul, "all_gather_matmul_kernel", Kernel())
    region = torch.zeros(1 << 16, dtype=torch.uint8)
    workspace = DeviceWorkspace([region.data_ptr()] * 2, region, 0, 64, 64, 1.0)
    config = replace(TABLE[90, 2, False], programs=132, tma=False)
    sizes = (1 << 15, 8), (8, 256), (1 << 15, 256)
    gathered, w, out = (torch.empty(size, dtype=torch.bfloat16) for size in sizes)
    sizes_of_ranks = (1 << 14,) * 2
    arriving = all_gather_matmul.prepare_with_copy_engines(
        config, w, gathered, out.dtype, sizes_of_ranks
    )
    arriving.prepared.bind(workspace, 1)(gathered, w, None, out)
    assert (
        grids == [(132 - all_gather_matmul._FREE_MULTIPROCESSORS, 1, 1)]
        and all_gather_matmul._FREE_MULTIPROCESSORS >= 1
    )


# Stores and signals of tiles, and loads of reductions.

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


def list_events(compiled: Build) -> list[str]:
    """Return the events of the tile loop in PTX order, without repetitions."""
    loop = re.split(RANK_WAIT, compiled.ptx)[0]  # the reductions follow
    kinds = (re.compile(pattern) for pattern in EVENTS.values())
    named = "|".join(f"({kind.pattern})" for kind in kinds)
    names = list(EVENTS)
    events = (names[match.lastindex - 1] for match in re.finditer(named, loop))
    return [event for event, _ in itertools.groupby(events)]


@pytest.mark.parametrize("name", PUSHES)
@pytest.mark.parametrize("arch", sweep([90, 100]))
def test_bulk_stores_complete_before_the_signal(name: str, arch: int) -> None:
    """Inspect the events before each signal.

    The bulk store must be complete, not only read from shared memory. One signal is in the loop and
    one follows the last tile.
    """
    events = list_events(build(name, tl.bfloat16, arch, TABLE[arch, 2, False]))
    assert "bulk store" in events and "store" not in events
    _entered, *tiles = (index for index, event in enumerate(events) if event == "release")
    assert len(tiles) >= 2 and all(events[index - 1] == "complete" for index in tiles), events


@pytest.mark.parametrize("name", [*PUSHES, pytest.param("one_shot", marks=pytest.mark.slow)])
@pytest.mark.parametrize("wire", [tl.bfloat16, thorough(tl.float32)])
@pytest.mark.parametrize("arch", sweep([90, 80, 100]))
def test_tile_is_published_during_the_next_matmul(name: str, wire: tl.dtype, arch: int) -> None:
    """Inspect the position of the release of a tile.

    It must be in the K loop, under a condition. A release directly after the stores would wait
    until they all arrive. fp32 partial sums must not spill: the conversion of an accumulator that
    is not sliced uses 192 to 328 bytes of stack on sm_100. The loads of the next tile must still
    fit into shared memory.
    """
    compiled = build(name, tl.bfloat16, arch, TABLE[arch, 2, False], WIRE=wire)
    assert compiled.stack == compiled.local == 0 and compiled.shared <= SHARED_BYTES[arch], compiled
    assert compiled.depth(TENSOR_CORES[arch]) == (1 if name in PUSHES else 2)
    events = [event for event in list_events(compiled) if event not in ("complete", "read")]
    assert ("bulk store" in events) == (arch >= 90 and wire == tl.bfloat16 and name in PUSHES)
    pairs = set(itertools.pairwise(events))
    assert not pairs & {("store", "release"), ("bulk store", "release")}, events
    if name in PUSHES:  # one loop over tiles and K
        entered, tile, *_ = re.split(EVENTS["release"], compiled.ptx)
        assert int(re.findall(r"Depth=(\d)", entered + tile)[-1]) == 1


def test_tma_stores_need_shared_memory_for_a_full_tile() -> None:
    config = TABLE[90, 2, False]
    assert config.stores_by_tma(16, 16, 64)
    assert not config.stores_by_tma(16, 16, 63)  # unaligned rows
    assert not config.stores_by_tma(16, 32, 64)
    assert not replace(config, num_stages=4).stores_by_tma(16, 16, 64)
    assert not TABLE[80, 2, False].stores_by_tma(16, 16, 64)
    assert TABLE[90, 2, True].stores_by_tma(16, 32, 64)


# Warp specialization.

CONFIG = TABLE[100, 2, False]
STORING, WORKING = 256, 128  # threads
SPECIALIZED = ["matmul_reduce_scatter", "matmul", "two_shot", "one_shot"]
SIDE_EFFECTS = r"inline_asm|atomic_|tt\.store|gpu\.barrier"


@needs_specialization
@pytest.mark.parametrize("name", sweep(SPECIALIZED, count=2))
@pytest.mark.parametrize("wire", [tl.bfloat16, thorough(tl.float32)])
def test_registers_are_divided_and_suffice(name: str, wire: tl.dtype) -> None:
    """Compile with warp specialization.

    The accumulator has two buffers, so that the next tile is multiplied during a store.
    """
    compiled = build(name, tl.bfloat16, 100, CONFIG, WIRE=wire)
    assert compiled.threads == STORING + WORKING
    storing, working = sorted(set(map(int, re.findall(r"setmaxnreg\S+\s+(\d+)", compiled.ptx))))[
        ::-1
    ]
    assert storing * STORING + working * WORKING <= REGISTERS and storing > compiled.registers
    assert compiled.registers * compiled.threads <= REGISTERS
    assert compiled.stack == compiled.local == 0 and compiled.shared <= SHARED_BYTES[100], compiled
    assert 512 * compiled.scratch <= SCRATCH_BYTES  # more programs than GPUs run at a time
    assert compiled.count(r"tcgen05\.mma") > 0
    assert re.search(r"tmem_alloc.*memdesc<2x128x256xf32", compiled.ttgir)


@needs_specialization
@pytest.mark.parametrize("name", sweep(SPECIALIZED, count=2))
@pytest.mark.parametrize("delays", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_hooks_run_in_the_warps_that_store(name: str, delays: bool) -> None:
    """Inspect the barriers and the partitions.

    Hooks signal from thread 0 and use barriers that the remaining warps never reach. A barrier
    without a thread count would wait for these warps.
    """
    compiled = build(name, tl.bfloat16, 100, CONFIG, delays=delays)
    begin, end = compiled.ttgir.index("partition0("), compiled.ttgir.rindex("ttg.warp_return")
    partitions = compiled.ttgir[begin:end]
    assert "tc_gen5_mma" in partitions and "async_tma_copy_global_to_local" in partitions
    assert not re.findall(SIDE_EFFECTS, partitions)
    assert compiled.count(r"bar\.sync\s+0, 256;") > 0
    assert compiled.count(r"bar(rier)?\.sync\s+\d+;") == compiled.count(r"barrier\.sync\s+1;")


def test_tile_loop_specialization(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepare operands for several tile loops.

    A loop is not specialized if tiles wait for rows, if threads load operands, for four warps, or
    before Triton 3.7.
    """
    monkeypatch.setattr(configs, "TRITON", (3, 7))
    x, w = (torch.empty(256, 64, dtype=torch.bfloat16) for _ in range(2))
    odd = torch.empty(256, 65, dtype=torch.bfloat16)

    def is_specialized(
        config: configs.MatmulConfig, *tensors: torch.Tensor, waits: bool = False
    ) -> bool:
        plan = config.plan_operands(*tensors, torch.bfloat16, waits=waits)
        assert ("maxnreg" in plan.launch) != plan.tiling.specialized
        return plan.tiling.specialized

    assert is_specialized(CONFIG, x, w.t()) and not is_specialized(CONFIG, x, w.t(), waits=True)
    assert not is_specialized(CONFIG, odd[:, :64], w.t()) and not is_specialized(
        CONFIG, x, odd[:, :64].t()
    )
    assert not is_specialized(replace(CONFIG, num_warps=4), x, w.t())
    assert [key for key, config in TABLE.items() if config.specialize] == [(100, 2, False)]
    assert {*SPECIALIZED, *UNSPECIALIZED} == set(KERNELS)
    monkeypatch.setattr(configs, "TRITON", (3, 6))
    assert not is_specialized(CONFIG, x, w.t())


# Copy programs: bytes in flight and chunks.


F32, BF16 = torch.float32, torch.bfloat16


def bytes_in_flight(compiled: Build, blocks: int, threads: int) -> int:
    """Return the bytes that a copy program loads before its first wait."""
    before, _, loop = compiled.ptx.partition(f"cp.async.wait_group \t{blocks - 1};")
    assert loop, "no ring"
    loads = re.findall(r"cp\.async\.c[ag]\.shared\.global [^,]*, [^,]*, 0x(\w+)", before)
    return sum(int(size, 16) for size in loads) * threads


@pytest.mark.parametrize("divisible", sweep([True, False], num_thorough=1))
@pytest.mark.parametrize(("arch", "dtype"), sweep([(90, tl.bfloat16), (80, tl.float32)]))
def test_a_ring_is_in_flight(arch: int, dtype: Any, divisible: bool) -> None:
    """Count the bytes in flight, also for rows that are not a multiple of 16 bytes.

    The ring shares its memory with the tile loop.
    """
    itemsize = dtype.primitive_bitwidth // 8
    config = TABLE[arch, itemsize, False]
    compiled = build("all_gather_matmul", dtype, arch, config, divisible=divisible)
    blocks = RING_BYTES // (BLOCK * itemsize)
    assert bytes_in_flight(compiled, blocks, 32 * config.num_warps) == RING_BYTES == 64 << 10
    multiply_only = build("multiply_arriving", dtype, arch, config, divisible=divisible)
    assert compiled.shared == max(multiply_only.shared, RING_BYTES)


def test_a_captured_gather_by_copy_engines_runs_the_kernel_of_the_eager_call() -> None:
    """Check that Triton does not specialize kernels on the chunk arguments.

    A capture uses larger chunks and cannot compile. By default, Triton compiles a separate kernel
    for arguments that equal 1.
    """
    kernel = all_gather_matmul.all_gather_matmul_kernel
    params = {param.name: param for param in kernel.params}
    assert all(params[name].do_not_specialize for name in ("chunks", "chunk_tiles"))


def test_every_copy_program_has_a_chunk() -> None:
    config = TABLE[90, 2, False]
    for max_bytes, world, programs in ((1, 2, 1), (1, 8, 7), (3 << 16, 4, 9), (1 << 20, 8, 12)):
        assert plan_copies(config, 2, max_bytes, world).programs == programs
    assert plan_copies(config, 2, 1 << 20, 1).programs == 0
