"""Wrong input: one line with the values, on every rank, before anything is sent. The group goes
on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import faults, refusals
from tests.support.ranked import fresh_group, on_ranks
from tests.support.refusals import Refusal


def wrong_answer(refusal: Refusal, group: dist.ProcessGroup) -> str | None:
    """What is not as it should be, or None."""
    wanted = f"{refusal.error.__name__}: {refusal.pattern}"
    try:
        refusal.call(group)
    except Exception as error:
        message = str(error)
        if type(error) is not refusal.error or not re.search(refusal.pattern, message):
            return f"expected {wanted}\ngot {type(error).__name__}: {message}"
        if "\n" in message:
            return f"more than one line: {message}"
        return None
    return f"not refused; expected {wanted}"


def works(group: dist.ProcessGroup) -> bool:
    got = tpkernels.all_reduce(torch.ones(3), group)
    return torch.equal(got, torch.full((3,), float(group.size())))


@pytest.mark.parametrize(
    "table",
    [
        refusals.matmul_operands,
        refusals.packed_weights,
        refusals.local_products,
        refusals.epilogues,
        refusals.shards,
        refusals.collectives,
        refusals.arguments,
        refusals.group_arguments,
        refusals.options,
        refusals.normed_products,
        refusals.normed_sums,
        refusals.scaled_operands,
        refusals.scaled_scales,
        refusals.scaled_options,
        refusals.placements,
    ],
    ids=lambda table: table.__name__,
)
@on_ranks(2)
def test_refusals(table: Callable[[], Iterator[Refusal]]) -> None:
    """Each wrong call on every rank. Nothing is sent: the group counts no call."""
    with fresh_group() as group:
        workspace = faults.workspace_of(group)
        for refusal in table():
            epoch = workspace.epoch
            wrong = wrong_answer(refusal, group)
            assert wrong is None, wrong
            assert workspace.epoch == epoch, (
                f"something was sent before the error: {refusal.pattern}"
            )
        assert works(group), "the group does not work any more"


# Jobs, run in the ranks.


@on_ranks(2)
def test_on_an_unused_group() -> list[str]:
    """A first call that is wrong sets nothing up, and the next sets it up."""
    group = dist.new_group()
    assert group is not None
    tables = (refusals.matmul_operands, refusals.epilogues, refusals.shards)
    found = [wrong_answer(refusal, group) for table in tables for refusal in table()]
    if not works(group):
        found.append("the group does not work")
    dist.destroy_process_group(group)
    return [wrong for wrong in found if wrong is not None]


@on_ranks(2)
def test_on_one_rank_only() -> None:
    """The others do not notice: nothing was sent, and all meet in the next call."""
    with fresh_group() as group:
        for refusal in [*refusals.matmul_operands(), *refusals.shards()]:
            assert group.rank() != 0 or not (wrong := wrong_answer(refusal, group)), wrong
        assert works(group), "the group does not work any more"


@on_ranks(3)
def test_a_group_that_this_rank_is_not_in() -> list[str]:
    """Passed as torch returns it, and by the name that its ranks have for it."""
    rank, made = dist.get_rank(), [dist.new_group([0]), dist.new_group([1, 2])]
    mine, other = made if rank == 0 else made[::-1]
    names: list[Any] = [None] * 3
    dist.all_gather_object(names, mine.group_name)
    outside, name = f"rank {rank} of the world is not in this group", names[rank == 0]
    refused = [
        refusals.no(ValueError, outside, lambda _: tpkernels.init(other)),
        refusals.no(ValueError, outside, lambda _: tpkernels.all_reduce(torch.ones(3), other)),
        refusals.no(
            ValueError,
            f"no process group '{name}' on this rank; .* this rank is not in it",
            lambda _: tpkernels.all_reduce(torch.ones(3), name),
        ),
    ]
    return [wrong for one in refused if (wrong := wrong_answer(one, mine)) is not None]


@pytest.mark.parametrize("total,world", [(-1, 2), (4, 0), (4, -1)])
def test_impossible_splits(total: int, world: int) -> None:
    with pytest.raises(ValueError, match=f"cannot split {total} rows over {world} ranks"):
        tpkernels.shard_sizes(total, world)


@pytest.mark.parametrize("total,world", [(0, 3), (1, 4), (7, 3), (12, 4), (1023, 5)])
def test_splits_are_balanced(total: int, world: int) -> None:
    sizes = tpkernels.shard_sizes(total, world)
    assert (len(sizes), sum(sizes)) == (world, total)
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


def test_no_default_group() -> None:
    with pytest.raises(ValueError, match="no default process group: call"):
        tpkernels.init()
