"""One case of `tpkernels bench` on one rank: verified first, then timed with its baselines."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from tpkernels.bench.baselines import baselines, torch_multiplies
from tpkernels.bench.cases import Case, planned, random_case, run_torch, run_tpkernels, settle
from tpkernels.bench.inputs import Inputs
from tpkernels.bench.roofline import Rates
from tpkernels.bench.specs import Spec
from tpkernels.bench.sweep import Effort
from tpkernels.bench.verification import Verdict, verify
from tpkernels.launch.session import rank_device, synchronizer
from tpkernels.timing import Samples, Variant, measure

_FEWEST = 3  # repetitions, however long they take: see `timing.measure`


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


def run_case(
    spec: Spec, algorithms: Sequence[str], effort: Effort, rates: Rates, device: str
) -> CaseReport:
    """Verify a case, then times whatever is right, interleaved with the baselines. `unfused` is
    always included. Collective.

    Args:
        rates: the same on all ranks.
    """
    case = random_case(spec, rank_device(device))
    names = list(dict.fromkeys([*algorithms, "unfused"]))
    seconds = math.inf if effort.seconds is None else effort.seconds
    expected = spec.cost(dist.get_world_size()).flops / rates.torch_flops
    if "auto" in names:
        settle(case, seconds)
    affordable = expected * _FEWEST <= seconds
    choices = _verified(
        case, names, with_torch=affordable and effort.baselines and torch_multiplies(case)
    )
    inputs = Inputs(case, cold=effort.cold)
    with baselines(
        case,
        inputs,
        torch_matmul_seconds=expected,
        most=seconds / _FEWEST,
        wanted=effort.baselines,
    ) as (runs, left_out):
        for name in names:
            if choices[name].verdict.right:
                runs[name] = functools.partial(run_next, inputs, name)
        # all_reduce works in place, and so does torch with what is normalised: each timed region
        # starts from the same values.
        undo = inputs.restore if case.op.startswith("all_reduce") else None
        variants = {name: Variant(run, undo) for name, run in runs.items()}
        samples = measure(
            variants, repeat=effort.repeat, budget=seconds, synchronize=synchronizer(device)
        )
    return CaseReport(choices, samples, left_out, inputs.over_cache)


def run_next(inputs: Inputs, algorithm: str) -> object:
    """Run the op on the next copy of a case's inputs."""
    return run_tpkernels(inputs.sharded(), algorithm)


def _verified(case: Case, algorithms: list[str], *, with_torch: bool) -> dict[str, Choice]:
    """Compare each algorithm's result with float64. Without torch's result the bound makes no
    allowance for the error of torch's result."""
    runs = {name: planned(case.copy(), name) for name in algorithms}
    outputs = {name: output for name, (output, _) in runs.items()}
    verdicts = verify(case, run_torch(case.copy()) if with_torch else None, outputs)
    return {
        name: Choice(plan.algorithm, plan.reason, verdicts[name])
        for name, (_, plan) in runs.items()
    }
