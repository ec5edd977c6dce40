"""Experts on shards against a float64 loop over tokens: split by width and whole, tokens of each
rank and of all, gradients, packed weights, state dicts."""

from __future__ import annotations

import copy
import itertools
import pickle
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode

import tpkernels
from tests.support.compiled import ops_in
from tests.support.nn_reference import far
from tests.support.ranked import fresh_group, on_ranks
from tests.support.tiers import sweep
from tpkernels.nn import ColumnParallelLinear, MoE
from tpkernels.nn.moe import PROJECTIONS
from tpkernels.ops.experts import _routes_of_experts, route, sum_routes

F64 = torch.float64
TOKENS, EXPERTS, HIDDEN, WIDTH, K = 7, 3, 8, 10, 2


#: Forms of experts: those of Mixtral, and those of gpt-oss.
FORMS: list[dict[str, bool]] = [{}, {"bias": True, "transposed": True, "interleaved": True}]


def loop(x: Any, ids: Any, weights: Any, moe: MoE, w: dict[str, Any]) -> torch.Tensor:
    """The sum over the experts of each token, one after the other."""
    rows = []

    def project(x: torch.Tensor, name: str, expert: Any) -> torch.Tensor:
        matrix = w[name][expert].mT if moe.transposed else w[name][expert]
        return matrix @ x + (w[f"{name}_bias"][expert] if moe.bias else 0)

    for token, chosen, factors in zip(x, ids, weights, strict=True):
        row = torch.zeros_like(token)
        for expert, factor in zip(chosen, factors, strict=True):
            inner = project(token, "gate_up_proj", expert)
            gate, up = (inner[::2], inner[1::2]) if moe.interleaved else inner.chunk(2)
            row = row + factor * project(F.silu(gate) * up, "down_proj", expert)
        rows.append(row)
    return torch.stack(rows)


