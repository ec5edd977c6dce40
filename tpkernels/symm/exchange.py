"""Problem: the ranks of a group tell each other something through a key-value store, before they
share anything better. The store may still hold what they said in an attempt that failed, or in an
earlier group of the same name: under torchrun a process group that is made anew finds its old keys.

Algorithm: each rank writes its word under a key of its own, with a nonce made for this attempt and
the number of exchanges for this purpose that it has completed. Once the words of all ranks are
there, of the same number, it confirms them under a key made from all nonces. It returns when all
ranks have confirmed the same words; until then it keeps looking for new ones.

Why no old word is taken: a rank's own nonce is new, so only ranks that take part now can confirm a
set of words that holds it.

Why nobody is left behind: a rank that has returned may overwrite its word in the next exchange, but
by then all confirmations are there, under a key that nobody overwrites. Words of another number are
never confirmed.

Failure: a rank that gives up tells those whose words it has seen, under keys made from their
nonces. Between exchanges it writes to the address of each rank's group instead (`tell_left`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import Store

from tpkernels.errors import CollectiveTimeoutError, PeerLostError, TpkernelsError
from tpkernels.text import of_error

_PAUSES = 1e-4, 0.01  # s between looks at the store: at first, and at most
_RARELY = 0.05  # s between looks for what is not expected: messages of failure, changed words


@dataclass
class Presence:
    """What one rank's group remembers from one exchange to the next."""

    address: str = field(default_factory=lambda: secrets.token_hex(8))
    addresses: list[str] = field(default_factory=list)  #: of all ranks, once one was completed
    completed: dict[str, int] = field(default_factory=dict)  #: exchanges, by purpose
    confirmed: dict[str, list[str]] = field(default_factory=dict)  #: own keys, by purpose


@dataclass(frozen=True)
class Participant:
    """This rank's place in a group, and the means to reach the others before there is memory."""

    store: Store
    group: str
    rank: int
    world: int
    timeout: float
    presence: Presence = field(default_factory=Presence)
    watch: Callable[[], None] | None = None  #: raises if a peer is lost, once that can be told

    @property
    def prefix(self) -> str:
        return f"tpkernels/{self.group}"

    def look(self, purpose: str, *more_addresses: str) -> None:
        """Raises if a peer is lost, or has written to this rank that it left."""
        if self.watch is not None:
            self.watch()
        for address in (self.presence.address, *more_addresses):
            key = self._mailbox(address)
            if self.store.check([key]):
                note = json.loads(self.store.get(key))
                kind = CollectiveTimeoutError if note["late"] else PeerLostError
                raise kind(
                    f"{purpose} of group '{self.group}': rank {self.rank} waited for rank "
                    f"{note['rank']}, which left with {note['why']}",
                    peer=note["peer"],
                )

    def tell(self, addresses: Iterable[str], error: BaseException) -> None:
        """Tells other ranks that this one has left with ``error``."""
        peer = error.peer if isinstance(error, TpkernelsError) else None
        note = {
            "rank": self.rank,
            "why": of_error(error),
            "late": isinstance(error, CollectiveTimeoutError),
            "peer": self.rank if peer is None else peer,
        }
        for address in addresses:
            with contextlib.suppress(RuntimeError):  # the store is gone
                self.store.set(self._mailbox(address), json.dumps(note))

    def _mailbox(self, address: str) -> str:
        return f"{self.prefix}/left/{address}"


def exchange(participant: Participant, purpose: str, say: dict[str, Any]) -> list[dict[str, Any]]:
    """What every rank says, in rank order. Collective; waits ``participant.timeout`` at the most.

    Raises:
        CollectiveTimeoutError, PeerLostError: a rank did not come, or left.
    """
    attempt = _Attempt(participant, purpose, say)
    try:
        return attempt.run()
    except BaseException as error:
        attempt.give_up(error)
        raise


def tell_left(participant: Participant, error: BaseException) -> None:
    """Tells the other ranks, in whatever exchange or set-up they wait, that this one has left."""
    addresses = participant.presence.addresses
    participant.tell(
        (each for rank, each in enumerate(addresses) if rank != participant.rank), error
    )


