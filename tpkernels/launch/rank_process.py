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

from tpkernels.launch import worker

PRELOAD = ["torch", "torch.distributed", "tpkernels.launch.worker", "tpkernels.launch.fork_server"]


def fork_server(preload: Sequence[str] = ()) -> ForkServerContext:
    """Starts the fork server if it is not running, and returns its context.

    Args:
        preload: additional modules for the server to import, so that ranks need not.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, *preload])
    # OpenMP and BLAS size their thread pools when they load, and a forked child cannot shrink a
    # pool that has started. Ranks raise the number through torch.set_num_threads.
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
    def start(cls, context: ForkServerContext, rank: int, setup: worker.Setup) -> RankProcess:
        ours, theirs = context.Pipe(duplex=True)
        process = context.Process(
            target=worker.main, args=(rank, setup, theirs), name=f"tpkernels-rank-{rank}"
        )
        try:
            process.start()
        except BaseException as error:
            ours.close()
            if isinstance(error, EOFError):
                raise RuntimeError("the fork server died; see stderr for the cause") from error
            raise
        finally:
            theirs.close()
        assert process.pid is not None  # it has started
        return cls(process, ours, process.pid)

    @property
    def exitcode(self) -> int | None:
        """None while the rank runs, or if its end is not known yet."""
        return self.process.exitcode

    @property
    def sentinel(self) -> int:
        """Becomes ready when the rank ends: see ``multiprocessing.connection.wait``."""
        return self.process.sentinel

    def join(self, seconds: float) -> None:
        """Waits at most ``seconds`` for the rank to end."""
        self.process.join(seconds)

    def close(self) -> None:
        """Releases the pipe and the process object of a rank that has ended."""
        self.pipe.close()
        with contextlib.suppress(ValueError):  # not reaped: the fork server is gone
            self.process.close()

    def kill(self) -> None:
        """SIGKILL to the rank and the processes it started, even if they are stopped."""
        if self.exitcode is None:
            with contextlib.suppress(ProcessLookupError):  # has no group yet, or just exited
                os.killpg(self.pid, signal.SIGKILL)
            self.process.kill()

    def describe(self, outcome: worker.Outcome) -> str:
        """What went wrong; for a rank that does not answer, its stacks (`worker.STACK_FILE`)."""
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
            stacks = [file.read_text() for file, to in links.items() if worker.STACK_FILE in to]
            return "\n".join(["no answer: still running", *stacks]).strip()
        except OSError as error:
            return f"no answer: {error}"
