"""`tpkernels tune` and `explain`: the measured times that `auto` chooses by, and what it chooses.

The first part runs on the ranks, the second in the process that starts them.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist

from tpkernels import groups, ops
from tpkernels.bench.cases import Case, Outputs, planned, random_case, run_tpkernels
from tpkernels.bench.inputs import Inputs
from tpkernels.bench.measuring import run_next
from tpkernels.bench.roofline import Rates, measure_rates, slowest_rates
from tpkernels.bench.specs import Spec
from tpkernels.bench.verification import Verdict, verify
from tpkernels.cache import cache_folder, check_folder, make_folder
from tpkernels.groups.group import Group
from tpkernels.launch.session import gather_objects, rank_device, ranks_share_gpus, synchronizer
from tpkernels.planning import machines, store
from tpkernels.planning.choose import Means, Plan, candidates, choose
from tpkernels.planning.machine import Machine, instructions, this_machine
from tpkernels.planning.machines import Link, Profile
from tpkernels.planning.table import Config, Measurement, Table
from tpkernels.terminal import UsageError, check_known, writable, writing
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
        """Return whether every algorithm's result is right."""
        return all(verdict.right for verdict in self.verdicts.values())


def tune_case(spec: Spec, repeat: int, budget: float, device: str = "cpu") -> TuneReport:
    """Verify all algorithms on one case and times the right ones, interleaved. On GPUs the best
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
    """Return today's measurement of a case."""
    tuning_key = spec.problem(world, device).tuning_key
    assert tuning_key is not None  # a spec is split evenly
    today = date.today().isoformat()
    return Measurement(*tuning_key, other=spec.other, ms=ms, date=today, config=config)


def _results(case: Case, algorithms: list[str]) -> dict[str, Outputs]:
    """Return the results of the algorithms that can run here, which are the same on all ranks."""
    outputs = {}
    for name in algorithms:
        with contextlib.suppress(NotImplementedError):  # kernels that do not run on these GPUs
            outputs[name] = run_tpkernels(case.copy(), name)
    return outputs


def _same_bits(left: Outputs, right: Outputs) -> bool:
    """Return whether two algorithms give the same results on all ranks."""
    return all(gather_objects(all(map(torch.equal, left, right))))


def best_config(
    spec: Spec,
    case: Case,
    group: Group,
    fused: Variant,
    finish: Callable[[], object] | None,
) -> Config:
    """Return the fastest of the default config and the candidates, which calls use from here on;
    the same on all ranks. Not interleaved, because a new config requires a new plan."""
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
    forced = measurement(spec, group.world, {"fused": 1.0}, device, config)
    group.use_times(device, Table((forced,)))


def _compiles(case: Case, config: Config, finish: Callable[[], object] | None) -> bool:
    """Return whether the kernel with these block sizes fits the GPUs of all ranks. Tried outside
    the op, where a failure would break the group."""
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
    """Raise ``UsageError`` if ranks would share a GPU, which makes their times meaningless."""
    if device == "cuda" and ranks_share_gpus(world):
        raise UsageError(
            f"{world} ranks on {torch.cuda.device_count()} GPUs: times of ranks that share a GPU "
            "do not apply elsewhere; use fewer ranks (--tp) or --device cpu"
        )


def check_cache() -> None:
    """Raise ``UsageError`` if the cache could not be written after measuring, or would not be
    read."""
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
    """Return the milliseconds of the slowest rank, by algorithm."""
    names = reports[0].samples
    return {name: summary([report.samples[name] for report in reports]).median for name in names}


def keep(spec: Spec, reports: list[TuneReport]) -> tuple[Path, Plan]:
    """Add the times to the machine's table; returns its file and the plan of ``auto`` with it."""
    machine = reports[0].machine
    new = measurement(spec, machine.ranks, medians(reports), machine.kind, reports[0].config)
    with writing(store.path_for(machine)):
        path, tuned = store.update(machine, new)
    problem = spec.problem(machine.ranks, machine.kind)
    means = Means(machine.shared_memory, instructions=instructions())
    return path, choose(problem, means, tuned=tuned)


_DTYPES = (torch.bfloat16, torch.float32, torch.float64)
_SMALL, _LARGE = 4 << 10, 16 << 20  # bytes of the tensor that is gathered
_REPEAT, _SECONDS = 20, 2.0


