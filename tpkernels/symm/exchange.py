"""All-gather of small JSON values among the ranks of a group: `Participant.exchange`.

The exchange uses the store of the process group until the ranks share memory. After that it uses
the workspace (`HostWorkspace.exchange`).

Problem: the store may hold stale messages of a failed attempt or of an earlier group with the same
name. Under torchrun, a process group that is created again finds its old keys.

Algorithm:
1. Each rank writes its message under a key of the rank. The message contains a fresh nonce and the
   number of exchanges that the rank has completed for this purpose.
2. When the messages of all ranks are present with equal numbers, each rank confirms the set under a
   key derived from all nonces.
3. A rank returns when all ranks have confirmed the same set. Until then it polls for new messages.

Invariant 1 (no stale message): the nonce of a rank is new, so only ranks of the current attempt can
confirm a set that contains it.
Invariant 2 (all ranks return): a rank that has returned may overwrite its message in the next
exchange. By then all confirmations are present, under keys that no rank overwrites.
Invariant 3 (in step): messages with different numbers are never confirmed.

Failure: a rank that gives up notifies the ranks whose messages it has seen, under keys made from
their nonces. Between exchanges it writes to the mailbox of every rank (`notify_left`).
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

from tpkernels.common.text import describe_error
from tpkernels.errors import CollectiveTimeoutError, PeerLostError, TpkernelsError

_PAUSES = 1e-4, 0.01  # s between polls of the store: initial and maximum
_CHECK_INTERVAL = 0.05  # s between checks for failure notices and changed messages


@dataclass
class ExchangeState:
    """State of a rank that persists between the exchanges of its group."""

    address: str = field(default_factory=lambda: secrets.token_hex(8))
    addresses: list[str] = field(default_factory=list)  #: per rank; set by the first exchange
    completed: dict[str, int] = field(default_factory=dict)  #: number of exchanges, by purpose
    #: keys of the last confirmations by this rank, by purpose
    confirmed: dict[str, list[str]] = field(default_factory=dict)

    def renew(self) -> ExchangeState:
        """Return the state for the next group with the same keys. A new address keeps it from
        receiving notices to the previous group."""
        return replace(self, address=secrets.token_hex(8), addresses=[])


@dataclass(frozen=True)
class Participant:
    """This rank as a member of a group: its position, and the means to reach its peers."""

    store: Store
    group: str
    rank: int
    world: int
    timeout: float
    exchange_state: ExchangeState = field(default_factory=ExchangeState)
    watch: Callable[[], None] | None = None  #: raises if a peer is lost; None: not watched yet
    group_ranks: tuple[int, ...] = ()  #: ranks in the larger group that these ranks belong to
    process_group: str = ""  #: name of the torch process group
    #: `HostWorkspace.exchange`, once the ranks share memory
    memory_exchange: Callable[[str, Any], list[Any]] | None = None

    @property
    def prefix(self) -> str:
        """Return the prefix of the group's keys in the store."""
        return f"tpkernels/{self.group}"

    def exchange(self, purpose: str, value: object) -> list[Any]:
        """Return the values of all ranks in rank order. Collective; waits at most ``timeout`` s.

        Args:
            purpose: name of the exchange, equal on all ranks.
            value: any value that JSON supports.

        Raises:
            CollectiveTimeoutError: a rank did not arrive in time.
            PeerLostError: a rank left the group.
            CollectiveMismatchError: a rank makes a different call (detected in memory only).
        """
        if self.memory_exchange is not None:
            return self.memory_exchange(purpose, value)
        attempt = _Attempt(self, purpose, value)
        try:
            return attempt.run()
        except BaseException as error:
            attempt.give_up(error)
            raise

    def group_rank(self, rank: int) -> int:
        """Return the rank to name in errors: in the larger group, if the ranks belong to one."""
        return self.group_ranks[rank] if self.group_ranks else rank

    def check_peers(self, purpose: str, *more_addresses: str) -> None:
        """Raise if a peer is lost or has sent a notice that it left."""
        if self.watch is not None:
            self.watch()
        for address in (self.exchange_state.address, *more_addresses):
            key = self._mailbox(address)
            if self.store.check([key]):
                note = json.loads(self.store.get(key))
                kind = CollectiveTimeoutError if note["late"] else PeerLostError
                raise kind(
                    f"{purpose} of group '{self.group}': rank {self.group_rank(self.rank)} waited "
                    f"for rank {note['rank']}, which failed: {note['why']}",
                    peer=note["peer"],
                )

    def notify_left(self, error: BaseException) -> None:
        """Notify all peers that this rank has left, whichever exchange or set-up they are in."""
        addresses = enumerate(self.exchange_state.addresses)
        self.notify((address for rank, address in addresses if rank != self.rank), error)

    def notify(self, addresses: Iterable[str], error: BaseException) -> None:
        """Notify the ranks at ``addresses`` that this rank has left with ``error``."""
        peer = error.peer if isinstance(error, TpkernelsError) else None
        note = {
            "rank": self.group_rank(self.rank),
            "why": describe_error(error),
            "late": isinstance(error, CollectiveTimeoutError),
            "peer": self.group_rank(self.rank) if peer is None else peer,
        }
        with contextlib.suppress(RuntimeError):  # the store no longer exists
            for address in addresses:
                self.store.set(self._mailbox(address), json.dumps(note))

    def _mailbox(self, address: str) -> str:
        return f"{self.prefix}/left/{address}"


