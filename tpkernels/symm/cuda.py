"""Workspaces of GPU kernels, in torch symmetric memory, and a watcher thread for lost peers.

A call only queues a kernel, so the host is not synchronized with the signals of the kernel. The
host uses a separate channel for the group, in a call that never ends. A watcher thread polls this
channel to detect dead peers. When this rank closes the workspace, it abandons the call to notify
its peers.
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
from tpkernels.symm.gpu_memory import GpuSegments, SymmetricBuffer, make_symmetric, make_workspace
from tpkernels.symm.streams import SideStreams

_logger = logging.getLogger("tpkernels")

CHECK_INTERVAL_S = 0.02  # seconds between checks of the peers
_QUERY_S = 1e-4  # seconds between queries of an event
_SLICE_S = 1.0
_GRACE_S = 5.0  # seconds that queued calls may run before an orderly close
_ABORT_S = 5.0  # seconds that kernels may run after their waits have ended


class Watcher:
    """Aborts the waits of kernels on ``workspaces`` and raises the ``alarm`` when a peer is lost.

    No other code may use ``channel`` while the watcher runs. No rank publishes RESULT in its call.
    """

    def __init__(
        self,
        channel: _C.host.Channel,
        workspaces: Sequence[DeviceWorkspace],
        alarm: _C.calls.Alarm | None = None,
    ) -> None:
        self.error: TpkernelsError | None = None
        self._channel, self._workspaces, self._alarm = channel, workspaces, alarm
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tpkernels-watch", daemon=True)

    def _run(self) -> None:
        while not self._stop.wait(CHECK_INTERVAL_S):
            try:
                self._channel.watch(Phase.RESULT, 0.0)
            except TpkernelsError as error:
                self.error = error
                if self._alarm is not None:
                    self._alarm.raised = True
                for workspace in tuple(self._workspaces):
                    workspace.abort(0 if error.peer is None else error.peer)
                return

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


class CudaWorkspace:
    """The growable workspace of a group on one device, and the watcher of its peers.

    ``channel`` is exclusive to this object. All ranks have begun a call on it that never ends.
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
        self.side_streams = SideStreams(device)
        self._participant, self._channel = participant, channel
        # All workspaces, including outgrown ones: a captured graph may use an outgrown workspace.
        self.workspaces: list[DeviceWorkspace] = []
        self.segments = GpuSegments()
        self._multicast: list[SymmetricBuffer] = []  # all buffers, including outgrown ones
        self._chaos: dict[str, Any] | None = None
        self._watcher = Watcher(channel, self.workspaces, alarm).__enter__()
        self.event = streams.new_event(device)  #: after the last call outside a capture
        self._pid = os.getpid()
        self.used_in_graph = False  #: a graph contains calls of this group
        on_gpu = device.type == "cuda"
        self._current_device = torch.cuda.device(device) if on_gpu else nullcontext()
        self._order = streams.get_device_order(device)
        self._stream: torch.cuda.Stream | None = None  # of the running call; None in a capture

    @property
    def current(self) -> DeviceWorkspace:
        """Return the largest workspace."""
        return self.workspaces[-1]

    def grow(self, signals: int, buffer_bytes: int, reason: str | None = None) -> None:
        """Create a larger workspace. Collective; errors as in ``make_workspace``.

        It has at least the requested size and at least twice the size of the previous workspace.
        All workspaces together therefore use less than twice the memory of the largest.
        """
        if self.workspaces:
            signals, buffer_bytes = self.current.enlarged_size(signals, buffer_bytes)
        workspace = make_workspace(self._participant, signals, buffer_bytes, self.device, reason)
        if self._chaos is not None:
            workspace.set_chaos(**self._chaos)
        self.workspaces.append(workspace)
        workspace.use_variants(self._variants)
        self._alarm.watch(workspace.failure_flag_address)
        # The watcher aborts only the workspaces that exist when it detects a lost peer.
        if self._watcher.error is not None:
            raise self._watcher.error

    @property
    def multicast(self) -> torch.Tensor:
        """Return the buffer for torch multimem ops. Requires an earlier `grow_multicast`."""
        return self._multicast[-1].memory

    def grow_multicast(self, nbytes: int) -> None:
        """Allocate a buffer for torch multimem ops, at least ``nbytes`` and twice the previous
        size. Collective; errors as in ``make_symmetric``.

        Raises:
            NotImplementedError: on all ranks, if the memory has no multicast address.
        """
        if self._multicast:
            nbytes = max(nbytes, 2 * self.multicast.numel())
        buffer = make_symmetric(self._participant, nbytes, self.device)
        if not buffer.multicast:
            raise NotImplementedError(
                "the memory of the GPUs has no multicast address; multicast needs NVSwitch"
            )
        self._multicast.append(buffer)

    def use_variants(self, variants: frozenset[str]) -> None:
        """Use these variants of ``direct`` and ``fused`` from the next call on; see
        `DeviceWorkspace.variants`."""
        self._variants = variants
        for workspace in self.workspaces:
            workspace.use_variants(variants)

    def make_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a symmetric tensor for a user. Collective; errors as in ``make_symmetric``."""
        return self.segments.make(self._participant, shape, dtype, self.device)

    def set_timeout(self, seconds: float) -> None:
        """Set the limit of waits in kernels, from the next call on. Captured graphs keep the limit
        of their capture."""
        self._participant = replace(self._participant, timeout=seconds)
        for workspace in self.workspaces:
            workspace.set_timeout(seconds)

    def check(self, description: str) -> None:
        """Raise the error of the first failed kernel or lost peer, if any.

        Args:
            description: the call that performs this check, for the message.
        """
        workspace = next((workspace for workspace in self.workspaces if workspace.has_failed), None)
        if workspace is None:
            if self._watcher.error is not None:
                raise self._watcher.error
            return
        if streams.is_captured(self.device):
            raise CaptureError(
                f"an earlier call of group '{self._participant.group}' failed on the GPU (detected "
                f"by {description}); end the capture, then call tpkernels.check for the error"
            )
        failure = workspace.failure()
        assert failure is not None  # has_failed was true
        if self._watcher.error is not None and failure[0] == ABORTED:
            raise self._watcher.error  # it names the cause
        raise kernel_error(
            failure,
            where=f"an earlier call of the group (detected by {description})",
            rank=self._participant.rank,
            timeout=self._participant.timeout,
            groups=self._order.groups,
        )

    def wait(self) -> None:
        """Wait until all calls outside graphs have run. Return immediately in a capture."""
        while not streams.is_captured(self.device) and not self.await_calls(_SLICE_S):
            pass

    # As a context manager it encloses one call; calls do not nest. The calls of all groups on the
    # device run one at a time, on any stream. In a capture, the streams order them. A
    # generator-based context manager would run five times as many Python functions.

    def __enter__(self) -> CudaWorkspace:
        self._current_device.__enter__()
        try:
            if streams.is_captured(self.device):
                self.used_in_graph, self._stream = True, None
                return self
            stream = self._stream = streams.current_stream(self.device)
            if stream is not None:
                self._order.begin(self._participant.group, stream)
        except BaseException:
            self._current_device.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if self._stream is not None:
                try:
                    if kind is not None:
                        self.side_streams.join()  # so that the event covers their work
                finally:
                    assert self.event is not None  # a GPU has an event
                    self._order.end(self._stream, self.event)
        finally:
            self._current_device.__exit__(None, None, None)

    def await_calls(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for all calls outside graphs. Return whether they have run."""
        deadline = time.monotonic() + seconds
        while self.event is not None and not self.event.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(_QUERY_S)
        return True

    def drain(self) -> None:
        """Wait up to `_GRACE_S` for queued calls outside graphs, before `close` aborts them."""
        if not self._is_forked() and not streams.is_captured(self.device):
            with suppress(RuntimeError):  # device error; `close` reports it
                self.await_calls(_GRACE_S)

    def set_chaos(self, **switches: Any) -> None:
        """See ``DeviceWorkspace.set_chaos``."""
        self._chaos = switches
        for workspace in self.workspaces:
            workspace.set_chaos(**switches)

    def close(self, reason: str, late: bool = False, culprit: int = -1) -> None:
        """Stop the watcher, notify the peers and abort the waits of queued kernels.

        The memory is freed after these kernels have run. It is never freed if they do not end in
        time or a graph may replay them, because the kernels would access memory that has a new
        owner.
        """
        if self._is_forked():
            self._leak()
            return
        self._watcher.__exit__()
        self._channel.abandon(reason, late, culprit)
        self._order.groups.discard(self._participant.group)
        for workspace in self.workspaces:
            self._alarm.unwatch(workspace.failure_flag_address)
        ended = False
        try:
            self._abort(culprit)
            ended = not self.used_in_graph and self._await_kernels()
        finally:
            if not ended:
                self._leak()

    def leave(self) -> None:
        """Abort the waits of queued kernels when the process exits, and keep their memory."""
        self._abort(-1)
        self._leak()

    def _is_forked(self) -> bool:
        """Return whether this process is a fork. A fork must not touch the device or memory that
        the parent shares."""
        return os.getpid() != self._pid

    def _abort(self, culprit: int) -> None:
        for workspace in self.workspaces:
            workspace.abort(self._participant.rank if culprit < 0 else culprit)

    def _await_kernels(self) -> bool:
        """Return whether the kernels have ended, after their waits were aborted."""
        if streams.is_captured(self.device):  # by a different group: events cannot be queried
            return False
        try:
            if self.await_calls(_ABORT_S):
                return True
            reason = f"still run {_ABORT_S:g} s after the group was closed"
        except RuntimeError as error:  # the device has failed
            reason = f"may still run: {error}"
        _logger.warning(
            "kernels of group '%s' on %s %s; their workspaces are never freed: %d bytes",
            *(
                self._participant.group,
                self.device,
                reason,
                sum(workspace.nbytes for workspace in self.workspaces),
            ),
        )
        return False

    def _leak(self) -> None:
        for memory in (*self.workspaces, self.segments, self._multicast):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
