"""The kernels and copies of ``tpkernels.cuda`` for the GPU suite."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from benchmarks.gpu.stage import (
    Result,
    Setting,
    captured,
    checks,
    delayed,
    integers,
    stage,
    synchronize,
    times_ms,
)
from tpkernels import _C, cuda, groups
from tpkernels.dtypes import CODES
from tpkernels.symm.device import DeviceWorkspace

WORDS, BUFFER_BYTES = 1 << 16, 256 << 20
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
COUNTS = (1, 1000, 65_537, 3_000_001)
ROWS = ((1, 512), (5, 2056), (3, 8192), (70, 64))
RATES = (50.0, 150.0, 300.0, 450.0)  # GB/s
PACED_BYTES = 64 << 20
WAYS = ("two_shot", "ll", "ll_two_shot", "ll128")


def _values(seed: int, device: str, dtype: torch.dtype, count: int) -> torch.Tensor:
    """Random values, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, generator=generator) * 100).to(dtype).to(device)


def _host_sum(partials: list[torch.Tensor]) -> torch.Tensor:
    """The sum in rank order by csrc/host, in the partials' dtype."""
    given = [partial.cpu() for partial in partials]
    out, code = torch.empty_like(given[0]), CODES[given[0].dtype]
    addresses = [partial.data_ptr() for partial in given]
    _C.host.sum_partials(out.data_ptr(), addresses, code, 0, out.numel(), _C.host.Epilogue(code))
    return out


def _workspace(device: str) -> DeviceWorkspace:
    """The device workspace of all ranks, which may share a GPU."""
    group = groups.get(groups.name_of(dist.new_group())).ready()
    assert group.workspace is not None
    if device == "cpu":
        return group.workspace.device(WORDS, BUFFER_BYTES >> 4, "the GPU suite")
    own = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(own)
    reason = group.unsupported_kernels(own, "CUDA", cuda.unsupported(own))
    if reason is not None:
        raise NotImplementedError(reason)
    return group.workspace.cuda(own, WORDS, BUFFER_BYTES, "the GPU suite").current


