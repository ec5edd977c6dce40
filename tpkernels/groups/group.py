"""The state of a process group: ranks, shared workspace, lock, agreed settings, and failure."""

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
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import constants

from tpkernels import _C
from tpkernels.common import defaults
from tpkernels.common.text import describe_error, format_options
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
from tpkernels.planning.problem import INVARIANT, ORDERED, VENDOR, Problem
from tpkernels.planning.qualification import Qualification
from tpkernels.planning.table import Series, Table, are_close
from tpkernels.symm import streams
from tpkernels.symm.colocation import probe_colocation
from tpkernels.symm.exchange import ExchangeState, Participant
from tpkernels.symm.host import BACKEND_SPIN_US, SPIN_US, HostWorkspace
from tpkernels.symm.node import Node, make_node
from tpkernels.torch_private import detect_fake_mode, get_backend, get_timeout

_logger = logging.getLogger("tpkernels")
TUNING_SECONDS = 5.0  # for one problem
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_NCCL_TIMEOUT = timedelta(minutes=10)  # torch default; used if torch was built without NCCL


@dataclass(frozen=True)
class Tuning:
    """Settings for tuning problems at their first call; see ``tpkernels.autotune``.

    Attributes:
        limit: seconds per problem. No round starts after this limit.
        save: add the times to the file that `tpkernels tune` writes.
    """

    limit: float = TUNING_SECONDS
    save: bool = False


# A limit per problem that keeps the first step of a model short.
_QUALIFIED_GPU_TUNING = Tuning(limit=2.0)


def _failure_key(problem: Problem) -> tuple[Series | Problem, int]:
    """Return the key of a problem in `PlannerInputs.failures`."""
    return problem.tuning_key or (problem, 0)


@dataclass
class PlannerInputs:
    """The measurements and settings that calls are planned from. Identical on all ranks."""

    tables: dict[str, Table] = field(default_factory=dict)  #: by device; see `Group.timing_table`
    tuning: Tuning | None = None
    #: Per tuned problem, the algorithms that failed and the reasons. Empty if no algorithm failed.
    failures: dict[tuple[Series | Problem, int], dict[str, str]] = field(default_factory=dict)

    def find_failures(self, problem: Problem) -> dict[str, str] | None:
        """Return the reason of failure by algorithm, or None if neither this problem nor a problem
        of similar size was tuned. For problems that are never tuned, a failed call counts."""
        key = _failure_key(problem)
        matches = [
            reasons
            for (series, extent), reasons in self.failures.items()
            if series == key[0] and are_close(extent, key[1])
        ]
        return (
            {name: reason for reasons in matches for name, reason in reasons.items()}
            if matches
            else None
        )


@dataclass
class CudaNumerics:
    """The numerics of CUDA reductions in a group: an argument of ``tpkernels.init``, or derived
    from the torch flag for deterministic algorithms, which may change between calls."""

    fixed: str | None = None  #: the argument of ``tpkernels.init``
    agreed: str | None = None  #: the numerics that all ranks last agreed on

    @property
    def requested(self) -> str:
        """Return the numerics that this rank requests for the next call."""
        return self.fixed or (ORDERED if torch.are_deterministic_algorithms_enabled() else VENDOR)

    @property
    def planned_for_flag(self) -> bool | None:
        """Return the value of the torch flag that planned calls are valid for. None if for both
        values."""
        return None if self.fixed or self.agreed is None else self.agreed == ORDERED

    @property
    def changed(self) -> bool:
        """Return whether cached plans use numerics that differ from the current request."""
        return self.agreed not in (None, self.requested)

    def adopt(self, rank: int, requests: Sequence[str]) -> None:
        """Adopt the numerics that all ranks request. Raises ``ValueError`` on all ranks if they
        differ."""
        requested = requests[rank]
        for other, value in enumerate(requests):
            if value != requested:
                raise ValueError(
                    f"rank {rank} uses numerics '{requested}' but rank {other} uses '{value}'; set "
                    "torch.use_deterministic_algorithms to the same value on all ranks, or pass "
                    "numerics to tpkernels.init"
                )
        self.agreed = requested


