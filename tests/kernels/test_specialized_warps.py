"""The compiled tile loop on sm_100, where some warps load and multiply while others store."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import triton.language as tl

from tests.support.kernel_builds import KERNELS, UNSPECIALIZED, build
from tests.support.tiers import sweep, thorough
from tpkernels.kernels import configs
from tpkernels.kernels.configs import CANDIDATES, TABLE
from tpkernels.symm.device import SCRATCH_BYTES

CONFIG = TABLE[100, 2, False]
REGISTERS, SHARED_BYTES = 1 << 16, 227 << 10
STORING, WORKING = 256, 128  # threads
SPECIALIZED = ["matmul_reduce_scatter", "matmul", "two_shot", "one_shot"]
SIDE_EFFECTS = r"inline_asm|atomic_|tt\.store|gpu\.barrier"


@pytest.mark.parametrize("name", sweep(SPECIALIZED, count=2))
@pytest.mark.parametrize("wire", [tl.bfloat16, thorough(tl.float32)])
def test_registers_are_divided_and_suffice(name: str, wire: tl.dtype) -> None:
    found = build(name, tl.bfloat16, 100, CONFIG, WIRE=wire)
    assert found.threads == STORING + WORKING
    storing, working = sorted(set(map(int, re.findall(r"setmaxnreg\S+\s+(\d+)", found.ptx))))[::-1]
    assert storing * STORING + working * WORKING <= REGISTERS and storing > found.registers
    assert found.registers * found.threads <= REGISTERS
    assert found.stack == found.local == 0 and found.shared <= SHARED_BYTES, found
    assert 512 * found.scratch <= SCRATCH_BYTES  # more programs than GPUs run at a time
    assert found.count(r"tcgen05\.mma") > 0


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


@pytest.mark.parametrize("name", sweep(SPECIALIZED))
def test_the_next_tile_has_an_accumulator_of_its_own(name: str) -> None:
    """So it is multiplied while a tile is stored."""
    found = build(name, tl.bfloat16, 100, CONFIG)
    assert re.search(r"tmem_alloc.*memdesc<2x128x256xf32", found.ttgir)


@pytest.mark.parametrize("arch", sweep([90, 80]))
def test_no_other_architecture_has_them(arch: int) -> None:
    for few in (False, True):
        config = TABLE[arch, 2, few]
        found = build("matmul_reduce_scatter", tl.bfloat16, arch, config)
        assert not found.specialized and found.threads == 32 * config.num_warps


def test_where_the_tile_loop_is_specialized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where tiles wait for their rows, where threads load operands, or for four warps."""
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
    monkeypatch.setattr(configs, "_TRITON", (3, 6))
    assert not found(CONFIG, x, w.t())


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECIALIZED)
def test_what_tuning_tries_compiles(name: str) -> None:
    for candidate in CANDIDATES[False]:
        config = replace(CONFIG, **dict(candidate))
        found = build(name, tl.bfloat16, 100, config)
        assert found.stack == 0 and found.shared <= SHARED_BYTES, candidate
        assert 512 * found.scratch <= SCRATCH_BYTES, candidate
        assert found.specialized == (config.num_warps == 8), candidate


@pytest.mark.slow
def test_spills_of_loads_by_threads_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why only what TMA loads is specialised."""
    monkeypatch.setattr(configs.MatmulConfig, "specializes", lambda *_: True)
    config = replace(CONFIG, tma=False)
    assert build("matmul_reduce_scatter", tl.bfloat16, 100, config, divisible=False).stack > 0
