"""Reports of differences: values computed by hand, their text, and the location of a wrong
shard."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import ranked
from tpkernels.numerics import Report, compare
from tpkernels.ops.reference import Expected

INF, NAN = math.inf, math.nan
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def failing(report: Report) -> list[tuple[int, int]]:
    """Return the grid row and column of each region with errors."""
    return [
        (i, j)
        for i, line in enumerate(report.regions)
        for j, region in enumerate(line)
        if region.fraction
    ]


def test_by_hand() -> None:
    ref = torch.tensor([[0.0, 10.0, 100.0], [-4.0, 2.0, 1.0]])
    out = torch.tensor([[0.5, 12.0, 100.0], [-4.0, 2.0, 5.0]])
    report = compare(ref, out, atol=0.5, rtol=0.125, region_grid=(2, 1))
    assert not report.passed
    assert (report.max, report.mean, report.median) == (4.0, 6.5 / 6, 0.0)
    assert (report.above, report.not_finite) == (2, 0)  # 0.5 is at its tolerance, not above it
    assert report.fraction == 2 / 6
    assert report.worst is not None
    assert (report.worst.index, report.worst.reference, report.worst.result) == ((1, 2), 1.0, 5.0)
    above, below = ((r.rows, r.columns, r.fraction, r.largest) for (r,) in report.regions)
    assert above == ((0, 1), (0, 3), 1 / 3, 2.0)
    assert below == ((1, 2), (0, 3), 1 / 3, 4.0)
    assert str(report).splitlines() == [
        "FAIL: [2, 3], float32 against float32, atol 0.5, rtol 0.125",
        "difference: max 4, mean 1.08, median 0",
        "above tolerance: 2 of 6 elements (33.3%)",
        "worst: [1, 2] is 5, expected 1",
        "regions: fraction above tolerance, largest difference",
        "                     0:3",
        "  0  0:1  !33.3% 2.0e+00",
        "  1  1:2  !33.3% 4.0e+00",
    ]


def test_the_worst_element_exceeds_its_tolerance_most() -> None:
    ref, out = torch.tensor([1000.0, 1.0]), torch.tensor([1009.0, 2.0])
    report = compare(ref, out, atol=0.0, rtol=0.01)
    assert report.max == 9.0
    assert report.worst is not None
    assert report.worst.index == (1,)  # element 0 differs more, but within its tolerance


@pytest.mark.parametrize("dtype", DTYPES)
def test_regions_of_random_tensors(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    ref = torch.randn(3, 11, 13, dtype=torch.float64)
    out = (ref + 0.1 * torch.randn(ref.shape)).to(dtype)
    report = compare(ref, out, 0.05, 0.1, ([10, 0, 23], 3))
    difference = (out.double() - ref).abs()
    excess = difference - (0.05 + 0.1 * ref.abs())
    assert report.max == float(difference.max())
    assert report.mean == pytest.approx(float(difference.mean()), rel=1e-13)
    assert report.median == float(difference.median())
    assert report.above == int((excess > 0).sum())
    index = tuple(int(i) for i in torch.unravel_index(excess.argmax(), ref.shape))
    assert report.worst is not None
    assert report.worst.index == index
    assert (report.worst.reference, report.worst.result) == (ref[index].item(), out[index].item())
    assert (report.reference_dtype, report.result_dtype) == (torch.float64, dtype)
    rows, columns = zip(*((line[0].rows, line[0].columns) for line in report.regions), strict=True)
    assert rows == ((0, 10), (10, 10), (10, 33)) and set(columns) == {(0, 5)}
    for line in report.regions:
        assert [region.columns for region in line] == [(0, 5), (5, 9), (9, 13)]
        for region in line:
            region_slice = slice(*region.rows), slice(*region.columns)
            if region.empty:
                assert (region.fraction, region.largest) == (0.0, 0.0)
                continue
            wrong = (excess.view(33, 13)[region_slice] > 0).double()
            assert region.fraction == pytest.approx(float(wrong.mean()), rel=1e-13)
            assert region.largest == float(difference.view(33, 13)[region_slice].max())


@pytest.mark.parametrize("dim", [0, 1])
def test_a_wrong_shard_is_located(dim: int) -> None:
    """Only the region of the wrong rank fails."""
    wrong = 2
    sizes = [40, 0, 17, 23]
    torch.manual_seed(2)
    full = torch.randn((80, 48) if dim == 0 else (48, 80))
    shards = [shard.clone() for shard in full.split(sizes, dim)]
    shards[wrong] = shards[wrong].roll(1, dim)
    out = torch.cat(shards, dim).bfloat16()
    grid = (sizes, 2) if dim == 0 else (2, sizes)
    report = compare(full, out, 1e-2, 1e-2, grid)
    expected = [(wrong, 0), (wrong, 1)] if dim == 0 else [(0, wrong), (1, wrong)]
    assert failing(report) == expected
    lines = str(report).splitlines()[-len(report.regions) :]
    assert [i for i, line in enumerate(lines) if "!" in line] == sorted({i for i, _ in expected})


NOT_FINITE = [(NAN, NAN, True), (INF, INF, True), (INF, -INF, False), (INF, 1.0, False)]
NOT_FINITE += [(1.0, NAN, False), (NAN, 1.0, False), (1.0, -INF, False), (NAN, INF, False)]


@pytest.mark.parametrize(("ref", "out", "right"), [*NOT_FINITE, (INF, NAN, False)])
@pytest.mark.parametrize("rtol", [0.0, 0.5])  # relative to infinity, the tolerance is infinite
def test_non_finite_elements(ref: float, out: float, right: bool, rtol: float) -> None:
    reference, result = torch.zeros(3, 4), torch.zeros(3, 4)
    reference[1, 2], result[1, 2], result[0, 0] = ref, out, 0.25
    report = compare(reference, result, 0.5, rtol, (3, 4))
    assert report.passed == right
    assert (report.above, report.not_finite) == ((0, 0) if right else (1, 1))
    assert failing(report) == ([] if right else [(1, 2)])
    assert report.max == (0.25 if right else INF)
    assert report.mean == 0.25 / (12 if right else 11)
    assert report.median == 0.0
    assert report.worst is not None
    assert report.worst.index == ((0, 0) if right else (1, 2))
    assert ("NaN or infinite" in str(report)) != right


def test_no_finite_elements() -> None:
    report = compare(torch.zeros(2), torch.full((2,), NAN), 1, 1)
    assert (report.max, report.mean, report.median, report.fraction) == (INF, INF, INF, 1.0)


def test_a_tolerance_for_each_element() -> None:
    atol = torch.tensor([[1.0, 0.0], [0.0, 3.0]])
    report = compare(torch.zeros(2, 2), torch.full((2, 2), 2.0), atol, 0.0, (2, 2))
    assert failing(report) == [(0, 0), (0, 1), (1, 0)]
    assert "atol per element" in str(report)
    with pytest.raises(ValueError, match=r"atol has shape \[2\].* \[2, 2\]"):
        compare(atol, atol, torch.zeros(2), 0.0)
    for bad in (NAN, -1.0, INF):
        with pytest.raises(ValueError, match=f"atol is {bad}"):
            compare(atol, atol, torch.tensor([[0.0, bad], [0.0, 0.0]]), 0.0)


@pytest.mark.parametrize("shape", [(), (7,), (1, 1), (0,), (0, 3), (3, 0), (2, 3, 4, 5)])
def test_any_shape(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    report = compare(x, x, 0, 0)
    assert report.passed and report.shape == shape
    assert (report.max, report.mean, report.median, report.fraction) == (0, 0, 0, 0)
    assert (report.worst is None) == (x.numel() == 0)
    assert str(report).startswith("PASS")
    if x.numel():
        wrong = compare(x, x + 1, 0, 0)
        assert wrong.worst is not None
        assert wrong.worst.index == (0,) * len(shape)
        assert wrong.fraction == 1.0


def test_any_layout_and_gradient() -> None:
    x = torch.randn(6, 10, requires_grad=True)
    y = x.detach().t().contiguous().t()
    with warnings.catch_warnings():
        # torch warns about numbers read from a tensor with gradients
        warnings.simplefilter("error")
        assert compare(x, y, 0, 0).passed
    y[4, 3] += 1
    assert failing(compare(x, y, 0, 0, (6, 10))) == [(4, 3)]
    assert compare(torch.tensor([1, 2]), torch.tensor([True, True]), 0, 0).above == 1


@pytest.fixture
def single_rank() -> Iterator[None]:
    """Make this process the only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_dtensor_is_gathered(single_rank: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    x = torch.randn(4, 6)
    sharded = DTensor.from_local(x.clone(), init_device_mesh("cpu", (1,)), [Shard(0)])
    assert compare(x, sharded, 0, 0).passed
    x[2] += 1
    assert failing(compare(sharded, x, 0, 0, (4, 1))) == [(2, 0)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out": torch.ones(4, 5)}, r"ref has shape \[4, 6\] but out has shape \[4, 5\]"),
        ({"out": torch.ones(24)}, r"ref has shape \[4, 6\] but out has shape \[24\]"),
        ({"atol": -1e-3}, "atol is -0.001"),
        ({"atol": NAN}, "atol is nan"),
        ({"rtol": -2}, "rtol is -2"),
        ({"rtol": INF}, "rtol is inf"),
        (
            {"region_grid": (5, 1)},
            "splits the 4 rows of the matrix into 5 regions; the number of regions must be 1 to 4",
        ),
        ({"region_grid": (1, 7)}, "splits the 6 columns of the matrix into 7 regions"),
        ({"region_grid": (0, 1)}, "splits the 4 rows of the matrix into 0 regions"),
        ({"region_grid": ([2, 1], 1)}, r"sizes \[2, 1\], which add up to 3; .* 4 rows"),
        ({"region_grid": (1, [7, -1])}, r"sizes \[7, -1\], which add up to 6"),
    ],
)
def test_refusals(change: dict[str, Any], message: str) -> None:
    right = {"ref": torch.ones(4, 6), "out": torch.ones(4, 6), "atol": 0.0, "rtol": 0.0}
    with pytest.raises(ValueError, match=message):
        compare(**(right | change))