def routes(tokens: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Expert 1 gets nothing, and some tokens go twice to one."""
    torch.manual_seed(3)
    ids = torch.randint(0, 2, (tokens, K)) * 2
    return torch.randn(tokens, HIDDEN, dtype=F64), ids, torch.rand(tokens, K, dtype=F64)


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_routes_are_summed_in_the_order_of_k(dtype: torch.dtype) -> None:
    """To the bit, whatever the columns and threads; torch.sum does not."""
    ids = torch.randint(0, EXPERTS, (64, 8), generator=torch.Generator().manual_seed(1))
    weights = torch.rand(64, 8, dtype=F64 if dtype == F64 else torch.float32)
    routing = route(ids, weights, EXPERTS)
    rows = torch.randn(512, 101).to(dtype).requires_grad_()
    by_route = rows[routing.order.argsort()].view(64, 8, 101).to(weights.dtype)
    total = torch.zeros(64, 101, dtype=weights.dtype)
    for j in range(8):
        total = total + by_route[:, j] * weights[:, j, None]
    y = sum_routes(rows, routing)
    for threads in (3, torch.get_num_threads()):
        torch.set_num_threads(threads)
        assert torch.equal(sum_routes(rows, routing), total.to(dtype))
    got, wanted = (torch.autograd.grad(each.sum(), rows)[0] for each in (y, total.to(dtype)))
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("own", [(0, 3), (3, 2), (5, 0)], ids=str)
def test_routes_of_experts_in_a_static_number(own: tuple[int, int]) -> None:
    """Those to own experts come first: as without."""
    ids = torch.randint(0, 5, (40, 2), generator=torch.Generator().manual_seed(2))
    few, counts = _routes_of_experts(ids, 5, *own, static=False)
    ids[7:9, 1], wrong = torch.tensor([-1, 5]), [15, 17]
    order, same = _routes_of_experts(ids, 5, *own, static=True)
    mine = [route for route in few.tolist() if route not in wrong]
    assert order[: len(mine)].tolist() == mine and set(order.tolist()) == set(range(80))
    assert int(counts.sum() - same.sum()) == len(few) - len(mine) and len(same) == own[1]


@pytest.mark.parametrize("world", sweep([3, 2, 1, 4], later=2))
@pytest.mark.parametrize("width", sweep([WIDTH, 2], later=1))
@on_ranks()
def test_as_a_loop_over_tokens(width: int) -> list[str]:
    """Ranks without experts, width or tokens included."""
    failures: dict[str, str | None] = {}
    with fresh_group() as group:
        rank, world = group.rank(), group.size()
        for form, expert_parallel in itertools.product(FORMS, (False, True)):
            sizes = tpkernels.shard_sizes(TOKENS, world)
            if form and world > 1:  # the last rank has no token
                sizes = [*tpkernels.shard_sizes(TOKENS, world - 1), 0]
            mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
            for sequence_parallel in (False, True):
                what = f"{expert_parallel=} {sequence_parallel=} {form}"
                torch.manual_seed(1)
                moe = MoE(
                    EXPERTS,
                    HIDDEN,
                    width,
                    group,
                    expert_parallel=expert_parallel,
                    sequence_parallel=sequence_parallel,
                    max_rows=TOKENS * K if form else None,
                    dtype=F64,
                    **form,
                )
                whole = {
                    name: w.requires_grad_()
                    for name, w in tpkernels.nn.full_state_dict(moe).items()
                }
                x, ids, weights = routes()
                inputs = [x.requires_grad_(), weights.requires_grad_()]
                want = loop(x, ids, weights, moe, whole)
                upstream = torch.randn_like(want)
                want.backward(upstream)
                part = mine if sequence_parallel else slice(None)
                local = [t.detach()[part].clone().requires_grad_() for t in inputs]
                y = moe(
                    local[0],
                    ids[part],
                    local[1],
                    **({"shard_sizes": sizes} if sequence_parallel else {}),
                )
                y.backward(upstream[part])
                failures[f"{what} y"] = far(y.detach(), want.detach()[part], 1e-12)
                for name, got, full in zip(("x", "weights"), local, inputs, strict=True):
                    assert got.grad is not None and full.grad is not None
                    failures[f"{what} {name}"] = far(got.grad, full.grad[part], 1e-12)
                for name, w in whole.items():
                    got_grad = moe.get_parameter(name).grad
                    assert got_grad is not None and w.grad is not None
                    shard = moe.shard_of(name, w.grad)
                    if shard.numel():
                        failures[f"{what} {name}"] = far(got_grad, shard, 1e-12)
    return [f"{name}: {failure}" for name, failure in failures.items() if failure is not None]


@pytest.mark.parametrize("world", [2])
@on_ranks()
def test_packed() -> None:
    """The bits of plain weights in float32 integers; state dicts and loading as without."""
    with fresh_group() as group:
        for form, expert_parallel in zip(FORMS, (False, True), strict=True):
            moe = MoE(EXPERTS, HIDDEN, WIDTH, group, expert_parallel=expert_parallel, **form)
            with torch.no_grad():
                for w in moe.parameters():
                    w.copy_(torch.randint(-2, 3, w.shape))
            moe.activation = F.relu
            x, ids, _ = routes()
            x, weights = x.float().round(), torch.ones(TOKENS, K)
            state = tpkernels.nn.full_state_dict(moe)
            for drop in (False, True):
                packed = tpkernels.nn.pack_(copy.deepcopy(moe), drop=drop)
                with torch.no_grad():
                    assert torch.equal(packed(x, ids, weights), moe(x, ids, weights))
                    saved = tpkernels.nn.full_state_dict(packed)
                    assert all(torch.equal(saved[name], w) for name, w in state.items())
                    packed.load_state_dict({name: 2 * w for name, w in state.items()})
                    twice = packed(x, ids, weights)
                    plain = copy.deepcopy(moe)
                    plain.load_state_dict({name: 2 * w for name, w in state.items()})
                    assert torch.equal(twice, plain(x, ids, weights))
                    assert (packed.down_proj.dim() == 4) == drop
                with pytest.raises(
                    NotImplementedError,
                    match="is packed, and packed weights do not support gradients",
                ):
                    packed(x.requires_grad_(), ids, weights)
                x = x.detach()
                assert torch.equal(packed.unpack_().down_proj, 2 * moe.down_proj)
                assert torch.equal(packed(x.clone().requires_grad_(), ids, weights), twice)
            int8 = tpkernels.nn.pack_(copy.deepcopy(moe), dtype=torch.int8)
            with torch.no_grad():
                exact = moe(x, ids, weights)
                assert (int8(x, ids, weights) - exact).abs().max() < 0.05 * exact.abs().max()


class Experts(torch.nn.Module):
    """As transformers makes them: a method has another name than its function."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, HIDDEN))
        self.down_proj = torch.nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH))


