"""What the gradient tests run in the ranks, and what they compare with: the gradients that torch
finds of the ops' definitions in float64, within the bound of ops/reference.py.

Every rank makes the inputs of all ranks, and the gradients that reach their outputs, from the case.
The gradients of most definitions are sums of products, so magnitudes in place of the numbers give
``|A| @ |B|``, and ones the number of summands. Those of a normalisation are compared in float64.
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
from tests.support.ranked import check_job, difference, fresh_group, options_of, place
from tests.support.reference import draw
from tpkernels import groups
from tpkernels.ops.reference import Expected, bounded, unrounded

Named = dict[str, torch.Tensor]
_FLOAT64_ERROR = 1e-11  # relative, of a normalisation


def named_inputs(case: Case, rank: int, world: int) -> Named:
    """What a rank passes, by name."""
    if "all_gather" in case.op:
        pairs = reference.column_weights(case, rank)
        weights = {f"w{i}": w for i, (w, _) in enumerate(pairs)}
        biases = {f"b{i}": b for i, (_, b) in enumerate(pairs) if b is not None}
        return {"x": case.shard(reference.gathered_x(case), rank, world)} | weights | biases
    x, w = reference.partial_factors(case, rank, world)
    residual = reference.reduction_residual(case)
    if residual is not None and case.scattered:
        residual = case.shard(residual, rank, world)
    norm = reference.norm_weight(case) if case.normalises else None
    others = {"w": w, "bias": reference.reduction_bias(case), "residual": residual, "norm": norm}
    return {"x": x} | {name: value for name, value in others.items() if value is not None}


def output_grads(case: Case, rank: int, world: int) -> list[torch.Tensor]:
    """The gradients that reach a rank's outputs, the gathered x first. Their values are exact in
    both x's dtype and the output's."""
    case = case.values()

    def made(shape: Sequence[int], *what: object) -> torch.Tensor:
        return draw(case, tuple(shape), case.dtype, 1, "grad", *what).to(case.out).to(case.dtype)

    if "all_gather" in case.op:
        widths = [w.shape[1] for w, _ in reference.column_weights(case, rank)]
        outs = [made((*case.shape[:-1], n), rank, i) for i, n in enumerate(widths)]
        return [made(case.shape, rank), *outs] if case.return_gathered or not outs else outs
    whole = made(case.shape)
    if case.normalises:
        return [made(case.shape, "normalised"), whole]
    return [case.shard(whole, rank, world) if case.scattered else whole]


def definition(case: Case, ranks: Sequence[Named], world: int) -> list[list[torch.Tensor]]:
    """The outputs of each rank; those that all ranks have alike only once."""
    if "all_gather" in case.op:
        whole = torch.cat([mine["x"] for mine in ranks], case.dim)
        outs = [
            [whole @ mine[f"w{i}"] + mine.get(f"b{i}", 0) for i in range(len(case.n))]
            for mine in ranks
        ]
        return [[whole, *out] if case.return_gathered or not out else out for out in outs]
    total = sum(mine["x"] @ mine["w"] if "w" in mine else mine["x"] for mine in ranks)
    total = total + ranks[0].get("bias", torch.zeros(()))
    shards = total.split(case.shards(world), case.dim) if case.scattered else [total]
    outs = [[one + mine.get("residual", 0)] for one, mine in zip(shards, ranks, strict=False)]
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
    """The gradients of a rank's inputs by the definition, of changed numbers, through the outputs
    ``used``, of all ranks or of one."""
    inputs = [named_inputs(case, r, world) for r in range(world)]
    ranks = [{name: change(x).requires_grad_() for name, x in mine.items()} for mine in inputs]
    for name in {"bias", "norm", *([] if case.scattered else ["residual"])} & {*ranks[0]}:
        for mine in ranks:  # the same on all ranks
            mine[name] = ranks[0][name]
    pairs = [
        (outs[i], change(output_grads(case, r, world)[i]))
        for r, outs in enumerate(definition(case, ranks, world))
        for i in used
        if only in (None, r)
    ]
    outs, grads = zip(*pairs, strict=True)
    found = torch.autograd.grad(outs, [*ranks[rank].values()], grads, materialize_grads=True)
    return dict(zip(ranks[rank], found, strict=True))


def expected(case: Case, rank: int, world: int, used: Sequence[int]) -> dict[str, Expected]:
    """The gradients of a rank's inputs."""
    case, gathers = case.values(), "all_gather" in case.op
    dtypes = {name: value.dtype for name, value in named_inputs(case, rank, world).items()}

    def derived(change: Callable[[torch.Tensor], torch.Tensor], only: int | None = None) -> Named:
        return _derived(case, rank, world, used, change, only)

    def want(name: str, dtype: torch.dtype) -> Expected:
        whole = exact[name]
        if case.normalises:
            return Expected(whole, _FLOAT64_ERROR * (1 + whole.abs().max()) + 0 * whole, dtype)
        if not gathers and (name == "residual" or "w" not in dtypes):  # passed on as it is
            return Expected(whole, torch.zeros_like(whole), dtype)
        travels = sum(partials) if name == "x" and len(partials) > 1 else None
        if case.integers:
            return unrounded(whole, dtype)
        return bounded(
            whole,
            terms[name],
            int(counts[name].max()) if whole.numel() else 1,
            dtype=case.dtype,
            out=dtype,
            wire=case.dtype,
            partials=travels,
            unfused=unfused[name].to(dtype),
        )

    exact, terms = derived(torch.Tensor.double), derived(lambda x: x.double().abs())
    unfused = derived(lambda x: x.to(case.dtype, copy=True))
    counts = derived(lambda x: torch.ones_like(x, dtype=torch.float64))
    partials = [derived(torch.Tensor.double, r)["x"].abs() for r in range(world * gathers)]
    return {name: want(name, dtype) for name, dtype in dtypes.items()}


def call(
    case: Case, group: dist.ProcessGroup, save_gathered: bool
) -> tuple[Named, list[torch.Tensor]]:
    """(inputs that require a gradient, outputs) of one call."""
    linear = "transposed" if case.weight_layout == "linear" else case.weight_layout
    layouts = {"x": case.layout, "w": linear}
    named = {
        name: place(value, layouts.get(name[0], "plain")).requires_grad_()
        for name, value in named_inputs(case, group.rank(), group.size()).items()
    }
    options = options_of(case)
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
    factors = [named[name] for name in ("x", "w", "norm") if name in named]
    result: Any = getattr(tpkernels, case.op)(*factors, group, **options)
    return named, list(result) if case.normalises else [result]


def check(case: Case, group: dist.ProcessGroup, save_gathered: bool) -> list[str]:
    """What is wrong with the gradients of one call, as text; of a normalised sum, also of each of
    the results alone."""
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
            error = difference(got.contiguous(), wants[name])
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
                # So that no peer waits for this rank.
                groups.get(group.group_name).mark_broken(error)
                raise
    return failures


def run_cases(
    ranks: RanksFixture, world: int, cases: Sequence[Case], save_gathered: bool = False
) -> None:
    """Runs the cases on ``world`` ranks and fails with the failures of all ranks."""
    assert cases
    check_job(ranks(world), cases_job, list(cases), save_gathered, timeout=240)