class CudaCalls:
    """The calls with a workspace, on every rank."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.space = _workspace(device)
        self.rank, self.world = self.space.rank, self.space.world
        self._signature = 0

    def next(self) -> int:
        self._signature += 1
        return self._signature

    def reduce(self, way: str, dtype: torch.dtype, count: int) -> bool:
        """Whether an all-reduce equals the host's, to the bit."""
        xs = [_values(count + r, self.device, dtype, count) for r in range(self.world)]
        out = torch.empty_like(xs[0])
        cuda.all_reduce(self.space, self.next(), xs[self.rank], out, way=way)
        synchronize(self.device)
        return torch.equal(out.cpu(), _host_sum(xs))

    def normed(self, way: str, dtype: torch.dtype, rows: int, columns: int) -> bool:
        """Whether the sum is the host's, and its rows are normalised as they are alone, to the bit,
        and as torch does it, nearly."""
        shape, count = (rows, columns), rows * columns
        xs = [_values(count + r, self.device, dtype, count).view(shape) for r in range(self.world)]
        weight = _values(9, self.device, dtype, columns)
        total, normed, alone = (torch.empty_like(xs[0]) for _ in range(3))
        launch = cuda.prepare_normed_all_reduce(
            self.world, xs[self.rank], total, normed, weight, 1e-5, way=way
        )
        launch.run(self.space, self.next())
        cuda.rms_norm(total, alone, weight, 1e-5)
        synchronize(self.device)
        wide = torch.nn.functional.rms_norm(total.double(), [columns], weight.double(), 1e-5)
        near = torch.allclose(normed.double(), wide, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
        return near and torch.equal(normed, alone) and torch.equal(total.cpu(), _host_sum(xs))

    def shards(self, way: str, dtype: torch.dtype, row: int) -> bool:
        """Whether an all-gather and a reduce-scatter of uneven shards are right, to the bit."""
        sizes = tuple(1 + 5 * (r % 3) for r in range(self.world))
        rows, begin = sum(sizes), sum(sizes[: self.rank])
        own = slice(begin, begin + sizes[self.rank])
        xs = [_values(r, self.device, dtype, rows * row).view(rows, row) for r in range(self.world)]
        whole, part = torch.empty_like(xs[0]), torch.empty_like(xs[0][own])
        gather = cuda.prepare_all_gather(xs[0][own].contiguous(), whole, sizes, way)
        scatter = cuda.prepare_reduce_scatter(xs[self.rank], part, sizes, way=way)
        for launch in (gather, scatter):
            launch.run(self.space, self.next())
        synchronize(self.device)
        summed = _host_sum([x[own].contiguous() for x in xs])
        return torch.equal(whole, xs[0]) and torch.equal(part.cpu(), summed)

    def exchange(self, chunk: torch.Tensor, out: torch.Tensor) -> None:
        """Every rank sends its chunk to its neighbour, by a copy engine on another stream."""
        source = (self.rank - 1) % self.world
        with cuda.CopyCall(self.space, self.next()) as call:
            call.put(chunk, 0)
            call.publish(1)
            if source == self.rank:
                out.copy_(chunk)
            elif self.device == "cuda":
                side, here = torch.cuda.Stream(), torch.cuda.current_stream()
                side.wait_stream(here)
                with torch.cuda.stream(side):
                    call.fetch(source, 1, out, 0)
                here.wait_stream(side)
            else:
                call.fetch(source, 1, out, 0)

    def copies(self, calls: int) -> bool:
        """Whether chunks arrive in repeated calls at the same addresses."""
        right, out = True, torch.empty(10_000, dtype=torch.int64, device=self.device)
        for i in range(calls):
            self.exchange(torch.full_like(out, 100 * i + self.rank), out)
            right = right and bool((out == 100 * i + (self.rank - 1) % self.world).all())
        return right

    def replays(self, count: int) -> bool:
        """Whether every replay of a graph of an all-reduce and a copy is right, with new input."""
        x = torch.zeros(5000, dtype=torch.float32, device=self.device)
        total, again, summed, got = (torch.empty_like(x) for _ in range(4))

        def calls() -> None:
            cuda.all_reduce(self.space, self.next(), x, total, way="two_shot")
            cuda.all_reduce(self.space, self.next(), x, again, way="ll")
            normed = cuda.prepare_normed_all_reduce(
                self.world, x, summed, torch.empty_like(x), torch.ones_like(x), 0.0
            )
            normed.run(self.space, self.next())
            self.exchange(x, got)

        recorded, _ = captured(calls)
        right = True
        for i in range(count):
            x.fill_(i + self.rank)
            recorded.replay()
            torch.cuda.synchronize()
            want = self.world * i + sum(range(self.world))
            right = right and bool((total == want).all()) and torch.equal(total, again)
            right = right and torch.equal(total, summed)
            right = right and bool((got == i + (self.rank - 1) % self.world).all())
        return right


def check_job(device: str, calls: int, delay_us: int) -> list[tuple[str, bool]]:
    """The calls on one rank, and whether each was right."""
    made = CudaCalls(device)
    made.space.set_chaos(seed=made.rank, max_delay_us=delay_us)
    results = []
    for way in WAYS:
        sums = [made.reduce(way, dtype, n) for dtype in DTYPES for n in COUNTS[:calls]]
        results.append((f"{way} all-reduce", all(sums)))
    for way in ("one_shot", "ll"):
        shards = [made.shards(way, dtype, row) for dtype in DTYPES for row in (1, 40, 513)]
        results.append((f"{way} shards", all(shards)))
    for way in WAYS[:3]:
        rows = [made.normed(way, dtype, *shape) for dtype in DTYPES for shape in ROWS[:calls]]
        results.append((f"{way} all-reduce of normalised rows", all(rows)))
    results.append(("peer copies", made.copies(calls)))
    if device == "cuda":
        results.append(("graph replays", made.replays(20 * calls)))
    cuda.barrier(made.space, made.next())
    synchronize(device)
    return [*results, ("no failed wait", made.space.failure() is None)]


@stage(gpus=1)
def cuda_check(setting: Setting) -> Iterator[Result]:
    """All-reduces, copies and replays of ``csrc/cuda``, with and without delays."""
    for world in (1, 2, 4):
        for delay_us in (0, 200):
            args, by = (len(COUNTS), delay_us), delayed(delay_us)
            yield from checks(setting, world, check_job, *args, by=by, value=cuda.image_status())


@stage(gpus=1)
def paced_copy(setting: Setting) -> Iterator[Result]:
    """Whether a paced copy keeps its rate, and the time of a plain copy of the same size."""
    src = torch.randint(0, 255, (PACED_BYTES,), dtype=torch.uint8, device=setting.device)
    dst = torch.empty_like(src)
    for rate in RATES:
        jobs = [lambda rate=rate: cuda.paced_copy(dst, src, rate), lambda: dst.copy_(src)]
        paced, plain = times_ms(setting.device, jobs)
        cuda.paced_copy(dst.zero_(), src, rate)
        due = PACED_BYTES / rate * 1e-6
        value = f"{paced:.4f} ms, due {due:.4f} ms, unpaced {plain:.4f} ms"
        right = bool(torch.equal(src, dst)) and paced >= 0.99 * due
        yield Result(f"{PACED_BYTES >> 20} MiB at {rate:g} GB/s", value, right)


def _multimem_job(device: str, counts: tuple[int, ...]) -> list[tuple[str, bool]]:
    """Whether sums by the switch are exact on integers; nothing without multicast memory."""
    made = CudaCalls(device)
    results = []
    for dtype in DTYPES if made.space.multicast else ():
        right = True
        for count in counts:
            xs = [integers(r, device, dtype, count) for r in range(made.world)]
            out = torch.empty_like(xs[0])
            cuda.all_reduce(made.space, made.next(), xs[made.rank], out, way="multimem")
            synchronize(device)
            right = right and torch.equal(out, torch.stack(xs).sum(0).to(dtype))
        results.append((f"multimem all-reduce {dtype}", right))
    dist.barrier()
    return results


@stage(gpus=2)
def multimem_check(setting: Setting) -> Iterator[Result]:
    """All-reduces that the switch sums, where there is one."""
    world, counts = min(8, torch.cuda.device_count()), (8, 65_536, 3_000_000)
    found = list(checks(setting, world, _multimem_job, counts))
    yield from found or [Result("multicast memory", "there is none", ok=None)]
