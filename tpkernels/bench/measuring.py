"""One case of `tpkernels bench` on one rank: verified first, then timed with its baselines.

unfused        the op with algorithm "unfused": the same local matmul, nothing overlapped
torch          a torch.distributed collective (gloo, or NCCL on GPUs) and torch.matmul
local_matmul   the local matmul that the algorithms use, no communication: no op can be faster
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
    planned,
    random_case,
    run_local_matmul,
    run_torch,
    world_group,
)
from tpkernels.bench.specs import Spec
from tpkernels.bench.sweep import Method
from tpkernels.launch.session import all_gather_objects, rank_device, synchronizer
from tpkernels.local.packed import native
from tpkernels.local.scaled import ScaledMatrix, torch_takes
from tpkernels.ops.reference import Expected, rms_norm
from tpkernels.planning.cost import Rates
from tpkernels.qualification.op_case import NORM_EPS, Operands, Outputs
from tpkernels.timing import Samples, Variant, measure

_MIN_REPEAT = 3  # repetitions, however long they take: see `timing.measure`


@dataclass(frozen=True)
class Choice:
    """The plan of one requested algorithm, and the largest error of its result over the bound."""

    algorithm: str
    reason: str
    error_over_bound: float


@dataclass(frozen=True)
class CaseReport:
    """One rank's report on a case.

    Attributes:
        choices: by the requested name of the algorithm.
        samples: of the baselines and, by requested name, of the algorithms whose result is right.
        left_out: the baselines that were not run, with the reasons.
        inputs_over_cache: `Inputs.over_cache`.
    """

    choices: dict[str, Choice]
    samples: dict[str, Samples]
    left_out: dict[str, str]
    inputs_over_cache: float


def run_case(spec: Spec, method: Method, rates: Rates | None = None) -> CaseReport:
    """Verify a case, then time the right results, interleaved with the baselines. `unfused` is
    always included. Collective.

    Args:
        rates: the rates of the slowest rank, identical on all ranks; not needed if the method has
            no limit of seconds, or no baselines.
    """
    case = random_case(spec, rank_device(method.device))
    left_out = _left_out(case, method, rates)
    planned_runs = {
        name: planned(case.copy(), name) for name in dict.fromkeys([*method.algorithms, "unfused"])
    }
    worst = check(
        case,
        {name: outputs for name, (outputs, _) in planned_runs.items()},
        None if "torch" in left_out else run_torch(case.copy()),
    )
    choices = {
        name: Choice(plan.algorithm, plan.reason, worst[name])
        for name, (_, plan) in planned_runs.items()
    }
    del planned_runs  # frees their results
    inputs = Inputs(case, cold=method.cold)
    runs: dict[str, Callable[[], object]] = {
        "torch": lambda: run_torch(inputs.sharded()),
        "local_matmul": lambda: run_local_matmul(inputs.gathered()),
        "symm_mem": lambda: _run_symm_mem(inputs.sharded()),
    }
    runs = {name: run for name, run in runs.items() if name not in left_out}
    for name, choice in choices.items():
        if choice.error_over_bound <= 1:
            runs[name] = lambda name=name: inputs.sharded().run(name)  # type: ignore[misc]
    # all_reduce works in place, and so does torch with a sum that is normalised: each timed region
    # starts from the same values.
    undo = inputs.restore if case.spec.keeps_sum and case.w is None else None
    samples = measure(
        {name: Variant(run, undo) for name, run in runs.items()},
        repeat=method.repeat,
        budget=math.inf if method.seconds is None else method.seconds,
        synchronize=synchronizer(method.device),
    )
    reasons = {name: reason for name, reason in left_out.items() if reason}
    return CaseReport(choices, samples, reasons, inputs.over_cache)


def check(
    case: Operands, results: Mapping[str, Outputs], torch_outputs: Outputs | None = None
) -> dict[str, float]:
    """Compare results of ``case``, by name, with float64. Return the largest ``error / bound`` of
    each, see `Expected.worst`. Collective: each rank checks its rows, and all ranks return the
    largest of all rows.

    On CUDA tensors NCCL may sum, which rounds each of the W - 1 additions to the wire dtype, and
    torch adds up the squares of a norm in any order.

    Args:
        torch_outputs: the result of `run_torch`, whose error is added to the bound.
    """
    # Roundings to the wire dtype: one of a matmul's partial, and one of each sum by NCCL.
    on_wire = case.spec.has_matmul + (len(case.of.sizes) - 1 if case.x.is_cuda else 0)
    expected = case.expected(case.of.rows(case.rank), on_wire)
    if torch_outputs is not None:
        torch_error = (_mine(case, torch_outputs[0]) - expected[0].exact).abs()
        expected[0] = replace(expected[0], bound=expected[0].bound + torch_error)
    worst = {}
    for name, outputs in results.items():
        errors = [_worst(case, y, want) for y, want in zip(outputs, expected, strict=False)]
        if case.norm_weight is not None and errors[0] <= 1:  # normalised rows of a right sum
            total = _mine(case, outputs[0])
            normed = rms_norm(total, case.norm_weight, NORM_EPS, any_order=total.is_cuda)
            errors.append(_worst(case, outputs[1], normed))
        worst[name] = max(errors) if _same_on_all_ranks(case, outputs) else math.inf
    ranks = all_gather_objects(worst)
    return {name: max(rank[name] for rank in ranks) for name in worst}


def _mine(case: Operands, y: torch.Tensor) -> torch.Tensor:
    """Return the rows that this rank checks: its shard of an all-reduce, else all."""
    return y[case.of.rows(case.rank)] if case.spec.keeps_sum else y


def _worst(case: Operands, y: torch.Tensor, expected: Expected) -> float:
    """Return the largest ``error / bound`` of the rows that this rank checks."""
    shape = [sum(case.of.sizes), *expected.exact.shape[1:]]
    if case.spec.keeps_sum and y.shape != torch.Size(shape):
        return math.inf
    return expected.worst(_mine(case, y))


def _same_on_all_ranks(case: Operands, outputs: Outputs) -> bool:
    """Return whether an all-reduce produced the same bits on every rank."""
    same = True
    for output in outputs if case.spec.keeps_sum else []:
        bits = output.contiguous().view(torch.uint8)
        first = bits.clone()
        dist.broadcast(first, src=0)
        same = same and torch.equal(first, bits)
    return same


def _left_out(case: Operands, method: Method, rates: Rates | None) -> dict[str, str]:
    """Return the baselines that are not run, with the reasons; "" if the user expects none.
    Collective."""
    left_out = {"local_matmul": ""} if case.w is None else {}
    rows, expected = sum(case.of.sizes) if case.spec.gathers else len(case.x), 0.0
    if rates is not None and case.w is not None:
        expected = 2 * rows * case.w.numel() / rates.torch_flops
    if case.spec.routed or not method.baselines:
        left_out["torch"] = ""  # `unfused` already runs routed ops by torch's all-to-all
    elif case.scales and case.x.is_cuda and not _torch_multiplies(case):
        left_out["torch"] = "torch._scaled_mm does not support these operands on this GPU"
    elif method.seconds is not None and expected * _MIN_REPEAT > method.seconds:
        slow = "" if native(case.x.dtype) else "; the processor has no instructions for the dtype"
        left_out["torch"] = f"torch.matmul would need about {expected:.2g} s per call{slow}"
    if not (method.baselines and case.x.is_cuda):
        left_out["symm_mem"] = ""
    elif reasons := [reason for reason in all_gather_objects(_try_symm_mem(case)) if reason]:
        left_out["symm_mem"] = reasons[0]
    return left_out


def _torch_multiplies(case: Operands) -> bool:
    """Return whether torch has a kernel for scaled operands on this GPU."""
    x, w, scale_x, scale_w = case.factors
    return torch_takes(ScaledMatrix(x, scale_x), ScaledMatrix(w, scale_w), case.of.dtype)


def _try_symm_mem(case: Operands) -> str:
    """Run the fused op of torch once; return why it cannot run, or "". Collective."""
    if case.of.op not in ("all_gather_matmul", "matmul_reduce_scatter"):
        return f"torch.ops.symm_mem has no fused {case.of.op}"
    if min(case.of.sizes) != max(case.of.sizes):
        return "torch.ops.symm_mem needs equal shards"
    from tpkernels.torch_private import symmetric_memory

    try:
        symmetric_memory.enable_symm_mem_for_group(world_group().pg.group_name)
        _run_symm_mem(case)
        torch.cuda.synchronize()
    except (NotImplementedError, RuntimeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def _run_symm_mem(case: Operands) -> object:
    """Run the fused op of torch."""
    name, ops = world_group().name, torch.ops.symm_mem
    if case.spec.gathers:
        return ops.fused_all_gather_matmul(case.x, [case.w], 0, name)
    return ops.fused_matmul_reduce_scatter(case.x, case.w, "sum", 0, name)
