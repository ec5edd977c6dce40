"""A case of `tpkernels bench` on a rank: verify the op, then time it with its baselines.

unfused        the op with algorithm "unfused": the same local matmul without overlap
torch          a torch.distributed collective (gloo, or NCCL on GPUs) and torch.matmul
local_matmul   the local matmul of the algorithms without communication: a lower bound of the time
symm_mem       torch.ops.symm_mem.fused_* (CUDA)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from tpkernels.bench.cases import (
    Inputs,
    random_case,
    run_local_matmul,
    run_planned,
    run_torch,
    world_group,
)
from tpkernels.bench.specs import Spec
from tpkernels.bench.sweep import Method
from tpkernels.launch.session import all_gather_objects, rank_device, synchronizer
from tpkernels.local.packed import is_native
from tpkernels.local.scaled import ScaledMatrix, torch_supports
from tpkernels.ops.reference import Expected, rms_norm
from tpkernels.planning.cost import Rates
from tpkernels.qualification.op_case import NORM_EPS, Operands, Outputs
from tpkernels.timing import Samples, Variant, measure

_MIN_REPEAT = 3  # repetitions that run even if they exceed the budget: see `timing.measure`


@dataclass(frozen=True)
class Choice:
    """The plan of a requested algorithm, and the largest error of its result / error bound."""

    algorithm: str
    reason: str
    error_over_bound: float


@dataclass(frozen=True)
class CaseReport:
    """Report of a rank on a case.

    Attributes:
        choices: choices by requested algorithm.
        samples: samples by baseline and by requested algorithm, without wrong algorithms.
        skipped: baselines that were not run, with the reasons.
        inputs_over_cache: `Inputs.over_cache`.
    """

    choices: dict[str, Choice]
    samples: dict[str, Samples]
    skipped: dict[str, str]
    inputs_over_cache: float


def run_case(spec: Spec, method: Method, rates: Rates | None = None) -> CaseReport:
    """Verify a case, then time the correct algorithms, interleaved with the baselines. `unfused` is
    always included. Collective.

    Args:
        rates: rates of the slowest rank, identical on all ranks. Only needed if the method has a
            time limit and baselines.
    """
    operands = random_case(spec, rank_device(method.device))
    skipped = _find_skipped(operands, method, rates)
    planned_runs = {
        name: run_planned(operands.copy(), name)
        for name in dict.fromkeys([*method.algorithms, "unfused"])
    }
    worst = check(
        operands,
        {name: outputs for name, (outputs, _) in planned_runs.items()},
        None if "torch" in skipped else run_torch(operands.copy()),
    )
    choices = {
        name: Choice(plan.algorithm, plan.reason, worst[name])
        for name, (_, plan) in planned_runs.items()
    }
    del planned_runs  # frees the results
    inputs = Inputs(operands, cold=method.cold)
    runs: dict[str, Callable[[], object]] = {
        "torch": lambda: run_torch(inputs.sharded()),
        "local_matmul": lambda: run_local_matmul(inputs.gathered()),
        "symm_mem": lambda: _run_symm_mem(inputs.sharded()),
    }
    runs = {name: run for name, run in runs.items() if name not in skipped}
    for name, choice in choices.items():
        if choice.error_over_bound <= 1:
            runs[name] = lambda name=name: inputs.sharded().run(name)  # type: ignore[misc]
    # all_reduce works in place, and so does the torch baseline of all_reduce_rms_norm. Restore the
    # inputs so that each timed region starts with the same values.
    undo = inputs.restore if operands.spec.keeps_sum and operands.w is None else None
    samples = measure(
        {name: Variant(run, undo) for name, run in runs.items()},
        repeat=method.repeat,
        budget=math.inf if method.seconds is None else method.seconds,
        synchronize=synchronizer(method.device),
    )
    reasons = {name: reason for name, reason in skipped.items() if reason}
    return CaseReport(choices, samples, reasons, inputs.over_cache)


def check(
    operands: Operands, results: Mapping[str, Outputs], torch_outputs: Outputs | None = None
) -> dict[str, float]:
    """Compare results with float64. Return the largest ``error / bound`` by name (see
    `Expected.worst`). Collective: each rank checks a shard of the rows, and all ranks return the
    maximum over all rows.

    On CUDA tensors NCCL may reduce, with W - 1 roundings to the communication dtype, and torch sums
    the squares of a norm in any order.

    Args:
        results: results of ``operands``, by name.
        torch_outputs: the result of `run_torch`. Its error is added to the bound.
    """
    # Roundings to the communication dtype: one of a matmul partial, and one per addition by NCCL.
    roundings = operands.spec.has_matmul + (
        len(operands.case.sizes) - 1 if operands.x.is_cuda else 0
    )
    expected = operands.expected(operands.case.rows(operands.rank), roundings)
    if torch_outputs is not None:
        torch_error = (_select_checked_rows(operands, torch_outputs[0]) - expected[0].exact).abs()
        expected[0] = replace(expected[0], bound=expected[0].bound + torch_error)
    worst = {}
    for name, outputs in results.items():
        errors = [
            _worst(operands, y, reference) for y, reference in zip(outputs, expected, strict=False)
        ]
        if operands.norm_weight is not None and errors[0] <= 1:  # only for a correct sum
            total = _select_checked_rows(operands, outputs[0])
            normed = rms_norm(total, operands.norm_weight, NORM_EPS, any_order=total.is_cuda)
            errors.append(_worst(operands, outputs[1], normed))
        worst[name] = max(errors) if _is_identical_on_all_ranks(operands, outputs) else math.inf
    ranks = all_gather_objects(worst)
    return {name: max(rank[name] for rank in ranks) for name in worst}


def _select_checked_rows(operands: Operands, y: torch.Tensor) -> torch.Tensor:
    """Return the rows that this rank checks: its shard of an all-reduce, otherwise all rows."""
    return y[operands.case.rows(operands.rank)] if operands.spec.keeps_sum else y


def _worst(operands: Operands, y: torch.Tensor, expected: Expected) -> float:
    """Return the largest ``error / bound`` in the rows that this rank checks."""
    shape = [sum(operands.case.sizes), *expected.exact.shape[1:]]
    if operands.spec.keeps_sum and y.shape != torch.Size(shape):
        return math.inf
    return expected.worst(_select_checked_rows(operands, y))


def _is_identical_on_all_ranks(operands: Operands, outputs: Outputs) -> bool:
    """Return whether the results of an all-reduce are bitwise identical on all ranks."""
    same = True
    for output in outputs if operands.spec.keeps_sum else []:
        bits = output.contiguous().view(torch.uint8)
        first = bits.clone()
        dist.broadcast(first, src=0)
        same = same and torch.equal(first, bits)
    return same


def _find_skipped(operands: Operands, method: Method, rates: Rates | None) -> dict[str, str]:
    """Return the skipped baselines with the reasons. The reason is "" if the user does not expect
    the baseline. Collective."""
    skipped = {"local_matmul": ""} if operands.w is None else {}
    rows, expected = sum(operands.case.sizes) if operands.spec.gathers else len(operands.x), 0.0
    if rates is not None and operands.w is not None:
        expected = 2 * rows * operands.w.numel() / rates.torch_flops
    if operands.spec.routed or not method.baselines:
        skipped["torch"] = ""  # for routed ops, `unfused` already uses the torch all-to-all
    elif operands.scales and operands.x.is_cuda and not _torch_multiplies(operands):
        skipped["torch"] = "torch._scaled_mm does not support these operands on this GPU"
    elif method.seconds is not None and expected * _MIN_REPEAT > method.seconds:
        slow = (
            ""
            if is_native(operands.x.dtype)
            else "; the processor has no instructions for the dtype"
        )
        skipped["torch"] = f"torch.matmul would need about {expected:.2g} s per call{slow}"
    if not (method.baselines and operands.x.is_cuda):
        skipped["symm_mem"] = ""
    elif reasons := [reason for reason in all_gather_objects(_try_symm_mem(operands)) if reason]:
        skipped["symm_mem"] = reasons[0]
    return skipped


def _torch_multiplies(operands: Operands) -> bool:
    """Return whether torch._scaled_mm supports these operands on this GPU."""
    x, w, scale_x, scale_w = operands.tensor_args
    return torch_supports(ScaledMatrix(x, scale_x), ScaledMatrix(w, scale_w), operands.case.dtype)


def _try_symm_mem(operands: Operands) -> str:
    """Run the fused op of torch once. Return the reason why it cannot run, or "". Collective."""
    if operands.case.op not in ("all_gather_matmul", "matmul_reduce_scatter"):
        return f"torch.ops.symm_mem has no fused {operands.case.op}"
    if min(operands.case.sizes) != max(operands.case.sizes):
        return "torch.ops.symm_mem needs equal shards"
    from tpkernels.torch_private import symmetric_memory

    try:
        symmetric_memory.enable_symm_mem_for_group(world_group().pg.group_name)
        _run_symm_mem(operands)
        torch.cuda.synchronize()
    except (NotImplementedError, RuntimeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def _run_symm_mem(operands: Operands) -> object:
    """Run the fused op of torch."""
    name, ops = world_group().name, torch.ops.symm_mem
    if operands.spec.gathers:
        return ops.fused_all_gather_matmul(operands.x, [operands.w], 0, name)
    return ops.fused_matmul_reduce_scatter(operands.x, operands.w, "sum", 0, name)
