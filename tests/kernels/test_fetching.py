"""How fetchers bring the peers' rows: what is in flight, and which words a tile waits for."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton.language as tl

from tests.support import faults
from tests.support.emulated import require_none
from tests.support.kernel_builds import Build, build
from tests.support.ranked import fresh_group, on_ranks
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


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("sizes", "k", "dtype", "fetchers"),
    sweep(
        [
            ((20, 0, 37), 33, BF16, 2),  # rows of 66 bytes
            ((33, 17, 1), 7, F32, 3),
            ((40, 40, 40), 64, BF16, 5),
            ((1, 1, 1), 1, F32, 4),
        ]
    ),
)
@on_ranks(3, fixture="interpreting")
def test_a_tile_waits_for_all_pieces_of_its_rows(
    sizes: tuple[int, ...], k: int, dtype: torch.dtype, fetchers: int
) -> None:
    """And each word comes after its piece: a call in pieces of 64 elements."""
    from tpkernels.kernels import all_gather_matmul as kernel
    from tpkernels.kernels import sync
    from tpkernels.kernels.configs import INTERPRETER
    from tpkernels.kernels.sync import TILES

    rank, wrong, first_word = dist.get_rank(), [], TILES.value
    whole = torch.arange(sum(sizes) * k).remainder(251).to(dtype).view(-1, k)
    shards, w = whole.split(sizes), torch.ones(k, 3, dtype=dtype)
    gathered, out = torch.full_like(whole, torch.nan), torch.empty(sum(sizes), 3, dtype=F32)
    piece = 64
    config = replace(INTERPRETER, block_m=16, fetchers=fetchers, piece_bytes=piece * dtype.itemsize)
    publish, wait, tiles = sync.publish_from, kernel._wait_for_range, kernel._await_rows
    published, awaited = set[tuple[int, int]](), set[int]()

    def publish_and_look(peers: Any, to: int, source: Any, index: Any) -> None:
        number, owner = int(index) - first_word, int(source)
        at = slice(number * piece, (number + 1) * piece)
        there = gathered.split(sizes)[owner].reshape(-1)[at]
        if (owner, number) in published or not torch.equal(there, shards[owner].reshape(-1)[at]):
            wrong.append(f"piece {number} of rank {owner}")
        published.add((owner, number))
        publish(peers, to, source, index)

    def wait_and_note(peers: Any, source: Any, first: Any, last: Any) -> None:
        awaited.update(range(int(first) - first_word, int(last) - first_word))
        wait(peers, source, first, last)

    def tile_and_compare(arrivals: Any, owner: Any, tile_m: Any) -> None:
        awaited.clear()
        tiles(arrivals, owner, tile_m)
        begin, end = 16 * int(tile_m) * k, min(16 * (int(tile_m) + 1), sizes[int(owner)]) * k
        wanted = {at // piece for at in range(begin, end)} if int(owner) != rank else set()
        if awaited != wanted:
            wrong.append(f"tile {tile_m} of rank {owner} waits for {awaited}, not {wanted}")

    with pytest.MonkeyPatch.context() as patch, fresh_group() as group:
        patch.setattr(kernel, "BLOCK", 32)
        patch.setattr(sync, "publish_from", publish_and_look)
        patch.setattr(kernel, "_wait_for_range", wait_and_note)
        patch.setattr(kernel, "_await_rows", tile_and_compare)
        prepared = kernel.prepare(config, shards[rank], [w], gathered, F32, sizes)
        workspace = faults.workspace_of(group)
        space = workspace.device(prepared.words, prepared.buffer_bytes, "a test")
        space.set_chaos(seed=rank, max_delay_us=2000)
        prepared.launch(shards[rank], [w], [None], [out], gathered).run(space, 1)
        dist.barrier()
        assert space.failure() is None
    product = whole.float().sum(1, True).expand(-1, 3)
    if not (torch.equal(gathered, whole) and torch.equal(out, product)):
        wrong.append("the result")
    if len(published) != sum(-(-n * k // piece) for r, n in enumerate(sizes) if r != rank):
        wrong.append(f"{len(published)} pieces")
    require_none(wrong)
