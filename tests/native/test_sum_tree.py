"""Sums over K by a tree, with every vector unit: any split of K over ranks gives the same bits as
the sum on one rank, and an independent implementation of the tree gives the same bits."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence

import pytest
import torch

from tpkernels import _C
from tpkernels.local.packed import pack_shard, scale_group

BF16, F16, F32, INT8 = torch.bfloat16, torch.float16, torch.float32, torch.int8
# (K, unit, N): full panels; an odd K; a short last unit; a unit that is no multiple of a tile;
# units of a few elements; a head of 256.
SHAPES = [(768, 64, 130), (577, 64, 64), (1000, 64, 70), (240, 80, 33), (96, 16, 9)]
SHAPES += [(768, 256, 8)]
FORMATS = [(F32, None), (BF16, None), (F16, None), (BF16, INT8), (F32, INT8)]


@pytest.fixture(params=[*_C.host.vector_units(), "tiles"], autouse=True)
def unit(request: pytest.FixtureRequest) -> Iterator[str]:
    """Select a vector unit and return its name. "tiles" emulates AMX."""
    previous_unit = _C.host.vector_unit()
    _C.host.use_vector_unit(request.param)
    yield request.param
    _C.host.use_vector_unit(previous_unit)


def unit_size(k: int, size: int, packed_dtype: torch.dtype | None) -> int:
    """Return a multiple of ``size`` that consists of complete int8 groups."""
    return math.lcm(size, scale_group(k, "w")) if packed_dtype == INT8 else size


def local_nodes(
    x: torch.Tensor,
    w: torch.Tensor,
    packed_dtype: torch.dtype | None,
    sizes: Sequence[int],
    size: int,
    rank: int,
) -> torch.Tensor:
    """Return the nodes that a rank sends, for the full operands x [M, K] and w [K, N]."""
    begin, end = sum(sizes[:rank]), sum(sizes[: rank + 1])
    tree = _C.calls.SumTree(sizes, size, rank)
    packed = pack_shard(w[begin:end], packed_dtype, len(w)) if begin < end else w
    return _C.calls.multiply_nodes(x[:, begin:end].contiguous(), packed, tree)


def complete_subtrees(begin: int, end: int) -> list[tuple[int, int]]:
    """Return (level, index) of the largest nodes that units [begin, end) consist of."""
    nodes = []
    while begin < end:
        level = 0
        while begin % (2 << level) == 0 and begin + (2 << level) <= end:
            level += 1
        nodes.append((level, begin >> level))
        begin += 1 << level
    return nodes


def add_by_tree(nodes: dict[tuple[int, int], torch.Tensor]) -> torch.Tensor:
    """Add nodes by (level, index): first all siblings, then the rest from right to left."""
    nodes = dict(nodes)
    for level in itertools.count():
        if all(node_level < level for node_level, _ in nodes):
            break
        for index in sorted(i for node_level, i in nodes if node_level == level):
            if index % 2 == 0 and (level, index + 1) in nodes:
                parent = nodes.pop((level, index)) + nodes.pop((level, index + 1))
                nodes[level + 1, index // 2] = parent
    left_to_right = [nodes[key] for key in sorted(nodes, key=lambda node: node[1] << node[0])]
    total = left_to_right.pop()
    while left_to_right:
        total = left_to_right.pop() + total
    return total


def operands(k: int, n: int, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(k + rows)
    return torch.randn(rows, k).to(dtype), torch.randn(k, n).to(dtype)


@pytest.mark.parametrize(("dtype", "packed_dtype"), FORMATS)
@pytest.mark.parametrize(("k", "size", "n"), SHAPES)
def test_any_split_gives_the_same_bits(
    k: int, size: int, n: int, dtype: torch.dtype, packed_dtype: torch.dtype | None, unit: str
) -> None:
    """The nodes of 1 to 5 ranks, with random splits and empty ranks, add up to the sum on one
    rank. More than 192 rows need several passes."""
    if packed_dtype == INT8 and k % 4:
        pytest.skip("int8 needs a multiple of 4")
    size, rng = unit_size(k, size, packed_dtype), random.Random(k)
    units = -(-k // size)
    is_slow = unit in ("plain", "tiles") and n > 10
    for rows in (1, 7) if is_slow else (1, 7, 200):
        x, w = operands(k, n, rows, dtype)
        [expected] = local_nodes(x, w, packed_dtype, [k], size, 0)
        magnitude = (x.double().abs() @ w.double().abs()).max()
        error = (expected.double() - x.double() @ w.double()).abs().max() / magnitude
        assert error < (2e-2 if packed_dtype == INT8 else 1e-6)
        [first_row] = local_nodes(x[:1], w, packed_dtype, [k], size, 0)
        assert torch.equal(first_row, expected[:1]), "a row depends on the number of rows"
        for world in (2, 3, 5):
            cuts = [0, *sorted(rng.randint(0, units) for _ in range(world - 1)), units]
            sizes = [min(k, b * size) - min(k, a * size) for a, b in itertools.pairwise(cuts)]
            nodes: dict[tuple[int, int], torch.Tensor] = {}
            for rank, (begin, end) in enumerate(itertools.pairwise(cuts)):
                sent = local_nodes(x, w, packed_dtype, sizes, size, rank)
                keys = complete_subtrees(begin, end)
                if (begin, end) == (0, units):
                    keys = [(units.bit_length(), 0)]  # this rank adds all units
                nodes |= dict(zip(keys, sent, strict=True))
            assert torch.equal(add_by_tree(nodes), expected), (rows, cuts)


@pytest.mark.parametrize(("dtype", "packed_dtype"), FORMATS[:4])
def test_the_order_of_units_matters(
    dtype: torch.dtype, packed_dtype: torch.dtype | None, unit: str
) -> None:
    """Single units add up to the sum. In another order, or with rounded units, they do not: the
    other tests would find it."""
    k, size, rows = 1408, unit_size(1408, 64, packed_dtype), 5
    x, w = operands(k, 64, rows, dtype)
    [expected] = local_nodes(x, w, packed_dtype, [k], size, 0)
    units = [min(size, k - begin) for begin in range(0, k, size)]
    leaves = [local_nodes(x, w, packed_dtype, units, size, rank)[0] for rank in range(len(units))]
    keyed = {(0, i): leaf for i, leaf in enumerate(leaves)}
    assert torch.equal(add_by_tree(keyed), expected)
    swapped = keyed | {(0, 1): leaves[2], (0, 2): leaves[1]}
    in_order = torch.stack(leaves).cumsum(0)[-1]
    rounded = {key: leaf.bfloat16().float() for key, leaf in keyed.items()}
    for wrong in (add_by_tree(swapped), in_order, add_by_tree(rounded)):
        assert not torch.equal(wrong, expected)


def test_16_bit_panels_follow_the_order_of_fp32_panels(unit: str) -> None:
    """A bf16 or fp16 weight gives the bits of the same weight in fp32, because each unit is summed
    in the order of K. AMX tiles and AVX512_BF16 have their own order for bf16."""
    for dtype in (BF16, F16):
        if dtype == BF16 and (unit in ("tiles", "avx512_bf16") or unit.startswith("amx")):
            continue
        x, w = operands(577, 70, 9, dtype)
        [expected] = local_nodes(x.float(), w.float(), None, [577], 64, 0)
        assert torch.equal(local_nodes(x, w, None, [577], 64, 0)[0], expected)


@pytest.mark.parametrize(
    ("sizes", "size", "rank"), [([10, 10], 4, 0), ([0, 0], 4, 0), ([8, 8], 0, 0), ([8, 8], 4, 2)]
)
def test_bad_splits(sizes: list[int], size: int, rank: int) -> None:
    with pytest.raises(ValueError, match="K"):
        _C.calls.SumTree(sizes, size, rank)