class _Attempt:
    """The state machine of one rank in one exchange through the store."""

    def __init__(self, participant: Participant, purpose: str, value: object) -> None:
        self.participant, self.purpose, self.value = participant, purpose, value
        self.store, self.ranks = participant.store, range(participant.world)
        self.prefix = f"{participant.prefix}/{purpose}"
        self.keys = [f"{self.prefix}/{rank}" for rank in self.ranks]
        self.nonce = secrets.token_hex(8)
        self.number = participant.exchange_state.completed.get(purpose, 0)
        # Sets of messages that this rank has confirmed, by confirmation key.
        self.confirmed: dict[str, list[dict[str, Any]]] = {}

    def run(self) -> list[Any]:
        participant = self.participant
        message = {"nonce": self.nonce, "number": self.number, "value": self.value}
        message["address"] = participant.exchange_state.address
        deadline = time.monotonic() + participant.timeout
        self.store.set(self.keys[participant.rank], json.dumps(message))
        (pause, max_pause), next_check = _PAUSES, 0.0
        while True:
            now = time.monotonic()  # read before the checks, because they may be slow
            if not self.confirmed or now >= next_check:
                self._confirm()
            if (messages := self._all_confirmed()) is not None:
                break
            if now >= next_check:
                try:
                    participant.check_peers(self.purpose, self.nonce)
                except TpkernelsError:
                    # The peer may have returned from this exchange before it left.
                    if (messages := self._all_confirmed()) is not None:
                        break
                    raise
                next_check = now + _CHECK_INTERVAL
            if now >= deadline:
                raise self._timeout_error()
            time.sleep(pause)
            pause = min(2 * pause, max_pause)
        self._complete(messages)
        return [message["value"] for message in messages]

    def give_up(self, error: BaseException) -> None:
        """Notify the ranks that have arrived."""
        with contextlib.suppress(RuntimeError):  # the store no longer exists
            nonces = [message["nonce"] for message in map(self._get_message, self.ranks) if message]
            self.participant.notify((nonce for nonce in nonces if nonce != self.nonce), error)

    def _get_message(self, rank: int) -> dict[str, Any] | None:
        key = self.keys[rank]
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def _confirm(self) -> None:
        """Confirm the messages of all ranks if they are complete and belong to one exchange."""
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
        """Record the result, and delete earlier confirmations. All ranks have reached this
        exchange, so no rank reads them any more."""
        exchange_state, rank = self.participant.exchange_state, self.participant.rank
        exchange_state.addresses = [message["address"] for message in messages]
        exchange_state.completed[self.purpose] = self.number + 1
        stale, needed = exchange_state.confirmed.get(self.purpose, []), list[str]()
        for key, confirmed in self.confirmed.items():
            (needed if confirmed is messages else stale).append(f"{key}/{rank}")
        exchange_state.confirmed[self.purpose] = needed
        with contextlib.suppress(RuntimeError):  # the store does not support deletion
            for key in stale:
                self.store.delete_key(key)

    def _timeout_error(self) -> CollectiveTimeoutError:
        """Return the timeout error. It names the first missing rank."""
        participant, last = self.participant, next(reversed(self.confirmed), None)

        def has_arrived(rank: int) -> bool:
            message = self._get_message(rank)
            if message is None or message["number"] != self.number:
                return False
            return last is None or self.store.check([f"{last}/{rank}"])

        missing = participant.group_rank(
            next((rank for rank in self.ranks if not has_arrived(rank)), 0)
        )
        return CollectiveTimeoutError(
            f"{self.purpose} of group '{participant.group}': rank "
            f"{participant.group_rank(participant.rank)} waited {participant.timeout:g} s for rank "
            f"{missing}, which did not arrive. All ranks of the group must make their first call, "
            "call tpkernels.init or create a communicator together, within the timeout of the "
            "group.",
            peer=missing,
        )
