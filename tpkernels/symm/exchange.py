"""How the ranks of a group share a small value: `Participant.exchange`, the one way for it. It goes
through the process group's store until the ranks share memory, and through the workspace from then
on (`HostWorkspace.exchange`).

Problem: the store may still hold messages of an attempt that failed, or of an earlier group of the
same name: under torchrun, a process group that is created again finds its old keys.

Algorithm: each rank writes its message under its own key, with a nonce made for this attempt and
the number of exchanges it has completed for this purpose. Once the messages of all ranks are there,
with the same number, the rank confirms them under a key derived from all nonces. It returns when
all ranks have confirmed the same messages; until then it keeps looking for new ones.

Why no stale message is accepted: a rank's own nonce is new, so only ranks that take part now can
confirm a set of messages that contains it.

Why nobody is left behind: a rank that has returned may overwrite its message in the next exchange,
but by then all confirmations are there, under a key that nobody overwrites. Messages with different
numbers are never confirmed.

Failure: a rank that gives up notifies the ranks whose messages it has seen, under keys made from
their nonces. Between exchanges it writes to the address of each rank's group instead (`tell_left`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from torch.distributed import Store

from tpkernels.common.text import of_error
from tpkernels.errors import CollectiveTimeoutError, PeerLostError, TpkernelsError

_PAUSES = 1e-4, 0.01  # s between polls of the store: the first, and the longest
_RARELY = 0.05  # s between checks for the unexpected: notices of failure, changed messages


@dataclass
class Presence:
    """What a rank keeps from one exchange of its group to the next."""

    address: str = field(default_factory=lambda: secrets.token_hex(8))
    addresses: list[str] = field(default_factory=list)  #: of all ranks, after the first exchange
    completed: dict[str, int] = field(default_factory=dict)  #: exchanges, by purpose
    confirmed: dict[str, list[str]] = field(default_factory=dict)  #: own keys, by purpose

    def renewed(self) -> Presence:
        """Return it for the next group with the same keys, which no notice to the last reaches."""
        return replace(self, address=secrets.token_hex(8), addresses=[])


@dataclass(frozen=True)
class Participant:
    """This rank's place in a group, and its way to reach the others."""

    store: Store
    group: str
    rank: int
    world: int
    timeout: float
    presence: Presence = field(default_factory=Presence)
    watch: Callable[[], None] | None = None  #: raises if a peer is lost; None: not watched yet
    names: tuple[int, ...] = ()  #: the ranks' numbers in errors, where those of a larger group
    process_group: str = ""  #: its name in torch
    #: `HostWorkspace.exchange`, once the ranks share memory
    by_memory: Callable[[str, Any], list[Any]] | None = None

    @property
    def prefix(self) -> str:
        """Return what the group's keys in the store begin with."""
        return f"tpkernels/{self.group}"

    def exchange(self, purpose: str, value: object) -> list[Any]:
        """Return the values of all ranks, which JSON can hold, in rank order. Collective; waits at
        most ``timeout`` seconds.

        Raises:
            CollectiveTimeoutError, PeerLostError: a rank did not arrive, or left.
            CollectiveMismatchError: through memory only, a rank does something else.
        """
        if self.by_memory is not None:
            return self.by_memory(purpose, value)
        attempt = _Attempt(self, purpose, value)
        try:
            return attempt.run()
        except BaseException as error:
            attempt.give_up(error)
            raise

    def name(self, rank: int) -> int:
        """Return the number of a rank in errors."""
        return self.names[rank] if self.names else rank

    def look(self, purpose: str, *more_addresses: str) -> None:
        """Raise if a peer is lost, or has notified this rank that it left."""
        if self.watch is not None:
            self.watch()
        for address in (self.presence.address, *more_addresses):
            key = self._mailbox(address)
            if self.store.check([key]):
                note = json.loads(self.store.get(key))
                kind = CollectiveTimeoutError if note["late"] else PeerLostError
                raise kind(
                    f"{purpose} of group '{self.group}': rank {self.name(self.rank)} waited for "
                    f"rank {note['rank']}, which failed: {note['why']}",
                    peer=note["peer"],
                )

    def tell_left(self, error: BaseException) -> None:
        """Notify the other ranks, in whatever exchange or set-up, that this one has left."""
        addresses = enumerate(self.presence.addresses)
        self.tell((address for rank, address in addresses if rank != self.rank), error)

    def tell(self, addresses: Iterable[str], error: BaseException) -> None:
        """Notify the ranks at these addresses that this one has left with ``error``."""
        peer = error.peer if isinstance(error, TpkernelsError) else None
        note = {
            "rank": self.name(self.rank),
            "why": of_error(error),
            "late": isinstance(error, CollectiveTimeoutError),
            "peer": self.name(self.rank) if peer is None else peer,
        }
        with contextlib.suppress(RuntimeError):  # the store is gone
            for address in addresses:
                self.store.set(self._mailbox(address), json.dumps(note))

    def _mailbox(self, address: str) -> str:
        return f"{self.prefix}/left/{address}"


