"""Attention over a sharded sequence.

Within a host an all-gather replaces the ring of sends: each rank reads all keys and values.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

import tpkernels
from examples.parallel_kernel_bench.gallery import Case, Setup, problem
from examples.parallel_kernel_bench.plain import all_gather, all_reduce, all_to_all, ring_shift

# (output, log-sum-exp) of softmax(q k^T / sqrt(d)) v, and its gradients with respect to q, k, v.
attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
QKV, Attended = tuple[torch.Tensor, ...], tuple[torch.Tensor, torch.Tensor]


def merge_attention(a: Attended, b: Attended) -> Attended:
    """Combine the attention to two disjoint sets of keys into the attention to their union."""
    total = torch.logaddexp(a[1], b[1])
    scaled = (out * (lse - total).exp()[..., None] for out, lse in (a, b))
    return sum(scaled), total


def attend_by_ring(qkv: QKV, group: dist.ProcessGroup) -> torch.Tensor:
    """Pass keys and values round a ring, and add the attention to each earlier shard."""
    q, *kv = qkv
    attended = attend(q, *kv, 0.0, True)
    for step in range(1, group.size()):
        kv = ring_shift(*kv, group=group)
        if step <= group.rank():
            attended = merge_attention(attended, attend(q, *kv))
    return attended[0]


def attend_gathered(qkv: QKV, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather keys and values, and add the attention to all earlier shards in one call."""
    q, *kv = qkv
    num_earlier = q.shape[2] * group.rank()
    earlier = [tpkernels.all_gather(x, group, 2)[:, :, :num_earlier] for x in kv]
    attended = attend(q, *kv, 0.0, True)
    return merge_attention(attended, attend(q, *earlier))[0] if num_earlier else attended[0]


@problem(54, "causal attention; the sequence is sharded")
def ring_attention(setup: Setup) -> Case:
    q, k, v = (setup.normal(1, 8, setup.size(1024), 64) for _ in range(3))
    return Case(
        lambda: attend_by_ring((q, k, v), setup.group),
        lambda: attend_gathered((q, k, v), setup.group),
        depth=setup.size(1024) * setup.world,
    )


@problem(55, "a causal attention layer; sequence and heads are sharded")
def ring_attention_tp(setup: Setup) -> Case:
    context, tp = setup.mesh()
    x, heads = setup.normal(1, setup.size(1024), 512), 8 // tp.size()
    w, w_out = (setup.normal(n * heads * 64, 512) / 512**0.5 for n in (3, 1))

    def layer(attend):
        qkv = F.linear(x, w).unflatten(2, (3, heads, 64)).transpose(1, 3).unbind(2)
        return attend(qkv, context).transpose(1, 2).flatten(2)

    return Case(
        lambda: all_reduce(layer(attend_by_ring) @ w_out, tp),
        lambda: tpkernels.matmul_all_reduce(layer(attend_gathered), w_out, tp),
        depth=setup.size(1024) * context.size() + 512,
    )


@problem(57, "gradients of attention, averaged over data parallelism")
def ring_attention_backward_dp(setup: Setup) -> Case:
    context, data = setup.mesh()
    grad, q, k, v = (setup.normal(1, 8, setup.size(512), 64) for _ in range(4))
    out, lse = attend(q, all_gather(k, 2, context), all_gather(v, 2, context))

    def reference():
        dq, kv, dkv = torch.zeros_like(q), (k, v), (torch.zeros_like(k), torch.zeros_like(v))
        for _ in range(context.size()):
            dq_step, *dkv_step = attend_backward(grad, q, *kv, out, lse, 0.0, False)
            sums = (a + b for a, b in zip(dkv, dkv_step, strict=True))
            *kv, dk, dv = ring_shift(*kv, *sums, group=context)
            dq, dkv = dq + dq_step, (dk, dv)
        return tuple(all_reduce(x, data) / data.size() for x in (dq, *dkv))

    def ours():
        kv = (tpkernels.all_gather(x, context, 2) for x in (k, v))
        dq, *dkv = attend_backward(grad, q, *kv, out, lse, 0.0, False)
        dkv = (tpkernels.reduce_scatter(x, context, 2) for x in dkv)
        return tuple(tpkernels.all_reduce(x, data) / data.size() for x in (dq, *dkv))

    return Case(reference, ours, depth=setup.size(512) * context.size())


@problem(17, "rotate queries and keys by position, then gather the sequence")
def rope_allgather(setup: Setup) -> Case:
    q, k = (setup.normal(2, setup.size(1024), 8, 64) for _ in range(2))
    cos, sin = (setup.normal(2, setup.size(1024), 1, 64) for _ in range(2))

    def rotate(x):
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    return Case(
        lambda: tuple(all_gather(rotate(x), 1) for x in (q, k)),
        lambda: tuple(tpkernels.all_gather(rotate(x), setup.group, 1) for x in (q, k)),
    )


@problem(39, "an attention layer; the sequence is sharded, then the heads")
def ulysses_attention_e2e(setup: Setup) -> Case:
    x = setup.normal(2, setup.size(512), 512)
    w, w_out = (setup.normal(n, 512, shared=True) / 512**0.5 for n in (1536, 512))

    def layer(exchange):
        qkv = exchange(F.linear(x, w).unflatten(2, (3, 8, 64)), 1, 3).transpose(1, 3)
        y = F.scaled_dot_product_attention(*qkv.unbind(2)).transpose(1, 2)
        return F.linear(exchange(y, 2, 1).flatten(2), w_out)

    return Case(
        lambda: layer(all_to_all),
        lambda: layer(lambda x, *dims: tpkernels.all_to_all(x, setup.group, *dims)),
    )
