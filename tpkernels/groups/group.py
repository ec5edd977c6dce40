"""A process group as the ops see it: its ranks, the workspace they share, what they agreed on."""

from __future__ import annotations

import contextlib
import socket
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from tpkernels import defaults
from tpkernels.errors import CaptureError, GroupBrokenError
from tpkernels.groups import timeouts
from tpkernels.groups.endings import Endings
from tpkernels.groups.numerics import CudaNumerics
from tpkernels.groups.waiting_thread import Waiter
from tpkernels.planning import store
from tpkernels.planning.machine import this_machine
from tpkernels.planning.problem import ORDERED
from tpkernels.planning.table import Table
from tpkernels.planning.trials import Trial
from tpkernels.symm import capture
from tpkernels.symm.colocation import probe_colocation
from tpkernels.symm.exchange import Participant, Presence, exchange
from tpkernels.symm.host import HostWorkspace
from tpkernels.symm.node import Node, make_node
from tpkernels.text import named_values


class Group(Endings):
    """A process group with its workspace."""

    def __init__(self, pg: dist.ProcessGroup, forget: Callable[[Group], None]) -> None:
        super().__init__(pg.group_name)
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
        self.autotune = defaults.AUTOTUNE
        self.numerics: str | None = None  #: as given to `init`
        self.cuda_sums = CudaNumerics()
        self.trials: dict[Hashable, Trial] = {}  #: see ops/_trial.py
        self.times: dict[str, Table] = {}  #: rank 0's and of trials, by device type; see `tuned`
        self._known: dict[str, str] = {}  # what `from_rank_0` has returned
        self.waiter = Waiter()
        self.notices: list[str] = []  #: warnings that `warn` is to give
        self._ready = False
        self._presence = Presence()
        self._unsupported_kernels: dict[tuple[torch.device, str], str | None] = {}

    @property
    def pg(self) -> dist.ProcessGroup:
        """The process group; alive as long as it is registered with torch."""
        pg = self._pg()
        if pg is None:
            raise GroupBrokenError(f"process group '{self.name}' has been destroyed")
        return pg

    def ready(self, device: str = "cpu") -> Group:
        """Makes the workspace at the first call, on tensors of a device type; collective then."""
        if not self._ready:
            self.init(None, defaults.WORKSPACE_BYTES, defaults.AUTOTUNE, device=device)
        return self

    def timeout_on(self, device: str) -> float:
        """Seconds that a wait in a call on tensors of a device type may take."""
        return self.gpu_timeout if device == "cuda" else self.timeout

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

    def init(
        self,
        timeout: float | None,
        workspace_bytes: int,
        autotune: bool,
        numerics: str | None = None,
        device: str = "cpu",
    ) -> None:
        """See ``tpkernels.init``; ``device``: the type of the tensors that it is done for."""
        own = defaults.TIMEOUT if timeout is None else timeout
        gpu_timeout = timeouts.of_process_group(self.pg) if timeout is None else timeout
        options: dict[str, Any] = {
            "timeout": own,
            "workspace_bytes": workspace_bytes,
            "autotune": autotune,
            "numerics": numerics,
        }
        with self._together(ValueError, MemoryError):  # after these they may try again
            if self._ready:
                in_use = {name: getattr(self, name) for name in options}
                if options == in_use:
                    if timeout is not None:
                        self._set_timeouts(own, gpu_timeout)
                    return
                raise ValueError(
                    f"group '{self.name}' is in use with {named_values(in_use)}; it cannot change "
                    f"to {named_values(options)}"
                )
            participant = self.participant(gpu_timeout if device == "cuda" else own)
            one_machine = self._agree_on_memory(participant, options)
            if self.why_not_shared is None:
                self.workspace = HostWorkspace(participant, workspace_bytes)
            elif self.world > 1:
                self.node, self.why_no_node = make_node(participant, workspace_bytes)
                if one_machine and self.rank == 0:
                    self.notices.append(
                        "the ranks are on one machine but share no memory, and so take the slower "
                        f"process group: {self.why_not_shared}"
                    )
            self._set_timeouts(own, gpu_timeout)
            self.workspace_bytes, self.autotune = workspace_bytes, autotune
            self.numerics, self.cuda_sums = numerics, CudaNumerics(numerics)
            self._ready = True

    def _set_timeouts(self, timeout: float, gpu_timeout: float) -> None:
        self.timeout, self.gpu_timeout = timeout, gpu_timeout
        if self.nearby is not None:
            self.nearby.set_timeouts(timeout, gpu_timeout)
        if self.node is not None:
            self.node.set_timeout(timeout)

    def _agree_on_memory(self, participant: Participant, options: dict[str, Any]) -> bool:
        """Finds out with the other ranks whether all give the same options and can share memory
        (``why_not_shared``), and whether all run on one machine."""
        say = {"options": options, "host": socket.gethostname()}
        self.why_not_shared, said = probe_colocation(participant, say)
        for rank, other in enumerate(said):
            if other["options"] != options:
                raise ValueError(
                    f"tpkernels.init of group '{self.name}': rank {self.rank} gives "
                    f"{named_values(options)}, rank {rank} gives {named_values(other['options'])}; "
                    "all ranks must give the same"
                )
        one_machine = len({other["boot_id"] for other in said} - {None}) <= 1
        if self.why_not_shared is not None:
            self.hosts = len({other["host"] for other in said})
        return one_machine

    def tuned(self, device: str) -> Table:
        """The times that rank 0 finds in its cache for tensors of a device type: what each rank
        found by itself might differ, and with it the choices. Collective at the first call."""
        if self.world > 1 and device not in self.times:
            with self._together():
                if device not in self.times:  # another thread was first
                    self.times[device] = self._tuned_by_rank_0(device)
        return self.times.get(device, Table())

    def use_times(self, device: str, table: Table) -> None:
        """Plans calls by these times from now on. All ranks use the same, from the same call on."""
        with self.lock:
            self.times[device] = table
            self.forget_calls()

    def _tuned_by_rank_0(self, device: str) -> Table:
        found, ignored = Table(), ""
        if self.rank == 0:
            machine = this_machine(device, self.world, self.hosts, self.shared_memory)
            found, ignored = store.load(machine)
        say, seconds = {"table": store.to_json(found)}, self.timeout_on(device)
        said = self._exchange(f"the first call on {device}", say, seconds)
        if ignored:
            self.notices.append(ignored)
        return store.from_json(said[0]["table"])

    def cuda_numerics(self) -> str:
        """How a reduction of CUDA tensors sums; the same on all ranks. Collective at the first call
        and after each change of torch's flag."""
        if self.world == 1 or self.by_gloo("cuda"):  # the host sums in order at no extra cost
            return ORDERED
        sums = self.cuda_sums
        if not sums.settled:
            with self._together(ValueError):
                if not sums.settled:  # another thread was first
                    say = {"numerics": sums.wanted}
                    said = self._exchange("numerics", say, self.timeout_on("cuda"))
                    sums.settle(self.rank, [each["numerics"] for each in said])
        return sums.agreed

    def from_rank_0(self, purpose: str, make: Callable[[], str]) -> str:
        """What rank 0's ``make`` returns at the first call for a purpose; collective then."""
        if purpose not in self._known:
            with self._together():
                if purpose not in self._known:  # another thread was first
                    text = make()
                    if self.world > 1:
                        text = self._exchange(purpose, {"text": text}, self.timeout)[0]["text"]
                    self._known[purpose] = text
        return self._known[purpose]

    def known_from_rank_0(self, purpose: str) -> str | None:
        """What `from_rank_0` has returned for a purpose, if it has been called."""
        return self._known.get(purpose)

    def _exchange(self, purpose: str, say: dict[str, Any], seconds: float) -> list[dict[str, Any]]:
        """The statements of all ranks, in rank order, within ``seconds``. Collective."""
        if self.workspace is not None:
            with self.workspace.waiting(seconds):
                return self.workspace.exchange(purpose, say)
        return exchange(self.participant(seconds), purpose, say)

    def unsupported_kernels(
        self, device: torch.device, kernels: str, own: str | None
    ) -> str | None:
        """Why kernels of a kind, Triton or CUDA, cannot run on the ranks' GPUs, this rank's being
        ``device``; None: they can. ``own`` is what this rank knows already. The ranks find out
        together, at the first call, by trying: collective."""
        if self.workspace is None:
            return own
        key = device, kernels
        if key not in self._unsupported_kernels:
            if capture.is_captured(device):
                raise CaptureError(
                    f"group '{self.name}' has run no {kernels} kernels yet: call the op once "
                    "before the capture of a graph"
                )
            with self._together():
                if key not in self._unsupported_kernels:  # another thread was first
                    self._unsupported_kernels[key] = self._try_gpu_kernels(device, kernels, own)
        return self._unsupported_kernels[key]

    def _try_gpu_kernels(self, device: torch.device, kernels: str, own: str | None) -> str | None:
        try:
            assert self.workspace is not None  # the caller has looked
            self.workspace.open_cuda(device, kernels, own)
        except NotImplementedError as reason:
            return f"does not run here: {reason}"
        return None

    def make_room(self, nbytes: int, text: str) -> None:
        """Has the data buffers hold ``nbytes`` each for a call, as far as they may and can grow.
        Collective where they grow: all ranks ask for the same."""
        memory = self.node or self.workspace
        if memory is not None and memory.wants(nbytes):
            with self._together():
                refused = memory.grow(nbytes, text)
                if refused is not None and self.rank == 0:
                    self.notices.append(refused)

    def make_symmetric(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See ``tpkernels.empty``."""
        with self._together(MemoryError, NotImplementedError):
            if self.workspace is None:
                raise NotImplementedError(
                    "symmetric tensors need memory that all ranks share, which those of group "
                    f"'{self.name}' do not: {self.why_not_shared}"
                )
            return self.workspace.make_symmetric(shape, dtype)

    def participant(self, timeout: float) -> Participant:
        """This rank's place in the group, for an exchange through its store."""
        store = self.pg.get_group_store()
        return Participant(store, self.name, self.rank, self.world, timeout, self._presence)

    @contextlib.contextmanager
    def _together(self, *alike: type[Exception]) -> Iterator[None]:
        """What all ranks do together beside the calls of `backends.run`, in turn with them: an
        error breaks the group, unless it is one of ``alike``, which all ranks raise."""
        with self.turn():
            try:
                self.check_kernels("a step that all ranks take together")
                yield
            except alike:
                raise
            except BaseException as error:
                self.mark_broken(error)
                raise

    def warn(self) -> None:
        """Gives the warnings that have come up in calls, after these: a warning may be an error,
        with which rank 0 alone would leave a call."""
        notices, self.notices = self.notices, []
        for notice in notices:
            warnings.warn(notice, RuntimeWarning, stacklevel=3)
