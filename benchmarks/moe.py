"""Time an MoE layer without its router: tpkernels against the experts of transformers.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.moe
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.moe --memory experts

The experts of transformers run tensor-parallel over gloo on the same ranks, and in one process with
as many threads. A third baseline is expert-parallel, with two ``all_to_all_single`` over gloo. For
transformers the fastest of ``grouped_mm``, ``batched_mm`` (few tokens) and eager counts.

All variants run in turn, in random order. A time is the median over the turns, of the slowest rank.
The weights of several layers are used in turn, more than the caches hold, as in a model. Results
are first compared with the eager experts in one process. ``--memory`` prints the largest memory
growth of a rank in its first call with many tokens.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import tpkernels
from tpkernels.nn import MoE, pack_

SHAPES = ((1, 1024, 8, 2, 1024), (64, 1024, 8, 2, 1024), (2048, 1024, 8, 2, 1024))
LAYERS = 6
CALLS, MANY = 10, 1000  # calls of a layer in a turn, with fewer than so many tokens
OURS = ("width", "experts")
FEW = 16  # tokens up to which batched_mm is tried: it copies the weights of each route
Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def experts_of(hidden: int, experts: int, width: int) -> Any:
    """Return transformers' experts with random weights in bf16, the same on all ranks."""
    config = MixtralConfig(
        hidden_size=hidden, intermediate_size=width, num_local_experts=experts, hidden_act="silu"
    )
    module: Any = MixtralExperts(config).bfloat16().requires_grad_(False)
    for w in module.parameters():
        w.normal_(std=0.03)
    return module


def narrowed(whole: Any, rank: int, world: int) -> Any:
    """Return transformers' experts with this rank's width of each."""
    width = whole.intermediate_dim // world
    part = experts_of(whole.hidden_dim, whole.num_experts, width)
    mine = slice(rank * width, (rank + 1) * width)
    gate, up = whole.gate_up_proj.chunk(2, 1)
    part.gate_up_proj.copy_(torch.cat([gate[:, mine], up[:, mine]], 1))
    part.down_proj.copy_(whole.down_proj[:, :, mine])
    return part


