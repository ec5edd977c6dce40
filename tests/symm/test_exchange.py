"""The message exchange through a store: ranks that fail and retry read no stale messages."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.faults import run_concurrently
from tests.support.tiers import sweep
from tpkernels.errors import CollectiveTimeoutError, PeerLostError, TpkernelsError
from tpkernels.symm.exchange import ExchangeState, Participant

WORLD = 3
PATIENCE = 20.0  # timeout in seconds if something else must end the exchange
PROMPT = PATIENCE / 4


def members(store: dist.Store, world: int = WORLD, timeout: float = 5.0) -> list[Participant]:
    """Return the participants of a new group."""
    return [
        Participant(store, "group", rank, world, timeout, ExchangeState()) for rank in range(world)
    ]


def exchange_concurrently(
    ranks: list[Participant], message: object, purpose: str = "init"
) -> list[Any]:
    return run_concurrently([lambda m=m: m.exchange(purpose, {"word": message}) for m in ranks])


def complete(message: object, world: int = WORLD) -> list[Any]:
    """Return the results of all ranks if each of them passed ``message``."""
    return [[{"word": message}] * world] * world


STORES = ["hash", "file"]


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Any) -> dist.Store:
    path = str(tmp_path / "store")
    return dist.FileStore(path, -1) if request.param == "file" else dist.HashStore()


def test_all_ranks_receive_all_messages(store: dist.Store) -> None:
    ranks = members(store)
    for i in range(5):
        assert exchange_concurrently(ranks, i) == complete(i)
        assert exchange_concurrently(ranks, -i, "other purpose") == complete(-i)


def test_a_missing_rank_is_named() -> None:
    ranks = members(dist.HashStore(), timeout=0.2)
    for error in exchange_concurrently([ranks[0], ranks[2]], 1):
        assert isinstance(error, CollectiveTimeoutError) and error.peer == 1, error
        assert "for rank 1, which did not arrive" in str(error)


def test_a_failed_exchange_leaves_no_stale_messages(store: dist.Store) -> None:
    """The group retries after a failure; `run_random_failures` creates new groups instead."""
    ranks = members(store, timeout=0.2)
    for attempt in range(3):
        few = [m for m in ranks if m.rank != attempt % WORLD]
        assert all(
            isinstance(error, TpkernelsError) for error in exchange_concurrently(few, attempt)
        )
        patient = [replace(m, timeout=PATIENCE) for m in ranks]
        assert exchange_concurrently(patient, f"again {attempt}") == complete(f"again {attempt}")


@pytest.mark.parametrize("store", STORES[:1], indirect=True)
def test_a_rank_may_be_ahead(store: dist.Store) -> None:
    """A rank may start the next exchange before its peers notice the end of the current
    exchange."""
    ranks, rounds = members(store), 15

    def exchange_often(participant: Participant) -> list[Any]:
        rng = random.Random(participant.rank)
        results = []
        for i in range(rounds):
            if rng.random() < 0.3:
                time.sleep(rng.random() * 0.02)
            results.append(participant.exchange("init", {"word": i}))
        return results

    expected = [[{"word": i}] * WORLD for i in range(rounds)]
    for results in run_concurrently([lambda m=m: exchange_often(m) for m in ranks]):
        assert results == expected, results


def run_random_failures(seed: int, attempts: int) -> list[str]:
    """Create new groups repeatedly on one store. Return the wrong results.

    In each attempt some ranks may be missing, be late or give up. Then all ranks create a new
    group.
    """
    store, rng, wrong = dist.HashStore(), random.Random(seed), []
    for attempt in range(attempts):
        failing = rng.random() < 0.5
        ranks = members(store, timeout=0.15 if failing else PATIENCE)
        absent = rng.randrange(WORLD) if failing and rng.random() < 0.7 else None
        quitter = rng.randrange(WORLD) if failing and absent is None else None

        def exchange_late(participant: Participant, i: int, quits: bool, delay: float) -> Any:
            time.sleep(delay)
            until = time.monotonic() + delay

            def quit_now() -> None:
                if quits and time.monotonic() > until:
                    raise ArithmeticError("enough")

            return replace(participant, watch=quit_now).exchange("init", {"word": i})

        calls: list[Callable[[], Any]] = [
            partial(exchange_late, m, attempt, m.rank == quitter, rng.random() * 0.05)
            for m in ranks
            if m.rank != absent
        ]
        for result in run_concurrently(calls):
            if isinstance(result, list) and result != [{"word": attempt}] * WORLD:
                wrong.append(f"attempt {attempt}: {result}")
            if not failing and not isinstance(result, list):
                wrong.append(f"attempt {attempt}: {result!r}")
    return wrong


@pytest.mark.parametrize(("seed", "attempts"), sweep([(0, 8), (0, 25), (1, 25), (2, 25)]))
def test_random_failures(seed: int, attempts: int) -> None:
    assert run_random_failures(seed, attempts) == []


def test_a_rank_delayed_past_the_deadline_receives_arrived_messages() -> None:
    first, second = members(dist.HashStore(), 2)
    delayed = replace(first, timeout=0.2, watch=lambda: time.sleep(0.4))

    def later() -> list[Any]:
        time.sleep(0.1)
        return second.exchange("init", 1)

    assert run_concurrently([lambda: delayed.exchange("init", 0), later]) == [[0, 1]] * 2


def test_a_rank_that_leaves_after_its_return_counts_as_arrived() -> None:
    first, second = members(dist.HashStore(), 2, timeout=PATIENCE)
    first_waits, second_waits, left = (threading.Event() for _ in range(3))

    def until(reached: threading.Event, awaited: threading.Event) -> None:
        reached.set()
        assert awaited.wait(PATIENCE)

    def return_and_leave() -> list[Any]:
        participant = replace(first, watch=lambda: until(first_waits, second_waits))
        values = participant.exchange("init", 0)
        first.notify_left(OSError("a damaged disk"))
        left.set()
        return values

    def check_late() -> list[Any]:
        assert first_waits.wait(PATIENCE)
        participant = replace(second, watch=lambda: until(second_waits, left))
        return participant.exchange("init", 1)

    assert run_concurrently([return_and_leave, check_late]) == [[0, 1]] * 2
    with pytest.raises(PeerLostError, match="a damaged disk"):
        second.check_peers("the next")


def test_a_rank_that_gives_up_notifies_the_ranks_present() -> None:
    ranks = members(dist.HashStore(), timeout=PATIENCE)

    def give_up() -> None:
        if time.monotonic() > begin + 0.3:
            raise KeyboardInterrupt

    begin = time.monotonic()
    ranks[1] = replace(ranks[1], watch=give_up)
    results = exchange_concurrently(ranks[:2], 1)
    assert isinstance(results[0], PeerLostError) and results[0].peer == 1, results
    assert "rank 1, which failed: KeyboardInterrupt" in str(results[0])
    assert time.monotonic() - begin < 0.3 + PROMPT


def test_a_rank_that_leaves_between_exchanges_notifies_all() -> None:
    ranks = members(dist.HashStore(), timeout=PATIENCE)
    assert exchange_concurrently(ranks, 1) == complete(1)
    begin = time.monotonic()
    ranks[2].notify_left(ArithmeticError("no luck"))
    for error in exchange_concurrently(ranks[:2], 2, "next"):
        assert isinstance(error, PeerLostError) and error.peer == 2, error
        assert "failed: ArithmeticError: no luck" in str(error)
    assert time.monotonic() - begin < PROMPT
    # A new group is not affected.
    assert exchange_concurrently(members(ranks[0].store), 3) == complete(3)


def test_the_store_does_not_fill_up(store: dist.Store) -> None:
    ranks = members(store)
    exchange_concurrently(ranks, 0)
    keys = store.num_keys()
    for i in range(20):
        exchange_concurrently(ranks, i)
    assert store.num_keys() <= keys + WORLD
