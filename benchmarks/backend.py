"""Time the torch.distributed backend "tpkernels" next to gloo.

    python -m benchmarks.backend --json backend.json
    python -m benchmarks.backend collectives --ranks 2 4
    python -m benchmarks.backend crowded --kib 4 1024
    python -m benchmarks.backend decode --dtypes float32 bfloat16 --tokens 24 --repeat 7

    collectives   collectives of torch.distributed, fp32 unless noted
    crowded       the same, while another process keeps a core busy
    ddp           a training step of a transformer of 21M parameters in DistributedDataParallel
    decode        `generate` of a Llama of 100M parameters, sharded by transformers (tp_plan),
                  and not sharded, in one process with as many threads as there are ranks

Each rank has one thread and holds a group of each backend, whose timed regions are interleaved. The
ranks of `decode` belong to one backend; they stay alive, and their runs are interleaved. Each part
compares the results of the backends before it times them. Prints medians of the slowest rank. A
size is the size of the larger of input and output. Buffers are reused, so small ones are cached.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import tpkernels  # noqa: F401  registers the backend
from benchmarks import llama
from tpkernels.launch import Ranks
from tpkernels.launch.terminal import byte_size
from tpkernels.planning.machine import processor
from tpkernels.timing import interleaved, slowest

BACKENDS = ("gloo", "tpkernels")
KIB = {"collectives": (4, 64, 1 << 10, 8 << 10, 32 << 10), "crowded": (4, 64, 1 << 10, 16 << 10)}
REPEAT = {"collectives": 21, "crowded": 15, "ddp": 21, "decode": 7}
# Duration of a timed region. Beside a busy process it covers several time slices of the scheduler,
# so that each region includes its share of the preemptions.
REGION_SECONDS = {"collectives": 0.02, "crowded": 0.08}
MAX_CALLS = 8192  # per timed region
WARMUP = 2  # untimed repetitions of decode
Row = dict[str, Any]


@dataclass(frozen=True)
class Collective:
    """A collective. The input or the output has 1 / world of the bytes if it is sharded; a
    collective in place has no output."""

    call: Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup], object]
    dtype: torch.dtype = torch.float32
    shards_input: bool = False
    shards_output: bool = False
    in_place: bool = False

    def allocate(self, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the input and the output, filled with zeros."""
        count, world = nbytes // self.dtype.itemsize, dist.get_world_size()
        sizes = (
            count // world if self.shards_input else count,
            0 if self.in_place else count // world if self.shards_output else count,
        )
        return torch.zeros(sizes[0], dtype=self.dtype), torch.zeros(sizes[1], dtype=self.dtype)


