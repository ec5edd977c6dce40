"""One case of the benchmark on one rank: right first, then how fast, and beside what."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tpkernels.bench.baselines import baselines
from tpkernels.bench.cases import Case, Spec, planned, random_case, run_torch, run_tpkernels
from tpkernels.bench.device import own_device, synchronizer
from tpkernels.bench.inputs import Inputs
from tpkernels.bench.roofline import Rates, Work, measure_rates
from tpkernels.bench.sweep import Effort
from tpkernels.bench.timing import Samples, Variant, measure
from tpkernels.bench.verification import Verdict, verify

_FEWEST = 3  # repetitions, whatever they take: see `timing.measure`


@dataclass(frozen=True)
class Choice:
    """What one requested algorithm came to on a case."""

    algorithm: str
    reason: str
    verdict: Verdict


@dataclass(frozen=True)
class CaseReport:
    """What one rank found. ``samples`` has the baselines that the op has, and the algorithms that
    were right by the name asked for; ``left_out``: the baselines that were not run, and why;
    ``inputs_over_cache``: `Inputs.over_cache`."""

    choices: dict[str, Choice]
    samples: dict[str, Samples]
    left_out: dict[str, str]
    inputs_over_cache: float


def probe(dtype: torch.dtype, device: str) -> Rates:
    """The roofline's rates on this rank. Collective."""
    return measure_rates(dtype, own_device(device).type, synchronizer(device))


def run_case(
    spec: Spec, algorithms: Sequence[str], effort: Effort, rates: Rates, device: str
) -> CaseReport:
    """Checks one case, and times by turns what was right and what it replaces. `unfused` is always
    among them. Collective.

    Args:
        rates: the same on all ranks.
    """
    case = random_case(spec, own_device(device))
    names = list(dict.fromkeys([*algorithms, "unfused"]))
    seconds = math.inf if effort.seconds is None else effort.seconds
    expected = Work.of(spec, dist.get_world_size()).flops / rates.torch_flops
    affordable = expected * _FEWEST <= seconds
    choices = _checked(case, names, affordable and effort.baselines)
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
        # An all_reduce works in place: each region starts from the same values.
        undo = inputs.restore if case.op == "all_reduce" else None
        variants = {name: Variant(run, undo) for name, run in runs.items()}
        samples = measure(
            variants, repeat=effort.repeat, budget=seconds, synchronize=synchronizer(device)
        )
    return CaseReport(choices, samples, left_out, inputs.over_cache)


def run_next(inputs: Inputs, algorithm: str) -> object:
    """The op on the next copy of a case's inputs."""
    return run_tpkernels(inputs.sharded(), algorithm)


def _checked(case: Case, algorithms: list[str], with_torch: bool) -> dict[str, Choice]:
    """Each algorithm's result against float64; without torch's result nothing is allowed for the
    error that it would have."""
    runs = {name: planned(case.copy(), name) for name in algorithms}
    outputs = {name: found for name, (found, _) in runs.items()}
    verdicts = verify(case, run_torch(case.copy()) if with_torch else None, outputs)
    return {
        name: Choice(plan.algorithm, plan.reason, verdicts[name])
        for name, (_, plan) in runs.items()
    }
