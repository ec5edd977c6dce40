"""``tpkernels tune``."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Annotated

import torch
import typer
from typer import Option

import tpkernels
from tpkernels.bench.cases import random_case, run_planned, world_group
from tpkernels.bench.probes import measure_machine, rates_text
from tpkernels.bench.specs import Spec, check_spec, make_specs
from tpkernels.cli import options
from tpkernels.common.cache import cache_folder, check_folder, make_folder
from tpkernels.launch import session as sessions
from tpkernels.launch.session import Run
from tpkernels.launch.terminal import (
    UsageError,
    check_known,
    check_workers,
    console,
    milliseconds,
    parse_dtype,
    require_at_least,
    table,
    writable,
    writing,
)
from tpkernels.planning import store
from tpkernels.planning.algorithms import ALGORITHMS
from tpkernels.planning.choose import EMPTY_TABLE, Plan
from tpkernels.planning.machine import this_machine
from tpkernels.planning.op_spec import OPS

_TUNED = [name for name, spec in OPS.items() if not spec.routed]
_SHAPES = [f"{m},4096,4096" for m in (1, 16, 64, 256, 1024, 4096)]
_LEGEND = (
    "ms: shortest of the interleaved rounds, until the last rank has finished. Empty: not timed."
)


def tune(
    op: Annotated[list[str] | None, Option(help="Op to tune. Repeatable. Default: all.")] = None,
    shape: Annotated[
        list[str] | None,
        Option(
            help="Shape M,N,K of a matmul op, over all ranks. Repeatable. Default: M,4096,4096 "
            "with M from 1 to 4096. auto interpolates between two measured M."
        ),
    ] = None,
    sizes: Annotated[
        str,
        Option("--bytes", help="Tensor sizes of a collective, over all ranks; comma-separated."),
    ] = "4K,64K,1M,16M,64M",
    nproc: options.Ranks = None,
    dtype: options.Dtype = "bf16",
    device: options.Device = None,
    budget: Annotated[
        int, Option(help="Time budget per case, in seconds; no round starts after it.")
    ] = 20,
    threads: Annotated[
        int, Option(help="Threads per rank. Use the same number in the job that uses the times.")
    ] = 1,
    timeout: options.Timeout = 1800,
    machine: Annotated[
        bool,
        Option(
            "--machine",
            help="Measure the compute and communication rates of this machine instead. They are "
            "used by explain --machine this and by sharded matmuls.",
        ),
    ] = False,
) -> None:
    """Measure the algorithms for the given shapes, so that auto selects the fastest.

    In a program, tpkernels.autotune(save=True) does this at the first call with each shape. The
    times are saved in the cache folder ($XDG_CACHE_HOME/tpkernels, by default ~/.cache/tpkernels).
    They apply to this device, number of ranks and threads, and these versions of tpkernels, torch
    and Triton. Process groups that are initialized later use them. On CPUs, algorithms that cannot
    be the fastest are not timed, such as a chunked matmul of a few rows. If an algorithm fails, it
    is skipped, and the exit code is 1.
    """
    world = sessions.world_size(nproc, 2)
    require_at_least(1, budget=budget, timeout=timeout)
    check_workers(threads=threads)
    if world == 1:
        raise UsageError("nothing to tune with --tp 1: a single rank does not communicate")
    specs = [
        spec
        for name in check_known("op", op or _TUNED, _TUNED)
        for spec in make_specs(name, shape or _SHAPES, sizes, parse_dtype(dtype))
    ]
    for spec in () if machine else specs:
        check_spec(spec, world)
    device = sessions.resolve_device(device)
    if device == "cuda" and sessions.ranks_share_gpus(world):
        raise UsageError(
            f"{world} ranks would share {torch.cuda.device_count()} GPUs, and times of ranks that "
            "share a GPU are not representative; pass a lower --tp, or --device cpu"
        )
    if sessions.is_leader():
        _check_cache()
    with sessions.open_session(world, threads=threads, timeout=timeout, device=device) as run:
        if machine:
            _tune_machine(run, device)
        elif not _tune_cases(run, specs, budget, device):
            raise typer.Exit(1)


def _check_cache() -> None:
    """Raise ``UsageError`` before measuring if the cache could not be written or read."""
    try:
        folder = cache_folder()
        make_folder(folder)
        check_folder(folder)
    except (OSError, RuntimeError, ValueError) as error:
        message = (
            f"the cache folder cannot be used: {error}; set XDG_CACHE_HOME to a different folder"
        )
        raise UsageError(message) from error
    writable(folder / "tuning")


def _tune_machine(run: Run, device: str) -> None:
    machine, profile = run(measure_machine, device, date.today().isoformat())[0]
    if sessions.is_leader():
        with writing(store.get_profile_path(machine)):
            path = store.save_profile(machine, profile)
        console().print(f"{profile.title}: {rates_text(profile)}\nSaved to {path}", markup=False)


def _tune_cases(run: Run, specs: list[Spec], budget: int, device: str) -> bool:
    """Tune the cases one at a time. Return whether all algorithms succeeded."""
    out, choices, failures = console(), list[str](), list[str]()
    times = dict[str, dict[str, float]]()  # milliseconds by case, then algorithm
    for spec in specs:
        case = f"{spec.op} {spec}"
        with out.status(case):
            chosen, ms, failed, path = run(tune_case, spec, budget, device)[0]
        choices.append(f"{case}: auto now selects {chosen.algorithm}: {chosen.reason}")
        failures += [f"{case}: '{name}' {reason}" for name, reason in failed.items()]
        times[f"{spec.op}\n[dim]{spec}[/]"] = ms
    names = [name for name in ALGORITHMS if any(name in ms for ms in times.values())]
    grid = table("op\nM, N, K", tuple(names))
    for case, ms in times.items():
        grid.add_row(case, *(milliseconds(ms[name]) if name in ms else "" for name in names))
    if sessions.is_leader():
        out.print(grid)
        for line in (_LEGEND, *choices, *failures, f"Saved to {path}"):
            out.print(line, markup=False)
    return not failures


def tune_case(
    spec: Spec, budget: float, device: str = "cpu"
) -> tuple[Plan, dict[str, float], dict[str, str], Path]:
    """Tune a case on this rank and save the times, even if the case was measured before.
    Collective.

    Returns:
        The new plan of ``auto``, milliseconds by algorithm, the reason of each failed algorithm,
        and the path of the file.
    """
    operands, group = random_case(spec, sessions.rank_device(device)), world_group().ready(device)
    previous = group.timing_table(device)
    group.use_times(device, EMPTY_TABLE)
    group.planner_inputs.failures.clear()
    with tpkernels.autotune(limit=budget, save=True):
        run_planned(operands.copy(), "auto")
    measured = group.timing_table(device).measurements  # on GPUs, includes times in graphs
    failed = {
        name: reason
        for failures in group.planner_inputs.failures.values()
        for name, reason in failures.items()
    }
    group.use_times(device, previous.extended(measured))
    _, chosen = run_planned(operands, "auto")
    machine = this_machine(device, group.world, group.hosts, group.shared_memory)
    return chosen, dict(measured[0].ms) if measured else {}, failed, store.get_table_path(machine)
