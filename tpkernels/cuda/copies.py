"""Peer copies by the copy engines, ordered by signals: a call of several launches.

    with CopyCall(workspace, signature, [chunk]) as call:
        call.put(shard, 0)                     # into the memory of this rank, for the peers
        call.publish(1)
        side_streams.fork()                    # symm/streams.py
        with side_streams.current():
            call.fetch(peer, 1, chunk, 0)      # waits for signal 1, then copies
        side_streams.join()

Problem: fetch chunks from peers while the SMs run a matmul, in eager calls and replayed graphs.

Algorithm: a kernel begins the call and another kernel ends it. Between them each rank copies its
chunks into its region and publishes signals for them. The peers wait for the signals and copy the
chunks, on any streams that are forked from the call stream and joined back to it.

Sync: csrc/cuda/sync.cuh. One-block kernels store and await the signals of peers. The call does not
use cuStreamWriteValue64 and cuStreamWaitValue64 for signals, for three reasons:

1. The host supplies their values, and a captured graph fixes them. The epoch advances in device
   memory with every replay.
2. The stream wait has no deadline, so a lost peer would hang the stream.
3. The stream write would announce data to a peer even after a failed wait.

Waits of the kernels end at their deadline. The copy after a failed wait still runs. This is
harmless: copies pull, so it writes only to memory of this rank, and the failure is recorded.

Flags notify the kernels of the same rank that a chunk has arrived. The three reasons do not apply
to flags: they are constant, kernels await them, and after a failed wait the results of every reader
are poisoned. If supported, the stream therefore writes the flags and uses no multiprocessor of the
matmul. The write is fenced from the preceding copy, "similar to __threadfence_system()" (cuda.h).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tpkernels import _C
from tpkernels.cuda.image import device_and_stream, kernels, launch
from tpkernels.cuda.operands import check_contiguous, kernel_workspace
from tpkernels.symm import streams
from tpkernels.symm.device import MAX_FLAGS, DeviceWorkspace
from tpkernels.symm.gpu_memory import GpuSegment


def flags_need_kernels(device: torch.device) -> bool:
    """Return whether a call made now needs kernels to set flags, instead of stream writes."""
    return streams.is_captured(device) or not kernels(device_and_stream(device)[0]).streams_write()


class CopyCall:
    """One call on a group, on any streams of its device. Collective, with equal signatures.

    Inside the ``with`` block, every rank may write its memory. At the end of the block, all ranks
    have completed their fetches. The memory of a rank consists of both its data buffers, at fixed
    addresses in every call, as captured copies require. Each rank must queue all work of the call
    on the stream that is current at the start of the block, or join it to that stream.

    Args:
        results: contiguous tensors; filled with NaN at the end if a wait has failed.
        segment: fetch from this symmetric tensor instead of the rank memory; ``put`` is not used.
        flags: number of flags that `set_flag` may set.

    Raises:
        NotImplementedError: too many results or flags.
    """

    def __init__(
        self,
        workspace: DeviceWorkspace,
        signature: int,
        results: Sequence[torch.Tensor] = (),
        segment: GpuSegment | None = None,
        flags: int = 0,
    ) -> None:
        if len(results) > _C.cuda.MAX_RESULTS or flags > MAX_FLAGS:
            raise NotImplementedError(
                f"the copy-engine call needs {len(results)} results and {flags} flags, but at most "
                f"{_C.cuda.MAX_RESULTS} and {MAX_FLAGS} are supported; pass fewer weights per call"
            )
        for i, result in enumerate(results):
            check_contiguous(workspace.regions.device, **{f"results[{i}]": result})
        self.segment = segment
        self._workspace, self._results, self._flags = workspace, results, flags
        if segment is not None:
            signature = segment.signature(signature)
        self._workspace_args = kernel_workspace(workspace, signature)
        self.rank, self.last_signal = workspace.rank, workspace.signals - 2
        self._device = workspace.regions.device
        self._kernels = kernels(device_and_stream(self._device)[0])
        self._captured = flags > 0 and streams.is_captured(self._device)

    def __enter__(self) -> CopyCall:
        launch("call_begin", self._device, self._workspace_args, self._flags)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            results = [(x.data_ptr(), x.numel() * x.element_size()) for x in self._results]
            launch("call_end", self._device, self._workspace_args, _C.cuda.Results(results))

    def view(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> torch.Tensor:
        """Return a contiguous tensor at byte ``offset`` of the memory of this rank."""
        return self._workspace.view(dtype, shape, offset)

    def put(self, src: torch.Tensor, offset: int) -> None:
        """Copy a tensor to byte ``offset`` of the memory of this rank."""
        nbytes = self._check(src, offset)
        local_address = self._workspace.buffers(self._workspace.rank) + offset
        self._kernels.copy(self._stream(), local_address, src.data_ptr(), nbytes)

    def publish(self, index: int, peer: int | None = None) -> None:
        """Send signal ``index`` to rank ``peer``, or to all peers, after the preceding work of the
        stream."""
        self._check_signal(index)
        if peer is not None:
            self._check_peer(peer)
        signal = _C.cuda.Signal(-1 if peer is None else peer, index)
        launch("call_publish", self._device, self._workspace_args, signal)

    def set_flag(self, index: int) -> None:
        """Set a flag for the kernels of this rank, after the preceding work of the stream. Once per
        flag and call."""
        if not 0 <= index < self._flags:
            raise ValueError(f"flag index is {index}; it must be 0 to {self._flags - 1}")
        self._kernels.set_flag(self._stream(), self._workspace_args, index, self._captured)

    def fetch(self, source: int, index: int, dst: torch.Tensor, offset: int) -> None:
        """Queue `await_signal`, then `copy_from`."""
        self.await_signal(source, index)
        self.copy_from(source, dst, offset)

    def await_signal(self, source: int, index: int) -> None:
        """Queue a wait for signal ``index`` from rank ``source``. It also ends at a failure."""
        self._check_signal(index)
        self._check_peer(source)
        launch("call_wait", self._device, self._workspace_args, _C.cuda.Signal(source, index))

    def copy_from(self, source: int, dst: torch.Tensor, offset: int) -> None:
        """Copy from byte ``offset`` of the memory of rank ``source`` into ``dst``. The contents of
        ``dst`` are invalid after a failed wait."""
        self._check_peer(source)
        nbytes = self._check(dst, offset)
        if self.segment is None:
            begin = self._workspace.buffers(source)
        else:
            begin = self.segment.addresses[source]
        self._kernels.copy(self._stream(), dst.data_ptr(), begin + offset, nbytes)

    def _stream(self) -> int:
        return device_and_stream(self._device)[1]

    def _check(self, tensor: torch.Tensor, offset: int) -> int:
        """Return the size of the tensor in bytes. Raises ``ValueError`` if it does not fit."""
        check_contiguous(self._device, tensor=tensor)
        nbytes = tensor.numel() * tensor.element_size()
        capacity = 2 * self._workspace.buffer_bytes if self.segment is None else self.segment.nbytes
        if offset < 0 or offset + nbytes > capacity:
            raise ValueError(
                f"bytes [{offset}, +{nbytes}) are out of range; each rank has {capacity} bytes"
            )
        return nbytes

    def _check_signal(self, index: int) -> None:
        """Check a signal index. The call reserves the first and the last signal."""
        if not 1 <= index <= self.last_signal:
            raise ValueError(f"signal index is {index}; it must be 1 to {self.last_signal}")

    def _check_peer(self, rank: int) -> None:
        if not 0 <= rank < self._workspace.world or rank == self._workspace.rank:
            raise ValueError(
                f"rank {rank} is not a peer of rank {self._workspace.rank}; world_size is "
                f"{self._workspace.world}"
            )
