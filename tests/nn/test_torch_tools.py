"""PyTorch tools on sharded parameters: results match the unsharded model, or the tool raises."""

from __future__ import annotations

import copy
import io
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, get_total_norm

import tpkernels
from tests.support import hf_models
from tests.support.cases import RanksFixture
from tests.support.nn_reference import shard
from tests.support.ranked import check_job, find_unexpected_messages, on_ranks
from tpkernels import nn as tnn

pytest.importorskip("transformers")


def _pair(mesh: Any = None, frozen: bool = False) -> tuple[Any, Any]:
    """Return a model and a parallel copy."""
    single = hf_models.make("llama").requires_grad_(not frozen)
    mesh = hf_models.make_world_mesh() if mesh is None else mesh
    return single, tpkernels.parallelize(copy.deepcopy(single), mesh)


def _backward(model: Any, tokens: int = hf_models.TOKENS, scale: float = 1.0) -> None:
    (model(**hf_models.batch(tokens), use_cache=False).loss * scale).backward()


@on_ranks(3)
def test_norms_match_the_unsharded_gradients() -> None:
    """Run two backwards on a parallel model that was frozen, a copy, and reloaded models. Norms and
    clipping match the unsharded model."""
    single, parallel = _pair(frozen=True)
    for model in (single, parallel):
        model.requires_grad_(True)
    copied = copy.deepcopy(parallel)
    with torch.device("meta"):
        _, empty = _pair()
    loaded = empty.to_empty(device="cpu")
    loaded.load_state_dict(single.state_dict())
    loaded.model.rotary_emb = copy.deepcopy(single.model.rotary_emb)
    assigned = copy.deepcopy(parallel)
    assigned.load_state_dict(single.state_dict(), assign=True)
    for model in (single, parallel, copied, loaded, assigned):
        _backward(model)
        _backward(model, 5)
    for order in (2.0, 1.0, torch.inf):
        want = get_total_norm([p.grad for p in single.parameters()], order)
        for foreach in (None, True):
            for i, model in enumerate((parallel, copied, loaded, assigned)):
                got = get_total_norm([p.grad for p in model.parameters()], order, foreach=foreach)
                assert abs(got - want) <= 1e-5 * want, (i, order, foreach, got, want)
    want = clip_grad_norm_(single.parameters(), 0.5)
    got = clip_grad_norm_(parallel.parameters(), 0.5)
    copied.model.layers[0].mlp.up_proj.weight.grad = plain_grad = loaded.model.layers[
        0
    ].mlp.up_proj.weight.grad.clone()
    assert type(plain_grad) is torch.Tensor  # a plain gradient, assigned by the user
    returned_norm = tnn.clip_grad_norm_(copied, 0.5)
    for value in (got, returned_norm):
        assert abs(value - want) <= 1e-5 * want, f"clipped with the norm {value}, not {want}"
    loaded.model.norm.weight.grad.fill_(torch.inf)
    with pytest.raises(RuntimeError, match="norm of the gradients is inf"):
        tnn.clip_grad_norm_(loaded, 1.0, error_if_nonfinite=True)
    # A step gets plain tensors, which can be compiled. After the step, norms cover all shards.
    optimizer, kinds = torch.optim.SGD(parallel.parameters()), set[type]()
    optimizer.register_step_pre_hook(lambda *_: kinds.update(type(p.grad) for p in _all(optimizer)))
    optimizer.step()
    assert kinds == {torch.Tensor}, f"a step got gradients of {kinds}"
    for model in (parallel, copied):
        clipped = get_total_norm([p.grad for p in model.parameters()])
        assert abs(clipped - 0.5) <= 1e-5, f"the norm is {clipped} after clipping to 0.5"


