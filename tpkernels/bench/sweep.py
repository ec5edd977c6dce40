"""The cases of `tpkernels bench`, checked before any rank starts, and the shapes of models."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tpkernels.bench.specs import Spec, check_spec, make_specs
from tpkernels.common import dtypes
from tpkernels.launch.terminal import UsageError, check_known
from tpkernels.planning.op_spec import OPS

PROJECTIONS = ("qkv", "out", "gate_up", "down", "lm_head")
LAYER = PROJECTIONS[:4]  # projections of a layer; lm_head occurs once per model
ROWS = (16, 256, 2048)  # default of --m for models
SHAPES = ("16,2048,2048", "1024,2048,2048")
BYTES = "64K,1M,32M"
_LAYER_OPS = ["all_gather_matmul", "matmul_reduce_scatter"]


@dataclass(frozen=True)
class Model:
    """Global sizes of a transformer.

    ``ffn`` is the intermediate size of the MLP or, with ``experts``, of each expert. Each token is
    routed to ``top_k`` experts. A ``gated`` MLP has gate and up projections of this size.
    """

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    head_dim: int = 128
    gated: bool = True
    experts: int = 0
    top_k: int = 0


# Values from the configuration files of the models.
MODELS = {
    "gemma2-9b": Model(3584, 14336, heads=16, kv_heads=8, vocab=256000, head_dim=256),
    "gemma2-27b": Model(4608, 36864, heads=32, kv_heads=16, vocab=256000),
    "gpt3-175b": Model(12288, 49152, heads=96, kv_heads=96, vocab=50257, gated=False),
    "llama2-7b": Model(4096, 11008, heads=32, kv_heads=32, vocab=32000),
    "llama3-8b": Model(4096, 14336, heads=32, kv_heads=8, vocab=128256),
    "llama3-70b": Model(8192, 28672, heads=64, kv_heads=8, vocab=128256),
    "llama3-405b": Model(16384, 53248, heads=128, kv_heads=8, vocab=128256),
    "mixtral-8x7b": Model(4096, 14336, heads=32, kv_heads=8, vocab=32000, experts=8, top_k=2),
    "qwen2-72b": Model(8192, 29568, heads=64, kv_heads=8, vocab=152064),
    "qwen3-30b-a3b": Model(2048, 768, heads=32, kv_heads=4, vocab=151936, experts=128, top_k=8),
    "qwen3-32b": Model(5120, 25600, heads=64, kv_heads=8, vocab=151936),
    "smollm2-135m": Model(576, 1536, heads=9, kv_heads=3, vocab=49152, head_dim=64),
}


@dataclass(frozen=True)
class Projection:
    """A matmul x [M, K] @ w [K, N], column-parallel or row-parallel, with global sizes."""

    column: bool
    n: int
    k: int


def projection(model: Model, name: str, world: int) -> Projection:
    """Return a projection of `PROJECTIONS`. Q, K and V form a single weight, and so do gate and up.
    With more ranks than KV heads, KV heads are replicated, so N depends on ``world``."""
    hidden, queries = model.hidden, model.heads * model.head_dim
    pairs = max(model.kv_heads, world) * model.head_dim
    return {
        "qkv": Projection(True, queries + 2 * pairs, hidden),
        "out": Projection(False, hidden, queries),
        "gate_up": Projection(True, model.ffn * (2 if model.gated else 1), hidden),
        "down": Projection(False, hidden, model.ffn),
        "lm_head": Projection(True, model.vocab, hidden),
    }[name]


@dataclass(frozen=True, kw_only=True)
class Method:
    """Method of measurement for all cases.

    Attributes:
        repeat: number of interleaved repetitions of all variants.
        seconds: time after which no new repetition starts, except the first three. A torch.matmul
            baseline is skipped if three repetitions would exceed this time.
        cold: whether inputs are not in the cache, if memory permits.
        baselines: whether to run baselines with torch.matmul.
    """

    algorithms: list[str]
    threads: int = 1
    device: str = "cpu"
    repeat: int = 20
    seconds: float | None = None
    cold: bool = True
    baselines: bool = True


@dataclass(frozen=True)
class Item:
    """A case: a spec on ``world`` ranks, labeled with the models that contain it."""

    spec: Spec
    world: int
    labels: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Return the name of the case, identical in every run."""
        size = "x".join(map(str, self.spec.shape))
        return f"{self.spec.op} {size} {dtypes.name(self.spec.dtype)} tp{self.world}"


def plan_sweep(
    method: Method,
    *,
    worlds: Sequence[int],
    types: Sequence[torch.dtype],
    ops: Sequence[str],
    models: Sequence[str],
    projections: Sequence[str],
    rows: Sequence[int],
    shapes: Sequence[str],
    sizes: str,
) -> list[Item]:
    """Return the cases, one for each combination of the options. A matmul shape that several models
    share is a single case.

    Raises:
        UsageError: a name is unknown, or a case cannot be measured.
    """
    check_known("model", models, MODELS)
    if not models and (rows or projections):
        option = "m" if rows else "projection"
        raise UsageError(f"--{option} needs --model; --shape gives M, N and K")
    ops = check_known("op", ops or (_LAYER_OPS if models else OPS), OPS)
    projections = check_known("projection", projections or LAYER, PROJECTIONS)
    shapes = shapes or (() if models else SHAPES)

    def cases(world: int, dtype: torch.dtype) -> Iterator[Item]:
        for model, name in itertools.product(models, projections):
            matmul = projection(MODELS[model], name, world)
            for m, op in itertools.product(rows or ROWS, ops):
                if OPS[op].has_matmul and OPS[op].gathers == matmul.column:
                    spec = Spec(op, (m, matmul.n, matmul.k), dtype)
                    yield Item(spec, world, (f"{model} {name}",))
        for op in ops:
            for spec in make_specs(op, shapes, sizes, dtype):
                yield Item(spec, world)

    items: dict[tuple[Spec, int], Item] = {}
    for world, dtype in itertools.product(worlds, types):
        for item in cases(world, dtype):
            existing = items.setdefault((item.spec, world), item)
            labels = tuple(dict.fromkeys((*existing.labels, *item.labels)))
            items[item.spec, world] = dataclasses.replace(item, labels=labels)
    for item in items.values():
        label = " ".join(item.labels[:1])
        check_spec(item.spec, item.world, method.algorithms, device=method.device, label=label)
    return list(items.values())