def test_only_real_tensors_are_supported() -> None:
    x = torch.ones(2)
    with pytest.raises(TypeError, match="out must be a tensor, not list"):
        compare(x, [1.0, 1.0], 0, 0)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="ref has dtype complex64"):
        compare(x.cfloat(), x, 0, 0)


def test_percentages_do_not_round_to_all_or_nothing() -> None:
    x = torch.zeros(100_000)
    single, all_but_one = x.clone(), torch.ones_like(x)
    single[7], all_but_one[7] = 1, 0
    assert "1 of 100000 elements (0.1%)" in str(compare(x, single, 0, 0))
    assert "99999 of 100000 elements (99.9%)" in str(compare(x, all_but_one, 0, 0))


def test_errors_of_an_op_are_reported_by_region() -> None:
    exact, bound = torch.zeros(4, 4, dtype=torch.float64), torch.full((4, 4), 0.5)
    expected = Expected(exact, bound, torch.float32)
    result = torch.full((4, 4), 0.5)
    assert ranked.find_difference(result, expected) is None
    for wrong in (0.75, math.nan):
        result[2, 1] = wrong
        message = ranked.find_difference(result, expected)
        assert message is not None
        assert f"worst: [2, 1] is {wrong}, expected 0" in message
        assert message.count("!") == 1


@pytest.mark.gpu
def test_cuda_tensors() -> None:
    ref = torch.randn(100, 60, dtype=torch.float64)
    out = ref.bfloat16().cuda()
    out[40:50, 30:] = NAN
    report = compare(ref, out, 1e-2, 1e-2, (10, 2))
    assert failing(report) == [(4, 1)]
    assert report == compare(ref, out.cpu(), 1e-2, 1e-2, (10, 2))
