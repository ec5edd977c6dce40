"""``tpkernels profile``: what the ranks do when, on one clock, as a trace and as a picture."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Annotated, Any

import torch.distributed as dist
import typer
from rich.console import Console

from tpkernels.bench import timeline
from tpkernels.bench.options import (
    DTYPES,
    UsageError,
    algorithms_named,
    at_least,
    check_workers,
    dtype_named,
    ops_named,
    writable,
    writing,
)
from tpkernels.bench.output import console, milliseconds, table
from tpkernels.bench.recording import Recording, record_op, record_script
from tpkernels.bench.session import is_leader, open_session, under_torchrun, world_size
from tpkernels.bench.specs import check_algorithm, check_split, spec_of
from tpkernels.bench.trace import RankTime, merge, times
from tpkernels.cli.exit_codes import exit_codes


def profile(
    script: Annotated[
        list[str] | None,
        typer.Argument(help="A Python script and its arguments, as torchrun takes them."),
    ] = None,
    op: Annotated[str | None, typer.Option(help="An op, instead of a script.")] = None,
    shape: Annotated[
        str, typer.Option(help="M,N,K of a matmul op, over all ranks.")
    ] = "1024,2048,2048",
    size: Annotated[
        str, typer.Option("--bytes", help="Size for a collective alone, over all ranks.")
    ] = "1M",
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", "--tp", help="Ranks; 2 by default. torchrun's under torchrun."),
    ] = None,
    dtype: Annotated[str, typer.Option(help=" | ".join(DTYPES))] = "bf16",
    algorithm: Annotated[str, typer.Option(help="auto or an algorithm.")] = "auto",
    calls: Annotated[int, typer.Option(help="Calls of the op.")] = 3,
    out: Annotated[Path, typer.Option(help="Folder for trace.json and timeline.png.")] = Path(
        "tpkernels-profile"
    ),
    threads: Annotated[int, typer.Option(help="Threads of a rank.")] = 1,
    timeout: Annotated[int, typer.Option(help="Seconds that it may take.")] = 600,
) -> None:
    """Profile an op, or a script, on all ranks: one trace for Perfetto or chrome://tracing, and a
    picture with a lane for each rank and thread or stream.

    Options come before the script; what follows it is the script's. Its ranks are on this machine,
    and it makes its process group as under torchrun.
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
        files = _outputs(out) if is_leader() else None
        with open_session(world, threads=threads, timeout=timeout) as session:
            if op is not None:
                what = f"{op} {spec}"
                told = session.run(record_op, spec, algorithm, calls)
            else:
                assert script  # one of the two was given
                what, store = " ".join(script), dist.TCPStore("127.0.0.1", 0, is_master=True,
                                                              wait_for_workers=False)  # fmt: skip
                told = session.run(record_script, script[0], script[1:], store.port)
            if files is not None:
                _report(told, what, files, console())


def _check_script(script: list[str]) -> None:
    if under_torchrun():
        raise UsageError("a script's ranks are started here: run this without torchrun")
    if not Path(script[0]).is_file():
        raise UsageError(f"no script '{script[0]}'")


def _outputs(folder: Path) -> tuple[Path, Path]:
    """Where the trace and the picture go."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder '{folder}': {error.strerror}") from error
    return writable(folder / "trace.json"), writable(folder / "timeline.png")


def _report(told: list[Recording], what: str, files: tuple[Path, Path], out: Console) -> None:
    trace: dict[str, Any] = merge([json.loads(gzip.decompress(one.trace)) for one in told])
    hosts = sorted({one.host for one in told})
    trace["otherData"] = {"what": what, "ranks": len(told), "hosts": hosts}
    spent = times(trace, len(told))
    with writing(files[0]):
        files[0].write_text(json.dumps(trace))
    plan = f", {told[0].plan}" if told[0].plan else ""
    out.print(f"{what}, {len(told)} ranks{plan}", markup=False)
    out.print(_table(spent))
    out.print(
        "Each moment of a rank counts once: compute, else copy, else wait. overlapped: of the time "
        "in which data\nmoves (copies, messages under way, products that read a peer's memory), "
        "the share in which the rank computes."
    )
    moved = sum(one.moved for one in spent)
    share = sum(one.overlapped for one in spent) / moved if moved else 0.0
    out.print(f"overlapped share: {share:.0%} of {milliseconds(moved)} ms")
    if len(hosts) > 1:
        out.print(f"Ranks are on {len(hosts)} hosts, each on its own clock: they are not aligned.")
    missing = timeline.unsupported()
    if missing is None:
        with writing(files[1]):
            timeline.draw(trace, files[1], f"{what}: {share:.0%} of data movement overlapped")
    out.print(f"{files[0]} (ui.perfetto.dev), {missing or files[1]}", markup=False)


def _table(spent: list[RankTime]) -> Any:
    shown = table("rank", ("ms", "compute", "copy", "wait", "other", "data\nmoves"), "overlapped")
    for rank, one in enumerate(spent):
        parts = one.compute, one.copy, one.wait
        whole = one.total or 1.0  # nothing was recorded
        shares = [f"{part / whole:.1%}" for part in (*parts, one.total - sum(parts))]
        overlapped = f"{one.overlapped / one.moved:.0%}" if one.moved else "nothing moves"
        shown.add_row(
            str(rank), milliseconds(one.total), *shares, milliseconds(one.moved), overlapped
        )
    return shown