class _Attempt:
    """One rank's part in one exchange through the store."""

    def __init__(self, participant: Participant, purpose: str, value: object) -> None:
        self.participant, self.purpose, self.value = participant, purpose, value
        self.store, self.ranks = participant.store, range(participant.world)
        self.prefix = f"{participant.prefix}/{purpose}"
        self.keys = [f"{self.prefix}/{rank}" for rank in self.ranks]
        self.nonce = secrets.token_hex(8)
        self.number = participant.presence.completed.get(purpose, 0)
        self.confirmed: dict[str, list[dict[str, Any]]] = {}  # sets of messages, by their key

    def run(self) -> list[Any]:
        participant = self.participant
        message = {"nonce": self.nonce, "number": self.number, "value": self.value}
        message["address"] = participant.presence.address
        deadline = time.monotonic() + participant.timeout
        self.store.set(self.keys[participant.rank], json.dumps(message))
        (pause, longest), look_at = _PAUSES, 0.0
        while True:
            now = time.monotonic()  # before it looks, in which it may be held up
            if not self.confirmed or now >= look_at:
                self._confirm()
            if (messages := self._all_confirmed()) is not None:
                break
            if now >= look_at:
                try:
                    participant.look(self.purpose, self.nonce)
                except TpkernelsError:
                    # A rank may have returned, and then left, since this one looked.
                    if (messages := self._all_confirmed()) is not None:
                        break
                    raise
                look_at = now + _RARELY
            if now >= deadline:
                raise self._late()
            time.sleep(pause)
            pause = min(2 * pause, longest)
        self._complete(messages)
        return [message["value"] for message in messages]

    def give_up(self, error: BaseException) -> None:
        """Notify the ranks that are here already."""
        with contextlib.suppress(RuntimeError):  # the store is gone
            nonces = [message["nonce"] for message in map(self._message_of, self.ranks) if message]
            self.participant.tell((nonce for nonce in nonces if nonce != self.nonce), error)

    def _message_of(self, rank: int) -> dict[str, Any] | None:
        key = self.keys[rank]
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def _confirm(self) -> None:
        """Confirm the messages of all ranks, if they are there and belong to one exchange."""
        if not self.store.check(self.keys):
            return
        messages = [json.loads(message) for message in self.store.multi_get(self.keys)]
        nonces = " ".join(message["nonce"] for message in messages)
        key = f"{self.prefix}/{hashlib.sha256(nonces.encode()).hexdigest()[:32]}"
        in_step = all(message["number"] == self.number for message in messages)
        if in_step and key not in self.confirmed:
            self.confirmed[key] = messages
            self.store.set(f"{key}/{self.participant.rank}", "")

    def _all_confirmed(self) -> list[dict[str, Any]] | None:
        for key, messages in self.confirmed.items():
            if self.store.check([f"{key}/{rank}" for rank in self.ranks]):
                return messages
        return None

    def _complete(self, messages: list[dict[str, Any]]) -> None:
        """Delete earlier confirmations: all ranks are in this exchange, so none needs them."""
        presence, rank = self.participant.presence, self.participant.rank
        presence.addresses = [message["address"] for message in messages]
        presence.completed[self.purpose] = self.number + 1
        stale, needed = presence.confirmed.get(self.purpose, []), list[str]()
        for key, confirmed in self.confirmed.items():
            (needed if confirmed is messages else stale).append(f"{key}/{rank}")
        presence.confirmed[self.purpose] = needed
        with contextlib.suppress(RuntimeError):  # a store that cannot delete
            for key in stale:
                self.store.delete_key(key)

    def _late(self) -> CollectiveTimeoutError:
        """Return the error that names the first rank that is missing."""
        participant, last = self.participant, next(reversed(self.confirmed), None)

        def is_here(rank: int) -> bool:
            message = self._message_of(rank)
            if message is None or message["number"] != self.number:
                return False
            return last is None or self.store.check([f"{last}/{rank}"])

        missing = participant.name(next((rank for rank in self.ranks if not is_here(rank)), 0))
        return CollectiveTimeoutError(
            f"{self.purpose} of group '{participant.group}': rank "
            f"{participant.name(participant.rank)} waited {participant.timeout:g} s for rank "
            f"{missing}, which did not arrive. All ranks of the group must make their first call, "
            "call tpkernels.init or create a communicator together.",
            peer=missing,
        )
