"""A process group as the ops see it: its ranks, the workspace that they share, whose turn it is,
what its ranks have agreed on, and how it ends."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import constants

from tpkernels import _C
from tpkernels.common import defaults
from tpkernels.common.text import named_values, of_error
from tpkernels.errors import (
    CaptureError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupBrokenError,
    TpkernelsError,
)
from tpkernels.groups.waiting_thread import Waiter
from tpkernels.planning import qualification, store
from tpkernels.planning.machine import this_machine
from tpkernels.planning.problem import ORDERED, VENDOR, Problem
from tpkernels.planning.qualification import Qualification
from tpkernels.planning.table import Series, Table, are_alike
from tpkernels.symm import streams
from tpkernels.symm.colocation import probe_colocation
from tpkernels.symm.exchange import Participant, Presence
from tpkernels.symm.host import HostWorkspace
from tpkernels.symm.node import Node, make_node
from tpkernels.torch_private import backend_of, detect_fake_mode, timeout_of

_logger = logging.getLogger("tpkernels")
TUNING_SECONDS = 5.0  # for one problem
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_NCCL = timedelta(minutes=10)  # torch's default, where this torch was built without NCCL


@dataclass(frozen=True)
class Tuning:
    """Tune problems when they are first met; see ``tpkernels.autotune``.

    Attributes:
        limit: seconds after which no further round of a problem starts.
        save: add the times to the file that `tpkernels tune` writes.
    """

    limit: float = TUNING_SECONDS
    save: bool = False


_ON_QUALIFIED_GPUS = Tuning(limit=2.0)  # of the seconds of a model's first step, for each problem


def _failure_key(problem: Problem) -> tuple[Series | Problem, int]:
    """Return what identifies a problem among those of which algorithms have failed."""
    return problem.tuning_key or (problem, 0)


@dataclass
class Measured:
    """The measurements and settings that calls are planned from, the same on all ranks."""

    tables: dict[str, Table] = field(default_factory=dict)  #: by device type; see `Group.tuned`
    tuning: Tuning | None = None
    #: The algorithms that failed when a problem was tuned, and why; empty if none did.
    failures: dict[tuple[Series | Problem, int], dict[str, str]] = field(default_factory=dict)

    def failures_of(self, problem: Problem) -> dict[str, str] | None:
        """Return why each algorithm failed when this problem, or one of nearly the same extent, was
        tuned, or when this one, which is never tuned, was called; None if none was."""
        key = _failure_key(problem)
        found = [
            names
            for (series, extent), names in self.failures.items()
            if series == key[0] and are_alike(extent, key[1])
        ]
        return {name: why for names in found for name, why in names.items()} if found else None


@dataclass
class CudaNumerics:
    """How a group's reductions of CUDA tensors sum: as ``tpkernels.init`` was told, or by torch's
    flag for deterministic algorithms, which may change between calls."""

    fixed: str | None = None
    agreed: str | None = None  #: what all ranks wanted when they last agreed

    @property
    def wanted(self) -> str:
        """Return what this rank wants of the next call."""
        return self.fixed or (ORDERED if torch.are_deterministic_algorithms_enabled() else VENDOR)

    @property
    def planned_for_flag(self) -> bool | None:
        """Return the value of torch's deterministic flag for which planned calls are valid; None if
        for both."""
        return None if self.fixed or self.agreed is None else self.agreed == ORDERED

    @property
    def changed(self) -> bool:
        """Return whether calls have been planned that sum otherwise than this rank now wants."""
        return self.agreed not in (None, self.wanted)

    def settle(self, rank: int, everyone: Sequence[str]) -> None:
        """Adopt the numerics that all ranks want. Raise ``ValueError``, on all ranks, if they
        differ."""
        wanted = everyone[rank]
        for other, theirs in enumerate(everyone):
            if theirs != wanted:
                raise ValueError(
                    f"rank {rank} uses numerics '{wanted}' but rank {other} uses '{theirs}'; set "
                    "torch.use_deterministic_algorithms to the same value on all ranks, or pass "
                    "numerics to tpkernels.init"
                )
        self.agreed = wanted


class Group(_C.calls.Turns):
    """A process group with its workspace.

    Who holds ``lock`` has the turn. ``in_call`` is set while the ranks do something together on
    that thread. ``open`` says that calls can run; where it is false, `check_usable` says why.
    """

    def __init__(
        self, pg: dist.ProcessGroup, forget: Callable[[Group], None], name: str | None = None
    ) -> None:
        super().__init__()
        self.name: str = pg.group_name if name is None else name
        # Not ours to keep alive: a destroyed process group takes its workspace with it.
        self._pg = weakref.ref(pg, lambda _: forget(self))
        self.rank: int = pg.rank()
        self.world: int = pg.size()
        self.timeout = self.gpu_timeout = defaults.TIMEOUT
        self.workspace_bytes = defaults.WORKSPACE_BYTES
        self.workspace: HostWorkspace | None = None
        self.why_not_shared: str | None = None  #: why the ranks share no memory
        self.node: Node | None = None  #: if they do not, and the ranks of each host do
        self.why_no_node: str | None = None  #: what `hierarchical` lacks
        self.hosts = 1
        self.autotune: bool | None = defaults.AUTOTUNE
        self.numerics: str | None = None  #: as given to `init`
        self.waiter = Waiter()
        self.notices: list[str] = []  #: warnings that `warn` is to give
        self.cuda_sums = CudaNumerics()
        self.measured = Measured()
        self.on_meshes: dict[Hashable, Any] = {}  #: what a mesh's ranks agreed on; see mesh/
        self._qualification: dict[str, Qualification] = {}
        self._broken: str | None = None
        self._closed: str | None = None  # by what
        self._owner: int | None = None  # the process that has the group, where it is not this one
        self._ready = False
        self._presence = Presence()
        self._presence_of_second = Presence()
        self._unsupported_kernels: dict[tuple[torch.device, str], str | None] = {}

    @property
    def pg(self) -> dist.ProcessGroup:
        """Return the process group, alive as long as it is registered with torch."""
        pg = self._pg()
        if pg is None:
            raise GroupBrokenError(f"process group '{self.name}' has been destroyed")
        return pg

    def ready(self, device: str = "cpu") -> Group:
        """Make the workspace at the first call, on tensors of a device type; collective then."""
        if not self._ready:
            self.init(None, defaults.WORKSPACE_BYTES, defaults.AUTOTUNE, device=device)
        return self

    def init(
        self,
        timeout: float | None,
        workspace_bytes: int,
        autotune: bool | None,
        numerics: str | None = None,
        device: str = "cpu",
    ) -> None:
        """See ``tpkernels.init``; ``device``: the type of the tensors that it is done for."""
        cpu_timeout = defaults.TIMEOUT if timeout is None else timeout
        gpu_timeout = timeout_on_gpus(self.pg) if timeout is None else timeout
        options: dict[str, Any] = {
            "timeout": cpu_timeout,
            "workspace_bytes": workspace_bytes,
            "autotune": autotune,
            "numerics": numerics,
        }
        with self.together(ValueError, MemoryError):  # after these they may try again
            if self._ready:
                in_use = {name: getattr(self, name) for name in options}
                if options == in_use:
                    if timeout is not None:
                        self._set_timeouts(cpu_timeout, gpu_timeout)
                    return
                raise ValueError(
                    f"group '{self.name}' is already initialized with {named_values(in_use)}; it "
                    f"cannot be changed to {named_values(options)}"
                )
            participant = self.participant(gpu_timeout if device == "cuda" else cpu_timeout)
            one_machine, leaders = self._agree_on_memory(
                participant, {**options, "timeout_on_gpus": gpu_timeout}
            )
            if self.why_not_shared is None:
                self.workspace = HostWorkspace(participant, workspace_bytes)
            elif self.world > 1:
                self.node, self.why_no_node = make_node(participant, workspace_bytes, leaders)
                if one_machine and self.rank == 0:
                    self.notices.append(
                        "the ranks are on one machine but do not share memory, so calls use the "
                        f"slower process group: {self.why_not_shared}"
                    )
            self._set_timeouts(cpu_timeout, gpu_timeout)
            self.workspace_bytes, self.autotune = workspace_bytes, autotune
            if autotune and self.measured.tuning is None:
                self.measured.tuning = Tuning()
            self.numerics, self.cuda_sums = numerics, CudaNumerics(numerics)
            self._ready = True

    def make_second_group(self, purpose: str, device: str) -> Group:
        """Make a group of the same ranks with its own workspace, for tensors of a device type. It
        shares this group's measured times and numerics. Only one may exist at a time, since the
        next reuses its store keys. Collective.

        Raises:
            MemoryError: on all ranks.
        """
        made = Group(self.pg, _close, f"{self.name}/{purpose}")
        made._presence = self._presence_of_second.renewed()
        made.init(
            self.timeout_on(device), self.workspace_bytes, False, self.numerics, device=device
        )
        made._set_timeouts(self.timeout, self.gpu_timeout)
        made.measured.tables, made.cuda_sums = self.measured.tables, self.cuda_sums
        return made

    def _set_timeouts(self, timeout: float, gpu_timeout: float) -> None:
        self.timeout, self.gpu_timeout = timeout, gpu_timeout
        if self.local_workspace is not None:
            self.local_workspace.set_timeouts(timeout, gpu_timeout)
        if self.node is not None:
            self.node.set_timeout(timeout)

    def _agree_on_memory(
        self, participant: Participant, options: dict[str, Any]
    ) -> tuple[bool, list[int]]:
        """Find out with the other ranks whether all give the same options and can share memory
        (``why_not_shared``), whether all run on one machine, and with whom each shares memory."""
        statement = {"options": options, "host": socket.gethostname()}
        found = probe_colocation(participant, statement)
        self.why_not_shared, statements = found.why_not, found.statements
        for rank, other in enumerate(statements):
            if other["options"] != options:
                raise ValueError(
                    f"tpkernels.init of group '{self.name}': rank {self.rank} passes "
                    f"{named_values(options)}, but rank {rank} passes "
                    f"{named_values(other['options'])}; all ranks must pass the same options"
                )
        one_machine = len({other["boot_id"] for other in statements} - {None}) <= 1
        if self.why_not_shared is not None:
            self.hosts = len({other["host"] for other in statements})
        return one_machine, found.leaders

    # What the group is made of.

    @property
    def shared_memory(self) -> bool:
        """Return whether all ranks map each other's memory."""
        return self.workspace is not None

    @property
    def local_workspace(self) -> HostWorkspace | None:
        """Return the workspace that the ranks of this host share; None if there is none."""
        return self.workspace if self.node is None else self.node.workspace

    @property
    def usable_bytes(self) -> int:
        """Return the bytes that each data buffer may grow to, as far as the group is set up."""
        memory = self.node or self.workspace
        return self.workspace_bytes if memory is None else memory.usable_bytes

    def participant(self, timeout: float) -> Participant:
        """Return this rank's place in the group, for an exchange through its store."""
        return Participant(
            store=self.pg.get_group_store(),
            group=self.name,
            rank=self.rank,
            world=self.world,
            timeout=timeout,
            presence=self._presence,
            process_group=self.pg.group_name,
        )

    def uses_gloo(self, device: str) -> bool:
        """Return whether gloo, which works in host memory, is the group's backend for a device
        type."""
        backend = backend_of(self.pg, device)
        return backend is not None and backend.name() == "gloo"

    def timeout_on(self, device: str) -> float:
        """Return how many seconds a wait in a call on tensors of a device type may take."""
        return self.gpu_timeout if device == "cuda" else self.timeout

    # Whose turn it is: one call at a time.

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Make a call: wait for those of other threads first. What a signal handler asks for
        meanwhile is refused."""
        with self.lock:
            self.check_usable()
            try:
                self.in_call = True
                yield
            finally:
                self.in_call = False

    def check_usable(self) -> None:
        """Raise ``GroupBrokenError`` after a failure, once closed, and in a fork of the rank;
        ``RuntimeError`` within a call. The caller holds ``lock``."""
        if self._owner is not None:
            raise GroupBrokenError(
                f"group '{self.name}' belongs to process {self._owner}, and process {os.getpid()} "
                f"was forked from it; use the group in process {self._owner}, or create a process "
                "group in the fork"
            )
        if self.in_call:  # of this thread, which holds the lock
            raise RuntimeError(
                f"group '{self.name}' is already in a call on this thread; a signal handler or "
                "callback cannot use it during a call"
            )
        if self._broken is not None:
            raise GroupBrokenError(
                f"group '{self.name}' is broken and cannot run more calls; create a new group. "
                f"It broke with: {self._broken}"
            )
        if self._closed is not None:
            raise GroupBrokenError(
                f"group '{self.name}' was closed by {self._closed} while this call was waiting for "
                "the group lock"
            )

    def within_call(self) -> bool:
        """Return whether this very thread is in a call."""
        if not self.lock.acquire(blocking=False):
            return False
        try:
            return self.in_call
        finally:
            self.lock.release()

    def warn(self) -> None:
        """Issue the warnings collected during calls. This comes after the calls: where a filter
        turns warnings into errors, rank 0 alone would leave a call."""
        notices, self.notices = self.notices, []
        for notice in notices:
            warnings.warn(notice, RuntimeWarning, stacklevel=3)

    # How it ends: by a failure, by the end of its process group, with the process.

    def break_between_calls(self, error: BaseException) -> None:
        """Break the group because this rank left with ``error`` on the way to a call, or between
        two; not while a graph is traced, which makes no calls. A call of another thread ends first,
        but none begins."""
        if detect_fake_mode() is not None:
            return
        # Within a call, in a signal handler, all calls are refused: this rank is not out of step.
        if self._broken is None and not self.within_call():
            self._broken, self.open = of_error(error), False
            with self.lock:
                self._tell_peers(error)

    def mark_broken(self, error: BaseException) -> None:
        """Break the group because this rank left a call with ``error``: peers that wait for it are
        told, and no further call can run."""
        if self._broken is not None:
            return
        self._broken, self.open = of_error(error), False
        self._tell_peers(error)

    def _tell_peers(self, error: BaseException) -> None:
        if self.local_workspace is None:
            if not self._ready:
                self._tell_in_store(error)
        elif self.node is None or not isinstance(error, CollectiveMismatchError):
            # Across hosts each rank detects a mismatch by itself, from the greetings.
            peer = error.peer if isinstance(error, TpkernelsError) else None
            late = isinstance(error, CollectiveTimeoutError)
            self.local_workspace.abandon(of_error(error), late, -1 if peer is None else peer)

    def tell_outside_calls(self, error: BaseException) -> None:
        """Notify, through the store, the ranks that may be waiting there for this rank's value.
        Ranks that share its memory have been notified; a mismatch each rank detects itself."""
        found_by_all = self.workspace is not None or isinstance(error, CollectiveMismatchError)
        if self._ready and not found_by_all:
            self._tell_in_store(error)

    def _tell_in_store(self, error: BaseException) -> None:
        with contextlib.suppress(GroupBrokenError):  # destroyed meanwhile
            self.participant(self.timeout).tell_left(error)

    def check_kernels(self, text: str) -> None:
        """Raise the error if a GPU kernel has failed so far; ``text`` names, in its message, the
        call that noticed."""
        if self.workspace is not None:
            self.workspace.check_kernels(text)

    def check(self) -> None:
        """See ``tpkernels.check``."""
        with self.lock:
            self.check_usable()
            try:
                if self.local_workspace is not None:
                    self.local_workspace.check()
            except TpkernelsError as error:
                self.mark_broken(error)
                raise

    @property
    def is_forked(self) -> bool:
        """Return whether the group belongs to another process, which this one was forked from."""
        return self._owner is not None

    def disown(self, owner: int) -> None:
        """Mark the group as belonging to process ``owner``, from which this process was forked.
        This process can then neither make the owner's calls nor end them."""
        if self._owner is None:  # else: already inherited, from a fork further up
            self._owner = owner
        self.open = False
        self.in_call = False
        self.renew_lock()  # a thread that the fork did not copy may have held it
        self.waiter = Waiter()

    def leave(self) -> None:
        """Tell kernels that still wait that this process ends."""
        if self.local_workspace is not None and not self.is_forked:
            self.local_workspace.leave()

    def close(self, by: str) -> None:
        """Refuse further calls and free the workspace. Do nothing while a thread is in a call: then
        the workspace goes with its last use."""
        if not self.lock.acquire(blocking=False):
            return
        try:
            if self.in_call:
                return
            self._closed, self.open = by, False
            self.forget_calls()
            self.waiter.close()
            local_workspace, self.workspace, self.node = self.local_workspace, None, None
            if local_workspace is not None:
                local_workspace.close()
        finally:
            self.lock.release()

    # What its ranks agree on between calls.

    @contextlib.contextmanager
    def together(self, *raised_by_all: type[Exception]) -> Iterator[None]:
        """Run the block as a collective step that is not an op's call, holding the group's turn. An
        error breaks the group, unless its type is in ``raised_by_all``: those are raised on all
        ranks alike."""
        try:
            with self.turn():
                try:
                    self.check_kernels("a collective setup step")
                    yield
                except raised_by_all:
                    raise
                except BaseException as error:
                    self.mark_broken(error)
                    self.tell_outside_calls(error)
                    raise
        except BaseException as error:  # also of a signal handler, in the wait for the turn
            if not isinstance(error, (TpkernelsError, *raised_by_all)):
                self.break_between_calls(error)
            raise

    def exchange(self, purpose: str, value: object, seconds: float) -> list[Any]:
        """Return the values of all ranks, which JSON can hold, in rank order, within ``seconds``.
        Collective, in a turn of the caller's."""
        if self.workspace is not None:
            with self.workspace.waiting(seconds):
                return self.workspace.exchange(purpose, value)
        return self.participant(seconds).exchange(purpose, value)

    def exchange_in_turn(self, purpose: str, value: object, device: str) -> list[Any]:
        """Exchange values as `exchange` does, taking the group's turn first, with the timeout for
        tensors of a device type."""
        with self.together():
            return self.exchange(purpose, value, self.timeout_on(device))

    def _once(self, known: dict[_Key, _Value], key: _Key, agree: Callable[[], _Value]) -> _Value:
        """Return the value of a key, on which the ranks agree together at the first call."""
        if key not in known:
            with self.together():
                if key not in known:  # another thread was first
                    known[key] = agree()
        return known[key]

    def cuda_numerics(self) -> str:
        """Return how a reduction of CUDA tensors sums, the same on all ranks. Collective at the
        first call and after each change of torch's flag."""
        if self.world == 1 or self.uses_gloo("cuda"):  # the host sums in order at no extra cost
            return ORDERED
        sums = self.cuda_sums
        if sums.agreed != sums.wanted:
            with self.together(ValueError):
                if sums.agreed != sums.wanted:  # another thread was first
                    seconds = self.timeout_on("cuda")
                    sums.settle(self.rank, self.exchange("numerics", sums.wanted, seconds))
        assert sums.agreed is not None  # they have settled it
        return sums.agreed

    # What calls are planned by.

    def has_times(self, device: str) -> bool:
        """Return whether measured times apply to tensors of a device type: those of GPUs are taken
        with NCCL."""
        return not (device == "cuda" and self.uses_gloo("cuda"))

    def tuned(self, device: str) -> Table:
        """Return the times that rank 0 finds in its cache for tensors of a device type: what each
        rank found by itself might differ, and with it the choices. Collective at the first call."""
        tables = self.measured.tables
        if self.world == 1:
            return tables.get(device, Table())
        return self._once(tables, device, lambda: self._tuned_by_rank_0(device))

    def _tuned_by_rank_0(self, device: str) -> Table:
        found, ignored = Table(), ""
        if self.rank == 0:
            machine = this_machine(device, self.world, self.hosts, self.shared_memory)
            found, ignored = store.load(machine)
        text, seconds = store.to_json(found), self.timeout_on(device)
        tables = self.exchange(f"the first call on {device}", text, seconds)
        if ignored:
            self.notices.append(ignored)
        return store.table_from(tables[0])

    def qualification(self) -> Qualification:
        """Return the variants that `auto` may select on CUDA tensors, from rank 0's report.
        Collective at the first call."""
        if self.world == 1 or self.workspace is None:
            return Qualification()  # there is nothing to choose, or only what spans hosts
        return self._once(self._qualification, "cuda", self.qualification_of_rank_0)

    def qualification_of_rank_0(self) -> Qualification:
        """Read this machine's report on rank 0. Collective; the caller holds the group lock."""
        found, ignored = qualification.load("cuda") if self.rank == 0 else (None, "")
        if ignored:
            self.notices.append(ignored)
        elif found is None and self.rank == 0:
            _say_that_nothing_is_qualified()
        values = (Qualification() if found is None else found.qualification(self.world)).to_json()
        return Qualification.from_json(
            self.exchange("qualified algorithms", values, self.gpu_timeout)[0]
        )

    def use_qualification(self, qualification: Qualification) -> None:
        """Plan all later calls on CUDA tensors by this report. All ranks do so from the same
        call on."""
        with self.lock:
            self._qualification["cuda"] = qualification
            if self.workspace is not None:
                self.workspace.use_variants(_variants_of(qualification))
            self.forget_calls()

    def use_times(self, device: str, table: Table) -> None:
        """Plan calls from these times from now on. All ranks use the same, from the same call
        on."""
        with self.lock:
            self.measured.tables[device] = table
            self.forget_calls()

    def leave_out(self, problem: Problem, algorithm: str, why: str) -> None:
        """Plan ``auto``'s calls of a problem without an algorithm from now on. All ranks do so from
        the same call on."""
        with self.lock:
            self.measured.failures.setdefault(_failure_key(problem), {})[algorithm] = why
            if self.rank == 0:
                self.notices.append(f"{problem}: algorithm '{algorithm}' {why}")
            self.forget_calls()

    def tuning_on(self, device: str) -> Tuning | None:
        """Return how problems with tensors of a device type are tuned on the spot, None if they
        are not: as asked for, and on CUDA tensors also where some algorithm is qualified."""
        tuning = self.measured.tuning
        if tuning is not None or device != "cuda" or self.autotune is False:
            return tuning
        agreed = self._qualification.get("cuda", Qualification())  # communicates nothing
        return _ON_QUALIFIED_GPUS if agreed.variants else None

    def use_tuning(self, tuning: Tuning | None) -> None:
        """Plan calls anew, tuning each new problem as ``tuning`` says; None stops tuning. All ranks
        do so from the same call on."""
        with self.lock:
            self.measured.tuning = tuning
            self.forget_calls()

    def note_capture(self, device: torch.device) -> bool:
        """Return whether a graph is being captured, where nothing is tuned. If so, remember to plan
        all calls again after the capture."""
        captured = streams.is_captured(device)
        self.untuned_in_capture = self.untuned_in_capture or captured
        return captured

    def forget_stale_calls(self, problem: Problem, device: torch.device) -> None:
        """Forget all planned calls if a call on CUDA tensors would now be planned differently:
        torch's flag has changed, or the problem was met in a capture, where nothing is tuned."""
        if self.untuned_in_capture and not streams.is_captured(device):
            self.untuned_in_capture = False
            self.forget_calls()
        if problem.spec.reduces and self.cuda_sums.changed:
            self.forget_calls()

    # Memory and kernels.

    def make_room(self, nbytes: int, text: str) -> None:
        """Make the data buffers hold ``nbytes`` each for a call, as far as they may and can grow.
        Collective where they grow: all ranks ask for the same."""
        memory = self.node or self.workspace
        if memory is not None and memory.wants(nbytes):
            with self.together():
                refused = memory.grow(nbytes, text)
                if refused is not None and self.rank == 0:
                    self.notices.append(refused)

    def make_symmetric(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None
    ) -> torch.Tensor:
        """See ``tpkernels.empty``; ``device``: where it is made, None for the host's memory."""
        if device is not None:
            own_reason: str | None = None
            if device.type == "cuda" and not torch.cuda.is_available():
                # this rank cannot, but must still take part in the collective check below
                own_reason, device = "needs a GPU that is visible to torch", torch.device("cpu")
            elif device == torch.device("cuda"):  # without an index
                device = torch.device("cuda", torch.cuda.current_device())
            why = self.unsupported_kernels(device, "symmetric memory", own_reason)
            if why is not None:
                raise NotImplementedError(f"symmetric memory {why}")
            if streams.is_captured(device):
                raise CaptureError(
                    f"tpkernels.empty({list(shape)}, {dtype}) of group '{self.name}' waits for the "
                    "GPU and cannot be captured; create symmetric tensors before the graph capture"
                )
        with self.together(MemoryError, NotImplementedError):
            if self.workspace is None:
                raise NotImplementedError(
                    "symmetric tensors need shared memory, but the ranks of group "
                    f"'{self.name}' do not share memory: {self.why_not_shared}"
                )
            return self.workspace.make_symmetric(shape, dtype, device)

    def unsupported_kernels(
        self, device: torch.device, kernels: str, own_reason: str | None
    ) -> str | None:
        """Return why kernels of a kind, Triton or CUDA, cannot run on the ranks' GPUs, this rank's
        being ``device``; None: they can. ``own_reason`` is what this rank knows already. The ranks
        find out together, at the first call, by trying: collective."""
        if self.workspace is None:
            return own_reason
        key = device, kernels
        if key in self._unsupported_kernels:
            return self._unsupported_kernels[key]
        if streams.is_captured(device):
            raise CaptureError(
                f"group '{self.name}' has not set up {kernels} kernels yet; call the op once "
                "before the graph capture"
            )
        if self.world > 1:
            self.workspace.use_variants(_variants_of(self.qualification()))

        def find_out() -> str | None:
            try:
                assert self.workspace is not None  # as above
                self.workspace.open_cuda(device, kernels, own_reason)
            except NotImplementedError as reason:
                return f"is not available in this group: {reason}"
            return None

        return self._once(self._unsupported_kernels, key, find_out)


@functools.cache  # once in a process
def _say_that_nothing_is_qualified() -> None:
    _logger.warning(
        "CUDA tensors use the torch calls, because no algorithm is qualified on this machine. Run "
        "`tpkernels qualify` once; algorithm='auto' then uses the qualified algorithms that are "
        "faster"
    )


def _variants_of(qualification: Qualification) -> frozenset[str]:
    return qualification.of("direct") | qualification.of("fused")


def _close(group: Group) -> None:
    group.close("the end of its process group")


def timeout_on_gpus(pg: dist.ProcessGroup) -> float:
    """Return the seconds that torch lets the collectives of a process group take on GPUs: the
    timeout of its backend for CUDA tensors, or torch's default for NCCL where there is none."""
    limit = timeout_of(pg, "cuda")
    if limit is None:
        limit = constants.default_pg_nccl_timeout or _NCCL
    return min(limit.total_seconds(), defaults.LONGEST_TIMEOUT)
