"""Attention over a sequence of which each rank has a part.

Within a host, a ring of sends is an all-gather: each rank reads all keys and values at once.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

import tpkernels
from examples.parallel_kernel_bench.gallery import Case, Setup, problem
from examples.parallel_kernel_bench.plain import exchanged, gathered, passed_on, summed

# (result, log-sum-exp) of softmax(q k^T / sqrt(d)) v, and its gradients by q, k, v.
attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
QKV, Attended = tuple[torch.Tensor, ...], tuple[torch.Tensor, torch.Tensor]


def merged(a: Attended, b: Attended) -> Attended:
    """Return what attention to the keys of both gives, from what it gives for each."""
    total = torch.logaddexp(a[1], b[1])
    parts = (out * (lse - total).exp()[..., None] for out, lse in (a, b))
    return sum(parts), total


def attend_by_ring(qkv: QKV, group: dist.ProcessGroup) -> torch.Tensor:
    """Pass keys and values round a ring, and add the attention to each earlier part."""
    q, *kv = qkv
    attended = attend(q, *kv, 0.0, True)
    for step in range(1, group.size()):
        kv = passed_on(*kv, group=group)
        if step <= group.rank():
            attended = merged(attended, attend(q, *kv))
    return attended[0]


def attend_gathered(qkv: QKV, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather keys and values, and add the attention to all of the earlier parts at once."""
    q, *kv = qkv
    before = q.shape[2] * group.rank()
    earlier = [tpkernels.all_gather(x, group, 2)[:, :, :before] for x in kv]
    attended = attend(q, *kv, 0.0, True)
    return merged(attended, attend(q, *earlier))[0] if before else attended[0]


@problem(54, "causal attention; the sequence is sharded")
def ring_attention(at: Setup) -> Case:
    q, k, v = (at.normal(1, 8, at.size(1024), 64) for _ in range(3))
    return Case(
        lambda: attend_by_ring((q, k, v), at.group),
        lambda: attend_gathered((q, k, v), at.group),
        depth=at.size(1024) * at.world,
    )


@problem(55, "a causal attention layer; sequence and heads are sharded")
def ring_attention_tp(at: Setup) -> Case:
    context, tp = at.mesh()
    x, heads = at.normal(1, at.size(1024), 512), 8 // tp.size()
    w, w_out = (at.normal(n * heads * 64, 512) / 512**0.5 for n in (3, 1))

    def layer(attend):
        qkv = F.linear(x, w).unflatten(2, (3, heads, 64)).transpose(1, 3).unbind(2)
        return attend(qkv, context).transpose(1, 2).flatten(2)

    return Case(
        lambda: summed(layer(attend_by_ring) @ w_out, tp),
        lambda: tpkernels.matmul_all_reduce(layer(attend_gathered), w_out, tp),
        depth=at.size(1024) * context.size() + 512,
    )


@problem(57, "gradients of attention, averaged over data parallelism")
def ring_attention_backward_dp(at: Setup) -> Case:
    context, data = at.mesh()
    grad, q, k, v = (at.normal(1, 8, at.size(512), 64) for _ in range(4))
    out, lse = attend(q, gathered(k, 2, context), gathered(v, 2, context))

    def reference():
        dq, kv, dkv = torch.zeros_like(q), (k, v), (torch.zeros_like(k), torch.zeros_like(v))
        for _ in range(context.size()):
            part, *parts = attend_backward(grad, q, *kv, out, lse, 0.0, False)
            sums = (a + b for a, b in zip(dkv, parts, strict=True))
            *kv, dk, dv = passed_on(*kv, *sums, group=context)
            dq, dkv = dq + part, (dk, dv)
        return tuple(summed(x, data) / data.size() for x in (dq, *dkv))

    def ours():
        kv = (tpkernels.all_gather(x, context, 2) for x in (k, v))
        dq, *dkv = attend_backward(grad, q, *kv, out, lse, 0.0, False)
        dkv = (tpkernels.reduce_scatter(x, context, 2) for x in dkv)
        return tuple(tpkernels.all_reduce(x, data) / data.size() for x in (dq, *dkv))

    return Case(reference, ours, depth=at.size(512) * context.size())


@problem(17, "rotate queries and keys by position, then gather the sequence")
def rope_allgather(at: Setup) -> Case:
    q, k = (at.normal(2, at.size(1024), 8, 64) for _ in range(2))
    cos, sin = (at.normal(2, at.size(1024), 1, 64) for _ in range(2))

    def rotated(x):
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    return Case(
        lambda: tuple(gathered(rotated(x), 1) for x in (q, k)),
        lambda: tuple(tpkernels.all_gather(rotated(x), at.group, 1) for x in (q, k)),
    )


@problem(39, "an attention layer; the sequence is sharded, then the heads")
def ulysses_attention_e2e(at: Setup) -> Case:
    x = at.normal(2, at.size(512), 512)
    w, w_out = (at.normal(n, 512, shared=True) / 512**0.5 for n in (1536, 512))

    def layer(exchange):
        qkv = exchange(F.linear(x, w).unflatten(2, (3, 8, 64)), 1, 3).transpose(1, 3)
        y = F.scaled_dot_product_attention(*qkv.unbind(2)).transpose(1, 2)
        return F.linear(exchange(y, 2, 1).flatten(2), w_out)

    return Case(
        lambda: layer(exchanged),
        lambda: layer(lambda x, *dims: tpkernels.all_to_all(x, at.group, *dims)),
    )
