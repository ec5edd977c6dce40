"""Layers with packed weights: the outputs and state dicts of plain ones; copied, loaded, moved,
unpacked and compiled. What needs the plain weight is refused."""

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
from tests.support.ranked import fresh_group, messages_of, on_ranks, unlike
from tests.support.tiers import sweep, thorough
from tpkernels import nn as tnn
from tpkernels.nn.linear import PackableModule, ParallelLinear

SHAPE = Shape(heads=4, kv_heads=2, tied=True)  # one of 3 ranks has no heads
GROUPS = Shape(heads=6, kv_heads=3, tied=True)  # 24 of K in groups of 8: 16 and 8 on two ranks
F32 = torch.float32
WAYS = sweep([(True, True), (False, False), (True, False), (False, True)], 2)


def make(group: dist.ProcessGroup, sequence: bool, seed: int = 0, shape: Shape = SHAPE) -> Model:
    torch.manual_seed(seed)
    return Model(shape, group, sequence).float()


def logits(model: torch.nn.Module, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    ids, _, rotary = inputs(SHAPE, 0)
    with torch.no_grad():
        out: torch.Tensor = model(ids, rotary)
    assert out.dtype == dtype
    return out.float()


def copied(model: Model) -> Model:
    """A copy of a model, of the same process group."""
    return copy.deepcopy(model, {id(model.pg): model.pg})


def layers_of(model: torch.nn.Module) -> list[ParallelLinear]:
    return [layer for layer in model.modules() if isinstance(layer, ParallelLinear)]


def local(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    state: dict[str, Any] = model.state_dict()
    return {name: getattr(value, "local", value).clone() for name, value in state.items()}


def wrong(model: Model, drop: bool, want: torch.Tensor, state: dict[str, torch.Tensor]) -> str:
    """What a packed model has that is not as in the plain one, or is not packed."""
    for layer in layers_of(model):
        if (layer._packed is None) != layer.empty or not layer.weight.requires_grad:
            return f"{layer} is not packed, or needs no gradient"
        if (layer.weight.dim() == 3) != (drop and not layer.empty):
            return f"{layer} has a weight of shape {list(layer.weight.shape)}"
        if drop and not layer.empty and layer._packed.data_ptr() != layer.weight.data_ptr():
            return f"{layer} has its packed weight twice"
    if not torch.allclose(logits(model), want, atol=1e-5):
        return f"logits {logits(model)}, not {want}"
    got = local(model)
    if list(got) != list(state) or not all(torch.equal(got[name], state[name]) for name in state):
        return f"a state dict {got}, not {state}"
    return ""


@pytest.mark.parametrize("world", QUICK_WORLDS)
@pytest.mark.parametrize(("sequence", "drop"), WAYS)
@on_ranks()
def test_a_packed_model_is_the_same(tmp_path: Path, sequence: bool, drop: bool) -> list[str]:
    with fresh_group() as group:
        model = make(group, sequence)
        want, state = logits(model), local(model)
        assert tnn.pack_(model, drop=drop) is model
        loaded = tnn.pack_(make(group, sequence, seed=1), drop=drop)
        loaded.load_state_dict(tnn.full_state_dict(model))
        restored = tnn.pack_(make(group, sequence, seed=1), drop=drop)
        saved = restored.state_dict()
        dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path)
        dcp.load({"model": saved}, checkpoint_id=tmp_path)
        restored.load_state_dict(saved)
        assigned = tnn.pack_(make(group, sequence, seed=1), drop=drop)
        assigned.load_state_dict(tnn.full_state_dict(model), assign=True)
        layer = model.mlp.down_proj
        models = {
            "packed": model,
            "packed twice": tnn.pack_(tnn.pack_(copied(model), drop=not drop), drop=drop),
            "copied": copied(model),
            "loaded": loaded,
            "loaded by torch.distributed.checkpoint": restored,
            "loaded with assign": assigned,
            "moved to where it is": copied(model).to("cpu"),
        }
        failures = [f"{how}: {wrong(one, drop, want, state)}" for how, one in models.items()]
        pickled = pickle.loads(pickle.dumps(layer))
        if not torch.equal(local(pickled)["weight"], local(layer)["weight"]):
            failures.append("pickled: another weight")
        for layer in layers_of(model):
            layer.unpack_()
        if not torch.equal(logits(model), want) or any(p.dim() == 3 for p in model.parameters()):
            failures.append("unpacked: another output, or packed weights")
        ids, targets, rotary = inputs(SHAPE, 0)
        model.loss(ids, targets, rotary).backward()  # type: ignore[no-untyped-call]
    return [failure for failure in failures if not failure.endswith(": ")]


def mixture(group: dist.ProcessGroup, seed: int) -> tuple[tnn.MoE, Callable[[], torch.Tensor]]:
    torch.manual_seed(seed)
    moe = tnn.MoE(3, 8, 10, group)
    tokens = torch.linspace(-1, 1, 40).view(5, 8)
    ids, weights = torch.arange(10).view(5, 2) % 3, torch.ones(5, 2)
    return moe, lambda: moe(tokens, ids, weights)


def decoder(group: dist.ProcessGroup, seed: int) -> tuple[Model, Callable[[], torch.Tensor]]:
    model = make(group, False, seed)
    return model, lambda: logits(model)


@pytest.mark.parametrize("world", QUICK_WORLDS)
@pytest.mark.parametrize("drop", [False, True])
@on_ranks()
def test_a_checkpoint_read_into_a_state_dict(tmp_path: Path, drop: bool) -> None:
    """The model computes with it at once, and ``load_state_dict`` packs it. Saving unpacks
    nothing."""
    with fresh_group() as group, torch.no_grad():
        for make_model in (decoder, mixture):
            (saved, want), (model, call) = make_model(group, 0), make_model(group, 1)
            before = call()
            packed = [w.shape for w in tnn.pack_(model, drop=drop).parameters()]
            folders = [tmp_path / f"{make_model.__name__} {name}" for name in ("saved", "packed")]
            for folder, state in zip(
                folders, (saved.state_dict(), model.state_dict()), strict=True
            ):
                dcp.save({"model": state}, checkpoint_id=folder)
            assert [w.shape for w in model.parameters()] == packed
            for folder, expected in ((folders[0], want()), (folders[1], before)):
                states = model.state_dict(), model.state_dict()
                for state in states:
                    dcp.load({"model": state}, checkpoint_id=folder)
                    assert torch.allclose(call(), expected, atol=1e-5)
                model.load_state_dict(states[1])
                assert [w.shape for w in model.parameters()] == packed
                assert torch.allclose(call(), expected, atol=1e-5)
                layers = [one for one in model.modules() if isinstance(one, PackableModule)]
                empty = [one for one in layers if one._packed is None or one._packed == {}]
                assert all(one.empty for one in empty)


@on_ranks(2)
def test_other_state_dicts_that_a_checkpoint_is_read_into(tmp_path: Path) -> None:
    """A copy of one, one from before the layer moved, and a checkpoint that lacks a weight; 8
    bits."""
    with fresh_group() as group, torch.no_grad():
        (saved, want), (model, call) = decoder(group, 0), decoder(group, 1)
        tnn.pack_(model, drop=True)
        before, old = call(), model.state_dict()
        copied_state = copy.deepcopy(old)
        dcp.save({"model": saved.state_dict()}, checkpoint_id=tmp_path)
        dcp.load({"model": copied_state}, checkpoint_id=tmp_path)
        assert torch.equal(call(), before)
        assert torch.equal(copied_state["head.weight"].local, local(saved)["head.weight"])
        with pytest.raises(dcp.api.CheckpointException):
            dcp.load({"other": model.state_dict()}, checkpoint_id=tmp_path)
        assert torch.allclose(call(), before, atol=1e-5)

        model.bfloat16()
        before = logits(model, torch.bfloat16)
        dcp.load({"model": old}, checkpoint_id=tmp_path)  # of float32
        assert torch.equal(logits(model, torch.bfloat16), before)
        model.load_state_dict(old)
        assert torch.allclose(logits(model, torch.bfloat16), want(), atol=0.5)

        eight = tnn.pack_(make(group, False, seed=1, shape=GROUPS), drop=True, dtype=torch.int8)
        source = make(group, False, shape=GROUPS)
        dcp.save({"model": source.state_dict()}, checkpoint_id=tmp_path / "8")
        state = eight.state_dict()
        dcp.load({"model": state}, checkpoint_id=tmp_path / "8")
        assert all(torch.equal(w, local(source)[name]) for name, w in local(eight).items())
        eight.load_state_dict(state)
        again = local(tnn.pack_(source, drop=True, dtype=torch.int8))
        assert all(torch.equal(w, again[name]) for name, w in local(eight).items())


@on_ranks(2)
def test_a_layer_that_moves() -> None:
    """A layer is packed again in its new dtype; where it cannot be, it says what to do."""
    with fresh_group() as group:
        for drop in (False, True):
            plain = make(group, sequence=False)
            model = tnn.pack_(copied(plain), drop=drop)
            got = logits(copied(model).bfloat16(), torch.bfloat16)
            want = logits(copied(plain).bfloat16(), torch.bfloat16)
            assert torch.allclose(got, want, atol=0.05), f"{drop=}: {got} in bfloat16, not {want}"
            for layer in layers_of(model):
                layer.reset_parameters()
            other = logits(model)
            for layer in layers_of(model):
                layer.unpack_()
            assert torch.allclose(logits(model), other, atol=1e-5), drop
            one, two = (tnn.pack_(copied(plain), drop=drop).mlp.down_proj for _ in range(2))
            for message in messages_of([one.double, lambda layer=two: layer.to("meta")]):
                assert re.match("NotImplementedError: w is .*; call unpack_.. before$", message)


@on_ranks(2)
def test_layers_of_8_bits() -> list[str]:
    """Where K is a multiple of 4; they stay so when they are copied, moved or loaded."""
    failures = []
    with fresh_group() as group:
        for drop in (False, True):
            plain = make(group, sequence=False, shape=GROUPS)
            want = logits(plain)
            model = tnn.pack_(copied(plain), drop=drop, dtype=torch.int8)
            loaded = tnn.pack_(
                make(group, sequence=False, seed=1, shape=GROUPS), drop=drop, dtype=torch.int8
            )
            loaded.load_state_dict(tnn.full_state_dict(plain))
            ways = {"packed": model, "copied": copied(model), "loaded": loaded}
            ways["pickled"] = copied(plain)
            ways["pickled"].mlp = pickle.loads(pickle.dumps(copied(model).mlp))
            for how, one in ways.items():
                failures += [f"{drop=}, {how}: {layer}" for layer in other_dtypes(one, F32)]
                assert torch.allclose(logits(one), want, atol=0.01 * float(want.abs().max())), drop
            assert not torch.equal(logits(model), want), drop
            moved = other_dtypes(model.bfloat16(), torch.bfloat16)
            failures += [f"{drop=}, moved: {layer}" for layer in moved]
            for layer in layers_of(model):
                assert layer.unpack_().weight.dtype == torch.bfloat16, (drop, layer)
    return failures


def other_dtypes(model: torch.nn.Module, dtype: torch.dtype) -> list[str]:
    """The layers that are not packed in 8 bits where K is a multiple of 4, in ``dtype`` elsewhere,
    of a model that has both."""
    seen, others = set(), []
    for layer in layers_of(model):
        if layer._packed is not None:
            whole = layer.in_features % 4 == 0
            seen.add(whole)
            if layer._packed.dtype != (torch.int8 if whole else dtype):
                others.append(f"{layer} in {layer._packed.dtype}")
    return others if len(seen) == 2 else [f"not both kinds of K among {layers_of(model)}"]


@pytest.mark.parametrize(
    "backend", [thorough("aot_eager"), pytest.param("inductor", marks=pytest.mark.slow)]
)
@on_ranks(2, timeout=300)
def test_compiled(backend: str) -> None:
    torch._dynamo.reset()
    with fresh_group() as group:
        for sequence, drop in ((False, True), (True, False)):
            model = make(group, sequence)
            want = logits(model)
            compiled = torch.compile(tnn.pack_(model, drop=drop), backend=backend, fullgraph=True)
            for call in range(2):
                assert torch.allclose(logits(compiled), want, atol=1e-5), (sequence, drop, call)


@on_ranks(2)
def test_refusals() -> list[str]:
    with fresh_group() as group:
        x = torch.ones(2, 4)
        needs = x.clone().requires_grad_()
        column = tnn.ColumnParallelLinear(4, 6, group).pack_()
        frozen = tnn.RowParallelLinear(8, 6, group).pack_(drop=True).requires_grad_(False)
        qkv = tnn.QKVParallelLinear(4, 2, 2, 4, group).pack_()
        wide = tnn.MergedColumnParallelLinear(4, {"gate": 6}, group, dtype=torch.float64)
        compiled = torch.compile(frozen, backend="aot_eager")
        gradient = "is packed and has no gradient; call it under torch.no_grad(), or unpack_() it"
        row = f"NotImplementedError: {frozen!r} {gradient}"
        meta = tnn.RowParallelLinear(8, 6, group, device="meta")
        unbiased = tnn.ColumnParallelLinear(4, 6, group, bias=False).pack_()
        plain, x5 = torch.no_grad()(unbiased), torch.ones(2, 5)
        partly = tnn.MergedColumnParallelLinear(4, {"gate": 6, "up": 6, "down": 6}, group)
        for layer in partly.layers[1:]:
            layer.pack_(drop=layer is partly.layers[2])
            layer.weight.data[..., 0] = torch.inf if layer is partly.layers[2] else 1
        int8 = functools.partial(partly.pack_, dtype=torch.int8)
        failures = unlike({"ValueError: down.weight has NaN or infinite elements": int8})
        if [layer._packed is None for layer in partly.layers] != [True, False, False]:
            failures.append("layers were packed before another was refused")
        return failures + unlike(
            {
                f"NotImplementedError: {column!r} {gradient}": lambda: column(x),
                f"NotImplementedError: {qkv.layers[0]!r} {gradient}": lambda: qkv(x),
                row: lambda: frozen(needs),
                row[:-1]: lambda: compiled(needs),
                "NotImplementedError: gate.weight is float64; use the plain weight": wide.pack_,
                "NotImplementedError: w is a torch.strided tensor on meta": meta.pack_,
                "nothing": lambda: frozen(x),
                "ValueError: weight has K=8, split into [4, 4], but in int8 8 elements have one "
                "scale on any number of ranks; split K at multiples of 8": lambda: (
                    tnn.RowParallelLinear(8, 6, group).pack_(dtype=torch.int8)
                ),
                "ValueError: down_proj has K=8, split into [4, 4], but in int8": lambda: tnn.pack_(
                    tnn.MoE(2, 4, 8, group), dtype=torch.int8
                ),
                "packed shape [4, 3], but x of shape [2, 5] needs [5, N]": lambda: plain(x5),
                "weights[0] is float32 but x is bfloat16": lambda: plain(x.bfloat16()),
                "ValueError: x must have at least 2 dims": lambda: plain(x[0]),
            }
        )
