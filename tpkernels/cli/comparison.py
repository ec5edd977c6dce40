"""One case of the benchmark on one rank: right first, then how fast, and beside what.

gloo        torch.matmul and a collective of torch.distributed
matmul      torch.matmul of the local sizes, no communication
product     the local product as the algorithms do it, no communication
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from tpkernels.cli.cases import (
    Case,
    Spec,
    gathered,
    planned,
    random_case,
    run_matmul,
    run_product,
    run_torch,
    run_tpkernels,
)
from tpkernels.cli.check import Verdict, verify
from tpkernels.cli.timing import Samples, Variant, measure

BASELINES = ("gloo", "matmul", "product")


@dataclass(frozen=True)
class Choice:
    """What one requested algorithm came to on a case."""

    algorithm: str
    reason: str
    verdict: Verdict


@dataclass(frozen=True)
class CaseReport:
    """What one rank found. ``samples`` has the baselines that the op has, and the algorithms that
    were right by the name asked for."""

    choices: dict[str, Choice]
    samples: dict[str, Samples]


def run_case(spec: Spec, algorithms: list[str], repeat: int, baselines: bool) -> CaseReport:
    """Checks one case, and times what was right, and with ``baselines`` what it replaces.
    Collective."""
    case = random_case(spec)
    runs = {name: planned(case.copy(), name) for name in algorithms}
    outputs = {name: found for name, (found, _) in runs.items()}
    verdicts = verify(case, run_torch(case.copy()), outputs)
    choices = {
        name: Choice(plan.algorithm, plan.reason, verdicts[name])
        for name, (_, plan) in runs.items()
    }
    del runs, outputs
    right = [name for name in algorithms if verdicts[name].right]
    return CaseReport(choices, measure(_variants(case, right, baselines), repeat=repeat))


def _variants(case: Case, algorithms: list[str], baselines: bool) -> dict[str, Variant]:
    """An all_reduce works in place: each region starts from the same values."""
    scratch = case.copy()

    def reset() -> None:
        scratch.x.copy_(case.x)

    undo = reset if case.op == "all_reduce" else None
    variants: dict[str, Variant] = {}
    if baselines:
        variants["gloo"] = Variant(lambda: run_torch(scratch), undo)
    if case.weights:
        local = gathered(case)
        if baselines:
            variants["matmul"] = Variant(lambda: run_matmul(local))
        variants["product"] = Variant(lambda: run_product(local))
    for name in algorithms:
        variants[name] = Variant(functools.partial(run_tpkernels, scratch, name), undo)
    return variants
