"""``tpkernels tune``."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from typing import Annotated

import torch
import typer
from rich.markup import escape
from typer import Option

from tpkernels.bench.cases import (
    Case,
    Inputs,
    Outputs,
    planned,
    random_case,
    run_tpkernels,
    world_group,
)
from tpkernels.bench.probes import measure_machine, profile_of, rates_text
from tpkernels.bench.specs import Spec, check_split, specs_of
from tpkernels.bench.verification import Verdict, check
from tpkernels.cache import cache_folder, check_folder, make_folder
from tpkernels.cli import options
from tpkernels.groups.group import Group, Tuning
from tpkernels.launch import session as sessions
from tpkernels.launch.session import Run, all_gather_objects, synchronizer
from tpkernels.launch.terminal import (
    UsageError,
    at_least,
    check_known,
    check_workers,
    console,
    dtype_named,
    milliseconds,
    table,
    writable,
    writing,
)
from tpkernels.op_spec import OPS
from tpkernels.planning import store
from tpkernels.planning.algorithms import ALGORITHMS
from tpkernels.planning.choose import Means, Plan, candidates
from tpkernels.planning.machine import Machine, cpu_flags, this_machine
from tpkernels.planning.table import Config, Measurement, Table
from tpkernels.planning.trust import Trust
from tpkernels.timing import Variant, measure, slowest
from tpkernels.tuning.tuner import tuning_by

_TUNED = [name for name, spec in OPS.items() if not spec.routed]
_SHAPES = [f"{m},4096,4096" for m in (1, 16, 64, 256, 1024, 4096)]
_BYTES = "4K,64K,1M,16M,64M"
_CONFIG_REPEAT = 5
_LEGEND = (
    "ms: of all ranks together, interleaved. Empty: the algorithm cannot run this case, see "
    "tpkernels explain, it rounds differently, or there was nothing, or no memory, to compare it."
)


def tune(
    op: Annotated[list[str] | None, Option(help="An op; repeatable. Default: all.")] = None,
    shape: Annotated[
        list[str] | None,
        Option(
            help="M,N,K of a matmul op, over all ranks; repeatable. Default: M from 1 to 4096 of "
            "M,4096,4096. auto interpolates between two measured M."
        ),
    ] = None,
    sizes: options.Sizes = _BYTES,
    nproc: options.Ranks = None,
    dtype: options.Dtype = "bf16",
    device: options.Device = None,
    repeat: Annotated[int, Option(help="Maximum number of timed rounds.")] = 40,
    budget: Annotated[
        int, Option(help="Start no further round of a case after this many seconds.")
    ] = 20,
    threads: Annotated[
        int, Option(help="Threads per rank, here and in the job that uses the times.")
    ] = 1,
    timeout: options.Timeout = 1800,
    machine: Annotated[
        bool,
        Option(
            "--machine",
            help="Measure this machine's rates instead, for tpkernels plan --machine this and for "
            "products on meshes.",
        ),
    ] = False,
) -> None:
    """Measure every algorithm for the given shapes, so that auto chooses the fastest.

    Each algorithm is verified first, then all are timed interleaved, as within tpkernels.autotune:
    the caches are overwritten before each run. Times are kept in the cache folder
    ($XDG_CACHE_HOME/tpkernels, by default ~/.cache/tpkernels) for this device, number of ranks and
    threads, and these versions of tpkernels, torch and Triton. Groups that are set up afterwards
    use them. Wrong results are left out, and the exit code is 1. On CPUs an algorithm is also left
    out where its bits differ from those of the others.
    """
    world = sessions.world_size(nproc, 2)
    at_least(1, repeat=repeat, budget=budget, timeout=timeout)
    check_workers(threads=threads)
    if world == 1:
        raise UsageError("one rank has nothing to choose: it does not communicate")
    specs = [
        spec
        for name in check_known("op", op or _TUNED, _TUNED)
        for spec in specs_of(name, shape or _SHAPES, sizes, dtype_named(dtype))
    ]
    for spec in () if machine else specs:
        check_split(spec, world)
    device = sessions.resolve_device(device)
    if device == "cuda" and sessions.ranks_share_gpus(world):
        raise UsageError(
            f"{world} ranks on {torch.cuda.device_count()} GPUs: times of ranks that share a "
            "GPU do not apply elsewhere; use fewer ranks (--tp) or --device cpu"
        )
    if sessions.is_leader():
        _check_cache()
    with sessions.open_session(world, threads=threads, timeout=timeout, device=device) as run:
        if machine:
            _tune_machine(run, device)
        elif not _tune_cases(run, specs, repeat, budget, device):
            raise typer.Exit(1)


def _check_cache() -> None:
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


def _tune_machine(run: Run, device: str) -> None:
    reports = run(measure_machine, device)
    if sessions.is_leader():
        machine, profile = reports[0].machine, profile_of(reports, date.today().isoformat())
        with writing(store.profile_path_for(machine)):
            path = store.save_profile(machine, profile)
        console().print(f"{profile.title}: {rates_text(profile)}\nKept in {path}", markup=False)


def _tune_cases(run: Run, specs: list[Spec], repeat: int, budget: int, device: str) -> bool:
    """Tune the cases one by one, keeping the times of each; return whether all results are
    right."""
    out, right = console(), True
    grid = table("op\nM, N, K", tuple(ALGORITHMS), "auto before, and from now on")
    for spec in specs:
        with out.status(f"{spec.op} {spec}"):
            report: TuneReport = run(tune_case, spec, repeat, budget, device)[0]
        right = right and report.right
        if sessions.is_leader():
            path = store.path_for(report.machine)
            with writing(path):
                store.update(report.machine, *filter(None, [report.measurement]))
            grid.add_row(f"{spec.op}\n[dim]{spec}[/]", *_cells(report))
    if sessions.is_leader():
        out.print(grid)
        for line in (_LEGEND, f"Kept in {path}"):
            out.print(line, markup=False)
    return right


def _cells(report: TuneReport) -> list[str]:
    """Return the time of each algorithm, and how the choice changes."""
    times = report.measurement.ms if report.measurement is not None else {}
    cells = {name: milliseconds(ms) for name, ms in times.items()}
    if times:
        best = min(times, key=times.__getitem__)
        cells[best] = f"[bold green]{cells[best]}[/]"
    wrong = {name for name, verdict in report.verdicts.items() if not verdict.right}
    cells |= dict.fromkeys(wrong - times.keys(), "[bold red]WRONG[/]")
    before, after = report.before, report.after
    now = "" if before.algorithm == after.algorithm else f"{before.algorithm}, now "
    change = escape(f"{now}{after.algorithm}: {after.reason}")
    return [*(cells.get(name, "") for name in ALGORITHMS), change]


# On a rank.


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
    case = random_case(spec, sessions.rank_device(device))
    group = world_group().ready(device)
    means = Means(
        group.shared_memory,
        group.workspace_bytes,
        cpu_flags(),
        why_no_node=group.why_no_node,
        trust=group.trust() if device == "cuda" else Trust(),
    )
    _, before = planned(case.copy(), "auto")
    (call,) = group.planned_calls()
    results: dict[str, Outputs] = {}
    for name in candidates(spec.problem(group.world, device), means):
        with contextlib.suppress(NotImplementedError):  # kernels that do not run on these GPUs
            results[name] = run_tpkernels(case.copy(), name)
    verdicts = check(case, results)

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
        chosen = configs.choose(x.device, x.dtype, sum(case.sizes), w.shape[1], config)
        matmul.matmul(x, w, config=chosen)
        if finish is not None:
            finish()
    except Exception:  # Triton's own classes: out of shared memory or registers
        fits = False
    return all(all_gather_objects(fits))
