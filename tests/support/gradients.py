"""Run the gradient tests in the ranks and compute the expected gradients.

Expected gradients are the torch gradients of the op definitions in float64, with the error bound of
ops/reference.py. Every rank derives the inputs of all ranks, and the gradients of their outputs,
from the case.

Most gradients are sums of products. Differentiated with magnitudes as inputs, the definition gives
``|A| @ |B|``; with ones, it gives the number of summands. Gradients of RMSNorm are compared in
float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import tpkernels
from tests.support import reference
from tests.support.cases import Case, RanksFixture
from tests.support.ranked import (
    call_options,
    check_job,
    copy_to_layout,
    find_difference,
    fresh_group,
)
from tests.support.reference import draw
from tpkernels import groups
from tpkernels.ops.reference import Expected, expect_bounded, expect_exact

Named = dict[str, torch.Tensor]
_FLOAT64_ERROR = 1e-11  # relative, for RMSNorm


def named_inputs(case: Case, rank: int, world: int) -> Named:
    """Return the tensor arguments of a rank by name."""
    if "all_gather" in case.op:
        pairs = reference.column_weights(case, rank)
        weights = {f"w{i}": w for i, (w, _) in enumerate(pairs)}
        biases = {f"b{i}": b for i, (_, b) in enumerate(pairs) if b is not None}
        return {"x": case.shard(reference.gathered_x(case), rank, world)} | weights | biases
    x, w = reference.partial_operands(case, rank, world)
    residual = reference.reduction_residual(case)
    if residual is not None and case.scattered:
        residual = case.shard(residual, rank, world)
    norm = reference.norm_weight(case) if case.normalises else None
    optional = {"w": w, "bias": reference.reduction_bias(case), "residual": residual, "norm": norm}
    return {"x": x} | {name: value for name, value in optional.items() if value is not None}


def output_grads(case: Case, rank: int, world: int) -> list[torch.Tensor]:
    """Return the gradients of the outputs of a rank, gathered x first.

    Their values are exact in the dtypes of x and of the output.
    """
    case = case.values()

    def draw_grad(shape: Sequence[int], *seed_key: object) -> torch.Tensor:
        return (
            draw(case, tuple(shape), case.dtype, 1, "grad", *seed_key).to(case.out).to(case.dtype)
        )

    if "all_gather" in case.op:
        widths = [w.shape[1] for w, _ in reference.column_weights(case, rank)]
        outs = [draw_grad((*case.shape[:-1], n), rank, i) for i, n in enumerate(widths)]
        return [draw_grad(case.shape, rank), *outs] if case.return_gathered or not outs else outs
    sum_grad = draw_grad(case.shape)
    if case.normalises:
        return [draw_grad(case.shape, "normalised"), sum_grad]
    return [case.shard(sum_grad, rank, world) if case.scattered else sum_grad]


def definition(case: Case, ranks: Sequence[Named], world: int) -> list[list[torch.Tensor]]:
    """Return the outputs of each rank. Outputs that are equal on all ranks are listed once."""
    if "all_gather" in case.op:
        gathered = torch.cat([inputs["x"] for inputs in ranks], case.dim)
        outs = [
            [gathered @ inputs[f"w{i}"] + inputs.get(f"b{i}", 0) for i in range(len(case.n))]
            for inputs in ranks
        ]
        return [[gathered, *out] if case.return_gathered or not out else out for out in outs]
    total = sum(inputs["x"] @ inputs["w"] if "w" in inputs else inputs["x"] for inputs in ranks)
    total = total + ranks[0].get("bias", torch.zeros(()))
    shards = total.split(case.shards(world), case.dim) if case.scattered else [total]
    outs = [
        [shard + inputs.get("residual", 0)] for shard, inputs in zip(shards, ranks, strict=False)
    ]
    if case.normalises:
        ((sum_,),) = outs
        norm = F.rms_norm(sum_, sum_.shape[-1:], ranks[0]["norm"], reference.NORM_EPS)
        outs = [[norm, sum_]]
    return outs


def _derived(
    case: Case,
    rank: int,
    world: int,
    used: Sequence[int],
    change: Callable[[torch.Tensor], torch.Tensor],
    only: int | None = None,
) -> Named:
    """Differentiate the definition on changed values and return the input gradients of a rank.

    Gradients flow through the outputs ``used`` of all ranks, or of rank ``only``.
    """
    inputs = [named_inputs(case, r, world) for r in range(world)]
    ranks = [
        {name: change(x).requires_grad_() for name, x in rank_inputs.items()}
        for rank_inputs in inputs
    ]
    for name in {"bias", "norm", *([] if case.scattered else ["residual"])} & {*ranks[0]}:
        for rank_inputs in ranks:  # one tensor for all ranks
            rank_inputs[name] = ranks[0][name]
    pairs = [
        (outs[i], change(output_grads(case, r, world)[i]))
        for r, outs in enumerate(definition(case, ranks, world))
        for i in used
        if only in (None, r)
    ]
    outs, grads = zip(*pairs, strict=True)
    input_grads = torch.autograd.grad(outs, [*ranks[rank].values()], grads, materialize_grads=True)
    return dict(zip(ranks[rank], input_grads, strict=True))


def expected(case: Case, rank: int, world: int, used: Sequence[int]) -> dict[str, Expected]:
    """Return the expected input gradients of a rank."""
    case, gathers = case.values(), "all_gather" in case.op
    dtypes = {name: value.dtype for name, value in named_inputs(case, rank, world).items()}

    def derived(change: Callable[[torch.Tensor], torch.Tensor], only: int | None = None) -> Named:
        return _derived(case, rank, world, used, change, only)

    def expect(name: str, dtype: torch.dtype) -> Expected:
        exact_grad = exact[name]
        if case.normalises:
            return Expected(
                exact_grad, _FLOAT64_ERROR * (1 + exact_grad.abs().max()) + 0 * exact_grad, dtype
            )
        if not gathers and (name == "residual" or "w" not in dtypes):  # copied unchanged
            return Expected(exact_grad, torch.zeros_like(exact_grad), dtype)
        partial_magnitudes = sum(partials) if name == "x" and len(partials) > 1 else None
        if case.integers:
            return expect_exact(exact_grad, dtype)
        return expect_bounded(
            exact_grad,
            terms[name],
            int(counts[name].max()) if exact_grad.numel() else 1,
            dtype=case.dtype,
            out=dtype,
            wire=case.dtype,
            partials=partial_magnitudes,
            unfused=unfused[name].to(dtype),
        )

    exact, terms = derived(torch.Tensor.double), derived(lambda x: x.double().abs())
    unfused = derived(lambda x: x.to(case.dtype, copy=True))
    counts = derived(lambda x: torch.ones_like(x, dtype=torch.float64))
    partials = [derived(torch.Tensor.double, r)["x"].abs() for r in range(world * gathers)]
    return {name: expect(name, dtype) for name, dtype in dtypes.items()}


def call(
    case: Case, group: dist.ProcessGroup, save_gathered: bool
) -> tuple[Named, list[torch.Tensor]]:
    """Return the inputs, which require gradients, and the outputs of one call."""
    linear = "transposed" if case.weight_layout == "linear" else case.weight_layout
    layouts = {"x": case.layout, "w": linear}
    named = {
        name: copy_to_layout(value, layouts.get(name[0], "plain")).requires_grad_()
        for name, value in named_inputs(case, group.rank(), group.size()).items()
    }
    options = call_options(case)
    if "all_gather" in case.op:
        if not case.n:
            return named, [tpkernels.all_gather(named["x"], group, **options)]
        count = range(len(case.n))
        if case.biases:
            options["biases"] = [named.get(f"b{i}") for i in count]
        weights = [named[f"w{i}"] for i in count]
        options["save_gathered"] = save_gathered
        outs = tpkernels.all_gather_matmul(named["x"], weights, group, **options)
        return named, [outs[0], *outs[1]] if case.return_gathered else outs
    options |= {name: named[name] for name in ("bias", "residual") if name in named}
    tensor_args = [named[name] for name in ("x", "w", "norm") if name in named]
    result: Any = getattr(tpkernels, case.op)(*tensor_args, group, **options)
    return named, list(result) if case.normalises else [result]


def check(case: Case, group: dist.ProcessGroup, save_gathered: bool) -> list[str]:
    """Describe the wrong gradients of one call.

    For RMSNorm ops, also check the gradients of each result separately.
    """
    rank, world, wrong = group.rank(), group.size(), []
    grads = [grad.to(case.out) for grad in output_grads(case, rank, world)]
    if case.return_gathered:
        grads[0] = grads[0].to(case.dtype)
    for used in ((0, 1), (0,), (1,)) if case.normalises else (range(len(grads)),):
        inputs, outputs = call(case, group, save_gathered)
        pairs = zip(*((outputs[i], grads[i]) for i in used), strict=True)
        results = torch.autograd.grad(next(pairs), [*inputs.values()], next(pairs))
        where = f"rank {rank} of {world}: {case} {save_gathered=} outputs {[*used]}: gradient of"
        wants = expected(case, rank, world, used)
        for (name, x), got in zip(inputs.items(), results, strict=True):
            error = find_difference(got.contiguous(), wants[name])
            if error is not None:
                wrong.append(f"{where} {name}: {error}")
            if name[0] == "w" and x.t().is_contiguous() and x.stride() != got.stride():
                wrong.append(f"{where} {name} has strides {got.stride()}")
    return wrong


def cases_job(cases: Sequence[Case], save_gathered: bool) -> list[str]:
    failures: list[str] = []
    with fresh_group() as group:
        for case in cases:
            try:
                failures += check(case, group, save_gathered)
            except Exception as error:
                # Ends the waits of the peers.
                groups.get(group.group_name).mark_broken(error)
                raise
    return failures


def run_cases(
    ranks: RanksFixture, world: int, cases: Sequence[Case], save_gathered: bool = False
) -> None:
    """Run the cases on ``world`` ranks and fail with the failures of all ranks."""
    assert cases
    check_job(ranks(world), cases_job, list(cases), save_gathered, timeout=240)
