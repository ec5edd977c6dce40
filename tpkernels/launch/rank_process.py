"""The parent's side of one rank process; `tpkernels.launch.worker` is the rank's."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

from tpkernels.launch import worker as _rank

PRELOAD = ["torch", "torch.distributed", "tpkernels.launch.worker", "tpkernels.launch.fork_server"]


def fork_server(preload: Sequence[str] = ()) -> ForkServerContext:
    """Starts the fork server, unless it runs already, and returns its context.

    Args:
        preload: modules for it to import besides its own, so that no rank has to.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, *preload])
    # OpenMP and BLAS size their pools as they load, and a forked child cannot shrink a pool that
    # has started; ranks raise the number through torch.set_num_threads.
    saved = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("OMP_NUM_THREADS")
        if saved is not None:
            os.environ["OMP_NUM_THREADS"] = saved
    return context


@dataclass(frozen=True)
class RankProcess:
    """The parent's side of one rank."""

    process: ForkServerProcess
    pipe: connection.Connection
    pid: int

    @classmethod
    def start(cls, context: ForkServerContext, rank: int, setup: _rank.Setup) -> RankProcess:
        ours, theirs = context.Pipe(duplex=True)
        process = context.Process(
            target=_rank.main, args=(rank, setup, theirs), name=f"tpkernels-rank-{rank}"
        )
        try:
            process.start()
        except BaseException as error:
            ours.close()
            if isinstance(error, EOFError):
                raise RuntimeError("the fork server died; stderr says of what") from error
            raise
        finally:
            theirs.close()
        assert process.pid is not None  # it has started
        return cls(process, ours, process.pid)

    def kill(self) -> None:
        """SIGKILL to the rank and what it started; it ends stopped processes as well."""
        if self.process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):  # leads no group yet, or just gone
                os.killpg(self.pid, signal.SIGKILL)
            self.process.kill()

    def describe(self, outcome: _rank.Outcome) -> str:
        """What went wrong; of a rank that does not answer, where it is (`_rank.STACK_FILE`)."""
        if outcome.error is not None:
            return outcome.error.strip()
        if not outcome.timed_out:
            code = outcome.exitcode or 0
            return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        proc = Path(f"/proc/{self.pid}")
        try:
            if (proc / "stat").read_text().rpartition(")")[2].split()[0] == "T":
                return "no answer: stopped by a signal"
            os.kill(self.pid, signal.SIGUSR1)
            time.sleep(0.1)
            links = {file: os.readlink(file) for file in (proc / "fd").iterdir()}
            stacks = [f.read_text() for f, to in links.items() if _rank.STACK_FILE in to]
            return "\n".join(["no answer: still running", *stacks]).strip()
        except OSError as error:
            return f"no answer: {error}"