class _Attempt:
    """One rank's part in one exchange."""

    def __init__(self, participant: Participant, purpose: str, say: dict[str, Any]) -> None:
        self.participant, self.purpose = participant, purpose
        self.prefix = f"{participant.prefix}/{purpose}"
        self.keys = [f"{self.prefix}/{rank}" for rank in range(participant.world)]
        self.nonce = secrets.token_hex(8)
        self.number = participant.presence.completed.get(purpose, 0)
        self.say = say
        self.confirmed: dict[str, list[dict[str, Any]]] = {}  # the words, by the key for them

    def run(self) -> list[dict[str, Any]]:
        participant = self.participant
        word = {"nonce": self.nonce, "number": self.number, "say": self.say}
        word["address"] = participant.presence.address
        deadline = time.monotonic() + participant.timeout
        participant.store.set(self.keys[participant.rank], json.dumps(word))
        (pause, longest), look_at = _PAUSES, 0.0
        while True:
            words = self._all_confirmed()
            if words is not None:
                self._complete(words)
                return [word["say"] for word in words]
            now = time.monotonic()
            if not self.confirmed or now >= look_at:
                self._confirm()
            if now >= look_at:
                participant.look(self.purpose, self.nonce)
                look_at = now + _RARELY
            if now >= deadline:
                raise self._late()
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def give_up(self, error: BaseException) -> None:
        """Tells those that are here already."""
        with contextlib.suppress(RuntimeError):  # the store is gone
            words = [word for word in map(self._word_of, range(self.participant.world)) if word]
            nonces = (word["nonce"] for word in words)
            self.participant.tell((nonce for nonce in nonces if nonce != self.nonce), error)

    def _word_of(self, rank: int) -> dict[str, Any] | None:
        store, key = self.participant.store, self.keys[rank]
        return json.loads(store.get(key)) if store.check([key]) else None

    def _confirm(self) -> None:
        """Confirms the words of all ranks, if they are there and of one exchange."""
        store = self.participant.store
        if not store.check(self.keys):
            return
        words = [json.loads(word) for word in store.multi_get(self.keys)]
        if any(word["number"] != self.number for word in words):
            return
        nonces = " ".join(word["nonce"] for word in words)
        key = f"{self.prefix}/{hashlib.sha256(nonces.encode()).hexdigest()[:32]}"
        if key not in self.confirmed:
            self.confirmed[key] = words
            store.set(f"{key}/{self.participant.rank}", "")

    def _all_confirmed(self) -> list[dict[str, Any]] | None:
        for key, words in self.confirmed.items():
            if self.participant.store.check(
                [f"{key}/{rank}" for rank in range(self.participant.world)]
            ):
                return words
        return None

    def _complete(self, words: list[dict[str, Any]]) -> None:
        """All ranks are in this exchange, so none still needs what was confirmed before it."""
        presence, rank = self.participant.presence, self.participant.rank
        presence.addresses = [word["address"] for word in words]
        presence.completed[self.purpose] = self.number + 1
        before = presence.confirmed.get(self.purpose, [])
        mine = [f"{key}/{rank}" for key, each in self.confirmed.items() if each is words]
        others = [f"{key}/{rank}" for key, each in self.confirmed.items() if each is not words]
        presence.confirmed[self.purpose] = mine
        with contextlib.suppress(RuntimeError):  # a store that cannot delete
            for key in (*before, *others):
                self.participant.store.delete_key(key)

    def _late(self) -> CollectiveTimeoutError:
        """The error that names the first rank that did not come."""
        participant, last = self.participant, next(reversed(self.confirmed), None)

        def is_here(rank: int) -> bool:
            word = self._word_of(rank)
            if word is None or word["number"] != self.number:
                return False
            return last is None or participant.store.check([f"{last}/{rank}"])

        missing = next((rank for rank in range(participant.world) if not is_here(rank)), 0)
        return CollectiveTimeoutError(
            f"{self.purpose} of group '{participant.group}': rank {participant.rank} waited "
            f"{participant.timeout:g} s for rank {missing}, which did not come. All ranks of the "
            "group must make their first call, call tpkernels.init or create a communicator "
            "together.",
            peer=missing,
        )