@dataclass(frozen=True)
class MachineReport:
    """One rank's report: its rates, by the order of `_DTYPES`, and the seconds of an all-gather of
    `_SMALL` and of `_LARGE` bytes."""

    machine: Machine
    rates: tuple[Rates, ...]
    small: tuple[float, ...]
    large: tuple[float, ...]


def measure_machine(device: str) -> MachineReport:
    """Measure this rank's share of the machine while the others measure theirs. Collective."""
    assert dist.group.WORLD is not None  # it runs on ranks
    group = groups.get(dist.group.WORLD.group_name).ready(device)
    rates = tuple(measure_rates(dtype, device) for dtype in _DTYPES)
    place, variants = rank_device(device), {}
    for name, nbytes in (("small", _SMALL), ("large", _LARGE)):
        x = torch.zeros(nbytes // 4 // group.world, device=place)
        variants[name] = Variant(lambda x=x: ops.all_gather(x, group.name))  # type: ignore[misc]
    samples = measure(variants, repeat=_REPEAT, budget=_SECONDS, synchronize=synchronizer(device))
    machine = this_machine(device, group.world, group.hosts, group.shared_memory)
    return MachineReport(machine, rates, samples["small"].seconds, samples["large"].seconds)


def profile_of(reports: Sequence[MachineReport], day: str) -> Profile:
    """Return the rates that all ranks reach at once."""
    machine, world = reports[0].machine, len(reports)
    by_dtype = [slowest_rates(rates) for rates in zip(*(r.rates for r in reports), strict=True)]
    flops16, flops32, flops64 = (rates.flops for rates in by_dtype)
    small, large = (
        min(max(each) for each in zip(*seconds, strict=True))  # the best, as `measure_rates` takes
        for seconds in ([r.small for r in reports], [r.large for r in reports])
    )
    received = _LARGE * (world - 1) / world
    link = Link(call=small, step=0.0, bandwidth=received / max(large - small, 1e-9))
    return Profile(
        title=f"{machine.device}, {world} ranks x {machine.threads} threads",
        device=machine.kind,
        flops=(flops16, flops32, flops64),
        bandwidth=min(rates.copy_bytes for rates in by_dtype),
        memory=0,
        node=world,
        within=link,
        between=link,
        host=machines.machine_named(machines.name_of_own(machine.kind)).host,
        overlaps=machine.kind == "cuda",
        source=f"measured by tpkernels tune --machine, {day}",
        multiprocessors=_multiprocessors(machine.kind),
    )


def _multiprocessors(device: str) -> int:
    if device == "cpu":
        return 0
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)


def keep_machine(reports: Sequence[MachineReport]) -> tuple[Path, Profile]:
    """Write the rates to the cache folder; returns the file and the profile. ``UsageError`` if it
    cannot be written."""
    machine, profile = reports[0].machine, profile_of(reports, date.today().isoformat())
    with writing(machines.path_for(machine)):
        return machines.keep(machine, profile), profile


def machine_by_name(name: str | None, ranks: int, device: str) -> Profile:
    """Return a machine for `tpkernels plan`. ``UsageError`` if there is none of that name, or this
    one has not been measured.

    Args:
        name: of `machines.yaml`, or "this"; None: as a product on a mesh takes it.
        ranks: of the mesh, for "this".
    """
    if name is None:
        return machines.own_machine(device, ranks)[1]
    if name != machines.MEASURED:
        check_known("machine", [name], (machines.MEASURED, *machines.machines()))
        return machines.machine_named(name)
    measured = machines.load(this_machine(device, ranks, 1, True, threads=1))
    if measured is None:
        raise UsageError(
            f"this machine has not been measured with {ranks} ranks of 1 thread; run tpkernels "
            f"tune --machine --tp {ranks}"
        )
    return measured


def rates_text(profile: Profile) -> str:
    """Describe rates for people."""
    tflops = ", ".join(f"{flops / 1e12:.3g}" for flops in profile.flops)
    link = profile.within
    return (
        f"{tflops} TFLOP/s (16, 32, 64 bits), memory {profile.bandwidth / 1e9:.3g} GB/s, link "
        f"{link.bandwidth / 1e9:.3g} GB/s and {1e6 * link.call:.3g} us a call"
    )
