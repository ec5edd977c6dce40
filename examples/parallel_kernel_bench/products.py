"""Matmuls of sharded matrices."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import tpkernels
from examples.parallel_kernel_bench.gallery import Case, Setup, problem
from examples.parallel_kernel_bench.plain import all_gather, all_reduce, reduce_scatter


@problem(11, "x @ w; columns of x are sharded and sent transposed")
def allgather_gemm_AT(setup: Setup) -> Case:
    x = setup.integers(setup.size(1024), setup.size(512))
    w = setup.integers(setup.size(512) * setup.world, setup.size(1024))
    return Case(
        lambda: all_gather(x.t()).t() @ w,
        lambda: tpkernels.all_gather_matmul(x, w, setup.group, gather_dim=1),
    )


@problem(12, "x @ w; columns of x are sharded")
def allgather_gemm(setup: Setup) -> Case:
    x = setup.integers(setup.size(1024), setup.size(512))
    w = setup.integers(setup.size(512) * setup.world, setup.size(1024))
    return Case(
        lambda: all_gather(x, 1) @ w,
        lambda: tpkernels.all_gather_matmul(x, w, setup.group, gather_dim=1),
    )


@problem(13, "x @ w; columns of x and rows of w are sharded")
def gemm_allreduce(setup: Setup) -> Case:
    x, w = (setup.integers(setup.size(1024), setup.size(1024)) for _ in range(2))
    return Case(lambda: all_reduce(x @ w), lambda: tpkernels.matmul_all_reduce(x, w, setup.group))


@problem(14, "x @ w; columns of w are sharded, the result is gathered")
def gemm_allgather(setup: Setup) -> Case:
    x, w = (setup.integers(setup.size(1024), setup.size(1024)) for _ in range(2))
    return Case(lambda: all_gather(x @ w, 1), lambda: tpkernels.all_gather(x @ w, setup.group, 1))


@problem(15, "silu(x @ w1) @ w2; columns of x and rows of the result are sharded")
def combined_sharded_gemms(setup: Setup) -> Case:
    width = setup.size(512)
    x = setup.normal(width * setup.world, width)
    w1 = setup.normal(width * setup.world, 2 * width, shared=True) / width**0.5
    w2 = setup.normal(2 * width, 2 * width, shared=True) / width**0.5
    local = slice(setup.rank * width, (setup.rank + 1) * width)

    def reference():
        partial = x.new_zeros(len(x), 2 * width)
        partial[local] = F.silu(all_gather(x, 1) @ w1)[local] @ w2
        return reduce_scatter(partial)

    def ours():
        local_x = tpkernels.all_to_all(x, setup.group, gather_dim=1, scatter_dim=0)
        return F.silu(local_x @ w1) @ w2

    return Case(reference, ours, depth=width * setup.world)


@problem(16, "rows of x @ w; columns of x and rows of w are sharded")
def gemm_reducescatter(setup: Setup) -> Case:
    x = setup.integers(setup.size(512) * setup.world, setup.size(1024))
    w = setup.integers(setup.size(1024), setup.size(1024))
    return Case(
        lambda: reduce_scatter(x @ w), lambda: tpkernels.matmul_reduce_scatter(x, w, setup.group)
    )


@problem(46, "logits of a few tokens; rows of the head and its bias are sharded")
def gemv_decode(setup: Setup) -> Case:
    x, bias = setup.integers(4, setup.size(2048), shared=True), setup.integers(setup.size(16384))
    w = setup.integers(setup.size(16384), setup.size(2048))
    return Case(
        lambda: all_gather(x @ w.t() + bias, 1),
        lambda: tpkernels.all_gather(F.linear(x, w, bias), setup.group, 1),
    )


@problem(48, "a gated MLP; weights sharded by FSDP and tensor parallelism")
def fsdp_and_tp(setup: Setup) -> Case:
    fsdp, tp = setup.mesh()
    width, hidden = setup.size(1024), setup.size(2048) // tp.size()
    x = setup.normal(setup.size(512), width, shared=True)
    gate, up = (setup.normal(width // fsdp.size(), hidden) / width**0.5 for _ in range(2))
    down = setup.normal(hidden, width // fsdp.size()) / hidden**0.5

    def reference():
        y = F.silu(x @ all_gather(gate, 0, fsdp)) * (x @ all_gather(up, 0, fsdp))
        return all_reduce(y @ all_gather(down, 1, fsdp), tp)

    def ours():
        y = F.silu(x @ tpkernels.all_gather(gate, fsdp)) * (x @ tpkernels.all_gather(up, fsdp))
        return tpkernels.matmul_all_reduce(y, tpkernels.all_gather(down, fsdp, 1), tp)

    return Case(reference, ours, depth=hidden * tp.size())


# Coefficients by Keller Jordan: x -> a x + b (x x^T) x + c (x x^T)^2 x moves singular values to 1.
NEWTON_SCHULZ = 5 * [(3.4445, -4.7750, 2.0315)]


@problem(86, "the orthogonalized update of Muon; columns are sharded")
def tp_muon_orthogonalization(setup: Setup) -> Case:
    x = setup.normal(setup.size(512), setup.size(1024))

    def step(y, gram, a, b, c):
        return torch.addmm(y, torch.addmm(gram, gram, gram, alpha=c, beta=b), y, beta=a)

    def reference():
        y = x / all_reduce(x.square().sum()).sqrt()
        for coefficients in NEWTON_SCHULZ:
            y = step(y, all_reduce(y @ y.mT), *coefficients)
        return y

    def ours():
        y = x / tpkernels.all_reduce(x.square().sum(), setup.group).sqrt()
        for coefficients in NEWTON_SCHULZ:
            y = step(y, tpkernels.matmul_all_reduce(y, y.mT, setup.group), *coefficients)
        return y

    return Case(reference, ours, depth=x.shape[1] * setup.world)
