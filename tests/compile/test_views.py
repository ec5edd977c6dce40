"""Views of the same bytes as other numbers: collectives and matmuls that must not become one op."""

from __future__ import annotations

from typing import Any

import torch

from tests.compile.test_scaled import AG, by_row, bytes_gathered, product
from tests.support.cases import RanksFixture
from tests.support.ranked import fresh_group, report
from tests.support.scaled import BF16, E4M3, F32
from tests.support.traced import Graph, check, gather, reduce, rewritten, scatter

LEFT_ALONE = {
    "a gathered tensor": Graph(
        lambda x, w, *g: gather(x.half(), 0, *g).view(BF16) @ w.to(BF16), ((4, 6), (6, 5)),
        reasons=("aten.mm reads its bytes as bfloat16",),
    ),
    "a product": Graph(
        lambda x, w, *g: scatter((x.half() @ w.half()).view(BF16), 0, *g), (("3W", 6), (6, 5)),
        reasons=("its input has the bytes of aten.mm as bfloat16",),
    ),
    "an addend": Graph(
        lambda x, w, _, g: reduce(x.to(BF16) @ w.to(BF16) + (x.half() @ w.half()).view(BF16), g),
        ((4, 6), (6, 5)),
        reasons=("its input has the bytes of aten.mm as bfloat16",),
    ),
}  # fmt: skip


def left_job() -> list[str]:
    with fresh_group() as group:
        return [
            f"{name}: {failure}"
            for name, graph in LEFT_ALONE.items()
            for failure in check(graph, group)
        ]


def test_bytes_as_another_dtype(ranks: RanksFixture) -> None:
    report(failure for rank in ranks(2).run(left_job, timeout=100) for failure in rank)


def _scales_as_integers(x: Any, w: Any, *where: Any) -> Any:
    """The scales of the rows travel as int32."""
    rows, scale = by_row(x)
    scale = gather(scale.view(torch.int32), 0, *where).view(F32)
    one = torch.ones(1, w.shape[0])
    return product(bytes_gathered(rows, 0, *where), w.to(E4M3), scale, one)


def integers_job() -> list[str]:
    """The gather of scales that travel as integers stays."""
    failures = []
    with fresh_group() as group, torch.no_grad():
        where = group.size(), group.group_name
        x, w = torch.randint(-1, 2, (4, 32)).float(), torch.randint(-1, 2, (5, 32)).float()
        traced, found = rewritten(lambda *given: _scales_as_integers(*given, *where), [x, w])
        if found.counts != {AG: 1} or len(found.left_alone) != 1:
            failures.append(str(found))
        got, want = traced(x, w), _scales_as_integers(x, w, *where)
        if not torch.equal(got, want):
            failures.append(f"{got}, not {want}")
    return failures


def test_scales_that_travel_as_integers(ranks: RanksFixture) -> None:
    report(failure for rank in ranks(2).run(integers_job, timeout=60) for failure in rank)
