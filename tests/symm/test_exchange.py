"""The exchange through a store: ranks that fail and try again see no stale messages."""

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

from tests.support.faults import together
from tests.support.tiers import sweep
from tpkernels.errors import CollectiveTimeoutError, PeerLostError, TpkernelsError
from tpkernels.symm.exchange import Participant, Presence

WORLD = 3
PATIENCE = 20.0  # when something other than the deadline ends an exchange
PROMPT = PATIENCE / 4


def members(store: dist.Store, world: int = WORLD, timeout: float = 5.0) -> list[Participant]:
    """The ranks of a group that has just been made."""
    return [Participant(store, "group", rank, world, timeout, Presence()) for rank in range(world)]


def exchange_on_all(ranks: list[Participant], word: object, purpose: str = "init") -> list[Any]:
    return together([lambda m=m: m.exchange(purpose, {"word": word}) for m in ranks])


def complete(word: object, world: int = WORLD) -> list[Any]:
    """The results of all ranks if each of them passed ``word``."""
    return [[{"word": word}] * world] * world


STORES = ["hash", "file"]


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Any) -> dist.Store:
    path = str(tmp_path / "store")
    return dist.FileStore(path, -1) if request.param == "file" else dist.HashStore()


def test_all_get_the_statements_of_all(store: dist.Store) -> None:
    ranks = members(store)
    for i in range(5):
        assert exchange_on_all(ranks, i) == complete(i)
        assert exchange_on_all(ranks, -i, "other purpose") == complete(-i)


def test_a_missing_rank_is_named() -> None:
    ranks = members(dist.HashStore(), timeout=0.2)
    for error in exchange_on_all([ranks[0], ranks[2]], 1):
        assert isinstance(error, CollectiveTimeoutError) and error.peer == 1, error
        assert "for rank 1, which did not arrive" in str(error)


def test_a_failed_exchange_leaves_nothing_that_counts(store: dist.Store) -> None:
    """To the same group; `random_lives` makes new ones."""
    ranks = members(store, timeout=0.2)
    for attempt in range(3):
        few = [m for m in ranks if m.rank != attempt % WORLD]
        assert all(isinstance(error, TpkernelsError) for error in exchange_on_all(few, attempt))
        patient = [replace(m, timeout=PATIENCE) for m in ranks]
        assert exchange_on_all(patient, f"again {attempt}") == complete(f"again {attempt}")


@pytest.mark.parametrize("store", STORES[:1], indirect=True)
def test_a_rank_may_be_ahead(store: dist.Store) -> None:
    """It may begin the next exchange before others have noticed that this one is over."""
    ranks, rounds = members(store), 15

    def exchange_often(participant: Participant) -> list[Any]:
        draw = random.Random(participant.rank)
        results = []
        for i in range(rounds):
            if draw.random() < 0.3:
                time.sleep(draw.random() * 0.02)
            results.append(participant.exchange("init", {"word": i}))
        return results

    want = [[{"word": i}] * WORLD for i in range(rounds)]
    for results in together([lambda m=m: exchange_often(m) for m in ranks]):
        assert results == want, results


def random_lives(seed: int, attempts: int) -> list[str]:
    """Makes new groups again and again on one store. In each attempt some ranks may be missing, be
    late or give up, and then all make a new group. Returns what is wrong with the results."""
    store, draw, wrong = dist.HashStore(), random.Random(seed), []
    for attempt in range(attempts):
        failing = draw.random() < 0.5
        ranks = members(store, timeout=0.15 if failing else PATIENCE)
        absent = draw.randrange(WORLD) if failing and draw.random() < 0.7 else None
        quitter = draw.randrange(WORLD) if failing and absent is None else None

        def take_part(participant: Participant, i: int, quits: bool, delay: float) -> Any:
            time.sleep(delay)
            until = time.monotonic() + delay

            def quit_now() -> None:
                if quits and time.monotonic() > until:
                    raise ArithmeticError("enough")

            return replace(participant, watch=quit_now).exchange("init", {"word": i})

        calls: list[Callable[[], Any]] = [
            partial(take_part, m, attempt, m.rank == quitter, draw.random() * 0.05)
            for m in ranks
            if m.rank != absent
        ]
        for result in together(calls):
            if isinstance(result, list) and result != [{"word": attempt}] * WORLD:
                wrong.append(f"attempt {attempt}: {result}")
            if not failing and not isinstance(result, list):
                wrong.append(f"attempt {attempt}: {result!r}")
    return wrong


@pytest.mark.parametrize(("seed", "attempts"), sweep([(0, 8), (0, 25), (1, 25), (2, 25)]))
def test_random_failures(seed: int, attempts: int) -> None:
    assert random_lives(seed, attempts) == []


def test_a_rank_that_is_held_up_past_the_deadline_sees_who_has_come() -> None:
    first, second = members(dist.HashStore(), 2)
    held_up = replace(first, timeout=0.2, watch=lambda: time.sleep(0.4))

    def later() -> list[Any]:
        time.sleep(0.1)
        return second.exchange("init", 1)

    assert together([lambda: held_up.exchange("init", 0), later]) == [[0, 1]] * 2


def test_a_rank_that_returned_and_then_left_has_taken_part() -> None:
    first, second = members(dist.HashStore(), 2, timeout=PATIENCE)
    first_waits, second_waits, left = (threading.Event() for _ in range(3))

    def until(reached: threading.Event, other: threading.Event) -> None:
        reached.set()
        assert other.wait(PATIENCE)

    def return_and_leave() -> list[Any]:
        here = replace(first, watch=lambda: until(first_waits, second_waits))
        values = here.exchange("init", 0)
        first.tell_left(OSError("a damaged disk"))
        left.set()
        return values

    def look_for_notices_late() -> list[Any]:
        assert first_waits.wait(PATIENCE)
        here = replace(second, watch=lambda: until(second_waits, left))
        return here.exchange("init", 1)

    assert together([return_and_leave, look_for_notices_late]) == [[0, 1]] * 2
    with pytest.raises(PeerLostError, match="a damaged disk"):
        second.look("the next")


def test_a_rank_that_gives_up_notifies_those_that_are_there() -> None:
    ranks = members(dist.HashStore(), timeout=PATIENCE)

    def give_up() -> None:
        if time.monotonic() > begin + 0.3:
            raise KeyboardInterrupt

    begin = time.monotonic()
    ranks[1] = replace(ranks[1], watch=give_up)
    results = exchange_on_all(ranks[:2], 1)
    assert isinstance(results[0], PeerLostError) and results[0].peer == 1, results
    assert "rank 1, which failed: KeyboardInterrupt" in str(results[0])
    assert time.monotonic() - begin < 0.3 + PROMPT


def test_a_rank_that_leaves_between_exchanges_notifies_all() -> None:
    ranks = members(dist.HashStore(), timeout=PATIENCE)
    assert exchange_on_all(ranks, 1) == complete(1)
    begin = time.monotonic()
    ranks[2].tell_left(ArithmeticError("no luck"))
    for error in exchange_on_all(ranks[:2], 2, "next"):
        assert isinstance(error, PeerLostError) and error.peer == 2, error
        assert "failed: ArithmeticError: no luck" in str(error)
    assert time.monotonic() - begin < PROMPT
    assert exchange_on_all(members(ranks[0].store), 3) == complete(3)  # a new group


def test_the_store_does_not_fill_up(store: dist.Store) -> None:
    ranks = members(store)
    exchange_on_all(ranks, 0)
    keys = store.num_keys()
    for i in range(20):
        exchange_on_all(ranks, i)
    assert store.num_keys() <= keys + WORLD
