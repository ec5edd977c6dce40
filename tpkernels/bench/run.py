"""`tpkernels bench`: measures the cases of a sweep one by one."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from tpkernels import dtypes
from tpkernels.bench.file import save
from tpkernels.bench.inputs import COLD
from tpkernels.bench.measuring import run_case
from tpkernels.bench.results import Report, key, rates_of, result, roofline
from tpkernels.bench.roofline import Rates, measure_rates, slowest_rates
from tpkernels.bench.sweep import Item, Sweep
from tpkernels.launch.session import Session, is_leader, launched_ranks, open_session

_START_SECONDS = 0.3  # per case of any size: inputs, set-up, barriers
# Only estimates how long cases take, for the progress bar.
_NOMINAL = Rates(flops=5e10, torch_flops=5e10, copy_bytes=1e10, copy_over_cache=COLD)


def run_sweep(sweep: Sweep, report: Report, path: Path | None, *, timeout: int) -> None:
    """Measures the cases that ``report`` lacks and adds them, saving to ``path`` after every case.
    Under a launcher, rank 0's report decides.

    Raises:
        RankError: ranks failed. Like an interrupt, this loses the case being measured.
    """
    with _progress(Console(stderr=True)) as progress:
        bar = _Bar(sweep, progress)
        for world in dict.fromkeys(item.world for item in sweep.items):
            items = [item for item in sweep.items if item.world == world]
            if launched_ranks() is None and {key(item) for item in items} <= _done(report):
                continue  # no need to start ranks
            with open_session(
                world, threads=sweep.threads, timeout=timeout, device=sweep.device
            ) as session:
                _run_world(items, sweep, report, path if session.leader else None, session, bar)
    report["complete"] = True
    if path is not None and is_leader():
        save(report, path)


def _run_world(
    items: list[Item],
    sweep: Sweep,
    report: Report,
    path: Path | None,
    session: Session,
    bar: _Bar,
) -> None:
    """All cases of one world size."""
    world = items[0].world
    done, rooflines = session.run(_identity, (_done(report), report["rooflines"]))[0]
    rates = {entry["dtype"]: rates_of(entry) for entry in rooflines if entry["tp"] == world}
    for item in items:
        bar.begin(item)
        if key(item) not in done:
            dtype = dtypes.name(item.spec.dtype)
            if dtype not in rates:
                rates[dtype] = slowest_rates(
                    session.run(measure_rates, item.spec.dtype, sweep.device)
                )
                report["rooflines"].append(roofline(world, dtype, rates[dtype]))
            reports = session.run(
                run_case, item.spec, sweep.algorithms, sweep.effort, rates[dtype], sweep.device
            )
            report["results"].append(result(item, rates[dtype], reports))
            if path is not None:
                save(report, path)
        bar.end(item)


def _done(report: Report) -> set[str]:
    return {each["case"] for each in report["results"]}


def _identity(value: object) -> object:
    """Run on every rank, this broadcasts rank 0's value."""
    return value


class _Bar:
    """Progress bar: each case counts with its estimated time."""

    def __init__(self, sweep: Sweep, progress: Progress) -> None:
        self._progress, self._done = progress, 0
        total = sum(map(_weight, sweep.items))
        self._task = progress.add_task("", total=total, done=0, cases=len(sweep.items))

    def begin(self, item: Item) -> None:
        self._progress.update(self._task, description=key(item))

    def end(self, item: Item) -> None:
        self._done += 1
        self._progress.update(self._task, advance=_weight(item), done=self._done)


def _weight(item: Item) -> float:
    return _START_SECONDS + _NOMINAL.least_seconds(item.spec.cost(item.world))


def _progress(console: Console) -> Progress:
    """Only shown on a terminal."""
    return Progress(
        TextColumn("{task.fields[done]}/{task.fields[cases]}"),
        BarColumn(bar_width=30),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
        console=console,
        transient=True,
        speed_estimate_period=1e9,  # estimated from all cases so far: one may take minutes
        disable=not (console.is_terminal and is_leader()),
    )
