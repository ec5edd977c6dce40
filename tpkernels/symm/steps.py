"""Steps that the ranks of one host take together between calls: they agree on what comes next,
exchange statements and make further arenas."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from tpkernels import _C
from tpkernels._C.host import Phase
from tpkernels.integers import round_up
from tpkernels.symm.exchange import Participant, exchange
from tpkernels.symm.rendezvous import MappedArena, make_arena

PAGE = 4 << 10


class Steps:
    """The part of a `HostWorkspace` that takes these steps, each as a call on ``channel``."""

    participant: Participant
    channel: _C.host.Channel

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

    def _further_arena(self, purpose: str, nbytes: int) -> _C.host.Arena:
        """An arena in addition to the channel's, which watches the ranks already. Collective."""
        link = self._link(purpose, nbytes)
        for pidfd in link.pidfds:
            os.close(pidfd)
        return link.arena

    def _link(self, purpose: str, nbytes: int) -> MappedArena:
        """Make a new arena, in the call that has just begun. Collective."""
        region = round_up(nbytes, PAGE)
        return make_arena(self._watched(), purpose, region, [(0, region)])

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
