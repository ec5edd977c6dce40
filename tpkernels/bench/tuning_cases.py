"""The cases of `tpkernels tune` on one rank: each algorithm is verified, then the op is called as
within `tpkernels.autotune`."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date

import torch

from tpkernels.bench.cases import Case, Outputs, planned, random_case, run_tpkernels, world_group
from tpkernels.bench.inputs import Inputs
from tpkernels.bench.specs import Spec
from tpkernels.bench.verification import Verdict, verify
from tpkernels.groups.group import Group, Tuning
from tpkernels.launch.session import all_gather_objects, rank_device, synchronizer
from tpkernels.planning.choose import Means, Plan, candidates
from tpkernels.planning.machine import Machine, cpu_flags, this_machine
from tpkernels.planning.table import Config, Measurement, Table
from tpkernels.timing import Variant, measure, slowest
from tpkernels.tuning.tuner import tuning_by

_CONFIG_REPEAT = 5


@dataclass(frozen=True)
class TuneReport:
    """One rank's report on a case.

    Attributes:
        before, after: the plans of ``auto`` with the times known so far, and with these.
        verdicts: of all algorithms that can run.
        measurement: the times of the algorithms whose result is right, on CPUs to the bit: `auto`
            may take any. None: nothing could be measured.
    """

    machine: Machine
    before: Plan
    after: Plan
    verdicts: dict[str, Verdict]
    measurement: Measurement | None

    @property
    def right(self) -> bool:
        """Return whether every algorithm's result is right."""
        return all(verdict.right for verdict in self.verdicts.values())


def tune_case(spec: Spec, repeat: int, budget: float, device: str = "cpu") -> TuneReport:
    """Verify all algorithms on one case, and tune it with the right ones. On GPUs the best block
    sizes for the `fused` kernels are found first. Collective.

    Args:
        repeat, budget: the most rounds, and the seconds after which no further round starts.
    """
    case = random_case(spec, rank_device(device))
    group = world_group().ready(device)
    means = Means(
        group.shared_memory, group.workspace_bytes, cpu_flags(), why_no_node=group.why_no_node
    )
    _, before = planned(case.copy(), "auto")
    (call,) = group.planned_calls()
    results: dict[str, Outputs] = {}
    for name in candidates(spec.problem(group.world, device), means):
        with contextlib.suppress(NotImplementedError):  # kernels that do not run on these GPUs
            results[name] = run_tpkernels(case.copy(), name)
    verdicts = verify(case, None, results)

    def as_others(name: str) -> bool:
        """Return whether an algorithm's bits are those of `unfused` on all ranks."""
        same = map(torch.equal, results[name], results["unfused"])
        return device != "cpu" or all(all_gather_objects(all(same)))

    right = [name for name, verdict in verdicts.items() if verdict.right and as_others(name)]
    known, key = group.tuned(device), call.problem.tuning_key
    assert key is not None  # a spec is split evenly
    config: Config = ()
    try:
        if device == "cuda" and "fused" in right:
            inputs = Inputs(case, cold=True)
            fused = Variant(lambda: run_tpkernels(inputs.sharded(), "fused"))
            config = best_config(spec, case, group, fused, synchronizer(device))
        with tuning_by(group, Tuning(limit=budget, rounds=repeat, among=right, anew=True)):
            run_tpkernels(case.copy())
        found = [one for one in group.tuned(device).at(*key) if one not in known.at(*key)]
        new = [
            replace(one, other=spec.other, config=config, tried=False) for one in found if one.tried
        ]
        group.use_times(device, known.extended(new))
        _, after = planned(case.copy(), "auto")
    finally:
        group.use_times(device, known)
    machine = this_machine(device, group.world, group.hosts, group.shared_memory)
    return TuneReport(machine, before, after, verdicts, new[0] if new else None)


def best_config(
    spec: Spec, case: Case, group: Group, fused: Variant, finish: Callable[[], object] | None
) -> Config:
    """Return the fastest of the default config and the candidates, which calls use from here on;
    the same on all ranks. Not interleaved, because a new config requires a new plan."""
    from tpkernels.kernels import configs

    device, times = case.x.device.type, {}
    key = spec.problem(group.world, device).tuning_key
    assert key is not None  # a spec is split evenly
    today = date.today().isoformat()

    def use(config: Config) -> None:
        forced = Measurement(*key, other=spec.other, ms={"fused": 1.0}, date=today, config=config)
        group.use_times(device, Table((forced,)))

    for config in ((), *configs.candidates(spec.dtype, spec.shape[0])):
        if _compiles(case, config, finish):
            use(config)
            samples = measure({"fused": fused}, repeat=_CONFIG_REPEAT, synchronize=finish)["fused"]
            (times[config],) = slowest([statistics.median(samples.seconds)])
    best = min(times, key=times.__getitem__)
    use(best)
    return best


def _compiles(case: Case, config: Config, finish: Callable[[], object] | None) -> bool:
    """Return whether the kernel with these block sizes fits the GPUs of all ranks. Tried outside
    the op, where a failure would break the group."""
    from tpkernels.kernels import configs, matmul

    (w,), fits = case.weights, True
    x = case.x if case.x.shape[0] else w.new_zeros(1, w.shape[0])
    try:
        chosen = configs.choose(x.device, x.dtype, sum(case.sizes), config)
        matmul.matmul(x, w, config=chosen)
        if finish is not None:
            finish()
    except Exception:  # Triton's own classes: out of shared memory or registers
        fits = False
    return all(all_gather_objects(fits))
