"""`tpkernels tune` and `explain`: the measured times that `auto` chooses by, and what it chooses.

The first part runs on the ranks, the second in the process that starts them.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist

from tpkernels import groups
from tpkernels.bench.cases import Case, Outputs, planned, random_case, run_tpkernels
from tpkernels.bench.inputs import Inputs
from tpkernels.bench.machine import machine_by_name
from tpkernels.bench.measuring import run_next
from tpkernels.bench.specs import Spec, unsupported_kernels
from tpkernels.bench.verification import Verdict, verify
from tpkernels.cache import cache_folder, check_folder, make_folder
from tpkernels.groups.group import Group
from tpkernels.launch.session import gather_objects, rank_device, ranks_share_gpus, synchronizer
from tpkernels.planning import gpu_model, machines, store
from tpkernels.planning.choose import Means, Plan, candidates, choose, unsupported_algorithms
from tpkernels.planning.hops import all_reduce_way
from tpkernels.planning.machine import Machine, instructions, this_machine
from tpkernels.planning.problem import Problem
from tpkernels.planning.table import Config, Measurement, Table
from tpkernels.planning.trials import ELIGIBLE, is_eligible
from tpkernels.shards import shard_sizes
from tpkernels.symm.node import why_not_hierarchical
from tpkernels.terminal import UsageError, writable, writing
from tpkernels.timing import Samples, Variant, measure, slowest, summary

_CONFIG_REPEAT = 5


@dataclass(frozen=True)
class TuneReport:
    """One rank's report on a case.

    Attributes:
        before: the plan of ``auto`` with the times known so far.
        verdicts: of all algorithms that can run.
        samples: of the algorithms whose result is right, on CPUs to the bit: `auto` may take any.
        config: block sizes of the `fused` kernels in these samples.
        inputs_over_cache: `Inputs.over_cache`.
    """

    machine: Machine
    before: Plan
    verdicts: dict[str, Verdict]
    samples: dict[str, Samples]
    config: Config
    inputs_over_cache: float

    @property
    def right(self) -> bool:
        """Whether every algorithm's result is right."""
        return all(verdict.right for verdict in self.verdicts.values())


