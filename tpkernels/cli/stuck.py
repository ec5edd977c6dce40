"""``tpkernels stuck``."""

from __future__ import annotations

import json
import os
from typing import Annotated, Any

import typer

from tpkernels import _C
from tpkernels.cli import options
from tpkernels.common.text import printable
from tpkernels.launch.terminal import UsageError, require_at_least
from tpkernels.symm.rendezvous import WORKSPACE

_MAX_CALLS = 64  # recorded calls of a rank (csrc/host/call_records.h)


def stuck(
    pid: Annotated[int, typer.Argument(help="PID of a rank of the job.")],
    last: Annotated[int, typer.Option(help=f"Calls per rank, at most {_MAX_CALLS}.")] = 3,
    as_json: options.AsJson = False,
) -> None:
    """Show the last calls of all ranks in the groups of a running process.

    It shows which rank has not made a call that its peers wait in. The process is not disturbed.
    """
    require_at_least(1, maximum=_MAX_CALLS, last=last)
    groups = read_groups(pid, last)
    if as_json:
        typer.echo(json.dumps(groups, indent=2))
        return
    for group in groups:
        lines = f"group '{group['group']}', {len(group['ranks'])} ranks\n{group['text']}\n"
        typer.echo("\n".join(map(printable, lines.split("\n"))))


def read_groups(pid: int, last: int) -> list[dict[str, Any]]:
    """Return the groups of a process, each with the ``last`` calls of every rank. Times are in
    seconds of ``time.monotonic()``. Raises `UsageError` if the process has no group or cannot be
    read."""
    groups = dict[int, dict[str, Any]]()
    try:
        if os.readlink(f"/proc/{pid}/ns/pid") != os.readlink("/proc/self/ns/pid"):
            raise UsageError(
                f"process {pid} is in a different pid namespace, such as a container; run "
                "tpkernels stuck inside it, with the PID that the process has there"
            )
        for path in os.listdir(f"/proc/{pid}/fd"):
            descriptor = _open_workspace(f"/proc/{pid}/fd/{path}")
            if descriptor is None:
                continue
            try:
                groups[os.fstat(descriptor).st_ino] = _C.host.read_calls(descriptor, last)
            except RuntimeError as error:
                raise UsageError(f"a group of process {pid} cannot be read: {error}") from None
            finally:
                os.close(descriptor)
    except (FileNotFoundError, ProcessLookupError):
        raise UsageError(f"no process has PID {pid}") from None
    except PermissionError:
        raise UsageError(
            f"process {pid} belongs to a different user, or does not permit its inspection; run "
            "tpkernels stuck as the user of the process, or as root"
        ) from None
    if not groups:
        raise UsageError(
            f"process {pid} has no group of tpkernels whose ranks share memory; pass the PID of a "
            "rank, not of its launcher"
        )
    return list(groups.values())


def _open_workspace(link: str) -> int | None:
    """Open the file behind a link in /proc/PID/fd if it is a workspace."""
    try:
        if os.readlink(link).startswith(f"/memfd:tpkernels-{WORKSPACE}"):
            return os.open(link, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # closed meanwhile
        pass
    return None
