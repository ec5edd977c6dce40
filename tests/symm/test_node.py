"""Memory for the ranks of each host, in groups that span hosts: who has it, why not, how it grows.
The hosts share a machine: `on_hosts` keeps their ranks apart."""

from __future__ import annotations

import time
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support.cases import Case, RanksFixture
from tests.support.ranked import check_cases, fresh_group, messages_of, on_hosts, on_ranks
from tpkernels import groups
from tpkernels.errors import CollectiveTimeoutError
from tpkernels.symm import node as nodes
from tpkernels.symm import rendezvous
from tpkernels.symm.exchange import Participant


def refusal_job(hosts: str) -> list[str]:
    with on_hosts(hosts), fresh_group() as group:
        x = torch.ones(6, 4)
        messages = messages_of([lambda: tpkernels.all_gather(x, group, algorithm="hierarchical")])
        assert tpkernels.all_gather(x, group).shape[0] == 6 * len(hosts)  # the group goes on
        return messages


@pytest.mark.parametrize(
    ("hosts", "reason"),
    [
        ("010", "rank 2 shares a host with rank 0, but rank 1, which is between them, does not"),
        (
            "012",
            "needs a host with two or more ranks that share memory, but each host has one rank",
        ),
        ("00", "is for groups that span hosts, but all ranks of this group share memory"),
    ],
)
def test_hosts_that_do_not_fit(ranks: RanksFixture, hosts: str, reason: str) -> None:
    for (message,) in ranks(len(hosts)).run(refusal_job, hosts):
        assert message.startswith("NotImplementedError: algorithm 'hierarchical' of all_gather ")
        assert reason in message


@pytest.mark.parametrize("rank", [0, 3])
@on_ranks(4)
def test_a_host_without_memory_is_a_reason_on_all(rank: int) -> None:
    """One rank cannot make the memory of its host."""

    made = nodes.HostWorkspace
    fail = OSError("no descriptors are left") if dist.get_rank() == rank else made
    with mock.patch.object(nodes, "HostWorkspace", side_effect=fail):
        (message,) = refusal_job("0011")
        assert "needs shared memory on each host, but rank " in message
        assert f"rank {rank}" in message and "no descriptors are left" in message


@on_ranks(4)
def test_a_second_group_is_not_told_of_the_failure_of_an_earlier_one() -> None:
    """Why second groups have no nodes: one rank has no memory for the first of them."""
    with on_hosts("0011"), fresh_group() as group:
        whys = []
        for lacking in (True, False):
            why = "no memory here" if lacking and group.rank() == 2 else None
            with mock.patch.object(rendezvous, "short_of_memory", return_value=why):
                second = groups.get(group.group_name).make_second_group("tuning", "cpu")
            whys.append(second.why_no_node)
            second.close("the end of a test")
        first, then = whys
        assert first is not None and "no memory here" in first and then is None, (first, then)


@pytest.mark.filterwarnings("ignore:the workspace of group")
@pytest.mark.parametrize("lacking", [-1, 2])
@on_ranks(4)
def test_the_workspace_grows_on_all_hosts_or_is_not_used(lacking: int) -> None:
    """The buffers grow for a large call; on one host they cannot."""
    hosts = "0011"
    with on_hosts(hosts), fresh_group(8 << 20) as group:
        node = groups.get(group.group_name).node
        assert node is not None and node.hosts == (range(2), range(2, 4))
        before = node.channel.capacity
        if group.rank() == lacking:
            node.workspace._commit = lambda parts: "no memory here"  # type: ignore[method-assign]
        case = Case(op="matmul_reduce_scatter", shape=(1200, 2000), k=(8,), integers=True)
        case = replace(case, algorithm="hierarchical")
        wrong = check_cases([case, case], group)
        assert node.channel.capacity >= before
        usable = node.usable_bytes
        assert not wrong
        assert usable == (8 << 20 if lacking < 0 else 1 << 20)


@on_ranks(3)
def test_finalize_ends_the_node() -> None:
    """The memory of the host goes with the group; a peer that still waits for this rank is told."""
    with on_hosts("001"), fresh_group() as group:
        node = groups.get(group.group_name).node
        assert node is not None
        assert not check_cases(
            [Case(op="all_reduce", shape=(9, 5), algorithm="hierarchical")], group
        )
        dist.barrier()
        tpkernels.finalize()
        (message,) = messages_of([lambda: node.channel.begin(1, "another call")])
        assert "it left the call with tpkernels.finalize" in message


def test_errors_of_a_host_have_the_numbers_of_the_whole_group() -> None:
    local = Participant(dist.HashStore(), "group", 0, 2, 5.0, names=(4, 5))
    with (
        pytest.raises(CollectiveTimeoutError, match="rank 4 waited for rank 5, which") as error,
        rendezvous._Arena(local, 0, [], time.monotonic() - 1).bounded(1),
    ):
        pass
    assert error.value.peer == 5