def tune_case(spec: Spec, repeat: int, budget: float, device: str = "cpu") -> TuneReport:
    """Verifies all algorithms on one case and times the right ones, interleaved. On GPUs the best
    block sizes for the `fused` kernels are found first. Collective."""
    case = random_case(spec, rank_device(device))
    assert dist.group.WORLD is not None  # cases only run on ranks
    group = groups.get(dist.group.WORLD.group_name).ready(device)
    means = Means(
        group.shared_memory,
        group.workspace_bytes,
        instructions(),
        why_no_node=group.why_no_node,
    )
    problem = spec.problem(group.world, device)
    _, before = planned(case.copy(), "auto")
    results = _results(case, candidates(problem, means))
    verdicts = verify(case, None, results)
    inputs = Inputs(case, cold=True)
    undo = inputs.restore if spec.op == "all_reduce" else None  # works in place
    variants = {
        name: Variant(functools.partial(run_next, inputs, name), undo)
        for name, verdict in verdicts.items()
        if verdict.right and (device != "cpu" or _same_bits(results[name], results["unfused"]))
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
    """Today's measurement of a case."""
    tuning_key = spec.problem(world, device).tuning_key
    assert tuning_key is not None  # a spec is split evenly
    today = date.today().isoformat()
    return Measurement(*tuning_key, other=spec.other, ms=ms, date=today, config=config)


def _results(case: Case, algorithms: list[str]) -> dict[str, Outputs]:
    """The results of the algorithms that can run here, which are the same on all ranks."""
    outputs = {}
    for name in algorithms:
        with contextlib.suppress(NotImplementedError):  # kernels that do not run on these GPUs
            outputs[name] = run_tpkernels(case.copy(), name)
    return outputs


def _same_bits(left: Outputs, right: Outputs) -> bool:
    """Whether two algorithms give the same results on all ranks."""
    return all(gather_objects(all(map(torch.equal, left, right))))


def best_config(
    spec: Spec,
    case: Case,
    group: Group,
    fused: Variant,
    finish: Callable[[], object] | None,
) -> Config:
    """The fastest of the default config and the candidates, which calls use from here on; the same
    on all ranks. Not interleaved, because a new config requires a new plan."""
    from tpkernels.kernels import configs

    kind, times = case.x.device.type, {}
    for config in ((), *configs.candidates(spec.dtype, spec.shape[0])):
        if not _compiles(case, config, finish):
            continue
        _use(spec, group, kind, config)
        samples = measure({"fused": fused}, repeat=_CONFIG_REPEAT, synchronize=finish)["fused"]
        (times[config],) = slowest([statistics.median(samples.seconds)])
    best = min(times, key=times.__getitem__)
    _use(spec, group, kind, best)
    return best


def _use(spec: Spec, group: Group, device: str, config: Config) -> None:
    one = measurement(spec, group.world, {"fused": 1.0}, device, config)
    group.use_times(device, Table((one,)))


def _compiles(case: Case, config: Config, finish: Callable[[], object] | None) -> bool:
    """Whether the kernel with these block sizes fits the GPUs of all ranks. Tried outside the op,
    where a failure would break the group."""
    from tpkernels.kernels import configs, matmul

    (w,) = case.weights
    x = case.x if case.x.shape[0] else w.new_zeros(1, w.shape[0])
    try:
        chosen = configs.choose(x.device, x.dtype, sum(case.sizes), config)
        matmul.matmul(x, w, config=chosen)
        if finish is not None:
            finish()
    except Exception:  # Triton's own classes: out of shared memory or registers
        return all(gather_objects(False))
    return all(gather_objects(True))


def check_gpus(world: int, device: str) -> None:
    """``UsageError`` if ranks would share a GPU, which makes their times meaningless."""
    if device == "cuda" and ranks_share_gpus(world):
        raise UsageError(
            f"{world} ranks on {torch.cuda.device_count()} GPUs: times of ranks that share a GPU "
            "do not apply elsewhere; use fewer ranks (--tp) or --device cpu"
        )


def check_cache() -> None:
    """``UsageError`` if the cache could not be written after measuring, or would not be read."""
    try:
        folder = cache_folder()
        make_folder(folder)
        check_folder(folder)
    except (OSError, RuntimeError) as error:
        raise UsageError(f"no cache folder: {error}; set XDG_CACHE_HOME to one") from error
    except ValueError as error:
        raise UsageError(f"the cache folder '{folder}' is not used: {error}") from error
    writable(folder / "tuning")


def medians(reports: list[TuneReport]) -> dict[str, float]:
    """Milliseconds of the slowest rank, by algorithm."""
    names = reports[0].samples
    return {name: summary([each.samples[name] for each in reports]).median for name in names}


def keep(spec: Spec, reports: list[TuneReport]) -> tuple[Path, Plan]:
    """Adds the times to the machine's table; returns its file and the plan of ``auto`` with it."""
    machine = reports[0].machine
    new = measurement(spec, machine.ranks, medians(reports), machine.kind, reports[0].config)
    with writing(store.path_for(machine)):
        path, tuned = store.update(machine, new)
    problem = spec.problem(machine.ranks, machine.kind)
    means = Means(machine.shared_memory, instructions=instructions())
    return path, choose(problem, means, tuned=tuned)


@dataclass(frozen=True)
class Explanation:
    """Why ``auto`` chooses its algorithm for a case.

    Attributes:
        plan: the choice.
        unsupported: for each algorithm, why it cannot run; None: it can.
        cases: the measurements of this very problem.
        machine: None if this machine does not have the device.
        table: everything measured for the machine.
        tries: what ``auto`` tries in the first calls; empty: it keeps to the plan.
        ways: how `direct` sums on GPUs, where NVLink connects all of them and where not; None: not
            at all, or on CPUs.
        predicted: seconds by the model of GPUs, by algorithm; empty for CPUs.
        model: the GPUs of that model.
    """

    plan: Plan
    unsupported: dict[str, str | None]
    cases: list[Measurement]
    machine: Machine | None
    table: Table
    tries: list[str]
    ways: tuple[str, str] | None
    predicted: Mapping[str, float]
    model: str


def explain(
    spec: Spec, world: int, device: str, *, hosts: int, threads: int, gpu: str | None = None
) -> Explanation:
    """Plans a case for ranks on this machine, without starting any. ``gpu`` names the GPUs for the
    predictions; None: this machine's, or those of `machines.DEFAULTS`."""
    shared_memory = hosts == 1
    problem = spec.problem(world, device)
    means = Means(
        shared_memory,
        instructions=instructions(),
        unsupported=unsupported_kernels(device),
        why_no_node=why_not_hierarchical(shard_sizes(world, hosts)),
    )
    machine, table = None, Table()
    if device == "cpu" or torch.cuda.is_available():
        machine = this_machine(device, world, hosts, shared_memory, threads=threads)
        table = store.load_or_warn(machine)
    key = problem.tuning_key
    predicted, model = _predicted(spec, world, gpu) if device == "cuda" else ({}, "")
    return Explanation(
        plan=choose(problem, means, tuned=table),
        unsupported=unsupported_algorithms(problem, means),
        cases=[] if key is None else table.at(*key),
        machine=machine,
        table=table,
        tries=[name for name in candidates(problem, means) if name in ELIGIBLE]
        if is_eligible(problem, shared_memory, table)
        else [],
        ways=_ways(problem) if device == "cuda" else None,
        predicted=predicted,
        model=model,
    )


def _ways(problem: Problem) -> tuple[str, str] | None:
    if problem.op not in ("all_reduce", "matmul_all_reduce"):
        return None
    lines, words = (all_reduce_way(problem.nbytes, problem.world, each) for each in (True, False))
    return lines, words


def _predicted(spec: Spec, world: int, gpu: str | None) -> tuple[Mapping[str, float], str]:
    """What the model of GPUs says, and of which; nothing of several nodes."""
    if gpu is None:
        there = torch.cuda.is_available()
        gpu = machines.name_of_own("cuda") if there else machines.DEFAULTS["cuda"]
    profile = machine_by_name(gpu, world, "cuda")
    if profile.device != "cuda":
        raise UsageError(f"--gpu is '{gpu}', {profile.title}, which is no GPU")
    problem = spec.problem(world, "cuda")
    if (
        world > profile.node or problem.spec.scaled or problem.spec.exchanges
    ):  # the model knows none of these
        return {}, profile.title
    return gpu_model.predicted(problem, spec.other, profile), profile.title
