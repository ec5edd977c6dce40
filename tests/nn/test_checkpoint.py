"""State dicts have unsharded names and shapes, and load on a different number of ranks."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tpkernels
from tests.support.cases import RanksFixture
from tests.support.nn_reference import F64, Model, Shape
from tests.support.ranked import check_job, find_unexpected_messages, fresh_group, on_ranks
from tests.support.tiers import sweep
from tpkernels import nn as tnn
from tpkernels.nn.linear import Heads
from tpkernels.nn.sharding import Sharding

SHAPE = Shape(tied=True)


def make(group: Any, seed: int) -> Model:
    torch.manual_seed(seed)
    model = Model(SHAPE, group, True)
    sizes = tpkernels.shard_sizes(5, group.size())
    packed = Sharding.packed(0, [sizes, sizes[::-1]])
    keys = Heads(8, 1, 4, group.size()).plan_split("k_proj")  # a key head replicated on all ranks
    for name, features, options in (("packed", 10, {"out_sizes": packed}), ("keys", 4, keys)):
        layer = tnn.ColumnParallelLinear(3, features, group, dtype=F64, **options)
        model.add_module(name, layer)
    return model


def save_job(folder: str) -> dict[str, list[int]]:
    """Save through DCP, and the unsharded state dict on rank 0. Return the shapes."""
    with fresh_group() as group:
        model = make(group, seed=1)
        state = model.state_dict()
        dcp.save({"model": state}, checkpoint_id=f"{folder}/dcp")
        full_state = tnn.full_state_dict(model)
        assert full_state["head.weight"] is full_state["embed.weight"]  # tied
        if group.rank() == 0:
            torch.save(full_state, f"{folder}/whole.pt")
        return {name: list(value.shape) for name, value in state.items()}


def load_job(folder: str) -> None:
    with fresh_group() as group:
        want = tnn.full_state_dict(make(group, seed=1))
        for variant in ("dcp", "copied", "whole", "assigned", "meta"):
            model = make(group, seed=2)
            if variant == "dcp":
                state = model.state_dict()
                dcp.load({"model": state}, checkpoint_id=f"{folder}/dcp")
                model.load_state_dict(state)
            elif variant == "copied":
                model.load_state_dict(copy.deepcopy(make(group, seed=1).state_dict()))
            else:
                if variant == "meta":
                    model = model.to("meta")
                saved = torch.load(f"{folder}/whole.pt", mmap=True)
                model.load_state_dict(saved, assign=variant != "whole")
            for name, value in tnn.full_state_dict(model).items():
                assert torch.equal(value, want[name]), f"{variant}: {name} differs"
            extra_bytes = {p.untyped_storage().nbytes() - p.nbytes for p in model.parameters()}
            assert extra_bytes == {0}, (
                f"{variant}: parameters keep {extra_bytes} bytes that are not theirs"
            )


@pytest.mark.parametrize("saved, loaded", sweep([(2, 3), (4, 1)]))
def test_loading_on_a_different_number_of_ranks(
    ranks: RanksFixture, tmp_path: Path, saved: int, loaded: int
) -> None:
    shapes = ranks(saved).run(save_job, str(tmp_path))
    full_state = torch.load(tmp_path / "whole.pt")
    assert all(
        rank_shapes == {name: list(value.shape) for name, value in full_state.items()}
        for rank_shapes in shapes
    )
    assert shapes[0]["attention.q_proj.weight"] == [36, 12]
    assert shapes[0]["mlp.down_proj.weight"] == [12, 10]
    check_job(ranks(loaded), load_job, str(tmp_path))


@on_ranks(2)
def test_refusals() -> list[str]:
    with fresh_group() as group:
        layer = tnn.ColumnParallelLinear(5, 6, group, bias=False, dtype=F64)
        uneven = tnn.ColumnParallelLinear(5, 6, group, bias=False, out_sizes=[5, 1], dtype=F64)
        shard = layer.state_dict()["weight"]
        mesh = init_device_mesh("cpu", (1, group.size()), mesh_dim_names=("dp", "tp"))["dp"]
        zeros = torch.zeros(6, 5, dtype=F64)
        rank, pickles = group.rank(), [b""] * 2
        dist.all_gather_object(pickles, pickle.dumps(layer), group)
        return find_unexpected_messages(
            {
                f"by rank {1 - rank} of 2 and holds the shards of that rank, "
                f"but this is rank {rank} of 2": (lambda: pickle.loads(pickles[1 - rank])),
                "TypeError: a ShardTensor is one rank's shard and cannot be": lambda: pickle.dumps(
                    shard
                ),
                "use .local, or call .full_tensor() on all ranks": lambda: shard + 1,
                ".full_tensor() on all ranks": lambda: zeros.copy_(shard),
                "is [3, 5], but the unsharded parameter has shape [6, 5]": lambda: (
                    layer.load_state_dict({"weight": zeros[:3]})
                ),
                "load it with torch.distributed.checkpoint, or": lambda: layer.load_state_dict(
                    uneven.state_dict()
                ),
                "Missing key(s) in state_dict": lambda: layer.load_state_dict({}),
                "they are sharded differently": lambda: shard.copy_(uneven.state_dict()["weight"]),
                "NotImplementedError: weight is a DTensor: the state dict of a layer that": (
                    lambda: fully_shard(layer, mesh=mesh).state_dict()
                ),
            }
        )
