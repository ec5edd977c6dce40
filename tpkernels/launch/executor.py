"""Rank 0 drives: one process calls methods of an object that every rank holds.

Problem: a sharded model lives in several processes, and its user wants to call it like an object in
one. Calls must be quick, cost nothing while idle, carry tensors, and end with an error that names
the rank, whatever happens to it.

Algorithm: `Ranks` starts the processes, forms the default group and ends them. Each runs one job,
`serve`, which makes the object and handles messages (`tpkernels.launch.servant`) from a mailbox in
shared memory (`tpkernels.launch.mailbox`) until it is asked to leave. The driver has no rank: it
waits for replies in slices, and looks for dead ranks in between.

Lifetime: that of `Ranks`. The mailbox has no name and needs no clean-up.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from tpkernels.launch import messages
from tpkernels.launch.driver import Driver, request
from tpkernels.launch.job import GiveUp, Job
from tpkernels.launch.mailbox import DriverBox, RankBox, SharedRings
from tpkernels.launch.messages import Message
from tpkernels.launch.ranks import Ranks
from tpkernels.launch.servant import Servant, name_of
from tpkernels.launch.worker import LEAVE_SECONDS, Outcome

TIMEOUT = 300.0  # s, for a call
_SLICE_S = 0.1  # between two looks at the ranks


class Executor(Driver):
    """``nprocs`` rank processes on this machine, each with an object whose methods are called.

    Args:
        nprocs: number of ranks, at least 1.
        factory: makes the object on each rank, where the default process group is initialised: a
            class or function at the top of a module, or its name as "module:Class". With a name,
            only the ranks import the module.
        args, kwargs: of the factory; what `tpkernels.launch.messages` can send.
        threads, backend, env, start_timeout: as for `Ranks`.
        timeout: seconds for a call, and for the factory.

    Raises:
        RankError: a rank did not start, or the factory failed.
        TypeError, ValueError: the factory or an argument cannot be sent.
    """

    def __init__(
        self,
        nprocs: int,
        factory: str | Callable[..., Any],
        *args: Any,
        threads: int = 1,
        timeout: float = TIMEOUT,
        start_timeout: float = 60.0,
        backend: str = "gloo",
        env: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(nprocs, timeout)
        name = name_of(factory)
        message = request("make", name, args, kwargs)
        rings = SharedRings.create(max(nprocs, 1))
        try:
            self._box = DriverBox(rings)
            self._ranks = Ranks(
                nprocs,
                backend=backend,
                threads=threads,
                env=env,
                start_timeout=start_timeout,
                shared=rings,
            )
        finally:
            rings.close()
        self._looking = threading.Lock()  # around Ranks, which threads must not share
        self._ranks.submit(serve)
        self._make(name, message)

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return self._ranks.pids

    @property
    def exitcodes(self) -> list[int | None]:
        """Of the ranks, once the executor is closed."""
        return self._ranks.exitcodes

    @property
    def healthy(self) -> bool:
        """Whether the executor is open and every rank is alive. Any thread may ask, at any time."""
        return self._why_closed is None and all(one.timed_out for one in self._serving())

    def _serving(self) -> list[Outcome]:
        """The outcomes of `serve`: a rank that still serves has timed out."""
        with self._looking:
            if self._why_closed is not None:
                raise RuntimeError("the executor was closed during a call")
            return self._ranks.collect(0)

    def _look(self, job: Job) -> None:
        for outcome in self._serving():
            if not outcome.timed_out and outcome.rank in job.pending:
                job.lose(outcome)

    def _check(self, job: Job) -> None:
        """Between the slices of a transfer."""
        self._look(job)
        if job.lost or job.left() <= 0:
            raise GiveUp

    def _send(self, message: Message, job: Job) -> None:
        self._box.send(message, lambda: self._check(job), _SLICE_S)

    def _receive(self, job: Job) -> tuple[int, tuple[Any, ...]] | None:
        while job.pending:
            left = job.left()
            rank = self._box.wait(sorted(job.pending), max(0.0, min(_SLICE_S, left)))
            if rank is not None:
                return rank, self._box.receive(rank, lambda: self._check(job), _SLICE_S)
            self._look(job)
            if left <= 0:
                break
        return None

    def _describe(self, outcome: Outcome) -> str:
        return self._ranks.describe(outcome)

    def _end(self, idle: bool) -> None:
        with self._looking:
            if idle:
                job = Job("close", self.world, LEAVE_SECONDS)
                with contextlib.suppress(GiveUp):
                    self._box.send(messages.encode(("close",)), job.check_time, _SLICE_S)
                    self._ranks.collect(job.left())
            self._ranks.close()


def serve(*, shared: SharedRings) -> None:
    """The job of a rank."""
    rank = dist.get_rank()
    box, servant = RankBox(shared, rank), Servant(rank)
    shared.close()
    while (message := box.receive()) != ("close",):
        for reply in servant.handle(message):
            box.send(reply)
