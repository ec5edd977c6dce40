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

_LEFT_OUT = "Not run, because the budget is {:.0f} s: {}. To run them, raise --budget"
_STYLES = {QUALIFIED: "green", DISQUALIFIED: "bold red", NOT_RUN: "dim"}


def qualify(
    nproc: Annotated[
        int | None,
        Option(
            "--nproc",
            "--tp",
            help="Number of ranks. Default: the number of GPUs, then half of it down to 2 or 3; 2 "
            "with one GPU and on CPUs.",
        ),
    ] = None,
    device: options.Device = None,
    budget: Annotated[
        float | None,
        Option(help="Time budget of all stages, in seconds. Default: 240 with one GPU, else 3600."),
    ] = None,
    thorough: Annotated[
        bool, Option("--thorough", help="Make four times as many calls, and inject faults.")
    ] = False,
    only: Annotated[
        str, Option(help="Run only stages whose names start with this text, such as direct/.")
    ] = "",
    rerun: Annotated[
        bool, Option("--rerun", help="Ignore saved results and run all stages again.")
    ] = False,
    plan: Annotated[bool, Option("--plan", help="List the stages without running them.")] = False,
    out: Annotated[Path | None, Option(help="JSON file for a copy of the report.")] = None,
) -> None:
    """Validate the GPU algorithms on this machine. `auto` uses only variants that pass.

    Each stage runs in separate processes with a deadline, so a crash or hang disqualifies only the
    variant under test. The report is saved in the cache folder for these GPUs, driver and versions.
    Stages that are already in the report are skipped. The exit code is 1 if a variant was
    disqualified. On CPU tensors the stages are a dry run that qualifies no variant.
    """
    if sessions.under_torchrun():
        raise UsageError("`tpkernels qualify` launches its own ranks; run it without torchrun")
    if nproc is not None:
        check_workers(nproc=nproc)
        at_least(2, nproc=nproc)
    if budget is not None and not budget > 0:
        raise UsageError(f"--budget is {budget:g}; it must be a positive number of seconds")
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
            console().print(f"The fused stages are skipped: fused {why}", markup=False)
    if not stages and known is None:
        raise UsageError(
            f"--only is '{only}', which is not the start of a stage name; --plan lists the stages"
        )
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
    dry_run = "This was a dry run on CPU tensors; it qualifies no variant"
    console().print(dry_run if path is None else f"Saved to {path}", markup=False)
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
        rate = f" (error rate below {3 / outcome.checks:.1g})" if stores else ""
        line += f", {what} correct{rate}, {outcome.seconds:.0f} s"
    else:
        line += f": {escape(outcome.reason.removeprefix(f'{DISQUALIFIED}: '))}"
    console().print(line, highlight=False)


def _show_plan(stages: list[Stage]) -> None:
    grid = table("stage", ("ranks", "seconds"), "skipped because")
    for stage in stages:
        grid.add_row(stage.name, str(stage.world), f"{stage.seconds:.0f}", escape(stage.why_not))
    console().print(grid)
    total = sum(stage.seconds for stage in stages if not stage.why_not)
    console().print(f"Estimated time: {total / 60:.1f} minutes")
