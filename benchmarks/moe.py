"""Time an MoE layer without its router: tpkernels against the experts of transformers.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.moe
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.moe --memory experts

The experts of transformers run tensor-parallel over gloo on the same ranks, and in one process with
as many threads. A third baseline is expert-parallel, with two ``all_to_all_single`` over gloo. For
transformers the fastest of ``grouped_mm``, ``batched_mm`` (few tokens) and eager counts.

Results are first compared with the eager experts in one process. Then all variants run interleaved,
in random order. A time is the median over the repetitions on the slowest rank. Calls cycle through
the weights of several layers, more than the caches hold, as in a model. ``--memory`` prints the
largest memory growth of a rank in its first call with many tokens.
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
CALLS, MANY_TOKENS = 10, 1000  # CALLS per layer and repetition below MANY_TOKENS, else 1
OURS = ("width", "experts")
MAX_BATCHED_MM_TOKENS = 16  # batched_mm copies the weights of every assignment
Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def make_experts(hidden: int, experts: int, width: int) -> Any:
    """Make transformers experts with random bf16 weights, identical on all ranks."""
    config = MixtralConfig(
        hidden_size=hidden, intermediate_size=width, num_local_experts=experts, hidden_act="silu"
    )
    module: Any = MixtralExperts(config).bfloat16().requires_grad_(False)
    for w in module.parameters():
        w.normal_(std=0.03)
    return module


def shard_experts(full: Any, rank: int, world: int) -> Any:
    """Make transformers experts with the local slice of the intermediate size."""
    width = full.intermediate_dim // world
    shard = make_experts(full.hidden_dim, full.num_experts, width)
    local = slice(rank * width, (rank + 1) * width)
    gate, up = full.gate_up_proj.chunk(2, 1)
    shard.gate_up_proj.copy_(torch.cat([gate[:, local], up[:, local]], 1))
    shard.down_proj.copy_(full.down_proj[:, :, local])
    return shard


def bind_implementation(module: Any, implementation: str, reduce: bool) -> Experts:
    """Return a call of transformers experts with an experts implementation of transformers.

    ``reduce`` adds an all-reduce of the outputs.
    """

    def run(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        module.config._experts_implementation = implementation
        y: torch.Tensor = module(x, ids, weights)
        if reduce:
            dist.all_reduce(y)
        return y

    return run


def make_all_to_all(full: Any) -> Experts:
    """Return a call of transformers experts with expert parallelism over ``all_to_all_single``."""
    rank, world = dist.get_rank(), dist.get_world_size()
    experts_per_rank = full.num_experts // world
    local = range(rank * experts_per_rank, (rank + 1) * experts_per_rank)

    def exchange(
        rows: torch.Tensor, send_counts: list[int], receive_counts: list[int]
    ) -> torch.Tensor:
        out = rows.new_empty(sum(receive_counts), *rows.shape[1:])
        dist.all_to_all_single(out, rows, receive_counts, send_counts)
        return out

    def run(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        sizes = tpkernels.shard_sizes(len(x), world)
        local_rows, k = slice(sum(sizes[:rank]), sum(sizes[: rank + 1])), ids.shape[1]
        experts = ids[local_rows].flatten()
        order = experts.argsort()
        send_counts = torch.bincount(experts // experts_per_rank, minlength=world)
        receive_counts = torch.empty_like(send_counts)
        dist.all_to_all_single(receive_counts, send_counts)
        counts = send_counts.tolist(), receive_counts.tolist()
        rows = exchange(x[local_rows][order // k], *counts)
        received_experts = exchange(experts[order], *counts)
        outputs = torch.empty_like(rows)
        for expert in local:
            selected = received_experts == expert
            gate, up = (rows[selected] @ full.gate_up_proj[expert].t()).chunk(2, -1)
            outputs[selected] = (full.act_fn(gate) * up) @ full.down_proj[expert].t()
        per_assignment = torch.empty_like(x[:1].expand(len(order), -1).contiguous())
        per_assignment[order] = exchange(outputs, *reversed(counts))
        sums = (
            (per_assignment.view(-1, k, x.shape[1]) * weights[local_rows][..., None])
            .sum(1)
            .to(x.dtype)
        )
        shards = [x.new_empty(max(sizes), x.shape[1]) for _ in sizes]
        dist.all_gather(shards, F.pad(sums, (0, 0, 0, max(sizes) - len(sums))))
        return torch.cat([shard[:size] for shard, size in zip(shards, sizes, strict=True)])

    return run


def make_variants(full: Any, tokens: int) -> dict[str, Experts]:
    """Return the timed variants by name. Names with "alone" run on rank 0 with all threads."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shard = shard_experts(full, rank, world)
    layers: dict[str, Experts] = {}
    for expert_parallel in (False, True):
        layer = MoE.from_experts(full, dist.group.WORLD, expert_parallel=expert_parallel)
        layers["experts" if expert_parallel else "width"] = pack_(layer, drop=True)
    implementations = [
        "grouped_mm",
        "eager",
        *(["batched_mm"] if tokens <= MAX_BATCHED_MM_TOKENS else []),
    ]
    for name in implementations:
        layers[f"gloo {name}"] = bind_implementation(shard, name, reduce=True)
        layers[f"alone {name}"] = bind_implementation(full, name, reduce=False)
    layers["all-to-all"] = make_all_to_all(full)
    return layers