def named(module: Any, implementation: str, reduce: bool) -> Experts:
    """Return transformers' experts by one of its implementations, summed over the ranks or not."""

    def run(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        module.config._experts_implementation = implementation
        y: torch.Tensor = module(x, ids, weights)
        if reduce:
            dist.all_reduce(y)
        return y

    return run


def by_all_to_all(whole: Any) -> Experts:
    """Return transformers' experts split whole over the ranks: tokens go to them and come back by
    ``all_to_all_single``."""
    rank, world = dist.get_rank(), dist.get_world_size()
    held = whole.num_experts // world
    mine = range(rank * held, (rank + 1) * held)

    def exchange(rows: torch.Tensor, left: list[int], arrived: list[int]) -> torch.Tensor:
        out = rows.new_empty(sum(arrived), *rows.shape[1:])
        dist.all_to_all_single(out, rows, arrived, left)
        return out

    def run(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        sizes = tpkernels.shard_sizes(len(x), world)
        own, k = slice(sum(sizes[:rank]), sum(sizes[: rank + 1])), ids.shape[1]
        experts = ids[own].flatten()
        order = experts.argsort()
        left = torch.bincount(experts // held, minlength=world)
        arrived = torch.empty_like(left)
        dist.all_to_all_single(arrived, left)
        counts = left.tolist(), arrived.tolist()
        rows = exchange(x[own][order // k], *counts)
        arrived_experts = exchange(experts[order], *counts)
        made = torch.empty_like(rows)
        for expert in mine:
            here = arrived_experts == expert
            gate, up = (rows[here] @ whole.gate_up_proj[expert].t()).chunk(2, -1)
            made[here] = (whole.act_fn(gate) * up) @ whole.down_proj[expert].t()
        by_route = torch.empty_like(x[:1].expand(len(order), -1).contiguous())
        by_route[order] = exchange(made, *reversed(counts))
        sums = (by_route.view(-1, k, x.shape[1]) * weights[own][..., None]).sum(1).to(x.dtype)
        parts = [x.new_empty(max(sizes), x.shape[1]) for _ in sizes]
        dist.all_gather(parts, F.pad(sums, (0, 0, 0, max(sizes) - len(sums))))
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    return run


def ways(whole: Any, tokens: int) -> dict[str, Experts]:
    """Return what is timed, by name; "alone" in the name: on rank 0, with all threads."""
    rank, world = dist.get_rank(), dist.get_world_size()
    part = narrowed(whole, rank, world)
    layers: dict[str, Experts] = {}
    for expert_parallel in (False, True):
        layer = MoE.from_experts(whole, dist.group.WORLD, expert_parallel=expert_parallel)
        layers["experts" if expert_parallel else "width"] = pack_(layer, drop=True)
    implementations = ["grouped_mm", "eager", *(["batched_mm"] if tokens <= FEW else [])]
    for name in implementations:
        layers[f"gloo {name}"] = named(part, name, reduce=True)
        layers[f"alone {name}"] = named(whole, name, reduce=False)
    layers["all-to-all"] = by_all_to_all(whole)
    return layers


def growth(way: str) -> float:
    """Return the MiB by which a rank grows at most in the first call with many tokens."""

    def resident(what: str) -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith(what))

    tokens, hidden, experts, k, width = SHAPES[-1]
    torch.manual_seed(0)
    layer = ways(experts_of(hidden, experts, width), tokens)[way]
    weights, ids = torch.randn(tokens, experts).softmax(1).topk(k)
    x = torch.randn(tokens, hidden).bfloat16()
    layer(x[:1], ids[:1], weights[:1])
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")  # the peak begins anew
    before = resident("VmRSS")
    layer(x, ids, weights)
    grown = torch.tensor((resident("VmHWM") - before) / 1024)
    dist.all_reduce(grown, dist.ReduceOp.MAX)
    return grown.item()


def timed(functions: Sequence[Callable[[], Any]], alone: bool) -> float:
    """Return the seconds of a call on this rank; the others wait for one that runs alone."""
    dist.barrier()
    seconds = 0.0
    if not alone or dist.get_rank() == 0:
        functions[-1]()  # ranks are in step, and threads awake, after it
        begin = time.perf_counter()
        for function in functions:
            function()
        seconds = (time.perf_counter() - begin) / len(functions)
    dist.barrier()
    return seconds


def measure(shape: Sequence[int], repeat: int) -> dict[str, float]:
    """Return the slowest rank's median microseconds of each way."""
    tokens, hidden, experts, k, width = shape
    world = dist.get_world_size()
    torch.manual_seed(0)
    wholes = [experts_of(hidden, experts, width) for _ in range(LAYERS)]
    logits = torch.randn(tokens, experts)
    weights, ids = logits.softmax(1).topk(k)
    weights /= weights.sum(1, keepdim=True)
    x = torch.randn(tokens, hidden).bfloat16()
    layers = [ways(whole, tokens) for whole in wholes]
    exact = named(wholes[0], "eager", reduce=False)(x, ids, weights).float()
    for name, run in layers[0].items():
        off = (run(x, ids, weights).float() - exact).abs().max() / exact.abs().max()
        if off > 0.03:
            raise SystemExit(
                f"{name}: error {off:.3g} relative to the maximum; at most 0.03 is allowed"
            )
    times: dict[str, list[float]] = {name: [] for name in layers[0]}
    order, calls = random.Random(0), LAYERS * (CALLS if tokens < MANY else 1)
    for _ in range(repeat):
        for name in order.sample(list(times), len(times)):
            alone = name.startswith("alone")
            torch.set_num_threads(world if alone else 1)
            runs = [partial(layers[i % LAYERS][name], x, ids, weights) for i in range(calls)]
            times[name].append(timed(runs, alone))
    medians = torch.tensor([1e6 * statistics.median(t) for t in times.values()])
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    return dict(zip(times, medians.tolist(), strict=True))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--repeat", type=int, default=9, help="interleaved repetitions (%(default)s)"
    )
    parser.add_argument(
        "--memory",
        choices=("width", "experts", "all-to-all", "gloo eager"),
        help="print the memory growth of this variant instead",
    )
    options = parser.parse_args()
    dist.init_process_group("gloo")
    tpkernels.init(dist.group.WORLD)
    print_once: Callable[..., None] = print if dist.get_rank() == 0 else lambda *_: None
    with torch.inference_mode():
        if options.memory:
            print_once(f"{growth(options.memory):.1f} MiB")
        else:
            compare(options.repeat, print_once)
    dist.destroy_process_group()


def compare(repeat: int, print_once: Callable[..., None]) -> None:
    """Print a row of times for each shape."""
    peers = {
        "transformers, gloo": "gloo",
        "all_to_all_single": "all-to-all",
        "one process": "alone",
    }
    header = ["tokens, hidden, experts, k, width", "tensor-parallel", "expert-parallel", *peers]
    header += ["speed-up, tensor-parallel", "speed-up, expert-parallel"]
    print_once("|", " | ".join(header), "|\n" + "|---" * len(header) + "|")
    for shape in SHAPES:
        found = measure(shape, repeat)
        best = [
            min((t, name) for name, t in found.items() if name.startswith(kind))
            for kind in peers.values()
        ]
        cells = [", ".join(map(str, shape)), *(f"{found[name]:.0f}" for name in OURS)]
        cells += [f"{t:.0f} {name.partition(' ')[2]}".strip() for t, name in best]
        cells += [f"{min(best)[0] / found[name]:.2f}" for name in OURS]
        print_once("|", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
