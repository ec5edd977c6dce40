"""The attention kernel: one result, to the bit, for every way to compute a query.

A prefill, decode steps, chunks, padded and packed batches, single heads, threads and vector units
must agree bitwise. Hidden keys and padding are NaN or infinite. The reference is fp64, with a
derived bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.local_matmul import threads
from tpkernels import _C

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
EPS = 2.0**-24  # of fp32
UNITS = _C.host.vector_units()


@pytest.fixture(params=UNITS)
def unit(request: pytest.FixtureRequest) -> Iterator[str]:
    """Select a vector unit and return its name."""
    previous_unit = _C.host.vector_unit()
    _C.host.use_vector_unit(request.param)
    yield request.param
    _C.host.use_vector_unit(previous_unit)


class Case(NamedTuple):
    """Shape and options of an attention. `gain` multiplies the queries."""

    head_dim: int = 64
    value_dim: int = 64
    heads: int = 6
    kv_heads: int = 2
    length: int = 150
    window: int = 0
    cap: float = 0.0
    sinks: bool = False
    gain: float = 1.0

    def options(self) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(5)
        sinks = torch.randn(self.heads, generator=generator) * 3 if self.sinks else None
        scale = self.head_dim**-0.5
        return {"scale": scale, "window": self.window, "cap": self.cap, "sinks": sinks}

    def operands(self, dtype: torch.dtype, batch: int = 1) -> tuple[torch.Tensor, ...]:
        """Return q, k and v."""
        generator = torch.Generator().manual_seed(self.length + self.head_dim)

        def random(heads: int, dim: int, gain: float = 1.0) -> torch.Tensor:
            shape = (batch, heads, self.length, dim)
            return (torch.randn(shape, generator=generator) * gain).to(dtype)

        q = random(self.heads, self.head_dim, self.gain)
        return q, random(self.kv_heads, self.head_dim), random(self.kv_heads, self.value_dim)


CASES = {
    "groups": Case(),
    "no groups": Case(heads=2, length=130),
    "one kv head": Case(heads=7, kv_heads=1, length=70),
    "head_dim 33": Case(33, 33, heads=2, length=70),
    "head_dim 80": Case(80, 80, heads=4, length=100),
    "head_dim 128": Case(128, 128, heads=4, length=100),
    "value_dim 128": Case(192, 128, heads=2, length=100),
    "value_dim 20": Case(64, 20, heads=2, length=100),
    "window 1": Case(heads=2, length=100, window=1),
    "window 70": Case(length=170, window=70),
    "window 100": Case(heads=2, length=210, window=100),
    "cap": Case(length=100, cap=2.0),
    "sinks": Case(length=140, sinks=True),
    "all options": Case(length=170, window=70, cap=3.0, sinks=True),
    "large scores": Case(length=140, gain=100.0),
    "large scores, sinks": Case(length=100, gain=-100.0, sinks=True),
}
DTYPES = (F32, F16, BF16)
ALL_DTYPES = ("groups", "head_dim 33", "all options")
SWEEP = [
    pytest.param(case, dtype, id=f"{name}-{dtype}")
    for i, (name, case) in enumerate(CASES.items())
    for dtype in (DTYPES if name in ALL_DTYPES else (DTYPES[i % 3],))
]
every_case = pytest.mark.parametrize(("case", "dtype"), SWEEP)


def attend(*operands: torch.Tensor, sequences: object = None, **options: Any) -> torch.Tensor:
    """Call the kernel with `sequences` as a list of rows."""
    table = None if sequences is None else torch.tensor(sequences, dtype=torch.int64).view(-1, 6)
    return _C.calls.attention(*operands, sequences=table, **options)


def assert_bitwise_equal(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.shape == expected.shape and got.dtype == expected.dtype
    integer = {2: torch.int16, 4: torch.int32}[got.element_size()]
    wrong = got.contiguous().view(integer) != expected.contiguous().view(integer)
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} differ, first at " + str(
        wrong.nonzero()[0].tolist()
    )


def exact(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Any, Any]:
    """Return the fp64 result and the bound of the error before the last rounding.

    Bounds, in units of EPS, to first order: a score is a chain of head_dim rounded steps on terms
    of total magnitude |q| . |k|. The scale, the cap (tanh has an absolute error of at most 8) and
    the subtraction of the maximum round few more times. The error of a weight, relative, is that of
    its exponent, and 4 for the power of 2 and its rescaling. Sums of `keys` positive terms round
    `keys` times at most, plus twice per block.
    """
    options, group = case.options(), case.heads // case.kv_heads
    q, k, v = q.double(), *(t.double().repeat_interleave(group, 1) for t in (k, v))
    scores = q @ k.transpose(2, 3) * options["scale"]
    magnitudes = q.abs() @ k.abs().transpose(2, 3) * options["scale"]
    if case.cap:
        scores = torch.tanh(scores / case.cap) * case.cap
    index = torch.arange(case.length)
    hidden = index > index[:, None]
    if case.window:
        hidden |= index <= index[:, None] - case.window
    scores = scores.masked_fill(hidden, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    exponents = (case.head_dim + 2) * magnitudes + 8 * case.cap + 4 * (top - scores).nan_to_num(0)
    exponents += 4 * top.abs()
    if case.sinks:
        sinks = options["sinks"].double()[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., : case.length]
    steps = case.length + 2 * (case.length / 64 + 1) + 12
    # Numerator and denominator have the same relative error of weights.
    relative = (exponents.masked_fill(hidden, 0) + steps) * EPS
    average = (weights * relative).sum(-1, keepdim=True)
    bound = (weights * relative) @ v.abs() + average * (weights @ v.abs())
    bound += 2.0**-124 * v.abs().sum(2, keepdim=True)  # weights below 2^-125 are 0
    return (weights @ v).transpose(1, 2), bound.transpose(1, 2)


@every_case
def test_the_error_is_within_the_bound(case: Case, dtype: torch.dtype) -> None:
    operands = case.operands(dtype, batch=2)
    want, bound = exact(case, *operands)
    got = attend(*operands, **case.options())
    assert got.shape == (2, case.length, case.heads, case.value_dim) and got.is_contiguous()
    eps = torch.finfo(dtype).eps / 2
    tiny = torch.finfo(dtype).smallest_normal * eps
    error = (got.double() - want).abs()
    allowed = bound * (1 + eps) + want.abs() * eps + tiny
    assert (error <= allowed).all(), f"{(error / allowed).max():.3g} times the bound"
    if dtype != F32 and case.gain == 1:  # the bound itself is small: rounding dominates
        assert error.max() <= 1.1 * (want.to(dtype).double() - want).abs().max() + bound.median()


@every_case
def test_every_vector_unit(case: Case, dtype: torch.dtype) -> None:
    operands = case.operands(dtype)
    before, results = _C.host.vector_unit(), []
    for name in UNITS:
        _C.host.use_vector_unit(name)
        results.append(attend(*operands, **case.options()))
        results.append(attend(operands[0][:, :, -1:], *operands[1:], **case.options()))
    _C.host.use_vector_unit(before)
    for i in range(2, len(results)):
        assert_bitwise_equal(results[i], results[i % 2])


@every_case
def test_prefill_decode_and_chunks(case: Case, dtype: torch.dtype) -> None:
    (q, k, v), options = case.operands(dtype), case.options()
    whole = attend(q, k, v, **options)
    for size in (1, 2, 7, 64, 100):
        chunks = []
        for begin in range(0, case.length, size):
            end = min(begin + size, case.length)
            keys = (k[:, :, :end], v[:, :, :end])  # the cache ends with the last query's own key
            chunks.append(attend(q[:, :, begin:end], *keys, **options))
        assert_bitwise_equal(torch.cat(chunks, 1), whole)


def pad(tensor: torch.Tensor, before: int, after: int, filler: float) -> torch.Tensor:
    shape = (*tensor.shape[:2], before + tensor.shape[2] + after, tensor.shape[3])
    padded = torch.full(shape, filler, dtype=tensor.dtype)
    padded[:, :, before : before + tensor.shape[2]] = tensor
    return padded


@every_case
def test_padded_and_packed_batches(case: Case, dtype: torch.dtype) -> None:
    operands, options, n = case.operands(dtype), case.options(), case.length
    whole = attend(*operands, **options)
    pads, room = (3, 70, 0, 131), n + 131
    for filler in (torch.nan, torch.inf):
        rows = [[pad(t, p, room - n - p, filler) for t in operands] for p in pads]
        q, k, v = (torch.cat(tensors) for tensors in zip(*rows, strict=True))
        table = [[b, p, n, p, p, 0] for b, p in enumerate(pads)]
        for count in (1, 2):
            with threads(count):
                padded = attend(q, k, v, sequences=table, **options)
            for b, p in enumerate(pads):
                assert_bitwise_equal(padded[b : b + 1, p : p + n], whole)
                assert not padded[b, :p].any() and not padded[b, p + n :].any()
        # One decode step of sequences of different lengths.
        lengths = [n, 1, n // 2, n - 1]
        own = [p + length - 1 for p, length in zip(pads, lengths, strict=True)]
        step = torch.cat([q[b : b + 1, :, i : i + 1] for b, i in enumerate(own)])
        table = [[b, 0, 1, p, i, 0] for b, (p, i) in enumerate(zip(pads, own, strict=True))]
        got = attend(step, k, v, sequences=table, **options)
        for b, length in enumerate(lengths):
            assert_bitwise_equal(got[b, 0], whole[0, length - 1])
        # Sequences in one batch entry, in any order, with gaps.
        packed = [torch.cat([pad(t, 5, 2, filler)] * 3, 2) for t in operands]
        begins = [5 + i * (n + 7) for i in (2, 0, 1)]
        got = attend(*packed, sequences=[[0, i, n, i, i, 0] for i in begins], **options)
        for i in begins:
            assert_bitwise_equal(got[:, i : i + n], whole)
        assert not got[:, n + 5 : n + 12].any()


@every_case
def test_each_head_alone_and_strided_caches(case: Case, dtype: torch.dtype) -> None:
    (q, k, v), options = case.operands(dtype), case.options()
    whole, group = attend(q, k, v, **options), case.heads // case.kv_heads
    for head in range(case.heads):
        kv = slice(head // group, head // group + 1)
        one = slice(head, head + 1)
        sinks = options["sinks"][one].clone() if case.sinks else None
        alone = attend(q[:, one], k[:, kv], v[:, kv], **{**options, "sinks": sinks})
        assert_bitwise_equal(alone, whole[:, :, one])
    cache = torch.full((2, case.kv_heads, 400, k.shape[3] + v.shape[3]), torch.nan).to(dtype)
    cache[1:, :, 9 : 9 + case.length] = torch.cat([k, v], -1)
    views = cache[1:, :, 9 : 9 + case.length].split([k.shape[3], v.shape[3]], -1)
    transposed = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert_bitwise_equal(attend(transposed, *views, **options), whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["window 1", "window 70", "window 100", "all options"])
def test_dropped_keys_of_a_window(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    (q, k, v), options = case.operands(dtype), case.options()
    whole = attend(q, k, v, **options)
    for begin, queries in ((case.length - 1, 1), (case.length - 20, 20), (case.window + 5, 3)):
        dropped = begin - case.window + 1
        for padding in (0, 11):
            keys = [pad(t[:, :, dropped : begin + queries], padding, 0, torch.nan) for t in (k, v)]
            row = [0, 0, queries, padding, padding + case.window - 1, dropped]
            got = attend(q[:, :, begin : begin + queries], *keys, sequences=[row], **options)
            assert_bitwise_equal(got, whole[:, begin : begin + queries])


@every_case
def test_hidden_keys_may_be_infinite(case: Case, dtype: torch.dtype) -> None:
    """Rows that are computed together see different keys; a weight of 0 would give NaN."""
    (q, k, v), options = case.operands(dtype), case.options()
    whole = attend(q, k, v, **options)
    for index in (1, 5, 40, 64, case.length - 1):
        keys, values = k.clone(), v.clone()
        keys[:, :, index], values[:, :, index] = torch.nan, torch.inf
        got = attend(q, keys, values, **options)
        assert_bitwise_equal(got[:, :index], whole[:, :index])
        assert not got[:, index].isfinite().any()
        if case.window:
            end = index + case.window
            assert_bitwise_equal(got[:, end:], whole[:, end:])


def test_queries_that_see_no_key(unit: str) -> None:
    q, k, v = torch.randn(1, 2, 5, 8), torch.randn(1, 1, 9, 8), torch.randn(1, 1, 9, 8)
    got = attend(q, k, v, scale=1.0, sequences=[[0, 1, 4, 6, 4, 0]])
    assert not got[0, :3].any() and got[0, 3:].all()  # the first two see keys 6 to 5
    assert_bitwise_equal(got[0, 3], v[0, 0, 6].expand(2, 8))  # a single key has weight 1
    assert attend(q[:, :, :0], k, v, scale=1.0).shape == (1, 0, 2, 8)
    assert not attend(q, k, v, scale=1.0, sequences=[]).any()


def test_integers_are_exact(unit: str) -> None:
    """Equal scores give equal weights, so the result is the mean of the values."""
    q, k = torch.zeros(1, 4, 256, 16), torch.ones(1, 2, 256, 16)
    v = torch.arange(256.0).view(1, 1, 256, 1).expand(1, 2, 256, 16).contiguous()
    for dtype in (F32, F16, BF16):
        got = attend(q.to(dtype), k.to(dtype), v.to(dtype), scale=1.0)
        means = (torch.arange(256.0) / 2).to(dtype)  # the mean of 0 to i
        assert_bitwise_equal(got, means.view(1, 256, 1, 1).expand(1, 256, 4, 16))
    sinks = torch.tensor([0.0, -torch.inf, 40.0, 0.0])
    got = attend(q[:, :, :1], k[:, :, :1], v[:, :, 1:2], scale=1.0, sinks=sinks)
    assert got[0, 0, [0, 1, 3], 0].tolist() == [0.5, 1.0, 0.5] and 0 < got[0, 0, 2, 0] < 1e-17


def test_threads_do_not_change_the_bits() -> None:
    case = Case(heads=8, kv_heads=4, length=300)
    operands, results = case.operands(BF16, batch=2), []
    for count in (1, 2, 3):
        with threads(count):
            results.append(attend(*operands, **case.options()))
    assert_bitwise_equal(results[1], results[0])
    assert_bitwise_equal(results[2], results[0])


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        ({"q": torch.ones(4, 3, 8)}, r"4 dims.*q has shape \[4, 3, 8\]"),
        ({"q": torch.ones(1, 4, 3, 8).double()}, "float32, float16 or bfloat16"),
        ({"k": torch.ones(1, 2, 5, 8).half()}, "all float32, float16 or bfloat16"),
        ({"k": torch.ones(1, 2, 8, 5).transpose(2, 3)}, "contiguous elements"),
        ({"k": torch.ones(1, 2, 5, 9)}, r"k \[1, 2, 5, 9\]"),
        ({"v": torch.ones(1, 2, 6, 8)}, r"v \[1, 2, 6, 8\]"),
        ({"q": torch.ones(1, 3, 3, 8)}, "H a multiple of Hkv"),
        ({"q": torch.ones(1, 4, 6, 8)}, "q has 6 queries, but k has only 5 keys"),
        ({"q": torch.ones(1, 4, 3, 8, device="meta")}, "expected a dense tensor"),
        ({"window": -1}, "window is -1; it must be 0"),
        ({"cap": -2.0}, "cap is -2.0"),
        ({"cap": float("nan")}, "cap is nan"),
        ({"sinks": torch.ones(3)}, r"sinks must be a contiguous float32 CPU tensor \[4\]"),
        ({"sinks": torch.ones(4).half()}, "float32"),
        ({"sequences": torch.ones(1, 5).long()}, r"int64 CPU tensor \[S, 6\]; it is \[1, 5\]"),
        ({"sequences": torch.ones(1, 6).int()}, "int64"),
        ({"sequences": [[1, 0, 1, 0, 0, 0]]}, "batch of sequence 0 is 1; it must be 0 to 0"),
        ({"sequences": [[0, 0, 4, 0, 0, 0]]}, "queries of sequence 0 is 4; it must be 0 to 3"),
        ({"sequences": [[0, 2, 2, 0, 0, 0]]}, "first_query of sequence 0 is 2; it must be 0 to 1"),
        ({"sequences": [[0, 0, 2, -1, 0, 0]]}, "first_key of sequence 0 is -1"),
        ({"sequences": [[0, 0, 2, 6, 0, 0]]}, "first_key of sequence 0 is 6; it must be 0 to 5"),
        ({"sequences": [[0, 0, 2, 0, 4, 0]]}, "own_key of sequence 0 is 4; it must be 0 to 3"),
        ({"sequences": [[0, 0, 1, 0, 0, -1]]}, "skipped of sequence 0 is -1"),
        ({"sequences": [[0, 0, 1, 0, 0, 2**63 - 1]]}, "skipped of sequence 0"),
        (
            {"sequences": [[0, 0, 2, 0, 0, 0], [0, 1, 2, 0, 0, 0]]},
            "two sequences contain query 1 of batch entry 0",
        ),
    ],
)
def test_refusals(change: dict[str, Any], pattern: str) -> None:
    arguments: dict[str, Any] = {
        "q": torch.ones(1, 4, 3, 8),
        "k": torch.ones(1, 2, 5, 8),
        "v": torch.ones(1, 2, 5, 8),
        "scale": 1.0,
    }
    _C.calls.attention(**arguments)
    if isinstance(change.get("sequences"), list):
        change = {"sequences": torch.tensor(change["sequences"], dtype=torch.int64)}
    with pytest.raises(ValueError, match=pattern):
        _C.calls.attention(**arguments | change)
