"""``tpkernels profile``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tpkernels.bench import plots
from tpkernels.bench.options import (
    UsageError,
    algorithms_named,
    at_least,
    check_workers,
    dtype_named,
    ops_named,
)
from tpkernels.bench.output import console, milliseconds, table
from tpkernels.bench.profile import Files, Profile, record_op, record_script
from tpkernels.bench.session import is_leader, open_session, under_torchrun, world_size
from tpkernels.bench.specs import check_algorithm, check_split, spec_of
from tpkernels.bench.trace import RankTime
from tpkernels.cli import options
from tpkernels.cli.exit_codes import exit_codes
from tpkernels.launch.ranks import loopback_store

_LEGEND = """\
Each moment of a rank counts once: as compute, else copy, else wait. overlapped: the fraction of the
time in which data moves (copies, messages in flight, matmuls that read a peer's memory) during
which the rank also computes."""


def profile(
    script: Annotated[
        list[str] | None,
        typer.Argument(help="A Python script and its arguments, as for torchrun."),
    ] = None,
    op: Annotated[str | None, typer.Option(help="An op, instead of a script.")] = None,
    shape: Annotated[
        str, typer.Option(help="M,N,K of a matmul op, over all ranks.")
    ] = "1024,2048,2048",
    size: options.Sizes = "1M",
    nproc: options.Ranks = None,
    dtype: options.Dtype = "bf16",
    algorithm: Annotated[str, typer.Option(help="auto or an algorithm.")] = "auto",
    calls: Annotated[int, typer.Option(help="Number of calls of the op.")] = 3,
    out: Annotated[Path, typer.Option(help="Folder for trace.json and timeline.png.")] = Path(
        "tpkernels-profile"
    ),
    threads: options.Threads = 1,
    timeout: options.Timeout = 600,
) -> None:
    """Profile an op or a script on all ranks: one trace for Perfetto or chrome://tracing, and a
    picture with a lane for each rank and thread or stream.

    Options precede the script; everything after it belongs to the script. Its ranks run on this
    machine, in an environment like torchrun's, and create their process group themselves.
    """
    with exit_codes():
        if (op is None) == (not script):
            raise UsageError("give either --op or a script")
        world = world_size(nproc, 2)
        at_least(1, calls=calls, timeout=timeout)
        check_workers(threads=threads)
        if op is not None:
            ops_named([op])
            spec = spec_of(op, shape, size, dtype_named(dtype))
            check_split(spec, world)
            algorithms_named([algorithm])
            check_algorithm(spec, world, algorithm)
        else:
            _check_script(script or [])
        files = Files.within(out) if is_leader() else None
        with open_session(world, threads=threads, timeout=timeout) as session:
            if op is not None:
                what = f"{op} {spec}"
                recordings = session.run(record_op, spec, algorithm, calls)
            else:
                assert script  # one of the two is given
                what = " ".join(script)
                store = loopback_store()
                recordings = session.run(record_script, script[0], script[1:], store.port)
            if files is not None:
                _report(Profile.of(recordings, what), what, files, console())


def _check_script(script: list[str]) -> None:
    if under_torchrun():
        raise UsageError("a script's ranks are started here: run this command without torchrun")
    if not Path(script[0]).is_file():
        raise UsageError(f"no script '{script[0]}'")


def _report(recorded: Profile, what: str, files: Files, out: Console) -> None:
    """Writes the files and prints the summary."""
    files.write(recorded, f"{what}: {recorded.overlapped:.0%} of the data movement overlapped")
    plan = f", {recorded.plan}" if recorded.plan else ""
    out.print(f"{what}, {len(recorded.spent)} ranks{plan}", markup=False)
    out.print(_table(recorded.spent))
    out.print(_LEGEND)
    moved = milliseconds(recorded.moved)
    out.print(f"Overlapped: {recorded.overlapped:.0%} of {moved} ms in which data moves.")
    if len(recorded.hosts) > 1:
        out.print(f"Ranks are on {len(recorded.hosts)} hosts, whose clocks are not aligned.")
    missing = plots.unsupported()
    picture = f"no picture: {missing}" if missing else files.timeline
    out.print(f"{files.trace} (ui.perfetto.dev), {picture}", markup=False)


def _table(spent: list[RankTime]) -> Table:
    grid = table(
        "rank", ("ms", "compute", "copy", "wait", "other", "data\nmoves, ms"), "overlapped"
    )
    for rank, one in enumerate(spent):
        parts = one.compute, one.copy, one.wait
        whole = one.total or 1.0  # nothing was recorded
        shares = [f"{part / whole:.1%}" for part in (*parts, one.total - sum(parts))]
        overlapped = f"{one.overlapped / one.moved:.0%}" if one.moved else "nothing moves"
        grid.add_row(
            str(rank), milliseconds(one.total), *shares, milliseconds(one.moved), overlapped
        )
    return grid
