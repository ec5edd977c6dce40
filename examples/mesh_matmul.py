"""One matmul on a mesh of two dims, in several variants that give the same result.

    torchrun --standalone --nproc-per-node 4 examples/mesh_matmul.py

The inputs are sharded over both axes, the weight and the result over the first axis. The results of
all variants are compared before the timing. More meshes and sizes, and a trace of all ranks:

    torchrun --standalone --nproc-per-node 8 examples/mesh_matmul.py --mesh 4x2
    torchrun --standalone --nproc-per-node 16 examples/mesh_matmul.py --mesh 4x4 --repeat 0
    tpkernels profile --nproc 4 --out trace examples/mesh_matmul.py --repeat 1
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import tpkernels

IN, WEIGHT, OUT = [Shard(0), Shard(1)], [Shard(0), Replicate()], [Shard(0), Replicate()]
TOLERANCES = {torch.float32: (1e-4, 1e-4), torch.bfloat16: (2e-2, 1.6e-2)}
WARMUP = 2


@dataclass(frozen=True)
class Axis:
    """Process group of one mesh axis, and the local index on that axis."""

    group: dist.ProcessGroup
    size: int
    index: int

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh, dim: int) -> Axis:
        return cls(mesh.get_group(dim), mesh.shape[dim], mesh.get_local_rank(dim))

    def pass_on(self, send: torch.Tensor, receive: torch.Tensor, distance: int) -> list[dist.Work]:
        """Start a send to the rank ``distance`` after this rank, and a receive from the rank
        ``distance`` before it."""
        destination, source = (
            dist.get_global_rank(self.group, (self.index + step) % self.size)
            for step in (distance, -distance)
        )
        return dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, send, destination, self.group),
                dist.P2POp(dist.irecv, receive, source, self.group),
            ]
        )


@dataclass(frozen=True)
class Job:
    """Local x [M/X, K/Y] and w [K/X, N] on a mesh X x Y. The local result is [M/X, N]."""

    x: DTensor
    w: DTensor
    rows: Axis
    columns: Axis

    def select_rows(self, full_w: torch.Tensor) -> torch.Tensor:
        """Return the rows of w that match the local columns of x."""
        return full_w.chunk(self.columns.size)[self.columns.index]


# Collectives: by torch, and by hand on a ring in one or two directions.


def torch_all_gather(shard: torch.Tensor, axis: Axis) -> torch.Tensor:
    full = shard.new_empty(axis.size * shard.shape[0], *shard.shape[1:])
    dist.all_gather(list(full.chunk(axis.size)), shard.contiguous(), group=axis.group)
    return full


def torch_all_reduce(partial: torch.Tensor, axis: Axis) -> torch.Tensor:
    dist.all_reduce(partial, group=axis.group)
    return partial


def ring_all_gather(shard: torch.Tensor, axis: Axis, directions: tuple[int, ...]) -> torch.Tensor:
    """Send shards along the ring. With two directions, each carries half of the rows."""
    full = shard.new_empty(axis.size, *shard.shape)
    full[axis.index] = shard
    views = list(zip(directions, full.chunk(len(directions), dim=1), strict=True))
    for step in range(axis.size - 1):
        works = []
        for distance, view in views:
            sent_index, received_index = (
                (axis.index - distance * (step + i)) % axis.size for i in (0, 1)
            )
            works += axis.pass_on(view[sent_index].contiguous(), view[received_index], distance)
        for work in works:
            work.wait()
    return full.flatten(0, 1)


def ring_all_reduce(partial: torch.Tensor, axis: Axis, directions: tuple[int, ...]) -> torch.Tensor:
    """Ring reduce-scatter, then all-gather. Each rank adds its partial sum to the passing chunk."""
    chunks = partial.view(axis.size, len(directions), -1)
    sums = torch.empty_like(chunks[0])
    for i, distance in enumerate(directions):
        partial_sum = chunks[(axis.index - distance) % axis.size, i].clone()
        for step in range(2, axis.size + 1):
            received = torch.empty_like(partial_sum)
            for work in axis.pass_on(partial_sum, received, distance):
                work.wait()
            partial_sum = received + chunks[(axis.index - distance * step) % axis.size, i]
        sums[i] = partial_sum
    return ring_all_gather(sums.view(1, -1), axis, (1,)).view(partial.shape)


# Variants of the matmul.


def gather_both(job: Job) -> torch.Tensor:
    x = torch_all_gather(job.x.to_local().t(), job.columns).t()
    return x @ torch_all_gather(job.w.to_local(), job.rows)


def gather_w(
    gather: Callable[[torch.Tensor, Axis], torch.Tensor],
    reduce: Callable[[torch.Tensor, Axis], torch.Tensor],
    accumulator: torch.dtype | None,
) -> Callable[[Job], torch.Tensor]:
    """All-gather w, slice it, multiply, and all-reduce over the second axis.

    Args:
        accumulator: dtype of the partial sums; None: the dtype of x.
    """

    def variant(job: Job) -> torch.Tensor:
        w = job.select_rows(gather(job.w.to_local(), job.rows))
        partial = (job.x.to_local() @ w).to(accumulator or job.x.dtype)
        return reduce(partial, job.columns).to(job.x.dtype)

    return variant


def permute_w(job: Job) -> torch.Tensor:
    """Multiply by one shard of w while the ring passes the next shard on."""
    x, w = job.x.to_local(), job.w.to_local().contiguous()
    first = job.columns.index * x.shape[1]  # first local column, as an index into K
    partial = torch.zeros(x.shape[0], w.shape[1], dtype=torch.float32)
    for step in range(job.rows.size):
        works, received = [], torch.empty_like(w)
        if step < job.rows.size - 1:
            works = job.rows.pass_on(w, received, 1)
        begin = ((job.rows.index - step) % job.rows.size) * w.shape[0]
        low, high = max(begin, first), min(begin + w.shape[0], first + x.shape[1])
        if low < high:
            partial += x[:, low - first : high - first] @ w[low - begin : high - begin]
        for work in works:
            work.wait()
        w = received
    return torch_all_reduce(partial, job.columns).to(x.dtype)


def make_tpkernels_variant(strategy: str) -> Callable[[Job], torch.Tensor]:
    return lambda job: tpkernels.sharded_matmul(job.x, job.w, OUT, strategy).to_local()


VARIANTS: dict[str, Callable[[Job], torch.Tensor]] = {
    "gather x and w": gather_both,
    "gather w, all-reduce": gather_w(torch_all_gather, torch_all_reduce, torch.float32),
    "gather w, all-reduce in the inputs' dtype": gather_w(torch_all_gather, torch_all_reduce, None),
    "gather w, all-reduce by a ring": gather_w(
        lambda shard, axis: ring_all_gather(shard, axis, (1,)),
        lambda partial, axis: ring_all_reduce(partial, axis, (1,)),
        torch.float32,
    ),
    "gather w, all-reduce by a bidirectional ring": gather_w(
        lambda shard, axis: ring_all_gather(shard, axis, (1, -1)),
        lambda partial, axis: ring_all_reduce(partial, axis, (1, -1)),
        torch.float32,
    ),
    "permute w during the matmul, all-reduce": permute_w,
    "tpkernels, gather x and w": make_tpkernels_variant("M,none"),
    "tpkernels, gather w, fused all-reduce": make_tpkernels_variant("M,K"),
    "tpkernels, auto": make_tpkernels_variant("auto"),
}


def print_once(message: str) -> None:
    if dist.get_rank() == 0:
        print(message, flush=True)


def check(job: Job) -> None:
    """Compare the variants with the first variant, and the first variant with the exact result."""
    mesh, reference = job.x.device_mesh, None
    atol, rtol = TOLERANCES[job.x.dtype]
    exact = job.x.full_tensor().double() @ job.w.full_tensor().double()
    for name, variant in VARIANTS.items():
        y = DTensor.from_local(variant(job), mesh, OUT, run_check=False).full_tensor()
        expected = exact if reference is None else reference
        report = tpkernels.numerics.compare(expected, y, atol, rtol, region_grid=(2, 2))
        if not report.passed:
            raise SystemExit(f"{name}: the result is wrong:\n{report}")
        reference = y if reference is None else reference
    print_once(f"{len(VARIANTS)} variants, all equal within atol {atol} and rtol {rtol}")


def measure(job: Job, repeat: int) -> None:
    """Time the variants interleaved in random order, each repetition on its slowest rank."""
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for repetition in range(WARMUP + repeat):
        for name in random.Random(repetition).sample(list(VARIANTS), len(VARIANTS)):
            dist.barrier()
            begin = time.perf_counter()
            with torch.profiler.record_function(name):
                VARIANTS[name](job)
            elapsed = torch.tensor(time.perf_counter() - begin)
            dist.all_reduce(elapsed, dist.ReduceOp.MAX)
            seconds[name].append(elapsed.item())
    medians = {name: 1e3 * statistics.median(samples[WARMUP:]) for name, samples in seconds.items()}
    baseline = medians["gather x and w"]
    width = max(map(len, VARIANTS))
    print_once(f"{'':{width}}  {'ms':>8}  speed-up")
    for name, ms in medians.items():
        print_once(f"{name:{width}}  {ms:8.2f}  {baseline / ms:7.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mesh", default="2x2", help="mesh shape (%(default)s)")
    parser.add_argument("--shape", default="2048,2048,1024", help="M,K,N (%(default)s)")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="default: bfloat16"
    )
    parser.add_argument(
        "--repeat",
        type=int,
        default=10,
        help="timed repetitions (%(default)s); 0 only checks the results",
    )
    args = parser.parse_args()
    mesh_shape = tuple(map(int, args.mesh.split("x")))
    m, k, n = map(int, args.shape.split(","))
    unit = 2 * mesh_shape[0] * mesh_shape[1]  # a bidirectional ring sends half chunks
    if any(size % unit for size in (m, k, n)):
        parser.error(
            f"--shape is {args.shape}; on mesh {args.mesh} M, K and N must be multiples of {unit}"
        )

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("x", "y"))
    torch.manual_seed(0)  # identical tensors on all ranks
    dtype = getattr(torch, args.dtype)
    full_x = torch.randn(m, k).to(dtype)
    full_w = (torch.randn(k, n) / k**0.5).to(dtype)
    x, w = distribute_tensor(full_x, mesh, IN), distribute_tensor(full_w, mesh, WEIGHT)
    job = Job(x, w, Axis.from_mesh(mesh, 0), Axis.from_mesh(mesh, 1))
    print_once(f"[{m}, {k}] @ [{k}, {n}] in {args.dtype} on {args.mesh}")
    check(job)
    if args.repeat:
        measure(job, args.repeat)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
