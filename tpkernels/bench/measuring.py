"""One case of `tpkernels bench` on one rank: verified first, then timed with its baselines.

unfused        the op with algorithm "unfused": the same local matmul, nothing overlapped
torch          a torch.distributed collective and torch.matmul
matmul         torch.matmul of the local sizes, no communication
local_matmul   the local matmul that the algorithms use, no communication
nccl           torch.matmul and NCCL through `tpkernels.nccl.Communicator` (CUDA)
symm_mem       torch.ops.symm_mem.fused_* (CUDA)

A fused op cannot be faster than the faster of `matmul` and `local_matmul`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tpkernels import nccl
from tpkernels.bench.cases import (
    Case,
    Inputs,
    planned,
    random_case,
    run_local_matmul,
    run_matmul,
    run_torch,
    run_tpkernels,
    with_norm,
)
from tpkernels.bench.specs import Spec
from tpkernels.bench.sweep import Method
from tpkernels.bench.verification import Verdict, verify
from tpkernels.errors import TpkernelsError
from tpkernels.launch.session import all_gather_objects, rank_device, synchronizer
from tpkernels.local.packed import native
from tpkernels.local.scaled import ScaledMatrix, torch_takes
from tpkernels.planning.cost import Rates
from tpkernels.timing import Samples, Variant, measure

BASELINES = ("unfused", "torch", "matmul", "local_matmul", "nccl", "symm_mem")
LOCAL = ("matmul", "local_matmul")  # without communication
_FEWEST = 3  # repetitions, however long they take: see `timing.measure`

Runs = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Choice:
    """The plan and the verdict of one requested algorithm."""

    algorithm: str
    reason: str
    verdict: Verdict


@dataclass(frozen=True)
class CaseReport:
    """One rank's report on a case.

    Attributes:
        choices: by the algorithm's requested name.
        samples: of the baselines and, by requested name, of the algorithms whose result is right.
        left_out: the baselines that were not run, with the reasons.
        inputs_over_cache: `Inputs.over_cache`.
    """

    choices: dict[str, Choice]
    samples: dict[str, Samples]
    left_out: dict[str, str]
    inputs_over_cache: float


def run_case(spec: Spec, method: Method, rates: Rates) -> CaseReport:
    """Verify a case, then time whatever is right, interleaved with the baselines. `unfused` is
    always included. Collective.

    Args:
        rates: the same on all ranks.
    """
    case = random_case(spec, rank_device(method.device))
    names = list(dict.fromkeys([*method.algorithms, "unfused"]))
    seconds = math.inf if method.seconds is None else method.seconds
    expected = spec.cost(dist.get_world_size()).flops / rates.torch_flops
    affordable = expected * _FEWEST <= seconds
    with_torch = affordable and method.baselines and _torch_multiplies(case)
    planned_runs = {name: planned(case.copy(), name) for name in names}
    # Without torch's result the bound makes no allowance for its error.
    verdicts = verify(
        case,
        run_torch(case.copy()) if with_torch else None,
        {name: outputs for name, (outputs, _) in planned_runs.items()},
    )
    choices = {
        name: Choice(plan.algorithm, plan.reason, verdicts[name])
        for name, (_, plan) in planned_runs.items()
    }
    del planned_runs  # frees their results
    inputs = Inputs(case, cold=method.cold)
    with contextlib.ExitStack() as stack:
        runs: Runs = {}
        left_out: dict[str, str] = {}
        if case.weights:
            runs["local_matmul"] = lambda: run_local_matmul(inputs.whole())
        if method.baselines:
            by_torch, left_out = _torch_baselines(case, inputs, stack)
            if not affordable:
                slow = "" if native(case.x.dtype) else ": no instructions for this dtype"
                reason = f"torch.matmul would take about {expected:.2g} s a call{slow}"
                by_torch, left_out = {}, left_out | dict.fromkeys(by_torch, reason)
            runs |= by_torch
        for name in names:
            if verdicts[name].right:
                runs[name] = lambda name=name: run_tpkernels(inputs.sharded(), name)  # type: ignore[misc]
        # all_reduce works in place, and so does torch with what is normalised: each timed region
        # starts from the same values.
        undo = inputs.restore if case.spec.keeps_sum and not case.weights else None
        variants = {name: Variant(run, undo) for name, run in runs.items()}
        synchronize = synchronizer(method.device)
        samples = measure(variants, repeat=method.repeat, budget=seconds, synchronize=synchronize)
    return CaseReport(choices, samples, left_out, inputs.over_cache)


def _torch_baselines(
    case: Case, inputs: Inputs, stack: contextlib.ExitStack
) -> tuple[Runs, dict[str, str]]:
    """Prepare the baselines that use torch.matmul, and say why others are left out. Collective.
    ``stack`` closes what they need."""
    runs: Runs = {"torch": lambda: run_torch(inputs.sharded())}
    left_out: dict[str, str] = {}
    if case.weights:
        runs["matmul"] = lambda: run_matmul(inputs.whole())
    if not _torch_multiplies(case):
        reason = "torch._scaled_mm does not take these operands on this GPU"
        runs, left_out = {}, dict.fromkeys(runs, reason)
    if case.x.is_cuda:
        for name, prepare in {"nccl": _nccl, "symm_mem": _symm_mem}.items():
            run, reason = None, ""
            try:
                run = prepare(inputs.sharded(), stack)
            except (NotImplementedError, RuntimeError, AttributeError, TpkernelsError) as error:
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
            reasons = list(filter(None, all_gather_objects(reason)))
            if reasons:
                left_out[name] = reasons[0]
            elif run is not None:
                runs[name] = lambda run=run: run(inputs.sharded())  # type: ignore[misc]
    return runs, left_out


def _torch_multiplies(case: Case) -> bool:
    """Return whether torch has the product of a case. On CPUs it has all that are in cases."""
    if not (case.scales and case.x.is_cuda):
        return True
    x, w = (ScaledMatrix(*operand) for operand in case.operands)
    return torch_takes(x, w, case.out_dtype)


def _nccl(case: Case, stack: contextlib.ExitStack) -> Callable[[Case], object]:
    """Prepare the op's collective by NCCL and torch.matmul; run it once."""
    if case.scales or case.spec.exchanges or case.spec.routed:
        raise NotImplementedError(f"no {case.op} is made of tpkernels.nccl here")
    group = _world_of_equal_shards(case, "NCCL")
    comm = stack.enter_context(nccl.Communicator(group))

    def run(copy: Case) -> object:
        if copy.spec.gathers:
            whole = comm.all_gather(copy.x)
            return [torch.matmul(whole, w) for w in copy.weights] or whole
        y = torch.matmul(copy.x, copy.weights[0]) if copy.weights else copy.x
        if copy.spec.scatters:
            return comm.reduce_scatter(y)
        return with_norm(copy, comm.all_reduce(y))

    run(case)
    comm.wait()
    return run


def _symm_mem(case: Case, stack: contextlib.ExitStack) -> Callable[[Case], object]:
    """Prepare torch's own fused op; run it once."""
    if case.op not in ("all_gather_matmul", "matmul_reduce_scatter"):
        raise NotImplementedError(f"torch.ops.symm_mem has no fused {case.op}")
    name, ops = _world_of_equal_shards(case, "torch.ops.symm_mem").group_name, torch.ops.symm_mem
    import torch.distributed._symmetric_memory as symmetric

    symmetric.enable_symm_mem_for_group(name)

    def run(copy: Case) -> object:
        if copy.spec.gathers:
            return ops.fused_all_gather_matmul(copy.x, list(copy.weights), 0, name)
        return ops.fused_matmul_reduce_scatter(copy.x, copy.weights[0], "sum", 0, name)

    run(case)
    torch.cuda.synchronize()
    return run


def _world_of_equal_shards(case: Case, who: str) -> dist.ProcessGroup:
    """Return the group of all ranks; refuse uneven shards, which a baseline cannot have."""
    if min(case.sizes) != max(case.sizes):
        raise NotImplementedError(f"{who} needs equal shards")
    assert dist.group.WORLD is not None
    return dist.group.WORLD
