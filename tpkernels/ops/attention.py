"""Causal attention on CPUs, whose results do not depend on the batch (csrc/host/attention.h)."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from tpkernels import _C
from tpkernels.ops.registration import Op, define_local

SCHEMA = (
    "attention(Tensor q, Tensor k, Tensor v, *, float scale, Tensor? sequences=None, int window=0, "
    "float cap=0.0, Tensor? sinks=None) -> Tensor"
)


def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    batch, heads, queries, _ = q.shape
    return q.new_empty(batch, queries, heads, v.shape[-1])


OP: Op[torch.Tensor] = define_local(
    SCHEMA,
    run=_C.calls.attention,
    fake=_fake,
    no_gradient="use torch.nn.functional.scaled_dot_product_attention",
)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    sequences: torch.Tensor | None = None,
    window: int = 0,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from queries to the keys at and before their positions.

    A result depends only on its query, on the visible keys and values of its sequence, and on the
    options, to the bit. It does not depend on the batch, on the queries of the same call, on
    padding, threads, or the vector unit. Online softmax (Milakov and Gimelshein, arXiv:1805.02867)
    over blocks of 64 keys, in fp32.

    Args:
        q: [B, heads, T, D] of float32, bfloat16 or float16 on the CPU, unit stride in D.
        k: [B, kv_heads, keys, D]. ``kv_heads`` divides ``heads``.
        v: [B, kv_heads, keys, D_v].
        scale: factor of the scores.
        sequences: int64 [S, 6], for each sequence: batch index, first query, number of queries,
            first key, key of the first query, and the number of its keys before the first key that
            are not in ``k``. Queries outside all sequences return zeros. Default: each batch entry
            is a sequence, and its last key belongs to its last query.
        window: number of keys that a query sees, including its own; 0 for all keys before it.
        cap: soft cap of the scores, ``cap * tanh(score / cap)``; 0 for none.
        sinks: float32 [heads], a score per head that only increases the denominator of the softmax.

    Returns:
        [B, T, heads, D_v] in the dtype of ``q``.

    Raises:
        ValueError: the operands do not fit.
        NotImplementedError: an operand requires a gradient.
    """
    options: dict[str, Any] = {
        "scale": scale,
        "sequences": sequences,
        "window": window,
        "cap": cap,
        "sinks": sinks,
    }
    # The dispatcher takes as long as the attention to 64 keys: 17 us (AMD EPYC Zen 3, torch 2.13,
    # 2026-11-27).
    is_plain = type(q) is type(k) is type(v) is torch.Tensor
    needs_gradient = torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad
    )
    if is_plain and not needs_gradient and not is_dynamo_compiling():
        return _C.calls.attention(q, k, v, **options)
    return OP.entry()(q, k, v, **options)
