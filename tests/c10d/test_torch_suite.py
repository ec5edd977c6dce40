"""The distributed tests that torch ships, on the backend "tpkernels"."""

from __future__ import annotations

import pytest

from tests.c10d.torch_suite import Record, Run, find_differences, run_tests

# Every collective that torch tests on CPUs, point-to-point operations, subgroups, objects and DDP.
SUBSET = [
    "DistributedDataParallelCPU",
    "all_gather",
    "all_gather_coalesced_with_empty",
    "all_gather_complex",
    "all_gather_object_default_pg",
    "all_reduce_coalesced_max",
    "all_reduce_full_group_product",
    "all_reduce_sum_async",
    "all_reduce_sum_complex",
    "all_to_all",
    "all_to_all_single_equal_split",
    "all_to_all_single_unequal_split",
    "barrier_timeout_full_group",
    "batch_isend_irecv_gloo",
    "broadcast",
    "destroy_group",
    "gather",
    "get_future",
    "reduce_min",
    "scatter",
    "scatter_object_list",
    "send_recv",
    "sparse_all_reduce_sum",
]
# torch implements monitored_barrier for the backend named "gloo" only, and DDP logs "custom" as the
# name of every backend in C++ that is not part of torch.
UNSUPPORTED = {
    "test_ddp_logging_data_cpu",
    "test_monitored_barrier_failure_order",
    "test_monitored_barrier_gloo",
    "test_monitored_barrier_gloo_subgroup",
    "test_monitored_barrier_wait_all_ranks",
}


def find_failures(records: list[Record]) -> list[str]:
    return [
        f"{record['test']}: {record['reason']}\n{record['error']}"
        for record in records
        if record["outcome"] == "failed"
    ]


def test_a_test_per_collective() -> None:
    pattern = f"^test_({'|'.join(SUBSET)})$"
    records = list(run_tests(Run(backend="tpkernels", pattern=pattern)))
    assert not find_failures(records)
    assert [record["outcome"] for record in records] == ["passed"] * len(SUBSET)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("ranks", "start"), [(2, "fork"), (3, "fork"), (4, "fork"), (8, "fork"), (2, "spawn")]
)
def test_every_test_that_passes_on_gloo(ranks: int, start: str) -> None:
    gloo, ours = (
        list(run_tests(Run(backend=backend, ranks=ranks, start=start)))
        for backend in ("gloo", "tpkernels")
    )
    differences = find_differences(gloo, ours)
    assert [row for row in differences if row[1] == "passed" and row[0] not in UNSUPPORTED] == []
    assert not find_failures([record for record in ours if record["test"] not in UNSUPPORTED])
