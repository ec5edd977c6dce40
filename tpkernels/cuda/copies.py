"""Peer copies by the copy engines, ordered by signals: a call of several launches.

    with CopyCall(space, signature, [chunk]) as call:
        call.put(shard, 0)                     # into this rank's memory, for the peers
        call.publish(1)
        side.fork()                            # symm/streams.py
        with side.current():
            call.fetch(peer, 1, chunk, 0)      # waits for that word, then copies
        side.join()

Problem: fetch chunks from peers while the SMs run a matmul, in eager calls and replayed graphs.

Algorithm: the call begins with one kernel and ends with another. Between them each rank copies its
chunks into its own region and publishes words for them. The peers wait for the words and copy, on
any streams forked from the call's stream and joined back to it.

Sync: csrc/cuda/sync.cuh. Kernels of one block write and await the words of peers, not
cuStreamWriteValue64 and cuStreamWaitValue64, for three reasons. Their values come from the host and
are fixed in a captured graph, but the epoch advances in device memory with every replay. Their wait
has no deadline, so a lost peer would hang the stream. And their write would announce data to a peer
even after a failed wait. Waits here end at their deadline. The copy behind a failed wait still
runs, which is harmless: copies pull, so it only writes to this rank's memory, and the failure is on
record.

None of the three holds for flags, which tell this rank's own kernels that a chunk has arrived: they
are constant, awaited by kernels, and read by nobody whose results are not poisoned after a failed
wait. So the stream writes them where it can, and takes no multiprocessor from the matmul. The write
is fenced from the copy before it, "similar to __threadfence_system()" (cuda.h).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tpkernels import _C
from tpkernels.cuda.image import device_and_stream, kernels, launch
from tpkernels.cuda.operands import check_contiguous, space_of
from tpkernels.symm import streams
from tpkernels.symm.device import FLAGS, DeviceWorkspace
from tpkernels.symm.gpu_memory import GpuSegment


def flags_take_kernels(device: torch.device) -> bool:
    """Return whether each flag of a call that is made now takes a kernel, not a stream's write."""
    return streams.is_captured(device) or not kernels(device_and_stream(device)[0]).streams_write()


class CopyCall:
    """One call on a group, on any streams of its device. From the start of the ``with`` block on,
    every rank may write its own memory; at the end of the block, all ranks have read what they
    fetch.

    A rank's memory is the bytes of both its buffers, at the same addresses in every call, as graphs
    that record copies need. All ranks make the call, with the same signature. Each must queue
    everything before the end on the stream that is current at the start, or join it to that.

    Args:
        results: contiguous; filled with NaN at the end if a wait has failed.
        in_place: what is fetched lies there and not in a rank's memory; nothing is put.
        flags: how many `raise_flag` may raise.

    Raises:
        NotImplementedError: too many results, or flags.
    """

    def __init__(
        self,
        space: DeviceWorkspace,
        signature: int,
        results: Sequence[torch.Tensor] = (),
        in_place: GpuSegment | None = None,
        flags: int = 0,
    ) -> None:
        if len(results) > _C.cuda.MOST_RESULTS or flags > FLAGS:
            raise NotImplementedError(
                f"the copy-engine call needs {len(results)} results and {flags} flags, but at most "
                f"{_C.cuda.MOST_RESULTS} and {FLAGS} are supported; pass fewer weights per call"
            )
        for i, result in enumerate(results):
            check_contiguous(space.regions.device, **{f"results[{i}]": result})
        self.in_place = in_place
        self._space, self._results, self._flags = space, results, flags
        if in_place is not None:
            signature = in_place.signature(signature)
        self._words = space_of(space, signature)
        self.rank, self.last_word = space.rank, space.words - 2
        self._device = space.regions.device
        self._kernels = kernels(device_and_stream(self._device)[0])
        self._captured = flags > 0 and streams.is_captured(self._device)

    def __enter__(self) -> CopyCall:
        launch("call_begin", self._device, self._words, self._flags)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            results = [(x.data_ptr(), x.numel() * x.element_size()) for x in self._results]
            launch("call_end", self._device, self._words, _C.cuda.Results(results))

    def view(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> torch.Tensor:
        """Return the contiguous tensor at byte ``offset`` of this rank's memory."""
        return self._space.view(dtype, shape, offset)

    def put(self, src: torch.Tensor, offset: int) -> None:
        """Copy a tensor to byte ``offset`` of this rank's memory."""
        nbytes = self._check(src, offset)
        here = self._space.buffers(self._space.rank) + offset
        self._kernels.copy(self._stream(), here, src.data_ptr(), nbytes)

    def publish(self, index: int, to: int | None = None) -> None:
        """Publish word ``index`` to rank ``to``, or to all peers: the stream's earlier work is
        done."""
        self._check_word(index)
        if to is not None:
            self._check_peer(to)
        signal = _C.cuda.Signal(-1 if to is None else to, index)
        launch("call_publish", self._device, self._words, signal)

    def raise_flag(self, index: int) -> None:
        """Tell this rank's own kernels, once in the call: the stream's earlier work is done."""
        if not 0 <= index < self._flags:
            raise ValueError(f"flag index is {index}; it must be 0 to {self._flags - 1}")
        self._kernels.raise_flag(self._stream(), self._words, index, self._captured)

    def fetch(self, source: int, index: int, dst: torch.Tensor, offset: int) -> None:
        """Do `await_word`, then `copy_from`."""
        self.await_word(source, index)
        self.copy_from(source, dst, offset)

    def await_word(self, source: int, index: int) -> None:
        """Have the stream wait for word ``index`` of rank ``source``, or for a failure."""
        self._check_word(index)
        self._check_peer(source)
        launch("call_wait", self._device, self._words, _C.cuda.Signal(source, index))

    def copy_from(self, source: int, dst: torch.Tensor, offset: int) -> None:
        """Copy from byte ``offset`` of the memory of rank ``source`` into ``dst``. After a failed
        wait the contents of ``dst`` must not be used."""
        self._check_peer(source)
        nbytes = self._check(dst, offset)
        if self.in_place is None:
            begin = self._space.buffers(source)
        else:
            begin = self.in_place.addresses[source]
        self._kernels.copy(self._stream(), dst.data_ptr(), begin + offset, nbytes)

    def _stream(self) -> int:
        return device_and_stream(self._device)[1]

    def _check(self, tensor: torch.Tensor, offset: int) -> int:
        """Return the size of the tensor in bytes; raises if it does not fit at ``offset``."""
        check_contiguous(self._device, tensor=tensor)
        nbytes = tensor.numel() * tensor.element_size()
        held = 2 * self._space.buffer_bytes if self.in_place is None else self.in_place.nbytes
        if offset < 0 or offset + nbytes > held:
            raise ValueError(
                f"bytes [{offset}, +{nbytes}) are out of range; each rank has {held} bytes"
            )
        return nbytes

    def _check_word(self, index: int) -> None:
        """Refuse the first word and the one after ``last_word``, which the call itself needs."""
        if not 1 <= index <= self.last_word:
            raise ValueError(f"signal index is {index}; it must be 1 to {self.last_word}")

    def _check_peer(self, rank: int) -> None:
        if not 0 <= rank < self._space.world or rank == self._space.rank:
            raise ValueError(
                f"rank {rank} is not a peer of rank {self._space.rank}; world_size is "
                f"{self._space.world}"
            )
