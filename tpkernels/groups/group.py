"""A process group as the ops see it: its ranks, the workspace they share, what they agreed on."""

from __future__ import annotations

import socket
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tpkernels import defaults
from tpkernels.errors import CaptureError, GroupBrokenError
from tpkernels.groups import timeouts
from tpkernels.groups.agreements import Agreements
from tpkernels.groups.numerics import CudaNumerics
from tpkernels.groups.tuning import Tuning
from tpkernels.groups.waiting_thread import Waiter
from tpkernels.symm import capture
from tpkernels.symm.colocation import probe_colocation
from tpkernels.symm.exchange import Participant, Presence
from tpkernels.symm.host import HostWorkspace
from tpkernels.symm.node import Node, make_node
from tpkernels.text import named_values


class Group(Agreements):
    """A process group with its workspace."""

    def __init__(
        self, pg: dist.ProcessGroup, forget: Callable[[Group], None], name: str | None = None
    ) -> None:
        super().__init__(pg.group_name if name is None else name)
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
        self.looks: list[Callable[[], None]] = []  #: see `look_in_waits`
        self._ready = False
        self._presence = Presence()
        self._presence_of_second = Presence()
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

    @property
    def usable_bytes(self) -> int:
        """What each data buffer may grow to, as far as the group is set up."""
        memory = self.node or self.workspace
        return self.workspace_bytes if memory is None else memory.usable_bytes

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
        autotune: bool | None,
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
        with self.together(ValueError, MemoryError):  # after these they may try again
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
            one_machine = self._agree_on_memory(
                participant, {**options, "timeout_on_gpus": gpu_timeout}
            )
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
            if autotune and self.tuning is None:
                self.tuning = Tuning()
            self.numerics, self.cuda_sums = numerics, CudaNumerics(numerics)
            self._ready = True

    def second(self, purpose: str, device: str) -> Group:
        """A group of the same ranks with a workspace of its own, for tensors of a device type; it
        has the times and the numerics of this one. One at a time: its keys in the store are used
        again. Collective.

        Raises:
            MemoryError: on all ranks.
        """
        made = Group(self.pg, _close, f"{self.name}/{purpose}")
        made._presence = self._presence_of_second
        made.init(
            self.timeout_on(device), self.workspace_bytes, False, self.numerics, device=device
        )
        made._set_timeouts(self.timeout, self.gpu_timeout)
        made.times, made.cuda_sums = self.times, self.cuda_sums
        return made

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
            with self.together():
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
            with self.together():
                refused = memory.grow(nbytes, text)
                if refused is not None and self.rank == 0:
                    self.notices.append(refused)

    def make_symmetric(
        self, shape: tuple[int, ...], dtype: torch.dtype, gpu: torch.device | None
    ) -> torch.Tensor:
        """See ``tpkernels.empty``; ``gpu``: where it is made, None for the host's memory."""
        if gpu is not None:
            own: str | None = None
            if gpu.type == "cuda" and not torch.cuda.is_available():
                own, gpu = "needs a GPU that torch sees", torch.device("cpu")
            elif gpu == torch.device("cuda"):  # without an index
                gpu = torch.device("cuda", torch.cuda.current_device())
            why = self.unsupported_kernels(gpu, "symmetric memory", own)
            if why is not None:
                raise NotImplementedError(f"symmetric memory {why}")
            if capture.is_captured(gpu):
                raise CaptureError(
                    f"tpkernels.empty({list(shape)}, {dtype}) of group '{self.name}' waits for the "
                    "GPU: make symmetric tensors before the capture of a graph"
                )
        with self.together(MemoryError, NotImplementedError):
            if self.workspace is None:
                raise NotImplementedError(
                    "symmetric tensors need memory that all ranks share, which those of group "
                    f"'{self.name}' do not: {self.why_not_shared}"
                )
            if gpu is not None:
                return self.workspace.make_symmetric_on(gpu, shape, dtype)
            return self.workspace.make_symmetric(shape, dtype)

    def look_in_waits(self, look: Callable[[], None]) -> None:
        """Has a wait on the host call ``look`` some 50 times a second; its error ends the wait."""
        self.looks.append(look)
        if self.nearby is not None and len(self.looks) == 1:
            looks = self.looks  # the channel must not keep the group alive
            self.nearby.channel.set_look(lambda: [each() for each in looks])

    def participant(self, timeout: float) -> Participant:
        """This rank's place in the group, for an exchange through its store."""
        return Participant(
            store=self.pg.get_group_store(),
            group=self.name,
            rank=self.rank,
            world=self.world,
            timeout=timeout,
            presence=self._presence,
            process_group=self.pg.group_name,
        )

    def warn(self) -> None:
        """Gives the warnings that have come up in calls, after these: a warning may be an error,
        with which rank 0 alone would leave a call."""
        notices, self.notices = self.notices, []
        for notice in notices:
            warnings.warn(notice, RuntimeWarning, stacklevel=3)


def _close(group: Group) -> None:
    group.close("the end of its process group")
