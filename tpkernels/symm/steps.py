"""Steps that the ranks of one host take together between calls: they agree on what comes next,
exchange statements and make further arenas."""

from __future__ import annotations

import contextlib
import os
import weakref
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from tpkernels import _C
from tpkernels._C.host import Phase
from tpkernels.defaults import result_pool_bytes
from tpkernels.integers import round_up
from tpkernels.symm.exchange import Participant, exchange
from tpkernels.symm.rendezvous import MappedArena, make_arena

PAGE = 4 << 10
_REGION_UNIT = 2 << 20  # whole pages on every processor
# How often a size of results is asked for before it gets shared memory: that saves some 0.7 ms of
# 32 MiB, and its first use costs 30 (csrc/host/shared_results.h, benchmarks/results).
PRIVATE_CALLS = 16


class Steps:
    """The part of a `HostWorkspace` that takes these steps, each as a call on ``channel``."""

    participant: Participant
    channel: _C.host.Channel
    results: _C.host.SharedResults | None = None  #: see `share_results`
    _may_share_results = True

    def view(
        self, rank: int, dtype: torch.dtype, shape: tuple[int, ...], offset: int = 0
    ) -> torch.Tensor:
        """A tensor in a rank's buffer of this epoch."""
        raise NotImplementedError

    @contextmanager
    def waiting(self, seconds: float) -> Iterator[None]:
        """Within the block, waits on the host may take that long."""
        usual = self.participant
        self.participant = replace(usual, timeout=seconds)
        self.channel.timeout = seconds
        try:
            yield
        finally:
            self.participant, self.channel.timeout = usual, usual.timeout

    def _further_arena(self, purpose: str, nbytes: int, *, commit: bool = True) -> _C.host.Arena:
        """An arena in addition to the channel's, which watches the ranks already. Collective."""
        link = self._link(purpose, nbytes, commit=commit)
        for pidfd in link.pidfds:
            os.close(pidfd)
        return link.arena

    def _link(self, purpose: str, nbytes: int, *, commit: bool = True) -> MappedArena:
        """A new arena, in the call that has just begun; ``commit``: with memory. Collective."""
        region = round_up(nbytes, PAGE)
        return make_arena(self._watched(), purpose, region, [(0, region)] if commit else [])

    def share_results(self, text: str) -> None:
        """Lets two ranks write to each other's results, which ``results`` then has the memory for:
        as many bytes as the result pool may keep, committed when they are needed. Collective at the
        first call. There is none if that fails on a rank, or if their limits differ."""
        if not self._may_share_results or self.participant.world != 2:
            return
        self._may_share_results = False
        limit = result_pool_bytes()
        self._agree(f"memory for the results of {text}")
        with contextlib.suppress(MemoryError):
            arena = self._further_arena("results", round_up(limit, _REGION_UNIT), commit=False)
            self.results = _C.host.SharedResults(arena, self.participant.rank, PRIVATE_CALLS)
            # Where a call's thread is the last to have the workspace, nobody closes it.
            weakref.finalize(self, self.results.close).atexit = False

    def close_results(self) -> None:
        """Those that are in use stay until they are dropped."""
        if self.results is not None:
            self.results.close()
            self.results = None

    def _watched(self) -> Participant:
        """This rank, for a rendezvous in the call that has just begun, with its peers watched."""
        channel = self.channel  # it watches for RESULT, which nobody publishes in such a call
        return replace(self.participant, watch=lambda: channel.watch(Phase.RESULT, 0.0))

    def _agree(self, text: str) -> None:
        """Checks that all ranks are about to do the same."""
        self.channel.begin(zlib.crc32(text.encode()) or 1, text)
        self.channel.barrier()

    def exchange(self, purpose: str, say: dict[str, Any]) -> list[dict[str, Any]]:
        """The statements of all ranks, in rank order. A separate call, which detects lost peers."""
        self._agree(purpose)
        return exchange(self._watched(), purpose, say)

    def numbers_of_all(self, purpose: str, mine: Sequence[int]) -> list[list[int]]:
        """A few numbers below 2^53 of each rank, in rank order. A separate call."""
        channel, own = self.channel, self.participant.rank
        channel.begin(zlib.crc32(purpose.encode()) or 1, purpose)
        shape = (len(mine),)
        self.view(own, torch.float64, shape).copy_(torch.tensor(mine, dtype=torch.float64))
        channel.publish(Phase.DATA)
        for peer in range(self.participant.world):
            channel.wait(peer, Phase.DATA)
        views = (self.view(r, torch.float64, shape) for r in range(self.participant.world))
        return [[int(number) for number in view.tolist()] for view in views]
