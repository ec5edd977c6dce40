"""Shared memory per host in groups that span hosts: support, reasons against it, and growth.
`on_hosts` simulates the hosts on one machine."""

from __future__ import annotations

import time
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support.cases import Case, RanksFixture
from tests.support.ranked import check_cases, collect_messages, fresh_group, on_hosts, on_ranks
from tpkernels import groups
from tpkernels.errors import CollectiveTimeoutError
from tpkernels.symm import node as nodes
from tpkernels.symm import rendezvous
from tpkernels.symm.exchange import Participant


def refusal_job(hosts: str) -> list[str]:
    with on_hosts(hosts), fresh_group() as group:
        x = torch.ones(6, 4)
        messages = collect_messages(
            [lambda: tpkernels.all_gather(x, group, algorithm="hierarchical")]
        )
        assert tpkernels.all_gather(x, group).shape[0] == 6 * len(hosts)  # the group remains usable
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
def test_unsupported_host_layouts(ranks: RanksFixture, hosts: str, reason: str) -> None:
    for (message,) in ranks(len(hosts)).run(refusal_job, hosts):
        assert message.startswith("NotImplementedError: algorithm 'hierarchical' of all_gather ")
        assert reason in message


@pytest.mark.parametrize("rank", [0, 3])
@on_ranks(4)
def test_a_host_without_memory_is_a_reason_on_all(rank: int) -> None:
    """One rank cannot create the shared memory of its host. All ranks report the reason."""

    workspace_class = nodes.HostWorkspace
    effect = OSError("no descriptors are left") if dist.get_rank() == rank else workspace_class
    with mock.patch.object(nodes, "HostWorkspace", side_effect=effect):
        (message,) = refusal_job("0011")
        assert "needs shared memory on each host, but rank " in message
        assert f"rank {rank}" in message and "no descriptors are left" in message


@on_ranks(4)
def test_a_second_group_does_not_report_an_earlier_failure() -> None:
    """One rank lacks memory for the first of two groups. Only the first group reports a reason."""
    with on_hosts("0011"), fresh_group() as group:
        reasons = []
        for lacking in (True, False):
            shortage = "no memory here" if lacking and group.rank() == 2 else None
            with mock.patch.object(rendezvous, "find_memory_shortage", return_value=shortage):
                second = groups.get(group.group_name).make_second_group("tuning", "cpu")
            reasons.append(second.no_node_reason)
            second.close("the end of a test")
        first, then = reasons
        assert first is not None and "no memory here" in first and then is None, (first, then)


@pytest.mark.filterwarnings("ignore:the workspace of group")
@pytest.mark.parametrize("lacking", [-1, 2])
@on_ranks(4)
def test_the_workspace_grows_on_all_hosts_or_on_none(lacking: int) -> None:
    """The buffers grow for a large call, unless one host cannot grow."""
    hosts = "0011"
    with on_hosts(hosts), fresh_group(8 << 20) as group:
        node = groups.get(group.group_name).node
        assert node is not None and node.hosts == (range(2), range(2, 4))
        before = node.channel.capacity
        if group.rank() == lacking:
            node.workspace._commit = lambda ranges: "no memory here"  # type: ignore[method-assign]
        case = Case(op="matmul_reduce_scatter", shape=(1200, 2000), k=(8,), integers=True)
        case = replace(case, algorithm="hierarchical")
        wrong = check_cases([case, case], group)
        assert node.channel.capacity >= before
        usable = node.usable_bytes
        assert not wrong
        assert usable == (8 << 20 if lacking < 0 else 1 << 20)


@on_ranks(3)
def test_finalize_ends_the_node() -> None:
    """finalize closes the shared memory of the host. Peers that still wait for this rank raise."""
    with on_hosts("001"), fresh_group() as group:
        node = groups.get(group.group_name).node
        assert node is not None
        assert not check_cases(
            [Case(op="all_reduce", shape=(9, 5), algorithm="hierarchical")], group
        )
        dist.barrier()
        tpkernels.finalize()
        (message,) = collect_messages([lambda: node.channel.begin(1, "another call")])
        assert "it left the call with tpkernels.finalize" in message


def test_errors_of_a_host_use_the_ranks_of_the_group() -> None:
    local = Participant(dist.HashStore(), "group", 0, 2, 5.0, group_ranks=(4, 5))
    with (
        pytest.raises(CollectiveTimeoutError, match="rank 4 waited for rank 5, which") as error,
        rendezvous._ArenaSetup(local, 0, [], time.monotonic() - 1).bounded(1),
    ):
        pass
    assert error.value.peer == 5