def _all(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@on_ranks(2)
def test_a_step_is_skipped_on_all_ranks() -> None:
    """Put infinities into the gradients of one rank, or of both ranks for a fused optimizer, which
    counts them. All ranks skip the step."""
    for fused, infinite in ((False, {1}), (True, {0, 1})):
        layer = tnn.ColumnParallelLinear(4, 4, dist.group.WORLD, bias=False)
        before = layer.weight.detach().clone()
        optimizer = torch.optim.Adam(layer.parameters(), fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(layer(torch.ones(2, 4)).sum()).backward()
        if dist.get_rank() in infinite:
            layer.weight.grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, layer.weight) and scaler.get_scale() == 1.0, fused


class Block(nn.Module):
    """User module with a ``process_group`` attribute, as in the torch wrappers."""

    def __init__(self) -> None:
        super().__init__()
        self.process_group = dist.group.WORLD
        self.up = tnn.ColumnParallelLinear(4, 6, self.process_group)


@on_ranks(2)
def test_unpickled_parameters_are_marked_as_shards() -> None:
    def gradient_norm(layer: nn.Module) -> torch.Tensor:
        layer.zero_grad()
        layer(torch.ones(2, 4)).sum().backward()
        return get_total_norm([p.grad for p in layer.parameters()])

    def round_trip(value: Any, **options: Any) -> Any:
        file = io.BytesIO()
        torch.save(value, file)
        file.seek(0)
        return torch.load(file, **options)

    layer = Block().up
    assert torch.equal(gradient_norm(round_trip(layer, weights_only=False)), gradient_norm(layer))
    assert type(copy.deepcopy(layer.weight.grad)) is torch.Tensor
    round_trip([list(layer.parameters()), layer.weight.grad])  # loads with weights_only=True


@on_ranks(2)
def test_states_load_if_one_rank_holds_a_full_parameter() -> None:
    layer = tnn.ColumnParallelLinear(4, 1, dist.group.WORLD, bias=False)
    optimizer = torch.optim.Adam(layer.parameters())
    for _ in range(2):
        layer(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@on_ranks(4)
def test_zero_consolidates_states_over_a_second_mesh_dim() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layer = tnn.ColumnParallelLinear(4, 6, mesh["tp"])
    group = mesh["dp"].get_group()
    optimizer = ZeroRedundancyOptimizer(layer.parameters(), torch.optim.Adam, process_group=group)
    layer(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.consolidate_state_dict(to=0)
    if group.rank() == 0:
        states = optimizer.state_dict()["state"].values()
        assert {type(value) for state in states for value in state.values()} == {torch.Tensor}


@on_ranks(2)
def test_wrappers_that_treat_shards_as_replicas_are_refused() -> list[str]:
    """Apply data parallelism over the tensor-parallel group, to a model or to a module around the
    model. The wrappers are refused, and parameters stay unchanged."""
    _, model = _pair()
    before = [p.detach().clone() for p in model.parameters()]
    zero = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=1.0)
    muon = torch.optim.Muon([model.model.layers[0].mlp.up_proj.weight])
    tuner: Any = type("LoraModel", (nn.Module,), {"__module__": "peft.tuners.lora.model"})()
    _backward(model)

    def adapt() -> None:
        tuner.model = model

    failures = find_unexpected_messages(
        {
            "ValueError: DistributedDataParallel would treat the parameters of ranks [0, 1] as": (
                lambda: DistributedDataParallel(model)
            ),
            'pass process_group=mesh["dp"].get_group()': (
                lambda: DistributedDataParallel(nn.Sequential(model))
            ),
            "ZeroRedundancyOptimizer would treat": zero.step,
            "Muon needs the full weights": muon.step,
            "LoraModel of PEFT cannot adapt a model that is sharded by tpkernels": adapt,
        }
    )
    assert all(map(torch.equal, before, model.parameters())), "parameters have changed"
    return failures


@on_ranks(4)
def test_data_parallelism_over_a_second_mesh_dim() -> list[str]:
    """Run DDP and FSDP2 over pairs of ranks with different batches. Gradients are averaged, and
    norms match the unsharded model on both batches."""
    failures = []
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    replica = mesh.get_local_rank("dp")
    single = hf_models.make("llama")
    for tokens in (6, 9):
        _backward(single, tokens, 0.5)
    grads = [p.grad for p in single.parameters()]
    want, want_max = get_total_norm(grads), get_total_norm(grads, torch.inf)
    for kind in ("ddp", "fsdp2"):
        parallel = tpkernels.parallelize(copy.deepcopy(single), mesh["tp"])
        parallel.zero_grad()
        if kind == "ddp":
            wrapped: Any = DistributedDataParallel(parallel, process_group=mesh["dp"].get_group())
            views = DistributedDataParallel(
                copy.deepcopy(parallel), device_mesh=mesh["dp"], gradient_as_bucket_view=True
            )
            refused = {"gradient_as_bucket_view=True replaces": partial(_backward, views)}
            failures += find_unexpected_messages(refused)
        else:
            for layer in parallel.model.layers:
                fully_shard(layer, mesh=mesh["dp"])
            wrapped = fully_shard(parallel, mesh=mesh["dp"])
        _backward(wrapped, (6, 9)[replica])
        got = get_total_norm([p.grad for p in wrapped.parameters()], torch.inf)
        assert abs(got - want_max) <= 1e-5 * want_max, (kind, got, want_max)
        returned_norm = tnn.clip_grad_norm_(wrapped, 1e9)
        for got in (returned_norm, clip_grad_norm_(wrapped.parameters(), 0.5)):
            assert abs(got - want) <= 1e-5 * want, (kind, got, want)
        clipped = tnn.clip_grad_norm_(wrapped, 1e9)
        assert abs(clipped - 0.5) <= 1e-5, f"{kind}: the norm is {clipped} after clipping to 0.5"
    return failures


@on_ranks(4)
def test_fsdp2_keeps_tensor_parallel_shards() -> list[str]:
    """Four ranks share three key-value heads, so their gradients are summed over ranks. Gradients
    match the unsharded model, and a step with infinities is skipped on all ranks. Tools that
    compute with full weights or save them are refused."""
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))
    single, parallel = _pair(mesh["tp"])
    for layer in parallel.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(parallel, mesh=mesh["dp"])
    for model in (single, parallel):
        _backward(model, 5)
        _backward(model)
    references = dict(single.named_parameters())
    for name, parameter in parallel.named_parameters():
        want = shard(parallel, name, references[name].grad)
        assert torch.allclose(parameter.grad.full_tensor(), want, 1e-4, 1e-6), name
    optimizer = torch.optim.Adam(parallel.parameters())
    muon = torch.optim.Muon([parallel.model.layers[0].mlp.up_proj.weight])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    if dist.get_rank() == 1:
        parallel.model.layers[0].mlp.up_proj.weight.grad.to_local()[0, 0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 1.0
    optimizer.step()
    group, second_model = mesh["dp"].get_group(), _pair(mesh["tp"])[1]
    return find_unexpected_messages(
        {
            "exp_avg of Adam is a DTensor: after the first step, the state": optimizer.state_dict,
            "Muon needs the full weights": muon.step,
            "FullyShardedDataParallel flattens the parameters": lambda: FullyShardedDataParallel(
                second_model, process_group=group, device_id=torch.device("cpu")
            ),
        }
    )


def _train(model: Any, optimizer: Any, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        _backward(model, 5 + step)
        optimizer.step()


def _save(folder: str) -> None:
    _, model = _pair()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    _train(model, optimizer, 2)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)


def _resume(folder: str) -> list[str]:
    single, model = _pair()
    reference = torch.optim.AdamW(single.parameters(), lr=0.01)
    _train(single, reference, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    # Before any step, the state of the unsharded optimizer and a copy of the state also load.
    from_unsharded = copy.deepcopy(model)
    unsharded = torch.optim.AdamW(from_unsharded.parameters(), lr=0.01)
    unsharded.load_state_dict(copy.deepcopy(reference.state_dict()))
    from_copy = copy.deepcopy(model)
    copied = torch.optim.AdamW(from_copy.parameters(), lr=0.01)
    copied.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    failures = find_unexpected_messages(
        {
            "a ShardTensor is one rank's shard and cannot be pickled": lambda: torch.save(
                optimizer.state_dict(), f"{folder}/{dist.get_rank()}.pt"
            )
        }
    )
    _train(single, reference, 1)
    want = single.state_dict()
    for parallel, adam in ((model, optimizer), (from_unsharded, unsharded), (from_copy, copied)):
        _train(parallel, adam, 1)
        got = tnn.full_state_dict(parallel)
        failures += [key for key in want if not torch.allclose(got[key], want[key], atol=1e-4)]
    return failures


def test_optimizer_states_match_the_unsharded_model(ranks: RanksFixture, tmp_path: Path) -> None:
    """Save on 2 ranks and resume on 3. Training continues like training of the unsharded model."""
    ranks(2).run(_save, str(tmp_path))
    check_job(ranks(3), _resume, str(tmp_path))
