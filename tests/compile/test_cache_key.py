"""Torch's compile caches tell graphs apart by the rank's place in the groups of their ops."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._inductor.compile_fx import compile_fx

import tpkernels
from tests.support.ranked import fresh_group, on_ranks
from tpkernels.launch import Ranks


def uneven_job(compiled: Path) -> tuple[list[int], int]:
    """The shape of a shard, and the hits of the cache, in which rank 1 looks after rank 0."""
    assert dist.group.WORLD is not None
    name, rank = dist.group.WORLD.group_name, dist.get_rank()

    def in_turn(graph: Any, inputs: Any) -> Any:
        deadline = time.monotonic() + 120
        while rank == 1 and not compiled.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        result = compile_fx(graph, inputs)
        compiled.touch()
        return result

    def scattered(x: torch.Tensor) -> torch.Tensor:
        shard: torch.Tensor = torch.ops.tpkernels.reduce_scatter(x, name, 0, shard_sizes=[3, 1])
        return shard * 2

    out = torch.compile(scattered, fullgraph=True, backend=in_turn)(torch.ones(4, 4))
    assert torch.equal(out, torch.full_like(out, 4))
    return list(out.shape), counters["aot_autograd"]["autograd_cache_hit"]


@pytest.mark.slow
def test_a_graph_is_not_taken_for_that_of_another_rank(tmp_path: Path) -> None:
    with Ranks(2, env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}) as pool:
        found = pool.run(uneven_job, tmp_path / "compiled", timeout=280)
    assert found == [([3, 4], 0), ([1, 4], 0)]


@on_ranks(2)
def test_what_the_user_has_set_stays() -> None:
    """The tag in two calls; the pass's key tells the groups."""
    tags, fusion = [], tpkernels.compile.fuse_collectives("tp")
    before = fusion.uuid()
    with fresh_group() as group, torch.compiler.config.patch(cache_key_tag="theirs"):
        assert fusion.uuid() != before
        for _ in range(2):
            with torch._subclasses.FakeTensorMode():
                tpkernels.all_reduce(torch.ones(3), group)
            tag = torch.compiler.config.cache_key_tag
            tags.append(tag.replace(f"{group.group_name}: ", "group: "))
    rank = dist.get_rank()
    first, second = tags
    assert first == second and first.startswith("theirs tpkernels{")
    assert f"group: {rank} of 2" in first


def test_the_key_for_the_cache() -> None:
    fuse = tpkernels.compile.fuse_collectives
    assert fuse().uuid() == fuse().uuid()
    assert fuse("one").uuid() != fuse().uuid()
    assert fuse("one", "two").uuid() == fuse("two", "one").uuid()