def _all_reduce(x: torch.Tensor, _: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(x, group=group)


COLLECTIVES = {
    "all_reduce": Collective(_all_reduce, in_place=True),
    "all_reduce, bf16": Collective(_all_reduce, torch.bfloat16, in_place=True),
    "all_reduce, max": Collective(
        lambda x, _, group: dist.all_reduce(x, dist.ReduceOp.MAX, group), in_place=True
    ),
    "all_gather_into_tensor": Collective(
        lambda x, out, group: dist.all_gather_into_tensor(out, x, group), shards_input=True
    ),
    "reduce_scatter_tensor": Collective(
        lambda x, out, group: dist.reduce_scatter_tensor(out, x, group=group), shards_output=True
    ),
    "broadcast": Collective(lambda x, _, group: dist.broadcast(x, 0, group), in_place=True),
    "all_to_all_single": Collective(
        lambda x, out, group: dist.all_to_all_single(out, x, group=group)
    ),
    "barrier": Collective(lambda *buffers_and_group: dist.barrier(buffers_and_group[-1])),
}


# On the ranks.


@functools.cache
def get_groups() -> dict[str, dist.ProcessGroup]:
    """Return a group of each backend. Collective at the first call."""
    assert dist.group.WORLD is not None
    return {"gloo": dist.group.WORLD, "tpkernels": dist.new_group(backend="tpkernels")}


def time_interleaved(
    run: Callable[[str], object],
    names: Iterable[str],
    repeat: int,
    region_seconds: float = 0.0,
    reset: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Return the milliseconds per call of each variant, one per repetition, on the slowest rank.

    The number of calls in a timed region is the first power of two that fills ``region_seconds``.
    ``reset`` runs before each region, untimed.
    """

    def region(name: str, calls: int) -> float:
        reset()
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(calls):
            run(name)
        return time.perf_counter() - begin

    calls = dict.fromkeys(names, 1)
    for name in [*calls] * 3:
        region(name, 1)
    for name in calls:
        while slowest([region(name, calls[name])])[0] < region_seconds and calls[name] < MAX_CALLS:
            calls[name] *= 2
    times: dict[str, list[float]] = {name: [] for name in calls}
    for name in interleaved(calls, repeat):
        times[name].append(1e3 * region(name, calls[name]) / calls[name])
    return {name: slowest(samples) for name, samples in times.items()}


def measure_collective(
    name: str, nbytes: int, repeat: int, region_seconds: float
) -> dict[str, list[float]]:
    """Verify a collective on integers, then time it in each group."""
    groups, collective = get_groups(), COLLECTIVES[name]
    results = []
    for group in groups.values():
        x, out = collective.allocate(nbytes)
        generator = torch.Generator().manual_seed(dist.get_rank())
        x.copy_(torch.randint(-8, 9, x.shape, generator=generator))
        collective.call(x, out, group)
        results.append(torch.cat([x, out]))
    if not torch.equal(*results):
        raise RuntimeError(f"{name} of {nbytes} bytes differs between {' and '.join(groups)}")
    source = torch.rand_like(x)  # repeated sums reach inf: as fast as other values
    return time_interleaved(
        lambda backend: collective.call(x, out, groups[backend]),
        groups,
        repeat,
        region_seconds,
        reset=lambda: x.copy_(source),
    )


def spin() -> None:
    """Keep a core busy until the process is killed."""
    while True:
        pass


class Transformer(nn.Module):
    """A transformer of 21M parameters."""

    vocabulary, width, layers = 2048, 512, 6

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.vocabulary, self.width)
        layer = nn.TransformerEncoderLayer(
            self.width, nhead=8, dim_feedforward=4 * self.width, dropout=0.0, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, self.layers, enable_nested_tensor=False)
        self.head = nn.Linear(self.width, self.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(tokens)))


def measure_training(batch: int, length: int, repeat: int) -> dict[str, list[float]]:
    """Time a training step in each group, and without communication."""
    torch.manual_seed(0)
    models: dict[str, nn.Module] = {"none": Transformer()}
    for backend, group in get_groups().items():
        model = copy.deepcopy(models["none"])
        models[backend] = DistributedDataParallel(model, process_group=group)
    optimizers = {name: torch.optim.AdamW(model.parameters()) for name, model in models.items()}
    torch.manual_seed(1 + dist.get_rank())
    tokens, targets = torch.randint(Transformer.vocabulary, (2, batch, length))

    def step(name: str) -> None:
        optimizers[name].zero_grad()
        logits = models[name](tokens)
        nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        optimizers[name].step()

    for backend in BACKENDS:
        step(backend)
    for ours, theirs in zip(*(models[name].parameters() for name in BACKENDS), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    return time_interleaved(step, models, repeat)


class Decoder:
    """A Llama on this rank: its shard, or the full model if there is only one rank."""

    def __init__(self, folder: str, dtype: torch.dtype) -> None:
        import transformers

        world = dist.get_world_size()
        # Without tp_size transformers reads WORLD_SIZE and, if it is not set, does not shard.
        options: Row = {} if world == 1 else {"tp_plan": "auto", "tp_size": world}
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.model = load(folder, dtype=dtype, **options).eval()
        shards = [p for p in self.model.parameters() if isinstance(p, DTensor)]
        used = {dist.get_backend(shard.device_mesh.get_group("tp")) for shard in shards}
        if used != (set() if world == 1 else {dist.get_backend()}):
            raise RuntimeError(f"shards on {sorted(used)}; expected {dist.get_backend()}")
        generator = torch.Generator().manual_seed(1)
        self.prompt = torch.randint(0, 8192, (1, llama.PROMPT), generator=generator)

    @torch.inference_mode()
    def logits(self) -> torch.Tensor:
        return self.model(self.prompt).logits.float()

    @torch.inference_mode()
    def decode(self, tokens: int) -> float:
        """Return the milliseconds per token of `generate`, including the prompt."""
        dist.barrier()
        begin = time.perf_counter()
        options = {"min_new_tokens": tokens, "max_new_tokens": tokens, "pad_token_id": 0}
        self.model.generate(self.prompt, do_sample=False, **options)
        return 1e3 * (time.perf_counter() - begin) / tokens


# The parts, in the main process.


def make_row(part: str, case: str, world: int, ms: dict[str, list[float]], **rest: object) -> Row:
    medians = {name: statistics.median(samples) for name, samples in ms.items()}
    return {"part": part, "case": case, "ranks": world, **rest, "median_ms": medians, "ms": ms}


def print_row(*cells: object) -> None:
    print("|", " | ".join(map(str, cells)), "|", flush=True)


def print_header(title: str, *names: object) -> None:
    print(f"\n{title}\n")
    print_row(*names)
    print("|" + "---|" * len(names), flush=True)


def run_collectives(part: str, world: int, options: argparse.Namespace) -> Iterator[Row]:
    """Time the collectives, in the part "crowded" beside a process that keeps a core busy."""
    kib = options.kib or KIB[part]
    beside = ", beside a busy process" if part == "crowded" else ""
    title = f"{world} ranks{beside}: gloo / tpkernels in us, and the speed-up"
    print_header(title, "collective", *(byte_size(size << 10) for size in kib))
    with Ranks(world) as ranks, contextlib.ExitStack() as stack:
        if part == "crowded":
            stack.enter_context(Ranks(1)).submit(spin)
        for name in options.collectives:
            cells = [""] * len(kib)
            for i, size in enumerate(kib[:1] if name == "barrier" else kib):
                arguments = name, size << 10, options.repeat or REPEAT[part], REGION_SECONDS[part]
                ms = ranks.run(measure_collective, *arguments)[0]
                row = make_row(part, name, world, ms, bytes=size << 10)
                gloo, ours = row["median_ms"].values()
                cells[i] = f"{1e3 * gloo:.0f} / {1e3 * ours:.0f}, **{gloo / ours:.2f}x**"
                yield row
            print_row(name, *cells)


def run_training(part: str, world: int, options: argparse.Namespace) -> Iterator[Row]:
    title = f"{world} ranks: training step of {' x '.join(map(str, options.batch))} tokens in ms"
    print_header(title, "without communication", *BACKENDS, "gloo / tpkernels")
    with Ranks(world) as ranks:
        ms = ranks.run(measure_training, *options.batch, options.repeat or REPEAT[part])[0]
    row = make_row(part, "training step", world, ms, batch=options.batch)
    none, gloo, ours = row["median_ms"].values()
    print_row(f"{none:.1f}", f"{gloo:.1f}", f"{ours:.1f}", f"**{gloo / ours:.2f}x**")
    yield row


def run_decode(part: str, world: int, options: argparse.Namespace) -> Iterator[Row]:
    threads = f"{world} threads"
    title = f"{world} ranks, or {threads} without sharding: decode in tokens/s"
    ratios = (f"tpkernels / {threads}", "tpkernels / gloo")
    print_header(title, "dtype", threads, *BACKENDS, *ratios)
    for dtype in options.dtypes:
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            with Ranks(1) as maker:
                maker.run(llama.save, "100m", folder, timeout=600)
            decoders = {
                name: stack.enter_context(
                    Ranks(
                        *(1 if name == threads else world, Decoder, folder, getattr(torch, dtype)),
                        backend="gloo" if name == threads else name,
                        threads=world if name == threads else 1,
                    )
                )
                for name in (threads, *BACKENDS)
            }
            gloo, ours = (decoders[name].call("logits", rank=0) for name in BACKENDS)
            tolerance = 1e-4 if dtype == "float32" else 0.1
            torch.testing.assert_close(gloo, ours, rtol=tolerance, atol=tolerance)
            ms: dict[str, list[float]] = {name: [] for name in decoders}
            for i in range(WARMUP + (options.repeat or REPEAT[part])):
                for name, ranks in decoders.items():
                    sample = max(ranks.call("decode", options.tokens))
                    ms[name] += [sample] if i >= WARMUP else []
        row = make_row(part, dtype, world, ms, tokens=options.tokens)
        base, gloo, ours = (1e3 / median for median in row["median_ms"].values())
        speedups = (f"**{ours / other:.2f}x**" for other in (base, gloo))
        print_row(dtype, f"{base:.1f}", f"{gloo:.1f}", f"{ours:.1f}", *speedups)
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", choices=PARTS, help="part to run (all)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="world sizes (2)")
    parser.add_argument("--kib", type=int, nargs="+", help="sizes of the collectives in KiB")
    parser.add_argument(
        "--collectives", nargs="+", choices=COLLECTIVES, default=COLLECTIVES, help="(all)"
    )
    parser.add_argument(
        "--batch", type=int, nargs=2, default=[2, 32], help="sequences and their length in ddp"
    )
    parser.add_argument("--dtypes", nargs="+", default=["float32"], help="of decode (float32)")
    parser.add_argument("--tokens", type=int, default=24, help="new tokens of decode (24)")
    parser.add_argument("--repeat", type=int, help=f"timed repetitions ({REPEAT})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples to this file")
    options = parser.parse_args()
    rows: list[Row] = []
    for part in [options.part] if options.part else PARTS:
        for world in options.ranks:
            rows.extend(PARTS[part](part, world, options))
    if options.json is not None:
        run = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shlex.join(["python", "-m", "benchmarks.backend", *sys.argv[1:]]),
            "cpu": processor(),
            "torch": torch.__version__,
            "load": os.getloadavg()[0],  # of the last minute, at the end
        }
        options.json.write_text(json.dumps({**run, "rows": rows}, indent=1) + "\n")


PARTS = {
    "collectives": run_collectives,
    "crowded": run_collectives,
    "ddp": run_training,
    "decode": run_decode,
}


if __name__ == "__main__":
    main()
