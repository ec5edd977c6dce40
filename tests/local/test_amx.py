"""The unit with AMX's tiles: its machine code, which an emulator runs where the processor has no
AMX, gives the bits of the loops on tiles in memory. And the check that each unit must pass."""

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
from tests.support.cxx import compiled
from tests.support.paths import NATIVE
from tests.support.products import assert_plain_bits, product, threads
from tpkernels import _C

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or "avx512_bf16" not in _C.host.vector_units(),
    reason="needs AVX-512 with bf16 instructions",
)
F32, BF16 = torch.float32, torch.bfloat16
EMULATED = bool(_C.host.amx_refused())
PRODUCTS = {"amx_bf16": 0x5C, "amx_int8": 0x5E}  # the opcodes of their instructions


@pytest.fixture
def emulator(cxx_cache: Path) -> ctypes.CDLL:
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-shared", "-fPIC"]
    return ctypes.CDLL(str(compiled(cxx_cache, "amx.so", [*flags, NATIVE / "amx_emulator.cpp"])))


def need(unit: str) -> None:
    """Skip where the processor has AMX, but not for the products of ``unit``."""
    if not EMULATED and unit not in _C.host.vector_units() + _C.host.failed_vector_units():
        pytest.skip(f"this processor has AMX, but not for {unit}")


@contextlib.contextmanager
def amx(emulator: ctypes.CDLL, *, wrong: int = 0) -> Iterator[None]:
    """One thread with the processor's AMX, or an emulated one, perhaps with a wrong instruction."""
    before, left = _C.host.vector_unit(), ctypes.c_bool()
    emulator.emulate_amx(wrong)
    try:
        with threads(1):
            yield
    finally:
        instructions = emulator.stop_emulation(ctypes.byref(left))
        _C.host.use_vector_unit(before)
    assert not left, "the tiles were not released"
    assert (instructions > 0) == EMULATED


@pytest.mark.parametrize("unit", PRODUCTS)
def test_a_unit_is_left_out_if_it_multiplies_wrongly(emulator: ctypes.CDLL, unit: str) -> None:
    need(unit)
    with amx(emulator):
        assert _C.host.multiplies_exactly(unit)
    if EMULATED:
        with amx(emulator, wrong=PRODUCTS[unit]):
            assert not _C.host.multiplies_exactly(unit)
    assert all(map(_C.host.multiplies_exactly, [*_C.host.vector_units(), "tiles"]))


def test_products_of_8_bits_have_the_bits_of_the_plain_unit(emulator: ctypes.CDLL) -> None:
    need("amx_int8")
    with amx(emulator):
        assert_plain_bits("amx_int8", (1, 4, 5, 16, 17, 32, 33, 70))


def test_the_instructions_do_what_the_loops_on_tiles_in_memory_do(emulator: ctypes.CDLL) -> None:
    need("amx_bf16")
    torch.manual_seed(0)
    for k, n, rows in [(1, 3, 1), (32, 64, 2), (90, 130, 15), (577, 70, 17), (600, 64, 47)]:
        x, w = torch.randn(rows, k).bfloat16(), tpkernels.pack(torch.randn(k, n).bfloat16())
        for out_dtype, bias in itertools.product((F32, BF16), (None, torch.randn(n))):
            results = []
            with amx(emulator):
                for unit in ("amx_bf16", "tiles"):
                    _C.host.use_vector_unit(unit)
                    results.append(product(x, w, out_dtype, bias))
            assert results[0] is not None and results[1] is not None
            assert torch.equal(*results), (k, n, rows, out_dtype)
