"""``tpkernels qualify``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from typer import Option

from tpkernels.cli import options
from tpkernels.kernels import unsupported
from tpkernels.launch import session as sessions
from tpkernels.launch.terminal import (
    UsageError,
    at_least,
    check_workers,
    console,
    table,
    writable,
    writing,
)
from tpkernels.planning import qualification
from tpkernels.planning.qualification import (
    DISQUALIFIED,
    NOT_RUN,
    QUALIFIED,
    QualificationReport,
    StageOutcome,
)
from tpkernels.qualification.run import run, topology_here
from tpkernels.qualification.schedule import (
    LITMUS,
    OVER_BUDGET,
    Stage,
    Topology,
    budget_of,
    schedule,
)

_LEFT_OUT = "Left out, because the budget is {:.0f} s: {}. Give them time with --budget"
_STYLES = {QUALIFIED: "green", DISQUALIFIED: "bold red", NOT_RUN: "dim"}


def qualify(
    nproc: options.Ranks = None,
    device: options.Device = None,
    budget: Annotated[
        float | None,
        Option(help="Seconds for all stages. Default: 240 with one GPU, else 3600."),
    ] = None,
    thorough: Annotated[
        bool, Option("--thorough", help="Four times as many calls, and faults.")
    ] = False,
    only: Annotated[str, Option(help="Stages whose names begin so, such as direct/.")] = "",
    rerun: Annotated[
        bool, Option("--rerun", help="Ignore saved results and run all stages again.")
    ] = False,
    plan: Annotated[bool, Option("--plan", help="Show the stages and end.")] = False,
    out: Annotated[Path | None, Option(help="Also write the report to this file, as JSON.")] = None,
) -> None:
    """Validate the GPU algorithms on this machine. `auto` uses only variants that pass.

    Each stage runs in separate processes with a deadline, so a crash or hang disqualifies only the
    variant under test. The report is saved in the cache folder for these GPUs, driver and versions;
    stages that it contains are skipped. The exit code is 1 if a variant was disqualified.
    """
    if sessions.under_torchrun():
        raise UsageError("qualify starts its ranks by itself: run it without torchrun")
    if nproc is not None:
        check_workers(nproc=nproc)
        at_least(2, nproc=nproc)
    if budget is not None and not budget > 0:
        raise UsageError(f"--budget is {budget:g}; it must be positive, in seconds")
    device = sessions.resolve_device(device)
    topology = topology_here() if device == "cuda" else Topology(("this CPU",) * 2, 90)
    worlds = () if nproc is None else (nproc,)
    known = qualification.load(device)[0] if device == "cuda" else None
    stages = schedule(
        topology,
        worlds,
        budget=budget,
        thorough=thorough,
        only=only,
        known=known.has if known is not None and not rerun else lambda name, world: False,
    )
    if device == "cpu":  # a CPU has none of the kernels of the litmus tests
        stages = [stage for stage in stages if stage.name not in LITMUS]
        if (why := unsupported(device)) is not None:
            stages = [stage for stage in stages if not stage.name.startswith("fused/")]
            console().print(f"fused is left out: it {why}", markup=False)
    if not stages and known is None:
        raise UsageError(f"no stage begins with '{only}'")
    if plan:
        return _show_plan(stages)
    if out is not None:
        writable(out)

    path = qualification.path_of(qualification.head(device)) if device == "cuda" else None

    left_out = []

    def on_stage(stage: Stage, outcome: StageOutcome, report: QualificationReport) -> None:
        _report(stage, outcome)
        if OVER_BUDGET in outcome.reason:
            left_out.append(stage.name)
        if path is not None:  # at once: what ends the command costs one stage only
            with writing(path):
                qualification.save(device, report)

    repeats, seconds = 4 if thorough else 1, budget_of(topology, budget)
    report = run(stages, device, repeats=repeats, budget=seconds, known=known, on_stage=on_stage)
    if left_out:
        console().print(_LEFT_OUT.format(seconds, ", ".join(left_out)), markup=False)
    kept = "A rehearsal on CPU tensors: it qualifies nothing" if path is None else f"Kept in {path}"
    console().print(kept, markup=False)
    if out is not None:
        with writing(out):
            out.write_text(qualification.text_of(device, report))
    if _disqualified(report):
        raise typer.Exit(1)


def _disqualified(report: QualificationReport) -> bool:
    worlds = (*report.variants.values(), *report.litmus.values())
    return any(one.status == DISQUALIFIED for world in worlds for one in world.values())


def _report(stage: Stage, outcome: StageOutcome) -> None:
    """Print a line as the stage ends."""
    style = _STYLES[outcome.status]
    where = stage.name if stage.is_virtual else f"{stage.name} on {stage.world} ranks"
    line = f"{where}: [{style}]{outcome.status}[/]"
    if outcome.status == QUALIFIED:
        stores = stage.name in LITMUS
        what = f"{outcome.checks} values" if stores else f"{outcome.checks} calls"
        rate = f", a rate of wrong ones below {3 / outcome.checks:.1g}" if stores else ""
        line += f", {what} right{rate}, {outcome.seconds:.0f} s"
    else:
        line += f": {escape(outcome.reason.removeprefix(f'{DISQUALIFIED}: '))}"
    console().print(line, highlight=False)


def _show_plan(stages: list[Stage]) -> None:
    grid = table("stage", ("ranks", "s"), "why not")
    for stage in stages:
        grid.add_row(stage.name, str(stage.world), f"{stage.seconds:.0f}", escape(stage.why_not))
    console().print(grid)
    total = sum(stage.seconds for stage in stages if not stage.why_not)
    console().print(f"About {total / 60:.0f} minutes")