def measure_memory(variant: str) -> float:
    """Return the largest memory growth of a rank in its first call with many tokens, in MiB."""

    def resident(field: str) -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith(field))

    tokens, hidden, experts, k, width = SHAPES[-1]
    torch.manual_seed(0)
    layer = make_variants(make_experts(hidden, experts, width), tokens)[variant]
    weights, ids = torch.randn(tokens, experts).softmax(1).topk(k)
    x = torch.randn(tokens, hidden).bfloat16()
    layer(x[:1], ids[:1], weights[:1])
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")  # resets VmHWM
    before = resident("VmRSS")
    layer(x, ids, weights)
    growth = torch.tensor((resident("VmHWM") - before) / 1024)
    dist.all_reduce(growth, dist.ReduceOp.MAX)
    return growth.item()


def time_calls(functions: Sequence[Callable[[], Any]], single_process: bool) -> float:
    """Return the seconds per call on this rank.

    With ``single_process`` only rank 0 calls, and its peers wait.
    """
    dist.barrier()
    seconds = 0.0
    if not single_process or dist.get_rank() == 0:
        functions[-1]()  # warm-up: aligns the ranks and wakes the threads
        begin = time.perf_counter()
        for function in functions:
            function()
        seconds = (time.perf_counter() - begin) / len(functions)
    dist.barrier()
    return seconds


def measure(shape: Sequence[int], repeat: int) -> dict[str, float]:
    """Return the median microseconds of each variant on the slowest rank."""
    tokens, hidden, experts, k, width = shape
    world = dist.get_world_size()
    torch.manual_seed(0)
    full_layers = [make_experts(hidden, experts, width) for _ in range(LAYERS)]
    logits = torch.randn(tokens, experts)
    weights, ids = logits.softmax(1).topk(k)
    weights /= weights.sum(1, keepdim=True)
    x = torch.randn(tokens, hidden).bfloat16()
    layers = [make_variants(full, tokens) for full in full_layers]
    exact = bind_implementation(full_layers[0], "eager", reduce=False)(x, ids, weights).float()
    for name, run in layers[0].items():
        error = (run(x, ids, weights).float() - exact).abs().max() / exact.abs().max()
        if error > 0.03:
            raise SystemExit(
                f"{name}: error {error:.3g} relative to the maximum; at most 0.03 is allowed"
            )
    times: dict[str, list[float]] = {name: [] for name in layers[0]}
    order, calls = random.Random(0), LAYERS * (CALLS if tokens < MANY_TOKENS else 1)
    for _ in range(repeat):
        for name in order.sample(list(times), len(times)):
            single_process = name.startswith("alone")
            torch.set_num_threads(world if single_process else 1)
            runs = [partial(layers[i % LAYERS][name], x, ids, weights) for i in range(calls)]
            times[name].append(time_calls(runs, single_process))
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
            print_once(f"{measure_memory(options.memory):.1f} MiB")
        else:
            compare(options.repeat, print_once)
    dist.destroy_process_group()


def compare(repeat: int, print_once: Callable[..., None]) -> None:
    """Print a table row of times per shape."""
    baselines = {
        "transformers, gloo": "gloo",
        "all_to_all_single": "all-to-all",
        "one process": "alone",
    }
    header = ["tokens, hidden, experts, k, width", "tensor-parallel", "expert-parallel", *baselines]
    header += ["speed-up, tensor-parallel", "speed-up, expert-parallel"]
    print_once("|", " | ".join(header), "|\n" + "|---" * len(header) + "|")
    for shape in SHAPES:
        results = measure(shape, repeat)
        best = [
            min((t, name) for name, t in results.items() if name.startswith(prefix))
            for prefix in baselines.values()
        ]
        cells = [", ".join(map(str, shape)), *(f"{results[name]:.0f}" for name in OURS)]
        cells += [f"{t:.0f} {name.partition(' ')[2]}".strip() for t, name in best]
        cells += [f"{min(best)[0] / results[name]:.2f}" for name in OURS]
        print_once("|", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
