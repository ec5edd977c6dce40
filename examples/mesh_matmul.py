"""One matmul on a mesh of two dims, in several variants that give the same result.

    torchrun --standalone --nproc-per-node 4 examples/mesh_matmul.py

The inputs are sharded over both axes, the weight and the result over the first. All variants are
compared with each other, then timed. Other meshes and sizes, and a trace of all ranks:

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
    """This rank's place along an axis of the mesh."""

    group: dist.ProcessGroup
    size: int
    at: int

    @classmethod
    def of(cls, mesh: DeviceMesh, dim: int) -> Axis:
        return cls(mesh.get_group(dim), mesh.shape[dim], mesh.get_local_rank(dim))

    def pass_on(self, send: torch.Tensor, receive: torch.Tensor, by: int) -> list[dist.Work]:
        """Starts to send to the neighbour ``by`` places on and to receive from the other side."""
        to, source = (
            dist.get_global_rank(self.group, (self.at + step) % self.size) for step in (by, -by)
        )
        return dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, send, to, self.group),
                dist.P2POp(dist.irecv, receive, source, self.group),
            ]
        )


@dataclass(frozen=True)
class Job:
    """x [M/X, K/Y] and w [K/X, N] of this rank; the result is [M/X, N]."""

    x: DTensor
    w: DTensor
    rows: Axis
    columns: Axis

    def own_part_of(self, whole_w: torch.Tensor) -> torch.Tensor:
        """The rows of w that belong to this rank's columns of x."""
        return whole_w.chunk(self.columns.size)[self.columns.at]


# The collectives: torch's, and rings by hand in one direction or in both.


def gather_by_torch(shard: torch.Tensor, axis: Axis) -> torch.Tensor:
    whole = shard.new_empty(axis.size * shard.shape[0], *shard.shape[1:])
    dist.all_gather(list(whole.chunk(axis.size)), shard.contiguous(), group=axis.group)
    return whole


def reduce_by_torch(part: torch.Tensor, axis: Axis) -> torch.Tensor:
    dist.all_reduce(part, group=axis.group)
    return part


def gather_by_ring(shard: torch.Tensor, axis: Axis, directions: tuple[int, ...]) -> torch.Tensor:
    """Shards travel along the ring; with two directions, half of each shard's rows in each."""
    whole = shard.new_empty(axis.size, *shard.shape)
    whole[axis.at] = shard
    lanes = list(zip(directions, whole.chunk(len(directions), dim=1), strict=True))
    for step in range(axis.size - 1):
        works = []
        for by, lane in lanes:
            here, coming = ((axis.at - by * (step + i)) % axis.size for i in (0, 1))
            works += axis.pass_on(lane[here].contiguous(), lane[coming], by)
        for work in works:
            work.wait()
    return whole.flatten(0, 1)


def reduce_by_ring(part: torch.Tensor, axis: Axis, directions: tuple[int, ...]) -> torch.Tensor:
    """Each chunk travels to its owner, and every rank on the way adds its own part. Then the sums
    are gathered."""
    chunks = part.view(axis.size, len(directions), -1)
    sums = torch.empty_like(chunks[0])
    for lane, by in enumerate(directions):
        passing = chunks[(axis.at - by) % axis.size, lane].clone()
        for step in range(2, axis.size + 1):
            arrived = torch.empty_like(passing)
            for work in axis.pass_on(passing, arrived, by):
                work.wait()
            passing = arrived + chunks[(axis.at - by * step) % axis.size, lane]
        sums[lane] = passing
    return gather_by_ring(sums.view(1, -1), axis, (1,)).view(part.shape)


# The ways.


def gather_both(job: Job) -> torch.Tensor:
    x = gather_by_torch(job.x.to_local().t(), job.columns).t()
    return x @ gather_by_torch(job.w.to_local(), job.rows)


def gather_w(
    gather: Callable[[torch.Tensor, Axis], torch.Tensor],
    reduce: Callable[[torch.Tensor, Axis], torch.Tensor],
    accumulator: torch.dtype | None,
) -> Callable[[Job], torch.Tensor]:
    """All-gather of w, slice, product, all-reduce over the second axis. Without an accumulator,
    partial results stay in the inputs' dtype."""

    def way(job: Job) -> torch.Tensor:
        w = job.own_part_of(gather(job.w.to_local(), job.rows))
        part = (job.x.to_local() @ w).to(accumulator or job.x.dtype)
        return reduce(part, job.columns).to(job.x.dtype)

    return way


