"""What `tpkernels tune` measures of one case on each rank."""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date

import torch.distributed as dist

from tpkernels import groups
from tpkernels.bench.benchmark import slowest
from tpkernels.bench.cases import Case, Outputs, Spec, planned, random_case, run_tpkernels
from tpkernels.bench.device import own_device, synchronizer
from tpkernels.bench.inputs import Inputs
from tpkernels.bench.measuring import run_next
from tpkernels.bench.session import gather_objects
from tpkernels.bench.timing import Samples, Variant, measure
from tpkernels.bench.verification import Verdict, verify
from tpkernels.groups.group import Group
from tpkernels.planning.choose import Means, Plan, candidates
from tpkernels.planning.machine import Machine, this_machine
from tpkernels.planning.table import Config, Measurement, Table

_CONFIG_REPEAT = 5


@dataclass(frozen=True)
class TuneReport:
    """What one rank found of a case: where it ran, what ``auto`` was, what is right, how long that
    took, and with which block sizes of the kernels."""

    machine: Machine
    before: Plan
    verdicts: dict[str, Verdict]
    samples: dict[str, Samples]
    config: Config
    inputs_over_cache: float  #: `Inputs.over_cache`


def tune_case(spec: Spec, repeat: int, budget: float, device: str = "cpu") -> TuneReport:
    """Checks all algorithms on one case and times those that are right, by turns; on GPUs the
    kernels of `fused` with the best block sizes, which are found before. Collective."""
    case = random_case(spec, own_device(device))
    assert dist.group.WORLD is not None  # cases run on ranks
    group = groups.get(dist.group.WORLD.group_name).ready()
    means = Means(shared_memory=group.shared_memory, workspace_bytes=group.workspace_bytes)
    problem = spec.problem(group.world, device)
    _, before = planned(case.copy(), "auto")
    verdicts = verify(case, None, _results(case, candidates(problem, means)))
    inputs = Inputs(case, cold=True)
    undo = inputs.restore if spec.op == "all_reduce" else None  # it works in place
    variants = {
        name: Variant(functools.partial(run_next, inputs, name), undo)
        for name, verdict in verdicts.items()
        if verdict.right
    }
    known, finish = group.tuned(device), synchronizer(device)
    config: Config = ()
    try:
        if device == "cuda" and "fused" in variants:
            config = best_config(spec, case, group, variants["fused"], finish)
        samples = measure(variants, repeat=repeat, budget=budget, synchronize=finish)
    finally:
        group.use_times(device, known)
    machine = this_machine(device, group.world, group.hosts, group.shared_memory)
    return TuneReport(machine, before, verdicts, samples, config, inputs.over_cache)


def measurement(
    spec: Spec, world: int, ms: dict[str, float], device: str = "cpu", config: Config = ()
) -> Measurement:
    """Times of a case, taken today."""
    tuning_key = spec.problem(world, device).tuning_key
    assert tuning_key is not None  # it is split evenly
    today = date.today().isoformat()
    return Measurement(*tuning_key, other=spec.other, ms=ms, date=today, config=config)


def _results(case: Case, algorithms: list[str]) -> dict[str, Outputs]:
    """What those that can run here come to; all ranks find the same."""
    found = {}
    for name in algorithms:
        with contextlib.suppress(NotImplementedError):  # kernels that do not run on these GPUs
            found[name] = run_tpkernels(case.copy(), name)
    return found


def best_config(
    spec: Spec,
    case: Case,
    group: Group,
    fused: Variant,
    finish: Callable[[], object] | None,
) -> Config:
    """The fastest of the table's config and the candidates, which calls take from here on; the same
    on all ranks. Not by turns: a change of the config plans the call anew."""
    from tpkernels.kernels import configs

    kind, times = case.x.device.type, {}
    for config in ((), *configs.candidates(spec.dtype, spec.shape[0])):
        if not _compiles(case, config, finish):
            continue
        _use(spec, group, kind, config)
        found = measure({"fused": fused}, repeat=_CONFIG_REPEAT, synchronize=finish)["fused"]
        (times[config],) = slowest([statistics.median(found.seconds)])
    best = min(times, key=times.__getitem__)
    _use(spec, group, kind, best)
    return best


def _use(spec: Spec, group: Group, device: str, config: Config) -> None:
    one = measurement(spec, group.world, {"fused": 1.0}, device, config)
    group.use_times(device, Table((one,)))


def _compiles(case: Case, config: Config, finish: Callable[[], object] | None) -> bool:
    """Whether the tile loop so cut fits the GPUs of all ranks. Within a call of the op it would
    break the group."""
    from tpkernels.kernels import configs, matmul

    (w,) = case.weights
    x = case.x if case.x.shape[0] else w.new_zeros(1, w.shape[0])
    try:
        cut = configs.choose(x.device, x.dtype, sum(case.sizes), config)
        matmul.matmul(x, w, config=cut)
        if finish is not None:
            finish()
    except Exception:  # of a class of Triton's own: out of shared memory, of registers
        return all(gather_objects(False))
    return all(gather_objects(True))
