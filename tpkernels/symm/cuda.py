"""Workspaces of the kernels on GPUs that can address each other, in torch's symmetric memory.

A call only queues a kernel, so nothing on the host is in step with its words. The host keeps a
separate channel for such a group, in a never-ending call on which a watcher thread detects dead
peers and announces its own exit.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch

from tpkernels import _C
from tpkernels._C.host import Phase
from tpkernels.errors import CaptureError, TpkernelsError
from tpkernels.symm import streams
from tpkernels.symm.device import ABORTED, DeviceWorkspace, kernel_error
from tpkernels.symm.exchange import Participant
from tpkernels.symm.gpu_memory import GpuSegments, Symmetric, make_symmetric, make_workspace
from tpkernels.symm.streams import SideStream

_logger = logging.getLogger("tpkernels")

LOOK_S = 0.02  # seconds between two looks at the peers
_QUERY_S = 1e-4  # seconds between two looks at an event
_SLICE_S = 1.0
_GRACE_S = 5.0  # that an orderly end leaves queued calls to run
_LAST_S = 5.0  # that kernels may take to end once their waits do


class Watch:
    """Ends the waits of kernels on ``spaces``, and raises the ``alarm``, when a peer is lost.

    Nothing else may use ``channel`` meanwhile, and no rank publishes RESULT in its call.
    """

    def __init__(
        self,
        channel: _C.host.Channel,
        spaces: Sequence[DeviceWorkspace],
        alarm: _C.calls.Alarm | None = None,
    ) -> None:
        self.error: TpkernelsError | None = None
        self._channel, self._spaces, self._alarm = channel, spaces, alarm
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="tpkernels-watch", daemon=True)

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            try:
                self._channel.watch(Phase.RESULT, 0.0)
            except TpkernelsError as error:
                self.error = error
                if self._alarm is not None:
                    self._alarm.raised = True
                for space in tuple(self._spaces):
                    space.abort(0 if error.peer is None else error.peer)
                return

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


class CudaWorkspace:
    """The growing workspace of a group's kernels on one device, and the watch over the peers.

    Nobody else uses ``channel``; all ranks have begun a call on it, which none ends.
    """

    def __init__(
        self,
        participant: Participant,
        channel: _C.host.Channel,
        device: torch.device,
        alarm: _C.calls.Alarm,
        variants: frozenset[str] = frozenset(),
    ) -> None:
        self.device, self._alarm, self._variants = device, alarm, variants
        self.side = SideStream(device)
        self._member, self._channel = participant, channel
        # All workspaces ever made: a captured graph may still use one that has been outgrown.
        self.spaces: list[DeviceWorkspace] = []
        self.segments = GpuSegments()
        self._multicast: list[Symmetric] = []  # ever made; as for `spaces`
        self._chaos: dict[str, Any] | None = None
        self._watch = Watch(channel, self.spaces, alarm).__enter__()
        self.event = streams.new_event(device)  #: after the last call outside a capture
        self._pid = os.getpid()
        self.recorded = False  #: a graph has calls of this group
        on_gpu = device.type == "cuda"
        self._current_device = torch.cuda.device(device) if on_gpu else nullcontext()
        self._order = streams.order_of(device)
        self._stream: torch.cuda.Stream | None = None  # of the call, in the order

    @property
    def current(self) -> DeviceWorkspace:
        """Return the largest workspace."""
        return self.spaces[-1]

    def grow(self, words: int, buffer_bytes: int, reason: str | None = None) -> None:
        """Make a workspace of at least that size and at least twice the last one's, so that all
        together take less than twice the largest. Collective; raises what ``make_workspace`` does.
        """
        if self.spaces:
            words, buffer_bytes = self.current.enlarged(words, buffer_bytes)
        space = make_workspace(self._member, words, buffer_bytes, self.device, reason)
        if self._chaos is not None:
            space.set_chaos(**self._chaos)
        self.spaces.append(space)
        space.use_variants(self._variants)
        self._alarm.watch(space.failed_word)
        # The watch ends the waits in the workspaces that it finds when a peer is lost.
        if self._watch.error is not None:
            raise self._watch.error

    @property
    def multicast(self) -> torch.Tensor:
        """Return the bytes for torch's multimem ops, of which `grow_multicast` has made some."""
        return self._multicast[-1].memory

    def grow_multicast(self, nbytes: int) -> None:
        """Make memory for torch's multimem ops: at least so many bytes, and twice as many as
        before. Collective; raises what ``make_symmetric`` does, and ``NotImplementedError`` on all
        ranks if there is no multicast."""
        if self._multicast:
            nbytes = max(nbytes, 2 * self.multicast.numel())
        made = make_symmetric(self._member, nbytes, self.device)
        if not made.multicast:
            raise NotImplementedError(
                "the memory of the GPUs has no multicast address; multicast needs NVSwitch"
            )
        self._multicast.append(made)

    def use_variants(self, variants: frozenset[str]) -> None:
        """Take these variants of ``direct`` and ``fused`` from the next call on; see
        `DeviceWorkspace.variants`."""
        self._variants = variants
        for space in self.spaces:
            space.use_variants(variants)

    def make_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Make a symmetric tensor for a user. Collective; raises what ``make_symmetric`` does."""
        return self.segments.make(self._member, shape, dtype, self.device)

    def set_timeout(self, seconds: float) -> None:
        """Bound waits in kernels, from the next call on. Graphs keep what they have recorded."""
        self._member = replace(self._member, timeout=seconds)
        for space in self.spaces:
            space.set_timeout(seconds)

    def check(self, text: str) -> None:
        """Raise the first failure of a kernel so far, or that a peer is lost. ``text``: what has
        found it."""
        space = next((space for space in self.spaces if space.has_failed), None)
        if space is None:
            if self._watch.error is not None:
                raise self._watch.error
            return
        if streams.is_captured(self.device):
            raise CaptureError(
                f"an earlier call of group '{self._member.group}' failed on the GPU (detected by "
                f"{text}); end the capture, then call tpkernels.check for the error"
            )
        failure = space.failure()
        assert failure is not None  # it has failed
        if self._watch.error is not None and failure[0] == ABORTED:
            raise self._watch.error  # which says more
        raise kernel_error(
            failure,
            where=f"an earlier call of the group (detected by {text})",
            rank=self._member.rank,
            timeout=self._member.timeout,
            groups=self._order.groups,
        )

    def wait(self) -> None:
        """Return when all calls outside graphs have run; at once in a capture."""
        while not streams.is_captured(self.device) and not self.ended(_SLICE_S):
            pass

    # As a context it is a call, which is not nested in another one. The calls of all groups on the
    # device run one after the other, whatever streams they come from; in a capture, the streams
    # order them. No generator: it would take five times as many functions of Python.

    def __enter__(self) -> CudaWorkspace:
        self._current_device.__enter__()
        try:
            if streams.is_captured(self.device):
                self.recorded, self._stream = True, None
                return self
            stream = self._stream = streams.current_stream(self.device)
            if stream is not None:
                self._order.begin(self._member.group, stream)
        except BaseException:
            self._current_device.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if self._stream is not None:
                try:
                    if kind is not None:
                        self.side.join()  # the event is to cover what is queued there
                finally:
                    assert self.event is not None  # there are streams
                    self._order.end(self._stream, self.event)
        finally:
            self._current_device.__exit__(None, None, None)

    def ended(self, seconds: float) -> bool:
        """Return whether all calls outside graphs have run, after a wait of at most that long."""
        deadline = time.monotonic() + seconds
        while self.event is not None and not self.event.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(_QUERY_S)
        return True

    def let_end(self) -> None:
        """Wait a while for the calls outside graphs to run, before `close` would end them."""
        if not self._is_forked() and not streams.is_captured(self.device):
            with suppress(RuntimeError):  # of the device; `close` reports it
                self.ended(_GRACE_S)

    def set_chaos(self, **switches: Any) -> None:
        """See ``DeviceWorkspace.set_chaos``."""
        self._chaos = switches
        for space in self.spaces:
            space.set_chaos(**switches)

    def close(self, why: str, late: bool = False, culprit: int = -1) -> None:
        """Stop the watch, tell the peers and end the waits of queued kernels. The memory is
        freed once these have run. If that takes too long, or a graph may replay some, it is never
        freed: kernels would read and write what somebody else has there by then."""
        if self._is_forked():
            self._keep()
            return
        self._watch.__exit__()
        self._channel.abandon(why, late, culprit)
        self._order.groups.discard(self._member.group)
        for space in self.spaces:
            self._alarm.unwatch(space.failed_word)
        ended = False
        try:
            self._abort(culprit)
            ended = not self.recorded and self._ended_at_last()
        finally:
            if not ended:
                self._keep()

    def leave(self) -> None:
        """End the waits of queued kernels as the process ends, and keep their memory."""
        self._abort(-1)
        self._keep()

    def _is_forked(self) -> bool:
        """Return whether this is a fork: it must not touch the device or what the parent shares."""
        return os.getpid() != self._pid

    def _abort(self, culprit: int) -> None:
        for space in self.spaces:
            space.abort(self._member.rank if culprit < 0 else culprit)

    def _ended_at_last(self) -> bool:
        """Return whether the kernels have ended, now that none waits any more."""
        if streams.is_captured(self.device):  # of another group's calls; events cannot be queried
            return False
        try:
            if self.ended(_LAST_S):
                return True
            why = f"still run {_LAST_S:g} s after the group was closed"
        except RuntimeError as error:  # the device has failed
            why = f"may still run: {error}"
        _logger.warning(
            "kernels of group '%s' on %s %s; their workspaces are never freed: %d bytes",
            *(self._member.group, self.device, why, sum(space.nbytes for space in self.spaces)),
        )
        return False

    def _keep(self) -> None:
        for memory in (*self.spaces, self.segments, self._multicast):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
