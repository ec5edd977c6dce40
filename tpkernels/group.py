"""A process group as the ops see it: its ranks, the workspace they share, what they agreed on."""

from __future__ import annotations

import contextlib
import socket
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from tpkernels.errors import CollectiveTimeoutError, GroupBrokenError, TpkernelsError
from tpkernels.symm.host import HostWorkspace
from tpkernels.symm.reach import share_a_host
from tpkernels.symm.rendezvous import Member, exchange
from tpkernels.symm.waiter import Waiter
from tpkernels.tuning import store
from tpkernels.tuning.machine import this_machine
from tpkernels.tuning.table import Table

DEFAULT_TIMEOUT = 30.0
DEFAULT_WORKSPACE_BYTES = 32 << 20


class Group:
    """A process group with its workspace. Calls on it are ordered by ``lock``."""

    def __init__(self, pg: dist.ProcessGroup, forget: Callable[[Group], None]) -> None:
        # Not ours to keep alive: a destroyed process group takes its workspace with it.
        self._pg = weakref.ref(pg, lambda _: forget(self))
        self.name: str = pg.group_name
        self.rank: int = pg.rank()
        self.world: int = pg.size()
        self.timeout = DEFAULT_TIMEOUT
        self._workspace_bytes = DEFAULT_WORKSPACE_BYTES
        self.workspace: HostWorkspace | None = None
        self.hosts = 1
        self._tuned: dict[str, Table] = {}  # rank 0's, by the kind of device
        self.calls: dict[Hashable, Any] = {}  # checked and planned calls, by their arguments
        self.lock = threading.RLock()
        self.waiter = Waiter()
        self._ready = False
        self._broken: str | None = None
        self._no_gpu_kernels: dict[tuple[torch.device, str], str | None] = {}

    @property
    def pg(self) -> dist.ProcessGroup:
        """The process group; alive as long as it is registered with torch."""
        pg = self._pg()
        if pg is None:
            raise GroupBrokenError(f"process group '{self.name}' has been destroyed")
        return pg

    def ready(self) -> Group:
        """Makes the workspace at the first call; collective then."""
        if not self._ready:
            self.init(DEFAULT_TIMEOUT, DEFAULT_WORKSPACE_BYTES)
        return self

    @property
    def shared_memory(self) -> bool:
        """Whether all ranks map each other's memory."""
        return self.workspace is not None

    def by_gloo(self, device: str) -> bool:
        """Whether gloo, which moves the host's memory, has the group's tensors of a device type."""
        try:
            return self.pg._get_backend(torch.device(device)).name() == "gloo"
        except RuntimeError:  # no backend has
            return False

    def init(self, timeout: float, workspace_bytes: int) -> None:
        """See ``tpkernels.init``."""
        with self.lock:
            self.check_usable()
            if self._ready:
                if (timeout, workspace_bytes) == (self.timeout, self._workspace_bytes):
                    return
                raise ValueError(
                    f"group '{self.name}' is in use with timeout={self.timeout:g}, "
                    f"workspace_bytes={self._workspace_bytes}; it cannot change to {timeout:g}, "
                    f"{workspace_bytes}"
                )
            member = self._member(timeout)
            with self._together(ValueError, MemoryError):  # they may try again
                if self.world == 1 or self._one_host(member, workspace_bytes):
                    self.workspace = HostWorkspace(member, workspace_bytes)
            self.timeout, self._workspace_bytes = timeout, workspace_bytes
            self._ready = True

    def _one_host(self, member: Member, workspace_bytes: int) -> bool:
        """Agrees with the other ranks on the options, and on whether all can share memory."""
        options = {"timeout": member.timeout, "workspace_bytes": workspace_bytes}
        one_host, said = share_a_host(member, {"options": options, "host": socket.gethostname()})
        for rank, other in enumerate(said):
            if other["options"] != options:
                raise ValueError(
                    f"tpkernels.init of group '{self.name}': rank {self.rank} gives {options}, "
                    f"rank {rank} gives {other['options']}; all ranks must give the same"
                )
        self.hosts = 1 if one_host else len({other["host"] for other in said})
        return one_host

    def tuned(self, device: str) -> Table:
        """The times that rank 0 finds in its cache for tensors of a device type: what each rank
        found by itself might differ, and with it the choices. Collective at the first call."""
        if self.world > 1 and device not in self._tuned:
            with self.lock, self._together():
                self._tuned[device] = self._tuned_by_rank_0(device)
        return self._tuned.get(device, Table())

    def use_times(self, device: str, table: Table) -> None:
        """Has calls be planned by other times from here on, on all ranks alike: for tuning."""
        with self.lock:
            self._tuned[device] = table
            self.calls.clear()

    def _tuned_by_rank_0(self, device: str) -> Table:
        found, ignored = Table(), ""
        if self.rank == 0:
            machine = this_machine(device, self.world, self.hosts, self.shared_memory)
            found, ignored = store.load(machine)
        purpose, say = f"the first call on {device}", {"table": store.to_json(found)}
        if self.workspace is not None:
            said = self.workspace.exchange(purpose, say)
        else:
            said = exchange(self._member(self.timeout), purpose, say)
        if ignored:  # now that nobody waits for this rank: a warning may be an error
            warnings.warn(ignored, RuntimeWarning, stacklevel=2)
        return store.from_json(said[0]["table"])

    def no_gpu_kernels(self, device: torch.device, kernels: str, own: str | None) -> str | None:
        """Why kernels of a kind, Triton or CUDA, cannot run on the ranks' GPUs, this rank's being
        ``device``; None: they can. ``own`` is what this rank knows already. The ranks find out
        together, at the first call, by trying: collective."""
        if self.workspace is None:
            return own
        key = device, kernels
        if key not in self._no_gpu_kernels:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"group '{self.name}' has run no {kernels} kernels yet: call the op once "
                    "before the capture of a graph"
                )
            with self.lock, self._together():
                try:
                    self.workspace.open_cuda(device, kernels, own)
                    self._no_gpu_kernels[key] = None
                except NotImplementedError as obstacle:
                    self._no_gpu_kernels[key] = f"does not run here: {obstacle}"
        return self._no_gpu_kernels[key]

    def make_symmetric(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See ``tpkernels.empty``."""
        with self.lock:
            self.check_usable()
            if self.workspace is None:
                raise NotImplementedError(
                    "symmetric tensors need memory shared by all ranks; group "
                    f"'{self.name}' spans hosts"
                )
            with self._together(MemoryError):
                return self.workspace.make_symmetric(shape, dtype)

    def _member(self, timeout: float) -> Member:
        return Member(self.pg.get_group_store(), self.name, self.rank, self.world, timeout)

    @contextlib.contextmanager
    def _together(self, *alike: type[Exception]) -> Iterator[None]:
        """What all ranks do together: an error breaks the group, unless it is one of ``alike``,
        which all ranks raise."""
        self.check_usable()
        try:
            yield
        except alike:
            raise
        except BaseException as error:
            self.leave(error)
            raise

    def leave(self, error: BaseException) -> None:
        """This rank left a call with ``error``: peers that wait for it are told, and no further
        call can run."""
        self._broken = f"{type(error).__name__}: {error}".removesuffix(": ")
        if self.workspace is not None:
            peer = error.peer if isinstance(error, TpkernelsError) else None
            late = isinstance(error, CollectiveTimeoutError)
            self.workspace.abandon(self._broken, late, -1 if peer is None else peer)

    def check_usable(self) -> None:
        """Raises ``GroupBrokenError`` after a failure."""
        if self._broken is not None:
            raise GroupBrokenError(
                f"group '{self.name}' is broken and can run no more calls; make a new group. "
                f"It broke with: {self._broken}"
            )

    def close(self) -> None:
        """Gives the workspace back."""
        self.waiter.close()
        if self.workspace is not None:
            self.workspace.close()
            self.workspace = None
