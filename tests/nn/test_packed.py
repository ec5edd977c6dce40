"""Layers with packed weights match the outputs and state dicts of plain layers, also when they are
copied, loaded, moved, unpacked or compiled. Operations that need the plain weight are refused."""

from __future__ import annotations

import copy
import functools
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.support.cases import QUICK_WORLDS
from tests.support.nn_reference import Model, Shape, inputs
from tests.support.ranked import collect_messages, find_unexpected_messages, fresh_group, on_ranks
from tests.support.tiers import sweep
from tpkernels import nn as tnn
from tpkernels.nn.linear import ParallelLinear
from tpkernels.nn.packing import PackableModule

SHAPE = Shape(heads=4, kv_heads=2, tied=True)  # one of 3 ranks has no heads
GROUPS = Shape(heads=6, kv_heads=3, tied=True)  # K=24 in groups of 8: 16 and 8 on two ranks
F32 = torch.float32
MODES = sweep([(True, True), (False, False), (True, False), (False, True)], 2)


def make(group: dist.ProcessGroup, sequence: bool, seed: int = 0, shape: Shape = SHAPE) -> Model:
    torch.manual_seed(seed)
    return Model(shape, group, sequence).float()


def logits(model: torch.nn.Module, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    ids, _, rotary = inputs(SHAPE, 0)
    with torch.no_grad():
        out: torch.Tensor = model(ids, rotary)
    assert out.dtype == dtype
    return out.float()


def copy_model(model: Model) -> Model:
    """Copy a model without copying its process group."""
    return copy.deepcopy(model, {id(model.pg): model.pg})


def parallel_layers(model: torch.nn.Module) -> list[ParallelLinear]:
    return [layer for layer in model.modules() if isinstance(layer, ParallelLinear)]


def local_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    state: dict[str, Any] = model.state_dict()
    return {name: getattr(value, "local", value).clone() for name, value in state.items()}


def check(case: str, model: Model, drop: bool, want: torch.Tensor, state: Any) -> None:
    """Check that a packed model has the outputs and state dict of the plain model."""
    for layer in parallel_layers(model):
        assert (not layer._packed) == layer.empty and layer.weight.requires_grad, (case, layer)
        assert (layer.weight.dim() == 3) == (drop and not layer.empty), (case, layer)
        if layer.weight.dim() == 3:  # the packed weight is stored once
            assert layer._packed["weight"].data_ptr() == layer.weight.data_ptr(), (case, layer)
    assert torch.allclose(logits(model), want, atol=1e-5), case
    got = local_state(model)
    assert list(got) == list(state), case
    assert all(torch.equal(got[name], state[name]) for name in state), case


@pytest.mark.parametrize("world", QUICK_WORLDS)
@pytest.mark.parametrize(("sequence", "drop"), MODES)
@on_ranks()
def test_packed_models_match_plain_models(sequence: bool, drop: bool) -> None:
    with fresh_group() as group:
        model = make(group, sequence)
        want, state = logits(model), local_state(model)
        assert tnn.pack_(model, drop=drop) is model
        loaded, assigned = (tnn.pack_(make(group, sequence, seed=1), drop=drop) for _ in range(2))
        loaded.load_state_dict(tnn.full_state_dict(model))
        assigned.load_state_dict(tnn.full_state_dict(model), assign=True)
        check("packed", model, drop, want, state)
        check(
            "packed twice",
            tnn.pack_(tnn.pack_(copy_model(model), drop=not drop), drop=drop),
            drop,
            want,
            state,
        )
        check("copied", copy_model(model), drop, want, state)
        check("loaded", loaded, drop, want, state)
        check("loaded with assign", assigned, drop, want, state)
        check("moved to where it is", copy_model(model).to("cpu"), drop, want, state)
        layer = model.mlp.down_proj
        pickled = pickle.loads(pickle.dumps(layer))
        assert torch.equal(local_state(pickled)["weight"], local_state(layer)["weight"])
        for layer in parallel_layers(model):
            layer.unpack_()
        assert torch.equal(logits(model), want) and all(p.dim() < 3 for p in model.parameters())
        ids, targets, rotary = inputs(SHAPE, 0)
        model.loss(ids, targets, rotary).backward()  # type: ignore[no-untyped-call]


def make_moe(group: dist.ProcessGroup, seed: int) -> tuple[tnn.MoE, Callable[[], torch.Tensor]]:
    torch.manual_seed(seed)
    moe = tnn.MoE(3, 8, 10, group)
    tokens = torch.linspace(-1, 1, 40).view(5, 8)
    ids, weights = torch.arange(10).view(5, 2) % 3, torch.ones(5, 2)
    return moe, lambda: moe(tokens, ids, weights)


def make_decoder(group: dist.ProcessGroup, seed: int) -> tuple[Model, Callable[[], torch.Tensor]]:
    model = make(group, False, seed)
    return model, lambda: logits(model)


@pytest.mark.parametrize("world", QUICK_WORLDS)
@pytest.mark.parametrize("drop", [False, True])
@on_ranks()
def test_a_checkpoint_read_into_a_state_dict(tmp_path: Path, drop: bool) -> None:
    """Load a checkpoint into the state dict of a packed model. The model uses the values
    immediately, and ``load_state_dict`` packs them. Saving does not unpack."""
    with fresh_group() as group, torch.no_grad():
        for make_model in (make_decoder, make_moe):
            (saved, want), (model, call) = make_model(group, 0), make_model(group, 1)
            before = call()
            packed = [w.shape for w in tnn.pack_(model, drop=drop).parameters()]
            folders = [tmp_path / f"{make_model.__name__} {name}" for name in ("saved", "packed")]
            dcp.save({"model": saved.state_dict()}, checkpoint_id=folders[0])
            dcp.save({"model": model.state_dict()}, checkpoint_id=folders[1])
            assert [w.shape for w in model.parameters()] == packed
            for folder, expected in ((folders[0], want()), (folders[1], before)):
                states = model.state_dict(), model.state_dict()
                for state in states:
                    dcp.load({"model": state}, checkpoint_id=folder)
                    assert torch.allclose(call(), expected, atol=1e-5)
                model.load_state_dict(states[1])
                assert [w.shape for w in model.parameters()] == packed
                assert torch.allclose(call(), expected, atol=1e-5)
                layers = [layer for layer in model.modules() if isinstance(layer, PackableModule)]
                assert all(layer.empty for layer in layers if not layer._packed)


@on_ranks(2)
def test_a_checkpoint_read_into_a_detached_state_dict(tmp_path: Path) -> None:
    """Load a checkpoint into a copied state dict, into one from before the layer moved, and with a
    missing weight. The model does not change until ``load_state_dict``. An int8 model ends with the
    packed values of the checkpoint."""
    with fresh_group() as group, torch.no_grad():
        (saved, want), (model, call) = make_decoder(group, 0), make_decoder(group, 1)
        tnn.pack_(model, drop=True)
        before, old_state = call(), model.state_dict()
        copied_state = copy.deepcopy(old_state)
        dcp.save({"model": saved.state_dict()}, checkpoint_id=tmp_path)
        dcp.load({"model": copied_state}, checkpoint_id=tmp_path)
        assert torch.equal(call(), before)
        assert torch.equal(copied_state["head.weight"].local, local_state(saved)["head.weight"])
        with pytest.raises(dcp.api.CheckpointException):
            dcp.load({"other": model.state_dict()}, checkpoint_id=tmp_path)
        assert torch.allclose(call(), before, atol=1e-5)

        model.bfloat16()
        before = logits(model, torch.bfloat16)
        dcp.load({"model": old_state}, checkpoint_id=tmp_path)  # float32 values
        assert torch.equal(logits(model, torch.bfloat16), before)
        model.load_state_dict(old_state)
        assert torch.allclose(logits(model, torch.bfloat16), want(), atol=0.5)

        int8_model = tnn.pack_(
            make(group, False, seed=1, shape=GROUPS), drop=True, dtype=torch.int8
        )
        source = make(group, False, shape=GROUPS)
        dcp.save({"model": source.state_dict()}, checkpoint_id=tmp_path / "8")
        state = int8_model.state_dict()
        dcp.load({"model": state}, checkpoint_id=tmp_path / "8")
        assert all(
            torch.equal(w, local_state(source)[name]) for name, w in local_state(int8_model).items()
        )
        int8_model.load_state_dict(state)
        repacked = local_state(tnn.pack_(source, drop=True, dtype=torch.int8))
        assert all(torch.equal(w, repacked[name]) for name, w in local_state(int8_model).items())


@on_ranks(2)
def test_a_layer_that_moves() -> None:
    """Move packed layers to a different dtype: they are packed again. A move to float64 or meta is
    refused with advice to call ``unpack_``."""
    with fresh_group() as group:
        for drop in (False, True):
            plain = make(group, sequence=False)
            model = tnn.pack_(copy_model(plain), drop=drop)
            got = logits(copy_model(model).bfloat16(), torch.bfloat16)
            want = logits(copy_model(plain).bfloat16(), torch.bfloat16)
            assert torch.allclose(got, want, atol=0.05), f"{drop=}: {got} in bfloat16, not {want}"
            for layer in parallel_layers(model):
                layer.reset_parameters()
            reset_logits = logits(model)
            for layer in parallel_layers(model):
                layer.unpack_()
            assert torch.allclose(logits(model), reset_logits, atol=1e-5), drop
            first, second = (
                tnn.pack_(copy_model(plain), drop=drop).mlp.down_proj for _ in range(2)
            )
            for message in collect_messages([first.double, lambda layer=second: layer.to("meta")]):
                assert re.match("NotImplementedError: w is .*; call unpack_.. first$", message)


def check_int8(model: torch.nn.Module, dtype: torch.dtype, case: Any) -> None:
    """Check that layers are packed in int8 if K is a multiple of 4, and in ``dtype`` otherwise.
    Both cases must occur."""
    dtypes = {
        (layer.in_features % 4 == 0, packed.dtype)
        for layer in parallel_layers(model)
        for packed in layer._packed.values()
    }
    assert dtypes == {(True, torch.int8), (False, dtype)}, case


@on_ranks(2)
def test_int8_layers() -> None:
    """Layers stay int8 when they are copied, moved or loaded."""
    with fresh_group() as group:
        for drop in (False, True):
            plain = make(group, sequence=False, shape=GROUPS)
            want = logits(plain)
            model, loaded = (
                tnn.pack_(make(group, False, seed, GROUPS), drop=drop, dtype=torch.int8)
                for seed in (0, 1)
            )
            loaded.load_state_dict(tnn.full_state_dict(plain))
            pickled = copy_model(plain)
            pickled.mlp = pickle.loads(pickle.dumps(copy_model(model).mlp))
            for case, candidate in enumerate((model, copy_model(model), loaded, pickled)):
                check_int8(candidate, F32, (drop, case))
                assert torch.allclose(
                    logits(candidate), want, atol=0.01 * float(want.abs().max())
                ), drop
            assert not torch.equal(logits(model), want), drop
            check_int8(model.bfloat16(), torch.bfloat16, drop)
            for layer in parallel_layers(model):
                assert layer.unpack_().weight.dtype == torch.bfloat16, (drop, layer)


@pytest.mark.thorough
@on_ranks(2)
def test_compiled() -> None:
    torch._dynamo.reset()
    with fresh_group() as group:
        for sequence, drop in ((False, True), (True, False)):
            model = make(group, sequence)
            want = logits(model)
            compiled = torch.compile(
                tnn.pack_(model, drop=drop), backend="aot_eager", fullgraph=True
            )
            assert torch.allclose(logits(compiled), want, atol=1e-5), (sequence, drop)


@on_ranks(2)
def test_refusals() -> list[str]:
    with fresh_group() as group:
        x = torch.ones(2, 4)
        x_with_grad = x.clone().requires_grad_()
        column = tnn.ColumnParallelLinear(4, 6, group).pack_()
        frozen = tnn.RowParallelLinear(8, 6, group).pack_(drop=True).requires_grad_(False)
        qkv = tnn.QKVParallelLinear(4, 2, 2, 4, group).pack_()
        double = tnn.MergedColumnParallelLinear(4, {"gate": 6}, group, dtype=torch.float64)
        compiled = torch.compile(frozen, backend="aot_eager")
        gradient = (
            "is packed, and packed weights do not support gradients; call it under "
            "torch.no_grad(), or call unpack_() on it"
        )
        row = f"NotImplementedError: {frozen!r} {gradient}"
        meta = tnn.RowParallelLinear(8, 6, group, device="meta")
        unbiased = tnn.ColumnParallelLinear(4, 6, group, bias=False).pack_()
        plain, x5 = torch.no_grad()(unbiased), torch.ones(2, 5)
        partly_packed = tnn.MergedColumnParallelLinear(4, {"gate": 6, "up": 6, "down": 6}, group)
        for layer in partly_packed.layers[1:]:
            layer.pack_(drop=layer is partly_packed.layers[2])
            layer.weight.data[..., 0] = torch.inf if layer is partly_packed.layers[2] else 1
        int8 = functools.partial(partly_packed.pack_, dtype=torch.int8)
        failures = find_unexpected_messages(
            {"ValueError: down.weight has NaN or infinite elements": int8}
        )
        if [bool(layer._packed) for layer in partly_packed.layers] != [False, True, True]:
            failures.append("layers were packed before another was refused")
        return failures + find_unexpected_messages(
            {
                f"NotImplementedError: {column!r} {gradient}": lambda: column(x),
                f"NotImplementedError: {qkv.layers[0]!r} {gradient}": lambda: qkv(x),
                row: lambda: frozen(x_with_grad),
                row[:-1]: lambda: compiled(x_with_grad),
                "NotImplementedError: gate.weight is float64, which cannot be packed": double.pack_,
                "NotImplementedError: w is a torch.strided tensor on meta": meta.pack_,
                "nothing": lambda: frozen(x),
                "ValueError: weight has K=8, split into [4, 4], but an int8 weight has one scale "
                "per 8 elements of K; split K at multiples of 8": lambda: tnn.RowParallelLinear(
                    8, 6, group
                ).pack_(dtype=torch.int8),
                "ValueError: down_proj has K=8, split into [4, 4], but an int8": lambda: tnn.pack_(
                    tnn.MoE(2, 4, 8, group), dtype=torch.int8
                ),
                "packed shape [4, 3], but x of shape [2, 5] needs [5, N]": lambda: plain(x5),
                "weights[0] is float32 but x is bfloat16": lambda: plain(x.bfloat16()),
                "ValueError: x must have at least 2 dims": lambda: plain(x[0]),
            }
        )
