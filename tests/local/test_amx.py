"""The AMX unit: its machine code is bitwise identical to the loops on tiles in memory.

An emulator runs it on processors without AMX. Also covers the self-test that each unit must pass.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tpkernels
from tests.support.cxx import compile_cached
from tests.support.local_matmul import assert_matches_plain_unit, multiply_checked, threads
from tests.support.paths import NATIVE
from tpkernels import _C

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or "avx512_bf16" not in _C.host.vector_units(),
    reason="needs AVX-512 with bf16 instructions",
)
F32, BF16 = torch.float32, torch.bfloat16
EMULATED = bool(_C.host.amx_refused())
OPCODES = {"amx_bf16": 0x5C, "amx_int8": 0x5E}  # opcodes of the instructions


@pytest.fixture
def emulator(cxx_cache: Path) -> ctypes.CDLL:
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-shared", "-fPIC"]
    return ctypes.CDLL(
        str(compile_cached(cxx_cache, "amx.so", [*flags, NATIVE / "amx_emulator.cpp"]))
    )


def need(unit: str) -> None:
    """Skip the test if the processor has AMX, but does not support ``unit``."""
    if not EMULATED and unit not in _C.host.vector_units() + _C.host.failed_vector_units():
        pytest.skip(f"this processor has AMX, but not for {unit}")


@contextlib.contextmanager
def amx(emulator: ctypes.CDLL, *, wrong: int = 0) -> Iterator[None]:
    """Run one thread with AMX, which is emulated if the processor lacks it.

    ``wrong``: opcode of an instruction that the emulator executes incorrectly.
    """
    before, unreleased = _C.host.vector_unit(), ctypes.c_bool()
    emulator.emulate_amx(wrong)
    try:
        with threads(1):
            yield
    finally:
        instructions = emulator.stop_emulation(ctypes.byref(unreleased))
        _C.host.use_vector_unit(before)
    assert not unreleased, "the tiles were not released"
    assert (instructions > 0) == EMULATED


@pytest.mark.parametrize("unit", OPCODES)
def test_the_self_test_detects_a_wrong_instruction(emulator: ctypes.CDLL, unit: str) -> None:
    need(unit)
    with amx(emulator):
        assert _C.host.multiplies_exactly(unit)
    if EMULATED:
        with amx(emulator, wrong=OPCODES[unit]):
            assert not _C.host.multiplies_exactly(unit)
    assert all(map(_C.host.multiplies_exactly, [*_C.host.vector_units(), "tiles"]))


def test_int8_is_bitwise_identical_to_the_plain_unit(emulator: ctypes.CDLL) -> None:
    need("amx_int8")
    with amx(emulator):
        assert_matches_plain_unit("amx_int8", (1, 4, 5, 16, 17, 32, 33, 70))


def test_instructions_are_bitwise_identical_to_the_loops(emulator: ctypes.CDLL) -> None:
    need("amx_bf16")
    torch.manual_seed(0)
    for k, n, rows in [(1, 3, 1), (32, 64, 2), (90, 130, 15), (577, 70, 17), (600, 64, 47)]:
        x, w = torch.randn(rows, k).bfloat16(), tpkernels.pack(torch.randn(k, n).bfloat16())
        for out_dtype, bias in itertools.product((F32, BF16), (None, torch.randn(n))):
            results = []
            with amx(emulator):
                for unit in ("amx_bf16", "tiles"):
                    _C.host.use_vector_unit(unit)
                    results.append(multiply_checked(x, w, out_dtype, bias))
            assert results[0] is not None and results[1] is not None
            assert torch.equal(*results), (k, n, rows, out_dtype)
