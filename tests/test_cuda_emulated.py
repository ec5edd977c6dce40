"""The CUDA all-reduces between processes, run on the CPU (see emulated.py): the sums bit for bit
those of csrc/host, call after call, under delays, among calls of the Triton kernels."""

from __future__ import annotations

import itertools
from pathlib import Path

import emulated
import pytest
import torch
from cases import RanksFixture

from tpkernels import _C, cuda
from tpkernels.dtypes import CODES

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = (F32, F16, BF16)
COUNTS = (0, 1, 7, 63, 64, 65, 1000, 4096, 9001)
EXACT_WAYS = ("one_shot", "two_shot")


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> str:
    cache = pytestconfig.cache
    folder = tmp_path_factory.mktemp("emulated") if cache is None else cache.mkdir("emulated")
    return str(emulated.build_driver(Path(folder)))


def random(count: int, dtype: torch.dtype, seed: int, offset: int = 0) -> torch.Tensor:
    """Sizes so different that the order of a sum matters; ``offset`` elements off alignment."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count + offset, generator=generator, dtype=torch.float64)
    size = 10.0 ** torch.randint(-2, 3, (count + offset,), generator=generator)
    return (values * size).to(dtype)[offset:]


def host_sum(
    partials: list[torch.Tensor],
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """What csrc/host computes."""
    out = torch.empty(partials[0].shape, dtype=out_dtype)
    epilogue = _C.Epilogue(
        CODES[out_dtype],
        0 if bias is None else bias.data_ptr(),
        1 if bias is None else bias.numel(),
        0 if residual is None else residual.data_ptr(),
        0 if residual is None else CODES[residual.dtype],
    )
    wire, addresses = CODES[partials[0].dtype], [p.data_ptr() for p in partials]
    _C.sum_partials(out.data_ptr(), addresses, wire, 0, out.numel(), epilogue)
    return out


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32 if x.dtype == F32 else torch.int16)


def sums_job(driver: str, way: str) -> list[str]:
    """All dtypes, counts, places and epilogues; what was wrong."""
    space = emulated.space_of(driver)
    rank, world, wrong = space.rank, space.world, []
    cases = itertools.product(COUNTS, DTYPES, (F32, BF16), (None, F16), (0, 1))
    for number, (count, dtype, out_dtype, residual_dtype, offset) in enumerate(cases):
        xs = [random(count, dtype, 100 * number + r, offset) for r in range(world)]
        bias = random(count, F32, 7) if number % 2 else None
        residual = None if residual_dtype is None else random(count, residual_dtype, 9, offset)
        out = torch.empty(count + offset, dtype=out_dtype)[offset:]
        cuda.all_reduce(space, number + 1, xs[rank], out, bias, residual, way)
        want = host_sum(xs, out_dtype, bias, residual)
        if not torch.equal(bits(out), bits(want)):
            wrong.append(f"{count} {dtype} {out_dtype} {residual_dtype} {offset}")
    failure = space.failure()
    return wrong if failure is None else [*wrong, str(failure)]


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("way", EXACT_WAYS)
def test_sums_are_the_hosts_bit_for_bit(
    ranks: RanksFixture, driver: str, way: str, world: int
) -> None:
    assert ranks(world).run(sums_job, driver, way) == [[]] * world
