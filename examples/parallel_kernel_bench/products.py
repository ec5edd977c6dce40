"""Products of sharded matrices."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import tpkernels
from examples.parallel_kernel_bench.gallery import Case, Setup, problem
from examples.parallel_kernel_bench.plain import gathered, scattered_sum, summed


@problem(11, "x @ w; columns of x are sharded and sent transposed")
def allgather_gemm_AT(at: Setup) -> Case:
    x = at.integers(at.size(1024), at.size(512))
    w = at.integers(at.size(512) * at.world, at.size(1024))
    return Case(
        lambda: gathered(x.t()).t() @ w,
        lambda: tpkernels.all_gather_matmul(x, w, at.group, gather_dim=1),
    )


@problem(12, "x @ w; columns of x are sharded")
def allgather_gemm(at: Setup) -> Case:
    x = at.integers(at.size(1024), at.size(512))
    w = at.integers(at.size(512) * at.world, at.size(1024))
    return Case(
        lambda: gathered(x, 1) @ w,
        lambda: tpkernels.all_gather_matmul(x, w, at.group, gather_dim=1),
    )


@problem(13, "x @ w; columns of x and rows of w are sharded")
def gemm_allreduce(at: Setup) -> Case:
    x, w = (at.integers(at.size(1024), at.size(1024)) for _ in range(2))
    return Case(lambda: summed(x @ w), lambda: tpkernels.matmul_all_reduce(x, w, at.group))


@problem(14, "x @ w; columns of w are sharded, the result is gathered")
def gemm_allgather(at: Setup) -> Case:
    x, w = (at.integers(at.size(1024), at.size(1024)) for _ in range(2))
    return Case(lambda: gathered(x @ w, 1), lambda: tpkernels.all_gather(x @ w, at.group, 1))


@problem(15, "silu(x @ w1) @ w2; columns of x and rows of the result are sharded")
def combined_sharded_gemms(at: Setup) -> Case:
    part = at.size(512)
    x = at.normal(part * at.world, part)
    w1 = at.normal(part * at.world, 2 * part, shared=True) / part**0.5
    w2 = at.normal(2 * part, 2 * part, shared=True) / part**0.5
    own = slice(at.rank * part, (at.rank + 1) * part)

    def reference():
        partial = x.new_zeros(len(x), 2 * part)
        partial[own] = F.silu(gathered(x, 1) @ w1)[own] @ w2
        return scattered_sum(partial)

    def ours():
        mine = tpkernels.all_to_all(x, at.group, gather_dim=1, scatter_dim=0)
        return F.silu(mine @ w1) @ w2

    return Case(reference, ours, depth=part * at.world)


@problem(16, "rows of x @ w; columns of x and rows of w are sharded")
def gemm_reducescatter(at: Setup) -> Case:
    x = at.integers(at.size(512) * at.world, at.size(1024))
    w = at.integers(at.size(1024), at.size(1024))
    return Case(
        lambda: scattered_sum(x @ w), lambda: tpkernels.matmul_reduce_scatter(x, w, at.group)
    )


@problem(46, "logits of a few tokens; rows of the head and its bias are sharded")
def gemv_decode(at: Setup) -> Case:
    x, bias = at.integers(4, at.size(2048), shared=True), at.integers(at.size(16384))
    w = at.integers(at.size(16384), at.size(2048))
    return Case(
        lambda: gathered(x @ w.t() + bias, 1),
        lambda: tpkernels.all_gather(F.linear(x, w, bias), at.group, 1),
    )


@problem(48, "a gated MLP; weights sharded by FSDP and tensor parallelism")
def fsdp_and_tp(at: Setup) -> Case:
    fsdp, tp = at.mesh()
    width, hidden = at.size(1024), at.size(2048) // tp.size()
    x = at.normal(at.size(512), width, shared=True)
    gate, up = (at.normal(width // fsdp.size(), hidden) / width**0.5 for _ in range(2))
    down = at.normal(hidden, width // fsdp.size()) / hidden**0.5

    def reference():
        y = F.silu(x @ gathered(gate, 0, fsdp)) * (x @ gathered(up, 0, fsdp))
        return summed(y @ gathered(down, 1, fsdp), tp)

    def ours():
        y = F.silu(x @ tpkernels.all_gather(gate, fsdp)) * (x @ tpkernels.all_gather(up, fsdp))
        return tpkernels.matmul_all_reduce(y, tpkernels.all_gather(down, fsdp, 1), tp)

    return Case(reference, ours, depth=hidden * tp.size())


# Keller Jordan's coefficients: x -> a x + b (x x^T) x + c (x x^T)^2 x brings singular values to 1.
NEWTON_SCHULZ = 5 * [(3.4445, -4.7750, 2.0315)]


@problem(86, "the orthogonalized update of Muon; columns are sharded")
def tp_muon_orthogonalization(at: Setup) -> Case:
    x = at.normal(at.size(512), at.size(1024))

    def step(y, gram, a, b, c):
        return torch.addmm(y, torch.addmm(gram, gram, gram, alpha=c, beta=b), y, beta=a)

    def reference():
        y = x / summed(x.square().sum()).sqrt()
        for coefficients in NEWTON_SCHULZ:
            y = step(y, summed(y @ y.mT), *coefficients)
        return y

    def ours():
        y = x / tpkernels.all_reduce(x.square().sum(), at.group).sqrt()
        for coefficients in NEWTON_SCHULZ:
            y = step(y, tpkernels.matmul_all_reduce(y, y.mT, at.group), *coefficients)
        return y

    return Case(reference, ours, depth=x.shape[1] * at.world)
