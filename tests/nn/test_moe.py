"""MoE layers against a float64 loop over tokens: tensor-parallel and expert-parallel experts, local
and replicated tokens, gradients, packed weights and state dicts."""

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
from tests.support.nn_reference import find_mismatch
from tests.support.ranked import fresh_group, on_ranks
from tests.support.tiers import sweep
from tpkernels.nn import ColumnParallelLinear, MoE
from tpkernels.nn.moe import PROJECTIONS
from tpkernels.ops.experts import _routes_of_experts, reduce_by_token, sort_assignments

F64 = torch.float64
TOKENS, EXPERTS, HIDDEN, WIDTH, K = 7, 3, 8, 10, 2


#: Layouts of the expert weights in Mixtral and in gpt-oss.
LAYOUTS: list[dict[str, bool]] = [{}, {"bias": True, "transposed": True, "interleaved": True}]


def reference_output(x: Any, ids: Any, weights: Any, moe: MoE, w: dict[str, Any]) -> torch.Tensor:
    """Return the weighted sum of the experts of each token, in float64."""
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


def make_assignments(tokens: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x, expert ids and router weights. Expert 1 gets no tokens, and some tokens are
    assigned twice to one expert."""
    torch.manual_seed(3)
    ids = torch.randint(0, 2, (tokens, K)) * 2
    return torch.randn(tokens, HIDDEN, dtype=F64), ids, torch.rand(tokens, K, dtype=F64)


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_expert_outputs_are_summed_in_slot_order(dtype: torch.dtype) -> None:
    """The sums are bitwise identical for any number of columns and threads, unlike torch.sum."""
    ids = torch.randint(0, EXPERTS, (64, 8), generator=torch.Generator().manual_seed(1))
    weights = torch.rand(64, 8, dtype=F64 if dtype == F64 else torch.float32)
    routing = sort_assignments(ids, weights, EXPERTS)
    rows = torch.randn(512, 101).to(dtype).requires_grad_()
    by_assignment = rows[routing.order.argsort()].view(64, 8, 101).to(weights.dtype)
    total = torch.zeros(64, 101, dtype=weights.dtype)
    for j in range(8):
        total = total + by_assignment[:, j] * weights[:, j, None]
    y = reduce_by_token(rows, routing)
    for threads in (3, torch.get_num_threads()):
        torch.set_num_threads(threads)
        assert torch.equal(reduce_by_token(rows, routing), total.to(dtype))
    got, want = (torch.autograd.grad(output.sum(), rows)[0] for output in (y, total.to(dtype)))
    assert torch.equal(got, want)


@pytest.mark.parametrize("local", [(0, 3), (3, 2), (5, 0)], ids=str)
def test_static_assignments_of_local_experts(local: tuple[int, int]) -> None:
    """With ``static``, assignments to local experts come first, in the same order as without."""
    ids = torch.randint(0, 5, (40, 2), generator=torch.Generator().manual_seed(2))
    dynamic, counts = _routes_of_experts(ids, 5, *local, static=False)
    ids[7:9, 1], invalid = torch.tensor([-1, 5]), [15, 17]
    order, static_counts = _routes_of_experts(ids, 5, *local, static=True)
    valid = [i for i in dynamic.tolist() if i not in invalid]
    assert order[: len(valid)].tolist() == valid and set(order.tolist()) == set(range(80))
    assert (
        int(counts.sum() - static_counts.sum()) == len(dynamic) - len(valid)
        and len(static_counts) == local[1]
    )


@pytest.mark.parametrize("world", sweep([3, 2, 1, 4], num_thorough=2))
@pytest.mark.parametrize("width", sweep([WIDTH, 2], num_thorough=1))
@on_ranks()
def test_against_a_loop_over_tokens(width: int) -> list[str]:
    """Outputs and gradients match the loop, also on ranks without experts, columns or tokens."""
    failures: dict[str, str | None] = {}
    with fresh_group() as group:
        rank, world = group.rank(), group.size()
        for layout, expert_parallel in itertools.product(LAYOUTS, (False, True)):
            sizes = tpkernels.shard_sizes(TOKENS, world)
            if layout and world > 1:  # the last rank has no token
                sizes = [*tpkernels.shard_sizes(TOKENS, world - 1), 0]
            local_rows = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
            for sequence_parallel in (False, True):
                case = f"{expert_parallel=} {sequence_parallel=} {layout}"
                torch.manual_seed(1)
                moe = MoE(
                    EXPERTS,
                    HIDDEN,
                    width,
                    group,
                    expert_parallel=expert_parallel,
                    sequence_parallel=sequence_parallel,
                    max_rows=TOKENS * K if layout else None,
                    dtype=F64,
                    **layout,
                )
                unsharded = {
                    name: w.requires_grad_()
                    for name, w in tpkernels.nn.full_state_dict(moe).items()
                }
                x, ids, weights = make_assignments()
                inputs = [x.requires_grad_(), weights.requires_grad_()]
                want = reference_output(x, ids, weights, moe, unsharded)
                upstream = torch.randn_like(want)
                want.backward(upstream)
                rows = local_rows if sequence_parallel else slice(None)
                local = [t.detach()[rows].clone().requires_grad_() for t in inputs]
                y = moe(
                    local[0],
                    ids[rows],
                    local[1],
                    **({"shard_sizes": sizes} if sequence_parallel else {}),
                )
                y.backward(upstream[rows])
                failures[f"{case} y"] = find_mismatch(y.detach(), want.detach()[rows], 1e-12)
                for name, got, full in zip(("x", "weights"), local, inputs, strict=True):
                    assert got.grad is not None and full.grad is not None
                    failures[f"{case} {name}"] = find_mismatch(got.grad, full.grad[rows], 1e-12)
                for name, w in unsharded.items():
                    got_grad = moe.get_parameter(name).grad
                    assert got_grad is not None and w.grad is not None
                    shard = moe.get_shard(name, w.grad)
                    if shard.numel():
                        failures[f"{case} {name}"] = find_mismatch(got_grad, shard, 1e-12)
    return [f"{name}: {failure}" for name, failure in failures.items() if failure is not None]


@pytest.mark.parametrize("world", [2])
@on_ranks()
def test_packed() -> None:
    """With small integers in float32, results are bitwise identical to plain weights. State dicts
    and loading work like in a plain layer."""
    with fresh_group() as group:
        for layout, expert_parallel in zip(LAYOUTS, (False, True), strict=True):
            moe = MoE(EXPERTS, HIDDEN, WIDTH, group, expert_parallel=expert_parallel, **layout)
            with torch.no_grad():
                for w in moe.parameters():
                    w.copy_(torch.randint(-2, 3, w.shape))
            moe.activation = F.relu
            x, ids, _ = make_assignments()
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
    """Experts like in transformers, with a method whose name differs from its function."""

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
    """Pickle and copy a plain or packed layer. Results are identical, and packed weights are stored
    once."""
    x, ids, weights = make_assignments()
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
def test_one_of_two_plain_weights_is_dropped(dropped: str) -> None:
    """Pack both weights and drop one plain weight, as `from_pretrained` does if the second is tied.
    Results and dims stay correct after copies, moves and loads."""
    x, ids, weights = make_assignments()
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
            assert find_mismatch(packed(x.float(), ids, weights.float()), want, 1e-5) is None, step
            saved = tpkernels.nn.full_state_dict(packed)
            assert all(torch.equal(saved[name], w) for name, w in state.items()), step
        packed.unpack_()
        assert all(torch.equal(packed.get_parameter(n), w) for n, w in moe.named_parameters())


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("world", [2])
@on_ranks()
def test_an_error_leaves_layers_packed(drop: bool) -> None:
    """Raise in ``_apply``, which `nn.Module.to` calls, at the first or second parameter. The layers
    stay packed and give the same results."""
    x, ids, weights = make_assignments()
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
                assert find_mismatch(call(), want, 1e-5) is None, (layer, last)


@pytest.mark.thorough
@pytest.mark.parametrize("world", [2])
@pytest.mark.parametrize(
    ("sequence", "rows"),
    [(True, 28), *(pytest.param(s, None, marks=pytest.mark.slow) for s in (False, True))],
)
@on_ranks()
def test_compiled_training_with_expert_parallelism(sequence: bool, rows: int | None) -> None:
    """Compile with graph breaks. With the same kernels, gradients are bitwise identical to eager
    mode. With inductor they are close, even if the experts of rank 0 get no tokens."""
    with fresh_group() as group, fresh_cache():
        options = {"expert_parallel": True, "sequence_parallel": sequence, "max_rows": rows}
        moe = MoE(EXPERTS, HIDDEN, WIDTH, group, **options)
        x, uneven, weights = make_assignments()
        assert moe.shardings["down_proj"].sizes == (2, 1)
        passes = tpkernels.compile.fuse_collectives(group).options
        cases: list[tuple[torch.Tensor, dict[str, Any], Any]] = [
            (uneven, {"backend": "aot_eager"}, torch.equal),
            (torch.full_like(uneven, 2), {"options": passes}, partial(torch.allclose, atol=1e-5)),
        ]
        for ids, compile_options, matches in cases:
            torch._dynamo.reset()
            grads = []
            for call in (moe, torch.compile(moe, **compile_options)):
                leaves = [x.float().requires_grad_(), weights.float().requires_grad_()]
                moe.zero_grad()
                call(leaves[0], ids, leaves[1]).square().sum().backward()
                grads.append([leaf.grad for leaf in (*leaves, *moe.parameters())])
            assert all(map(matches, *grads)), compile_options


@on_ranks(2)
def test_combine_without_rows_in_training_graphs() -> None:
    """The experts of rank 0 get no tokens. With gradients, rank 0 runs ``moe_combine`` outside the
    graph."""
    with fresh_group() as group:
        x, ids, weights = make_assignments()
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
def test_an_error_while_tracing_keeps_the_group_usable() -> None:
    with fresh_group() as group:
        breaking = tpkernels.groups.breaking_on_error(group.group_name)
        with FakeTensorMode(), pytest.raises(ZeroDivisionError), breaking:
            raise ZeroDivisionError
        tpkernels.all_reduce(torch.ones(2), group)
        ids, ones = torch.zeros(4, 1, dtype=torch.int64), torch.ones(2, 1)
        with FakeTensorMode() as mode:
            x = torch.ones(3, 8, requires_grad=True)
            args = mode.from_tensor(ones), mode.from_tensor(ids), 2, group.group_name
            y = torch.ops.tpkernels.moe_combine(x, *args)
            (grad,) = torch.autograd.grad(y.sum(), x)
            assert grad.shape == x.shape  # the assignments do not give the number of rows


@pytest.mark.slow
@pytest.mark.parametrize("world", [2])
@on_ranks()
def test_compiled() -> None:
    """Compile into one graph and call it with several numbers of tokens. Results and gradients are
    bitwise identical to eager mode."""
    with fresh_group() as group:
        for options in ({}, {"sequence_parallel": True}, {"expert_parallel": True}):
            moe = MoE(EXPERTS, HIDDEN, WIDTH, group, **options, **LAYOUTS[1])
            compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
            for tokens in (6, 8, 40):
                x, ids, weights = make_assignments(tokens)
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
        x, ids, weights = make_assignments()
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
            assert find_mismatch(rest, moe(x.float(), ids, weights.float()), 1e-5) is None
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
            with pytest.raises(ValueError, match=message):  # raised on all ranks
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
def test_transformers_experts_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Select the "tpkernels" experts by name in transformers models. Logits match eager mode, also
    for gpt-oss experts with biases and custom gates."""
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
        assert find_mismatch(logits[1], logits[0], 1e-5) is None, model_type
    assert len(counts) == 4