def permute_w(job: Job) -> torch.Tensor:
    """Parts of w pass from neighbour to neighbour while each rank multiplies what it has."""
    x, w = job.x.to_local(), job.w.to_local().contiguous()
    first = job.columns.at * x.shape[1]  # of this rank's columns, in K
    part = torch.zeros(x.shape[0], w.shape[1], dtype=torch.float32)
    for step in range(job.rows.size):
        works, coming = [], torch.empty_like(w)
        if step < job.rows.size - 1:
            works = job.rows.pass_on(w, coming, 1)
        begin = ((job.rows.at - step) % job.rows.size) * w.shape[0]
        low, high = max(begin, first), min(begin + w.shape[0], first + x.shape[1])
        if low < high:
            part += x[:, low - first : high - first] @ w[low - begin : high - begin]
        for work in works:
            work.wait()
        w = coming
    return reduce_by_torch(part, job.columns).to(x.dtype)


def by_tpkernels(strategy: str) -> Callable[[Job], torch.Tensor]:
    return lambda job: tpkernels.sharded_matmul(job.x, job.w, OUT, strategy).to_local()


WAYS: dict[str, Callable[[Job], torch.Tensor]] = {
    "gather x and w": gather_both,
    "gather w, all-reduce": gather_w(gather_by_torch, reduce_by_torch, torch.float32),
    "gather w, all-reduce in the inputs' dtype": gather_w(gather_by_torch, reduce_by_torch, None),
    "gather w, all-reduce by a ring": gather_w(
        lambda shard, axis: gather_by_ring(shard, axis, (1,)),
        lambda part, axis: reduce_by_ring(part, axis, (1,)),
        torch.float32,
    ),
    "gather w, all-reduce by a bidirectional ring": gather_w(
        lambda shard, axis: gather_by_ring(shard, axis, (1, -1)),
        lambda part, axis: reduce_by_ring(part, axis, (1, -1)),
        torch.float32,
    ),
    "permute w during the matmul, all-reduce": permute_w,
    "tpkernels, gather x and w": by_tpkernels("M,none"),
    "tpkernels, gather w, fused all-reduce": by_tpkernels("M,K"),
    "tpkernels, auto": by_tpkernels("auto"),
}


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def check(job: Job) -> None:
    """Compares every way with the first, region by region, and that with one process's product."""
    mesh, reference = job.x.device_mesh, None
    atol, rtol = TOLERANCES[job.x.dtype]
    exact = job.x.full_tensor().double() @ job.w.full_tensor().double()
    for name, way in WAYS.items():
        y = DTensor.from_local(way(job), mesh, OUT, run_check=False).full_tensor()
        against = exact if reference is None else reference
        report = tpkernels.numerics.compare(against, y, atol, rtol, region_grid=(2, 2))
        if not report.passed:
            raise SystemExit(f"{name}: the result is wrong:\n{report}")
        reference = y if reference is None else reference
    say(f"{len(WAYS)} variants, all equal within atol {atol} and rtol {rtol}")


def measure(job: Job, repeat: int) -> None:
    """Interleaved, in a new order each time; a repetition counts with its slowest rank's time."""
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for repetition in range(WARMUP + repeat):
        for name in random.Random(repetition).sample(list(WAYS), len(WAYS)):
            dist.barrier()
            begin = time.perf_counter()
            with torch.profiler.record_function(name):
                WAYS[name](job)
            took = torch.tensor(time.perf_counter() - begin)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            seconds[name].append(took.item())
    medians = {name: 1e3 * statistics.median(each[WARMUP:]) for name, each in seconds.items()}
    baseline = medians["gather x and w"]
    width = max(map(len, WAYS))
    say(f"{'':{width}}  {'ms':>8}  speed-up")
    for name, ms in medians.items():
        say(f"{name:{width}}  {ms:8.2f}  {baseline / ms:7.2f}x")


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
    given = parser.parse_args()
    mesh_shape = tuple(map(int, given.mesh.split("x")))
    m, k, n = map(int, given.shape.split(","))
    even = 2 * mesh_shape[0] * mesh_shape[1]  # halves of chunks travel each way round a ring
    if any(size % even for size in (m, k, n)):
        parser.error(
            f"--shape is {given.shape}; on mesh {given.mesh} M, K and N must be multiples of {even}"
        )

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("x", "y"))
    torch.manual_seed(0)  # the same on all ranks
    dtype = getattr(torch, given.dtype)
    whole_x = torch.randn(m, k).to(dtype)
    whole_w = (torch.randn(k, n) / k**0.5).to(dtype)
    x, w = distribute_tensor(whole_x, mesh, IN), distribute_tensor(whole_w, mesh, WEIGHT)
    job = Job(x, w, Axis.of(mesh, 0), Axis.of(mesh, 1))
    say(f"[{m}, {k}] @ [{k}, {n}] in {given.dtype} on {given.mesh}")
    check(job)
    if given.repeat:
        measure(job, given.repeat)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