def gate_of_experts(self: Experts, inner: torch.Tensor) -> torch.Tensor:
    gate, up = inner.chunk(2, -1)
    return F.silu(gate) * up


Experts._apply_gate = gate_of_experts  # type: ignore[attr-defined]


@pytest.mark.parametrize("world", [2])
@on_ranks()
def test_copies() -> None:
    """Pickled and copied, packed or not, with the packed weights once."""
    x, ids, weights = routes()
    with fresh_group() as group, torch.no_grad():
        for drop in (None, False, True):
            moe = MoE.from_experts(Experts(), group)
            if drop is not None:
                moe.pack_(drop=drop)
            want = moe(x.float(), ids, weights.float())
            for twin in (copy.deepcopy(moe), pickle.loads(pickle.dumps(moe))):
                assert torch.equal(twin(x.float(), ids, weights.float()), want), drop
                for name, packed in twin._packed.items():
                    shared = packed.data_ptr() == twin.get_parameter(name).data_ptr()
                    assert shared == drop, (drop, name)


@pytest.mark.parametrize("dropped", PROJECTIONS)
@pytest.mark.parametrize("world", [2])
@on_ranks()
def test_one_of_two_packed_weights_is_kept(dropped: str) -> None:
    """As `from_pretrained` packs experts of which one weight is tied."""
    x, ids, weights = routes()
    with fresh_group() as group, torch.no_grad():
        moe = MoE(EXPERTS, HIDDEN, WIDTH, group)
        want, state = moe(x.float(), ids, weights.float()), tpkernels.nn.full_state_dict(moe)
        packed = copy.deepcopy(moe)
        for name in PROJECTIONS:
            packed.pack_parameter(name, drop=name == dropped, dtype=None)
        dims = {name: 4 if name == dropped else 3 for name in PROJECTIONS}
        for step in ("packed", "copied", "moved", "loaded"):
            if step == "copied":
                packed = copy.deepcopy(packed)
            elif step == "moved":
                packed.to("cpu")
            elif step == "loaded":
                packed.load_state_dict(state)
            assert {name: w.dim() for name, w in packed.named_parameters()} == dims, step
            assert far(packed(x.float(), ids, weights.float()), want, 1e-5) is None, step
            saved = tpkernels.nn.full_state_dict(packed)
            assert all(torch.equal(saved[name], w) for name, w in state.items()), step
        packed.unpack_()
        assert all(torch.equal(packed.get_parameter(n), w) for n, w in moe.named_parameters())


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("world", [2])
@on_ranks()
def test_an_error_leaves_layers_packed(drop: bool) -> None:
    """Of what `nn.Module.to` and others apply, at each of the parameters."""
    x, ids, weights = routes()
    with fresh_group() as group, torch.no_grad():
        moe, linear = MoE(EXPERTS, HIDDEN, WIDTH, group), ColumnParallelLinear(8, 10, group)
        calls = {
            moe: lambda: moe(x.float(), ids, weights.float()),
            linear: lambda: linear(x.float()),
        }
        for layer, call in calls.items():
            want, shapes = call(), [w.shape for w in layer.pack_(drop=drop).parameters()]
            for last in range(2):
                seen = itertools.count()

                def fail(w: torch.Tensor, seen: Any = seen, last: int = last) -> torch.Tensor:
                    if next(seen) == last:
                        raise ZeroDivisionError
                    return w

                with pytest.raises(ZeroDivisionError):
                    layer._apply(fail)
                assert layer._packed is not None and layer._packed != {}, (layer, last)
                assert [w.shape for w in layer.parameters()] == shapes, (layer, last)
                assert far(call(), want, 1e-5) is None, (layer, last)


