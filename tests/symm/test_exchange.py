"""The exchange through a store: ranks that fail and come again find no old words."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.tiers import covering, sweep
from tpkernels.errors import CollectiveTimeoutError, PeerLostError, TpkernelsError
from tpkernels.symm import exchange as exchange_module
from tpkernels.symm.exchange import Participant, Presence, exchange, tell_left

WORLD = 3
PATIENCE = 20.0  # where something else than the deadline ends an exchange
PROMPT = PATIENCE / 4


def members(store: dist.Store, world: int = WORLD, timeout: float = 5.0) -> list[Participant]:
    """The ranks of a group that has just been made."""
    return [Participant(store, "group", rank, world, timeout, Presence()) for rank in range(world)]


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """Each call in a thread of its own; its result, or its exception."""
    results: list[Any] = [None] * len(calls)

    def run(i: int) -> None:
        try:
            results[i] = calls[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def all_say(ranks: list[Participant], word: object, purpose: str = "init") -> list[Any]:
    return together([lambda m=m: exchange(m, purpose, {"word": word}) for m in ranks])


def heard(word: object, world: int = WORLD) -> list[Any]:
    return [[{"word": word}] * world] * world


STORES = ["hash", "file", "prefix of hash"]


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Any) -> dist.Store:
    if request.param == "file":
        return dist.FileStore(str(tmp_path / "store"), -1)
    return (
        dist.PrefixStore("x", dist.HashStore()) if "prefix" in request.param else dist.HashStore()
    )


def test_all_hear_all(store: dist.Store) -> None:
    ranks = members(store)
    for i in range(5):
        assert all_say(ranks, i) == heard(i)
        assert all_say(ranks, -i, "other purpose") == heard(-i)


@pytest.mark.parametrize("missing", range(WORLD))
def test_a_rank_that_does_not_come_is_named(missing: int) -> None:
    ranks = members(dist.HashStore(), timeout=0.2)
    del ranks[missing]
    for error in all_say(ranks, 1):
        assert isinstance(error, CollectiveTimeoutError) and error.peer == missing, error
        assert f"for rank {missing}, which did not come" in str(error)


@pytest.mark.parametrize(
    ("store", "group"), covering(product(STORES, ["new", "same"])), indirect=["store"]
)
def test_a_failed_exchange_leaves_nothing_that_counts(store: dist.Store, group: str) -> None:
    anew = group == "new"
    ranks = members(store, timeout=0.2)
    for attempt in range(4):
        few = [m for m in ranks if m.rank != attempt % WORLD]
        assert all(isinstance(error, TpkernelsError) for error in all_say(few, attempt))
        if anew:
            ranks = members(store, timeout=0.2)
        patient = [replace(m, timeout=PATIENCE) for m in ranks]
        assert all_say(patient, f"again {attempt}") == heard(f"again {attempt}")
        if anew:
            ranks = members(store, timeout=0.2)


@pytest.mark.parametrize("store", sweep(STORES), indirect=True)
def test_a_rank_may_be_ahead(store: dist.Store) -> None:
    """It begins the next exchange before others have noticed that this one is over."""
    ranks, rounds = members(store), 30

    def talk(participant: Participant) -> list[Any]:
        draw = random.Random(participant.rank)
        found = []
        for i in range(rounds):
            if draw.random() < 0.3:
                time.sleep(draw.random() * 0.02)
            found.append(exchange(participant, "init", {"word": i}))
        return found

    want = [[{"word": i}] * WORLD for i in range(rounds)]
    for found in together([lambda m=m: talk(m) for m in ranks]):
        assert found == want, found


def random_lives(seed: int, attempts: int) -> list[str]:
    """Groups that are made anew again and again on one store. In each attempt some ranks may be
    missing, late, or give up, after which all make a new group; what is wrong with the results."""
    store, draw, wrong = dist.HashStore(), random.Random(seed), []
    for attempt in range(attempts):
        failing = draw.random() < 0.5
        ranks = members(store, timeout=0.15 if failing else PATIENCE)
        absent = draw.randrange(WORLD) if failing and draw.random() < 0.7 else None
        quitter = draw.randrange(WORLD) if failing and absent is None else None
        delays = [draw.random() * 0.05 for _ in ranks]

        def say(
            participant: Participant,
            i: int = attempt,
            quits: int | None = quitter,
            waits: Any = delays,
        ) -> Any:
            time.sleep(waits[participant.rank])
            if participant.rank == quits:
                until = time.monotonic() + waits[participant.rank]

                def quit_now() -> None:
                    if time.monotonic() > until:
                        raise ArithmeticError("enough")

                participant = replace(participant, watch=quit_now)
            return exchange(participant, "init", {"word": i})

        calls = [lambda m=m, say=say: say(m) for m in ranks if m.rank != absent]
        for result in together(calls):
            if isinstance(result, list) and result != [{"word": attempt}] * WORLD:
                wrong.append(f"attempt {attempt}: {result}")
            if not failing and not isinstance(result, list):
                wrong.append(f"attempt {attempt}: {result!r}")
    return wrong


@pytest.mark.parametrize(("seed", "attempts"), sweep([(0, 8), (0, 25), (1, 25), (2, 25)]))
def test_random_failures(seed: int, attempts: int) -> None:
    assert random_lives(seed, attempts) == []


@pytest.mark.thorough
def test_words_that_nobody_confirms_are_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a rank that takes the words as it finds them takes old ones."""

    def found(attempt: Any) -> Any:
        return next(reversed(attempt.confirmed.values()), None)

    monkeypatch.setattr(exchange_module._Attempt, "_all_confirmed", found)
    assert any(random_lives(seed, 25) for seed in range(3))


def test_who_gives_up_tells_those_that_are_there() -> None:
    ranks = members(dist.HashStore(), timeout=PATIENCE)

    def give_up() -> None:
        if time.monotonic() > begin + 0.3:
            raise KeyboardInterrupt

    begin = time.monotonic()
    ranks[1] = replace(ranks[1], watch=give_up)
    told = all_say(ranks[:2], 1)
    assert isinstance(told[0], PeerLostError) and told[0].peer == 1, told
    assert "rank 1, which left with KeyboardInterrupt" in str(told[0])
    assert time.monotonic() - begin < 0.3 + PROMPT


def test_who_leaves_between_exchanges_tells_all() -> None:
    ranks = members(dist.HashStore(), timeout=PATIENCE)
    assert all_say(ranks, 1) == heard(1)
    begin = time.monotonic()
    tell_left(ranks[2], ArithmeticError("no luck"))
    for error in all_say(ranks[:2], 2, "next"):
        assert isinstance(error, PeerLostError) and error.peer == 2, error
        assert "left with ArithmeticError: no luck" in str(error)
    assert time.monotonic() - begin < PROMPT
    assert all_say(members(ranks[0].store), 3) == heard(3)  # a new group


def test_the_store_does_not_fill_up(store: dist.Store) -> None:
    ranks = members(store)
    all_say(ranks, 0)
    keys = store.num_keys()
    for i in range(20):
        all_say(ranks, i)
    assert store.num_keys() <= keys + WORLD
