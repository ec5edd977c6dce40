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
    check_workers,
    console,
    require_at_least,
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
from tpkernels.qualification.run import get_topology, run
from tpkernels.qualification.schedule import (
    LITMUS,
    OVER_BUDGET,
    Stage,
    Topology,
    resolve_budget,
    schedule,
)

_OVER_BUDGET_NOTE = "Not run, because the budget is {:.0f} s: {}. To run them, raise --budget"
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
        require_at_least(2, nproc=nproc)
    if budget is not None and not budget > 0:
        raise UsageError(f"--budget is {budget:g}; it must be a positive number of seconds")
    device = sessions.resolve_device(device)
    topology = get_topology() if device == "cuda" else Topology(("this CPU",) * 2, 90)
    worlds = () if nproc is None else (nproc,)
    previous = qualification.load(device)[0] if device == "cuda" else None
    stages = schedule(
        topology,
        worlds,
        budget=budget,
        thorough=thorough,
        only=only,
        has_result=previous.has
        if previous is not None and not rerun
        else lambda name, world: False,
    )
    if device == "cpu":  # litmus kernels exist only for GPUs
        stages = [stage for stage in stages if stage.name not in LITMUS]
        if (reason := unsupported(device)) is not None:
            stages = [stage for stage in stages if not stage.name.startswith("fused/")]
            console().print(f"The fused stages are skipped: fused {reason}", markup=False)
    if not stages and previous is None:
        raise UsageError(
            f"--only is '{only}', which is not the start of a stage name; --plan lists the stages"
        )
    if plan:
        return _show_plan(stages)
    if out is not None:
        writable(out)

    path = (
        qualification.get_report_path(qualification.machine_key(device))
        if device == "cuda"
        else None
    )

    over_budget = []

    def on_stage(stage: Stage, outcome: StageOutcome, report: QualificationReport) -> None:
        _print_outcome(stage, outcome)
        if OVER_BUDGET in outcome.reason:
            over_budget.append(stage.name)
        if path is not None:  # save every outcome: an interrupt then loses only the current stage
            with writing(path):
                qualification.save(device, report)

    repeats, seconds = 4 if thorough else 1, resolve_budget(topology, budget)
    report = run(
        stages, device, repeats=repeats, budget=seconds, previous=previous, on_stage=on_stage
    )
    if over_budget:
        console().print(_OVER_BUDGET_NOTE.format(seconds, ", ".join(over_budget)), markup=False)
    dry_run = "This was a dry run on CPU tensors; it qualifies no variant"
    console().print(dry_run if path is None else f"Saved to {path}", markup=False)
    if out is not None:
        with writing(out):
            out.write_text(qualification.report_to_json(device, report))
    if _disqualified(report):
        raise typer.Exit(1)


def _disqualified(report: QualificationReport) -> bool:
    worlds = (*report.variants.values(), *report.litmus.values())
    return any(outcome.status == DISQUALIFIED for world in worlds for outcome in world.values())


def _print_outcome(stage: Stage, outcome: StageOutcome) -> None:
    """Print the outcome of a stage."""
    style = _STYLES[outcome.status]
    title = stage.name if stage.is_virtual else f"{stage.name} on {stage.world} ranks"
    line = f"{title}: [{style}]{outcome.status}[/]"
    if outcome.status == QUALIFIED:
        is_litmus = stage.name in LITMUS
        checks = f"{outcome.checks} values" if is_litmus else f"{outcome.checks} calls"
        rate = f" (error rate below {3 / outcome.checks:.1g})" if is_litmus else ""
        line += f", {checks} correct{rate}, {outcome.seconds:.0f} s"
    else:
        line += f": {escape(outcome.reason.removeprefix(f'{DISQUALIFIED}: '))}"
    console().print(line, highlight=False)


def _show_plan(stages: list[Stage]) -> None:
    grid = table("stage", ("ranks", "seconds"), "skipped because")
    for stage in stages:
        grid.add_row(
            stage.name, str(stage.world), f"{stage.seconds:.0f}", escape(stage.skip_reason)
        )
    console().print(grid)
    total = sum(stage.seconds for stage in stages if not stage.skip_reason)
    console().print(f"Estimated time: {total / 60:.1f} minutes")