class Backend(Protocol):
    """The `torch.distributed` backend "tpkernels" of a process group, if it has this backend."""

    name: str  #: of the process group
    timeout: timedelta
    transport: dist.ProcessGroup  #: for torch collectives on CPU tensors, which use gloo

    def drain(self, seconds: float | None) -> None:
        """Wait until the pending asynchronous collectives have run, for at most ``seconds``."""


class Group(_C.calls.GroupCalls):
    """A process group with its workspace.

    Only the holder of ``lock`` may run a call. ``in_call`` is set while that thread runs a call or
    another collective step. If ``open`` is false, calls are refused and `check_usable` raises the
    reason.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        on_destroyed: Callable[[Group], None],
        backend: Backend | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self.backend = backend
        self.name: str = pg.group_name if name is None else name
        # A weak reference: the workspace must be freed when the process group is destroyed.
        self._pg = weakref.ref(pg, lambda _: on_destroyed(self))
        self.rank: int = pg.rank()
        self.world: int = pg.size()
        self.timeout = self.gpu_timeout = defaults.TIMEOUT
        self.workspace_bytes = defaults.WORKSPACE_BYTES
        self.workspace: HostWorkspace | None = None
        self.unshared_reason: str | None = None  #: None if all ranks share memory
        self.node: Node | None = None  #: if only the ranks of each host share memory
        self.no_node_reason: str | None = None  #: why `hierarchical` cannot run
        self.hosts = 1
        self.autotune: bool | None = defaults.AUTOTUNE
        self.numerics: str | None = None  #: the argument of `init`
        self.waiter = Waiter()
        self.notices: list[str] = []  #: warnings that `warn` will issue
        self.numerics_state = CudaNumerics()
        self.planner_inputs = PlannerInputs()
        self.mesh_agreements: dict[Hashable, Any] = {}  #: see tpkernels/mesh/agreement.py
        self._qualification: dict[str, Qualification] = {}
        self._broken: str | None = None
        self._closed: str | None = None  # the cause
        self._owner_pid: int | None = None  # in a fork: the process that created the group
        self._ready = False
        self._exchange_state = ExchangeState()
        self._second_exchange_state = ExchangeState()
        self._unsupported_kernels: dict[tuple[torch.device, str], str | None] = {}

    @property
    def pg(self) -> dist.ProcessGroup:
        """Return the process group. It exists while it is registered with torch."""
        pg = self._pg()
        if pg is None:
            raise GroupBrokenError(f"process group '{self.name}' has been destroyed")
        return pg

    def ready(self, device: str = "cpu") -> Group:
        """Create the workspace at the first call on tensors of this device type. Collective
        then."""
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
        """Initialize the group; see ``tpkernels.init``. ``device`` is the type of the tensors of
        the first call."""
        cpu_timeout = self._default_timeout() if timeout is None else timeout
        gpu_timeout = timeout_on_gpus(self.pg) if timeout is None else timeout
        options: dict[str, Any] = {
            "timeout": cpu_timeout,
            "workspace_bytes": workspace_bytes,
            "autotune": autotune,
            "numerics": numerics,
        }
        with self.collective_step(ValueError, MemoryError):  # the ranks may retry after these
            if self._ready:
                in_use = {name: getattr(self, name) for name in options}
                if options == in_use:
                    if timeout is not None:
                        self._set_timeouts(cpu_timeout, gpu_timeout)
                    return
                raise ValueError(
                    f"group '{self.name}' is already initialized with {format_options(in_use)}; it "
                    f"cannot be changed to {format_options(options)}"
                )
            participant = self.participant(gpu_timeout if device == "cuda" else cpu_timeout)
            one_machine, first_ranks = self._agree_on_memory(
                participant, {**options, "timeout_on_gpus": gpu_timeout}
            )
            if self.unshared_reason is None:
                spin_us = SPIN_US if self.backend is None else BACKEND_SPIN_US
                self.workspace = HostWorkspace(participant, workspace_bytes, spin_us)
            elif self.world > 1:
                self.node, self.no_node_reason = make_node(
                    participant, workspace_bytes, first_ranks
                )
                if one_machine and self.rank == 0:
                    self.notices.append(
                        "the ranks are on one machine but do not share memory, so calls use the "
                        f"slower process group: {self.unshared_reason}"
                    )
            self._set_timeouts(cpu_timeout, gpu_timeout)
            self.workspace_bytes, self.autotune = workspace_bytes, autotune
            if autotune and self.planner_inputs.tuning is None:
                self.planner_inputs.tuning = Tuning()
            self.numerics, self.numerics_state = numerics, CudaNumerics(numerics)
            self._ready = True

    def make_second_group(self, purpose: str, device: str) -> Group:
        """Create a group with the same ranks and a separate workspace, for tensors of a device
        type. It shares the measured times and numerics of this group. Only one second group may
        exist at a time, because the next one reuses its store keys. Collective.

        Raises:
            MemoryError: on all ranks.
        """
        second = Group(self.pg, _close, self.backend, f"{self.name}/{purpose}")
        second._exchange_state = self._second_exchange_state.renew()
        second.init(
            self.timeout_on(device), self.workspace_bytes, False, self.numerics, device=device
        )
        second._set_timeouts(self.timeout, self.gpu_timeout)
        second.planner_inputs.tables, second.numerics_state = (
            self.planner_inputs.tables,
            self.numerics_state,
        )
        return second

    def _default_timeout(self) -> float:
        """Return the timeout for CPU tensors: of the backend "tpkernels", or of this package."""
        if self.backend is None:
            return defaults.TIMEOUT
        return min(self.backend.timeout.total_seconds(), defaults.MAX_TIMEOUT)

    def set_host_timeout(self, timeout: float) -> None:
        """Set the limit of a wait on CPU tensors, in seconds."""
        self._set_timeouts(min(timeout, defaults.MAX_TIMEOUT), self.gpu_timeout)

    def _set_timeouts(self, timeout: float, gpu_timeout: float) -> None:
        self.timeout, self.gpu_timeout = timeout, gpu_timeout
        if self.local_workspace is not None:
            self.local_workspace.set_timeouts(timeout, gpu_timeout)
        if self.node is not None:
            self.node.set_timeout(timeout)

    def _agree_on_memory(
        self, participant: Participant, options: dict[str, Any]
    ) -> tuple[bool, list[int]]:
        """Exchange options and probe which ranks share memory. Sets ``unshared_reason`` and raises
        ``ValueError`` on all ranks if the options differ.

        Returns:
            Whether all ranks run on one machine, and for each rank the lowest of the ranks that it
            shares memory with.
        """
        rank_info = {"options": options, "host": socket.gethostname()}
        colocation = probe_colocation(participant, rank_info)
        self.unshared_reason, rank_infos = colocation.unshared_reason, colocation.rank_infos
        for rank, other in enumerate(rank_infos):
            if other["options"] != options:
                raise ValueError(
                    f"tpkernels.init of group '{self.name}': rank {self.rank} passes "
                    f"{format_options(options)}, but rank {rank} passes "
                    f"{format_options(other['options'])}; all ranks must pass the same options"
                )
        one_machine = len({other["boot_id"] for other in rank_infos} - {None}) <= 1
        if self.unshared_reason is not None:
            self.hosts = len({other["host"] for other in rank_infos})
        return one_machine, colocation.first_ranks

    # Members and memory.

    @property
    def shared_memory(self) -> bool:
        """Return whether all ranks map each other's memory."""
        return self.workspace is not None

    @property
    def local_workspace(self) -> HostWorkspace | None:
        """Return the workspace that the ranks of this host share, or None."""
        return self.workspace if self.node is None else self.node.workspace

    @property
    def usable_bytes(self) -> int:
        """Return the capacity in bytes that each data buffer may grow to."""
        memory = self.node or self.workspace
        return self.workspace_bytes if memory is None else memory.usable_bytes

    def participant(self, timeout: float) -> Participant:
        """Return this rank as a participant of exchanges through the store of the group."""
        return Participant(
            store=self.pg.get_group_store(),
            group=self.name,
            rank=self.rank,
            world=self.world,
            timeout=timeout,
            exchange_state=self._exchange_state,
            process_group=self.pg.group_name,
        )

    def uses_gloo(self, device: str) -> bool:
        """Return whether the backend for a device type is gloo, which works in host memory. The
        backend "tpkernels" sends by gloo."""
        if device == "cpu" and self.backend is not None:
            return True
        backend = get_backend(self.pg, device)
        return backend is not None and backend.name() == "gloo"

    def collectives_on(self, device: str) -> dist.ProcessGroup:
        """Return the process group for torch collectives on tensors of a device type. With the
        backend "tpkernels", the collectives of ``pg`` on CPU tensors are calls of this group."""
        if device == "cpu" and self.backend is not None:
            return self.backend.transport
        return self.pg

    def timeout_on(self, device: str) -> float:
        """Return the timeout of a wait, in seconds, for calls on tensors of a device type."""
        return self.gpu_timeout if device == "cuda" else self.timeout

    # The group lock: one call at a time.

    def drain(self, seconds: float | None = None) -> None:
        """Wait until the asynchronous collectives of the group have run, for at most ``seconds``.
        They cannot run while this thread holds the lock, and are not waited for then."""
        if self.has_pending_calls and self.backend is not None and not self.lock.is_held():
            self.backend.drain(seconds)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the group lock during a call. Calls of different threads run one after another.
        Calls that a signal handler makes meanwhile are refused."""
        self.drain()
        with self.lock:
            self.check_usable()
            try:
                self.in_call = True
                yield
            finally:
                self.in_call = False

    def check_usable(self) -> None:
        """Raise ``GroupBrokenError`` after a failure, after `close`, and in a fork of the rank.
        Raise ``RuntimeError`` within a call. The caller holds ``lock``."""
        if self._owner_pid is not None:
            raise GroupBrokenError(
                f"group '{self.name}' belongs to process {self._owner_pid}, and process "
                f"{os.getpid()} was forked from it; use the group in process {self._owner_pid}, or "
                "create a process group in the fork"
            )
        if self.in_call:  # set by this thread, because it holds the lock
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

    def current_thread_in_call(self) -> bool:
        """Return whether the current thread is in a call."""
        if not self.lock.acquire(blocking=False):
            return False
        try:
            return self.in_call
        finally:
            self.lock.release()

    def warn(self) -> None:
        """Issue the warnings that were collected during a call. Use it only after the call: a
        filter may turn warnings into errors, and then rank 0 alone would leave the call."""
        notices, self.notices = self.notices, []
        for notice in notices:
            warnings.warn(notice, RuntimeWarning, stacklevel=3)

    # Failure, destruction of the process group, and exit of the process.

    def break_between_calls(self, error: BaseException) -> None:
        """Break the group because ``error`` interrupted this rank before a call or between two
        calls. A running call of a different thread completes; later calls are refused. Does nothing
        while a graph is traced, because tracing runs no calls."""
        if detect_fake_mode() is not None:
            return
        # In a signal handler during a call all calls are refused, so this rank is not out of step.
        if self._broken is None and not self.current_thread_in_call():
            self._broken, self.open = describe_error(error), False
            with self.lock:
                self._notify_peers(error)

    def mark_broken(self, error: BaseException) -> None:
        """Break the group because this rank left a call with ``error``. Notifies peers that wait
        for this rank and refuses further calls."""
        if self._broken is not None:
            return
        self._broken, self.open = describe_error(error), False
        self._notify_peers(error)

    def _notify_peers(self, error: BaseException) -> None:
        if self.local_workspace is None:
            if not self._ready:
                self._notify_in_store(error)
        elif self.node is None or not isinstance(error, CollectiveMismatchError):
            # Across hosts every rank detects a mismatch in the signatures that the ranks exchange.
            peer = error.peer if isinstance(error, TpkernelsError) else None
            late = isinstance(error, CollectiveTimeoutError)
            self.local_workspace.abandon(describe_error(error), late, -1 if peer is None else peer)

    def notify_outside_calls(self, error: BaseException) -> None:
        """Notify, through the store, the ranks that may wait there for a value of this rank. Does
        nothing if all ranks share memory, because they were notified there, and after a mismatch,
        because every rank detects it."""
        detected_by_all = self.workspace is not None or isinstance(error, CollectiveMismatchError)
        if self._ready and not detected_by_all:
            self._notify_in_store(error)

    def _notify_in_store(self, error: BaseException) -> None:
        with contextlib.suppress(GroupBrokenError):  # the process group was destroyed
            self.participant(self.timeout).notify_left(error)

    def check_kernels(self, description: str) -> None:
        """Raise the error of a failed GPU kernel, if any. ``description`` names the call that
        detected it."""
        if self.workspace is not None:
            self.workspace.check_kernels(description)

    def check(self) -> None:
        """Raise the error if the group has failed; see ``tpkernels.check``."""
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
        """Return whether the group belongs to the process that this process was forked from."""
        return self._owner_pid is not None

    def disown(self, owner: int) -> None:
        """Mark the group as owned by process ``owner``, the parent of this fork. This process can
        then neither run the calls of the owner nor end them."""
        if self._owner_pid is None:  # set already if the parent was a fork as well
            self._owner_pid = owner
        self.open = False
        self.in_call = self.has_pending_calls = False
        self.renew_lock()  # the holder may be a thread that the fork did not copy
        self.waiter = Waiter()

    def leave(self) -> None:
        """Release kernels that wait for peers, because this process ends."""
        if self.local_workspace is not None and not self.is_forked:
            self.local_workspace.leave()

    def close(self, cause: str) -> None:
        """Refuse further calls and free the workspace. Does nothing while a thread is in a call;
        the workspace is then freed with its last reference."""
        if not self.lock.acquire(blocking=False):
            return
        try:
            if self.in_call:
                return
            self._closed, self.open = cause, False
            self.clear_planned_calls()
            self.waiter.close()
            local_workspace, self.workspace, self.node = self.local_workspace, None, None
            if local_workspace is not None:
                local_workspace.close()
        finally:
            self.lock.release()

    # Agreement between ranks, outside calls.

    @contextlib.contextmanager
    def collective_step(self, *raised_by_all: type[Exception]) -> Iterator[None]:
        """Run the block as a collective step outside op calls, holding the group lock. An error
        breaks the group unless its type is in ``raised_by_all``, the errors that every rank
        raises."""
        try:
            with self.locked():
                try:
                    self.check_kernels("a collective setup step")
                    yield
                except raised_by_all:
                    raise
                except BaseException as error:
                    self.mark_broken(error)
                    self.notify_outside_calls(error)
                    raise
        except BaseException as error:  # includes signal handlers in the wait for the lock
            if not isinstance(error, (TpkernelsError, *raised_by_all)):
                self.break_between_calls(error)
            raise

    def exchange(self, purpose: str, value: object, seconds: float) -> list[Any]:
        """All-gather a JSON value within ``seconds``. Returns the values in rank order. Collective;
        the caller holds the group lock."""
        if self.workspace is not None:
            with self.workspace.wait_limit(seconds):
                return self.workspace.exchange(purpose, value)
        return self.participant(seconds).exchange(purpose, value)

    def lock_and_exchange(self, purpose: str, value: object, device: str) -> list[Any]:
        """Acquire the group lock and call `exchange` with the timeout for a device type.
        Collective."""
        with self.collective_step():
            return self.exchange(purpose, value, self.timeout_on(device))

    def _agree_once(
        self, cache: dict[_Key, _Value], key: _Key, agree: Callable[[], _Value]
    ) -> _Value:
        """Return the value of a key. The first call runs ``agree`` as a collective step."""
        if key not in cache:
            with self.collective_step():
                if key not in cache:  # a different thread may have been first
                    cache[key] = agree()
        return cache[key]

    def cuda_numerics(self) -> str:
        """Return the numerics of CUDA reductions, identical on all ranks. Collective at the first
        call and after each change of the torch flag."""
        if self.numerics == INVARIANT:
            raise NotImplementedError(
                "numerics 'invariant' supports CPU tensors only; pass numerics='ordered' to "
                "tpkernels.init"
            )
        if self.world == 1 or self.uses_gloo("cuda"):  # the host sums in order at no extra cost
            return ORDERED
        state = self.numerics_state
        if state.agreed != state.requested:
            with self.collective_step(ValueError):
                if state.agreed != state.requested:  # a different thread may have been first
                    seconds = self.timeout_on("cuda")
                    state.adopt(self.rank, self.exchange("numerics", state.requested, seconds))
        assert state.agreed is not None  # set by `adopt`
        return state.agreed

    # Inputs of the planner.

    def has_times(self, device: str) -> bool:
        """Return whether measured times apply to tensors of a device type. Times on GPUs are
        measured with NCCL."""
        return not (device == "cuda" and self.uses_gloo("cuda"))

    def timing_table(self, device: str) -> Table:
        """Return the times in the cache of rank 0 for tensors of a device type. The caches of the
        ranks may differ, but all ranks must make the same plans. Collective at the first call."""
        tables = self.planner_inputs.tables
        if self.world == 1:
            return tables.get(device, Table())
        return self._agree_once(tables, device, lambda: self._load_rank_0_table(device))

    def _load_rank_0_table(self, device: str) -> Table:
        table, ignored = Table(), ""
        if self.rank == 0:
            machine = this_machine(device, self.world, self.hosts, self.shared_memory)
            table, ignored = store.load(machine)
        json_table, seconds = store.to_json(table), self.timeout_on(device)
        tables = self.exchange(f"the first call on {device}", json_table, seconds)
        if ignored:
            self.notices.append(ignored)
        return store.table_from_json(tables[0])

    def qualification(self) -> Qualification:
        """Return the variants that `auto` may select on CUDA tensors, from the report of rank 0.
        Collective at the first call."""
        if self.world == 1 or self.workspace is None:
            return Qualification()  # one rank, or no shared memory: no variant applies
        return self._agree_once(self._qualification, "cuda", self.read_qualification)

    def read_qualification(self) -> Qualification:
        """Read the report of this machine on rank 0. Collective; the caller holds the group
        lock."""
        report, ignored = qualification.load("cuda") if self.rank == 0 else (None, "")
        if ignored:
            self.notices.append(ignored)
        elif report is None and self.rank == 0:
            _warn_unqualified()
        values = (Qualification() if report is None else report.qualification(self.world)).to_json()
        return Qualification.from_json(
            self.exchange("qualified algorithms", values, self.gpu_timeout)[0]
        )

    def use_qualification(self, qualification: Qualification) -> None:
        """Use this report for all later calls on CUDA tensors. All ranks must do this before the
        same call."""
        with self.lock:
            self._qualification["cuda"] = qualification
            if self.workspace is not None:
                self.workspace.use_variants(_kernel_variants(qualification))
            self.clear_planned_calls()

    def use_times(self, device: str, table: Table) -> None:
        """Use these times for all later calls. All ranks must set the same table before the same
        call."""
        with self.lock:
            self.planner_inputs.tables[device] = table
            self.clear_planned_calls()

    def exclude_algorithm(self, problem: Problem, algorithm: str, reason: str) -> None:
        """Exclude an algorithm from later ``auto`` calls of a problem. All ranks must do this
        before the same call."""
        with self.lock:
            self.planner_inputs.failures.setdefault(_failure_key(problem), {})[algorithm] = reason
            if self.rank == 0:
                self.notices.append(f"{problem}: algorithm '{algorithm}' {reason}")
            self.clear_planned_calls()

    def tuning_for(self, device: str) -> Tuning | None:
        """Return the settings for tuning at the first call of a problem, or None if it is off. On
        CUDA tensors it is also on if an algorithm is qualified and `autotune` is not False."""
        tuning = self.planner_inputs.tuning
        if tuning is not None or device != "cuda" or self.autotune is False:
            return tuning
        agreed = self._qualification.get("cuda", Qualification())  # no communication
        return _QUALIFIED_GPU_TUNING if agreed.variants else None

    def use_tuning(self, tuning: Tuning | None) -> None:
        """Clear the cached plans and tune each new problem with these settings. None stops tuning.
        All ranks must do this before the same call."""
        with self.lock:
            self.planner_inputs.tuning = tuning
            self.clear_planned_calls()

    def note_capture(self, device: torch.device) -> bool:
        """Record whether a graph is being captured, and return it. Captures do not tune, so all
        calls are planned again after the capture."""
        captured = streams.is_captured(device)
        self.untuned_in_capture = self.untuned_in_capture or captured
        return captured

    def clear_stale_calls(self, problem: Problem, device: torch.device) -> None:
        """Clear the cached plans if they are stale for a call on CUDA tensors: after a change of
        the torch flag, or after a capture, which does not tune."""
        if self.untuned_in_capture and not streams.is_captured(device):
            self.untuned_in_capture = False
            self.clear_planned_calls()
        if problem.spec.reduces and self.numerics_state.changed:
            self.clear_planned_calls()

    # Memory and kernels.

    def ensure_capacity(self, nbytes: int, description: str) -> None:
        """Grow the data buffers to ``nbytes`` each, within the limit and the available memory.
        Collective if they grow. All ranks request the same size for the call ``description``."""
        memory = self.node or self.workspace
        if memory is not None and memory.needs_growth(nbytes):
            with self.collective_step():
                warning = memory.grow(nbytes, description)
                if warning is not None and self.rank == 0:
                    self.notices.append(warning)

    def make_symmetric(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None
    ) -> torch.Tensor:
        """Create a symmetric tensor; see ``tpkernels.empty``. ``device`` is None for host
        memory."""
        if device is not None:
            local_reason: str | None = None
            if device.type == "cuda" and not torch.cuda.is_available():
                # This rank must still join the collective check below.
                local_reason, device = "needs a GPU that is visible to torch", torch.device("cpu")
            elif device == torch.device("cuda"):  # add the index of the current device
                device = torch.device("cuda", torch.cuda.current_device())
            reason = self.unsupported_kernels(device, "symmetric memory", local_reason)
            if reason is not None:
                raise NotImplementedError(f"symmetric memory {reason}")
            if streams.is_captured(device):
                raise CaptureError(
                    f"tpkernels.empty({list(shape)}, {dtype}) of group '{self.name}' waits for the "
                    "GPU and cannot be captured; create symmetric tensors before the graph capture"
                )
        with self.collective_step(MemoryError, NotImplementedError):
            if self.workspace is None:
                raise NotImplementedError(
                    "symmetric tensors need shared memory, but the ranks of group "
                    f"'{self.name}' do not share memory: {self.unshared_reason}"
                )
            return self.workspace.make_symmetric(shape, dtype, device)

    def unsupported_kernels(
        self, device: torch.device, kernels: str, local_reason: str | None
    ) -> str | None:
        """Return the reason why Triton or CUDA kernels cannot run on the GPUs of the group, or
        None. ``device`` is the GPU of this rank, ``local_reason`` a reason already known on this
        rank. The first call tries to open the kernels. Collective then."""
        if self.workspace is None:
            return local_reason
        key = device, kernels
        if key in self._unsupported_kernels:
            return self._unsupported_kernels[key]
        if streams.is_captured(device):
            raise CaptureError(
                f"group '{self.name}' has not set up {kernels} kernels yet; call the op once "
                "before the graph capture"
            )
        if self.world > 1:
            self.workspace.use_variants(_kernel_variants(self.qualification()))

        def open_kernels() -> str | None:
            try:
                assert self.workspace is not None  # checked above
                self.workspace.open_cuda(device, kernels, local_reason)
            except NotImplementedError as reason:
                return f"is not available in this group: {reason}"
            return None

        return self._agree_once(self._unsupported_kernels, key, open_kernels)


@functools.cache  # once in a process
def _warn_unqualified() -> None:
    _logger.warning(
        "CUDA tensors use the torch calls, because no algorithm is qualified on this machine. Run "
        "`tpkernels qualify` once; algorithm='auto' then uses the qualified algorithms that are "
        "faster"
    )


def _kernel_variants(qualification: Qualification) -> frozenset[str]:
    return qualification.variants_for("direct") | qualification.variants_for("fused")


def _close(group: Group) -> None:
    group.close("the end of its process group")


def timeout_on_gpus(pg: dist.ProcessGroup) -> float:
    """Return the timeout of a process group for CUDA tensors, in seconds: from its backend, or the
    torch default for NCCL if it has no such backend."""
    limit = get_timeout(pg, "cuda")
    if limit is None:
        limit = constants.default_pg_nccl_timeout or _NCCL_TIMEOUT
    return min(limit.total_seconds(), defaults.MAX_TIMEOUT)
