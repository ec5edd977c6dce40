"""Time a Llama or MoE model on tensor-parallel ranks of one thread, next to the alternatives.

    python -m benchmarks.llama --tokens 24 --repeat 7
    python -m benchmarks.llama --size 1b --tokens 8 --repeat 3
    python -m benchmarks.llama --setups threads ranks packed --batches 1 2 4 8 16
    python -m benchmarks.llama --compile --repeat 7
    python -m benchmarks.llama --setups threads torch transformers both --chart llama.svg
    python -m benchmarks.llama --size mixtral --setups threads:eager threads both experts

    threads        one process with as many threads as there are ranks, the baseline
    thread         one process with one thread
    torch          ranks, sharded by ``parallelize_module`` of torch over gloo
    transformers   ranks, sharded by transformers (``tp_plan="auto"``) over gloo
    ranks          ranks, sharded by `tpkernels.from_pretrained`
    packed         `ranks` with packed weights
    prefill        `ranks` with sequence-parallel prefill (``sequence_parallel="prefill"``)
    both           `ranks` with packed weights and sequence-parallel prefill
    invariant      `packed` with ``numerics="invariant"``
    sdpa           `packed` with SDPA of torch instead of the attention kernel
    experts        `packed` with expert parallelism (``expert_parallel=True``)
    plain_experts  `experts` without packed weights

A suffix after a colon selects the experts implementation of transformers. All processes stay alive,
and their runs are interleaved. Weights are random bfloat16, and decoding is greedy. Prints medians
of the prefill of 512 tokens and, at each batch size, of `generate` with a short prompt. With
--compile it prints forwards of 1, 8 and 512 tokens. --chart draws the speed-ups as bars.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import tpkernels
from benchmarks.chart import draw_bars
from tpkernels.launch import Ranks

PREFILL, PROMPT, FORWARDS = 512, 32, (1, 8, 512)
SETUPS = ("threads", "thread", "torch", "transformers", "ranks", "packed", "prefill", "both")
EXPERTS = (
    *("invariant", "sdpa", "experts", "plain_experts"),
    *(
        f"{setup}:{implementation}"
        for setup in ("threads", "transformers")
        for implementation in ("eager", "grouped_mm")
    ),
)
_FIELDS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size"),
)
NAMES = {
    "threads": "threads",
    "thread": "one thread",
    "torch": "torch TP, gloo",
    "transformers": "transformers TP",
    "both": "tpkernels",
}
SIZES = {
    "100m": dict(zip(_FIELDS, (1024, 2816, 8, 16, 8, 8192), strict=True)),
    "1b": dict(zip(_FIELDS, (2048, 5632, 22, 32, 4, 32000), strict=True)),  # TinyLlama-1.1B
    # 440M parameters each; top 2 of 8 experts, and top 8 of 64
    "mixtral": dict(zip(_FIELDS, (1024, 2048, 8, 16, 8, 8192), strict=True)),
    "qwen3_moe": {
        **dict(zip(_FIELDS, (1024, 2816, 8, 16, 8, 8192), strict=True)),
        **{"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 256},
        **{"norm_topk_prob": True, "head_dim": 64},
    },
}
_models: dict[str, Any] = {}  # loaded in this process


def save(size: str, folder: str, layers: int | None = None) -> None:
    """Save the model with random bfloat16 weights."""
    import transformers

    torch.manual_seed(0)
    fields = SIZES[size] if layers is None else {**SIZES[size], "num_hidden_layers": layers}
    model_type = size if size in ("mixtral", "qwen3_moe") else "llama"
    config = transformers.AutoConfig.for_model(model_type, **fields, max_position_embeddings=2048)
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config).bfloat16()
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.02) if parameter.dim() > 1 else parameter.data.fill_(1)
    model.save_pretrained(folder, max_shard_size="300MB")


def load_model(setup: str, folder: str, compiled: bool) -> None:
    """Load the full model or the local shard, depending on the setup."""
    import transformers

    load = transformers.AutoModelForCausalLM.from_pretrained
    setup = setup.partition(":")[0]
    if setup in _models:
        return
    if setup in ("threads", "thread"):
        model = load(folder, dtype=torch.bfloat16)
    elif setup == "transformers":
        # Without a size, transformers uses WORLD_SIZE, which may be missing, and does not shard.
        world = dist.get_world_size()
        model = load(folder, dtype=torch.bfloat16, tp_plan="auto", tp_size=world)
    elif setup == "torch":
        model = load(folder, dtype=torch.bfloat16)
        _parallelize_with_torch(model)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        sequence_parallel = "prefill" if setup in ("prefill", "both") else False
        model = tpkernels.from_pretrained(
            folder,
            mesh,
            sequence_parallel=sequence_parallel,
            pack=setup in ("packed", "sdpa", "both", "experts"),
            expert_parallel=setup.endswith("experts"),
            numerics="invariant" if setup == "invariant" else "ordered",
        )
    if setup == "sdpa":
        model.set_attn_implementation("sdpa")
    _models[setup] = torch.compile(model.eval()) if compiled else model.eval()


def _parallelize_with_torch(model: torch.nn.Module) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    columns, rows = ColwiseParallel(), RowwiseParallel()
    plan = {
        **dict.fromkeys([f"self_attn.{name}_proj" for name in "qkv"], columns),
        **{"mlp.gate_proj": columns, "mlp.up_proj": columns},
        **{"self_attn.o_proj": rows, "mlp.down_proj": rows},
    }
    parallelize_module(
        model, mesh, {f"model.layers.*.{name}": style for name, style in plan.items()}
    )
    head = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh, {"lm_head": head})


def _seconds(run: Callable[[], object]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _tokens(batch: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 8192, (batch, length), generator=generator)


def measure_once(
    setup: str, new_tokens: int, compiled: bool, batches: list[int]
) -> dict[str, float]:
    """Return the milliseconds of a forward and the tokens per second of `generate`."""
    setup, _, implementation = setup.partition(":")
    model, results = _models[setup], {}
    if implementation:
        model.set_experts_implementation(implementation)
    with torch.inference_mode():
        for length in FORWARDS if compiled else (PREFILL,):
            ids = _tokens(1, length)
            seconds = _seconds(functools.partial(model, ids, use_cache=False))
            results[f"forward of {length}, ms"] = 1e3 * seconds
        for batch in () if compiled else batches:
            options = {"do_sample": False, "pad_token_id": 0, "min_new_tokens": new_tokens}
            ids = _tokens(batch, PROMPT)
            run = functools.partial(model.generate, ids, max_new_tokens=new_tokens, **options)
            results[f"decode, batch {batch}, tokens/s"] = batch * new_tokens / _seconds(run)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--nproc",
        type=int,
        default=2,
        help="number of ranks, and threads of the single process (%(default)s)",
    )
    parser.add_argument("--size", choices=SIZES, default="100m", help="model (%(default)s)")
    parser.add_argument(
        "--setups", nargs="+", choices=[*SETUPS, *EXPERTS], default=SETUPS, help="setups to time"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], help="batch sizes")
    parser.add_argument(
        "--tokens", type=int, default=24, help="new tokens per generate call (%(default)s)"
    )
    parser.add_argument("--repeat", type=int, default=7, help="timed repetitions (%(default)s)")
    parser.add_argument(
        "--warmup", type=int, default=4, help="repetitions before timing (%(default)s)"
    )
    parser.add_argument("--compile", action="store_true", help="time compiled forwards")
    parser.add_argument(
        "--chart", type=Path, metavar="FILE.svg", help="SVG file for bars of the speed-ups"
    )
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        Ranks(1, threads=args.nproc) as multi_threaded,
        Ranks(1, threads=1) as single_threaded,
        Ranks(args.nproc, threads=1) as ranks,
    ):
        single_threaded.run(save, args.size, folder, timeout=600)
        processes = {
            setup: {"threads": multi_threaded, "thread": single_threaded}.get(
                setup.partition(":")[0], ranks
            )
            for setup in args.setups
        }
        for setup, process in processes.items():
            process.run(load_model, setup, folder, args.compile, timeout=600)
        results: dict[str, list[dict[str, float]]] = {setup: [] for setup in processes}
        for repetition in range(args.warmup + args.repeat):
            for setup, process in processes.items():
                options = setup, args.tokens, args.compile, args.batches
                result = process.run(measure_once, *options, timeout=600)[0]
                if repetition >= args.warmup:
                    results[setup].append(result)
    speedups: dict[str, dict[str, float]] = {}
    for metric in next(iter(results.values()))[0]:
        medians = {
            setup: statistics.median(sample[metric] for sample in results[setup])
            for setup in results
        }
        base = next(iter(medians.values()))
        speedups[metric] = {
            setup: base / value if metric.endswith("ms") else value / base
            for setup, value in medians.items()
        }
        print(
            metric,
            *(
                f"{setup} {medians[setup]:.1f} ({speedups[metric][setup]:.2f}x)"
                for setup in medians
            ),
            sep="; ",
        )
    if args.chart is not None:
        names = {setup: NAMES.get(setup, f"tpkernels, {setup}") for setup in processes}
        title = f"Llama, {args.size.upper()} parameters, bf16: speed-up over {args.nproc} threads"
        groups = {metric.rpartition(",")[0]: ratios for metric, ratios in speedups.items()}
        args.chart.write_text(
            draw_bars(title, groups, names, ours={"ranks", "packed", "prefill", "both"})
        )


if __name__ == "__main__":
    main()
