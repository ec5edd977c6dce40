"""Models by name, and the matmuls that their layers split over the ranks."""

from __future__ import annotations

from dataclasses import dataclass

PROJECTIONS = ("qkv", "out", "gate_up", "down", "lm_head")
LAYER = PROJECTIONS[:4]  # those of a layer; a model has one lm_head


@dataclass(frozen=True)
class Model:
    """Widths of a transformer, before the split. ``ffn`` is the inner width of the MLP; a ``gated``
    MLP has two matrices of that width, gate and up."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    head_dim: int = 128
    gated: bool = True


# From the models' configuration files.
MODELS = {
    "gemma2-9b": Model(3584, 14336, heads=16, kv_heads=8, vocab=256000, head_dim=256),
    "gemma2-27b": Model(4608, 36864, heads=32, kv_heads=16, vocab=256000),
    "gpt3-175b": Model(12288, 49152, heads=96, kv_heads=96, vocab=50257, gated=False),
    "llama2-7b": Model(4096, 11008, heads=32, kv_heads=32, vocab=32000),
    "llama3-8b": Model(4096, 14336, heads=32, kv_heads=8, vocab=128256),
    "llama3-70b": Model(8192, 28672, heads=64, kv_heads=8, vocab=128256),
    "llama3-405b": Model(16384, 53248, heads=128, kv_heads=8, vocab=128256),
    "qwen2-72b": Model(8192, 29568, heads=64, kv_heads=8, vocab=152064),
    "qwen3-32b": Model(5120, 25600, heads=64, kv_heads=8, vocab=151936),
    "smollm2-135m": Model(576, 1536, heads=9, kv_heads=3, vocab=49152, head_dim=64),
}


@dataclass(frozen=True)
class Projection:
    """A matmul over all ranks: x [M, K] by a weight [K, N]. ``column``: column-parallel
    (all_gather_matmul); otherwise row-parallel (a matmul and a reduction)."""

    column: bool
    n: int
    k: int


def projection(model: Model, name: str, world: int) -> Projection:
    """One of `PROJECTIONS`. Q, K and V form one weight, and so do gate and up. If there are more
    ranks than KV heads, each rank holds a copy of one, so N depends on ``world``."""
    hidden, queries = model.hidden, model.heads * model.head_dim
    match name:
        case "qkv":
            pairs = max(model.kv_heads, world) * model.head_dim
            return Projection(True, queries + 2 * pairs, hidden)
        case "out":
            return Projection(False, hidden, queries)
        case "gate_up":
            return Projection(True, model.ffn * (2 if model.gated else 1), hidden)
        case "down":
            return Projection(False, hidden, model.ffn)
        case "lm_head":
            return Projection(True, model.vocab, hidden)
    raise ValueError(f"unknown projection '{name}'; choose from {', '.join(PROJECTIONS)}")