@pytest.mark.thorough
@pytest.mark.parametrize("world", [2])
@pytest.mark.parametrize(
    ("sequence", "rows"),
    [(True, 28), *(pytest.param(s, None, marks=pytest.mark.slow) for s in (False, True))],
)
@on_ranks()
def test_compiled_training_of_whole_experts(sequence: bool, rows: int | None) -> None:
    """With breaks in the graph, but with the gradients of eager mode: to the bit by the same
    kernels, and by inductor where no token goes to the experts of rank 0."""
    with fresh_group() as group, fresh_cache():
        options = {"expert_parallel": True, "sequence_parallel": sequence, "max_rows": rows}
        moe = MoE(EXPERTS, HIDDEN, WIDTH, group, **options)
        x, uneven, weights = routes()
        assert moe.splits["down_proj"].sizes == (2, 1)
        passes = tpkernels.compile.fuse_collectives(group).options
        ways: list[tuple[torch.Tensor, dict[str, Any], Any]] = [
            (uneven, {"backend": "aot_eager"}, torch.equal),
            (torch.full_like(uneven, 2), {"options": passes}, partial(torch.allclose, atol=1e-5)),
        ]
        for ids, how, alike in ways:
            torch._dynamo.reset()
            grads = []
            for call in (moe, torch.compile(moe, **how)):
                leaves = [x.float().requires_grad_(), weights.float().requires_grad_()]
                moe.zero_grad()
                call(leaves[0], ids, leaves[1]).square().sum().backward()
                grads.append([leaf.grad for leaf in (*leaves, *moe.parameters())])
            assert all(map(alike, *grads)), how


@on_ranks(2)
def test_no_rows_are_combined_outside_of_graphs_for_training() -> None:
    """No token goes to the experts of rank 0."""
    with fresh_group() as group:
        x, ids, weights = routes()
        ids = torch.full_like(ids, 2)
        rows, _, handle = tpkernels.moe_dispatch(x, ids, weights, EXPERTS, group)
        assert (len(rows) == 0) == (group.rank() == 0)
        seen: list[str] = []

        def backend(module: torch.fx.GraphModule, _: Any) -> Any:
            seen.extend(ops_in(module))
            return module.forward

        def combine(rows: torch.Tensor) -> torch.Tensor:
            return tpkernels.moe_combine(2 * rows, handle)

        for grad in (True, False):
            torch._dynamo.reset()
            seen.clear()
            with torch.set_grad_enabled(grad):
                y = torch.compile(combine, backend=backend)(rows.requires_grad_(grad))
                assert torch.equal(y, combine(rows))
            if grad:
                y.sum().backward()
            assert ("tpkernels::moe_combine" in seen) == (not grad or group.rank() == 1)


@pytest.mark.parametrize("world", [2])
@on_ranks()
def test_an_error_in_a_traced_backward_breaks_nothing() -> None:
    with fresh_group() as group:
        breaking = tpkernels.groups.breaking_on_error(group.group_name)
        with FakeTensorMode(), pytest.raises(ZeroDivisionError), breaking:
            raise ZeroDivisionError
        tpkernels.all_reduce(torch.ones(2), group)
        routes, ones = torch.zeros(4, 1, dtype=torch.int64), torch.ones(2, 1)
        with FakeTensorMode() as mode:
            x = torch.ones(3, 8, requires_grad=True)
            given = mode.from_tensor(ones), mode.from_tensor(routes), 2, group.group_name
            y = torch.ops.tpkernels.moe_combine(x, *given)
            (grad,) = torch.autograd.grad(y.sum(), x)
            assert grad.shape == x.shape  # whose number of rows no route tells here


