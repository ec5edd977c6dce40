"""How fetchers bring the peers' rows: what is in flight, and which words a tile waits for."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import triton.language as tl

from tests.support.kernel_builds import Build, build
from tests.support.tiers import sweep
from tpkernels.kernels.all_gather_matmul import BLOCK, RING_BYTES, fetching_of
from tpkernels.kernels.configs import TABLE

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


def test_all_fetchers_have_a_piece() -> None:
    config = TABLE[90, 2, False]
    for most, world, programs in ((1, 2, 1), (1, 8, 7), (3 << 16, 4, 9), (1 << 20, 8, 12)):
        assert fetching_of(config, 2, most, world).programs == programs
    assert fetching_of(config, 2, 1 << 20, 1).programs == 0