@pytest.mark.slow
@pytest.mark.parametrize("world", [2])
@on_ranks()
def test_compiled() -> None:
    """In one graph, also for another number of tokens."""
    with fresh_group() as group:
        for options in ({}, {"sequence_parallel": True}, {"expert_parallel": True}):
            moe = MoE(EXPERTS, HIDDEN, WIDTH, group, **options, **FORMS[1])
            compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
            for tokens in (6, 8, 40):
                x, ids, weights = routes(tokens)
                grads = []
                for call in (moe, compiled):
                    moe.zero_grad()
                    y = call(x.float(), ids, weights.float())
                    y.square().sum().backward()
                    assert moe.down_proj.grad is not None
                    grads.append((y, moe.down_proj.grad))
                assert torch.equal(grads[0][0], grads[1][0]), (options, tokens)
                assert torch.equal(grads[0][1], grads[1][1]), (options, tokens)


@pytest.mark.parametrize("world", [2])
@on_ranks()
def test_refusals() -> None:
    with fresh_group() as group:
        moe = MoE(EXPERTS, HIDDEN, WIDTH, group)
        x, ids, weights = routes()
        for wrong in (-1, EXPERTS):
            bad = ids.clone()
            bad[2, 1] = wrong
            with pytest.raises(
                ValueError,
                match=f"topk_ids contains expert {wrong}, which is out of range; expected 0 to 2",
            ):
                moe(x.float(), bad, weights.float())
            with mock.patch.object(torch.compiler, "is_compiling", lambda: True):
                rest = moe(x.float(), bad, weights.float())
            rest[2] = torch.where(rest[2].isnan(), moe(x.float(), ids, weights.float())[2], 0)
            assert far(rest, moe(x.float(), ids, weights.float()), 1e-5) is None
        bad = ids.clone()
        bad[2, 1] = EXPERTS if group.rank() == 1 else 0
        wrong_expert = (
            "topk_ids of rank 1 contains expert 3 at",
            "topk_ids contains expert 3, which is out of range; expected 0 to 2",
        )
        for expert_parallel, message in zip((True, False), wrong_expert, strict=True):
            options = {"expert_parallel": expert_parallel, "sequence_parallel": True}
            layer = MoE(EXPERTS, HIDDEN, WIDTH, group, **options)
            want = layer(x.float(), ids, weights.float())
            with pytest.raises(ValueError, match=message):  # on all ranks
                layer(x.float(), bad, weights.float())
            with pytest.raises(ValueError, match=r"x of shape \[7, 7\] needs \[7, N\]"):
                layer(x.float()[:, 1:], ids, weights.float())
            with pytest.raises(TypeError, match=r"w\[0\] is float32 but x is float64"):
                layer(x, ids, weights)
            assert torch.equal(layer(x.float(), ids, weights.float()), want)
        with pytest.raises(ValueError, match=r"\[6, 2\]; both must be \[tokens, k\]"):
            moe(x.float(), ids, weights.float()[:6])
        with pytest.raises(ValueError, match="sequence_dim is 1; MoE supports 0"):
            MoE(EXPERTS, HIDDEN, WIDTH, group, sequence_dim=1)


@pytest.mark.thorough
def test_models_call_it_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where experts have biases and gates of their own, as those of gpt-oss."""
    transformers = pytest.importorskip("transformers")
    from tpkernels.integrations.transformers import experts

    counts = []

    def counted(*args: torch.Tensor) -> torch.Tensor:
        counts.append(args[2])
        return tpkernels.grouped_matmul(*args)

    monkeypatch.setattr(experts, "grouped_matmul", counted)
    sizes = dict(hidden_size=32, num_hidden_layers=1, vocab_size=50, head_dim=8)
    for model_type, options in (
        ("gpt_oss", {"num_local_experts": 4, "intermediate_size": 24}),
        ("qwen3_moe", {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 10}),
    ):
        config = transformers.AutoConfig.for_model(model_type, **sizes, **options)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.uniform_(-0.3, 0.3)
            ids, logits = torch.arange(1, 8)[None], []
            for implementation in ("eager", "tpkernels"):
                model.config._experts_implementation = implementation
                logits.append(model(ids).logits)
        assert far(logits[1], logits[0], 1e-5) is None, model_type
    assert len(counts) == 4
