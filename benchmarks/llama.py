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
    experts        `packed` with expert parallelism (``expert_parallel=True``)
    plain_experts  `experts` without packed weights

The part after a colon selects the experts implementation of transformers. All processes stay alive,
and run in turn. Weights are random bfloat16, and decoding is greedy. Prints medians of the prefill
of 512 tokens and, at each batch size, of `generate` with a short prompt. With --compile it prints
forwards of 1, 8 and 512 tokens. --chart draws the speed-ups as bars.
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
from benchmarks.chart import bars
from tpkernels.launch import Ranks

PREFILL, PROMPT, FORWARDS = 512, 32, (1, 8, 512)
SETUPS = ("threads", "thread", "torch", "transformers", "ranks", "packed", "prefill", "both")
EXPERTS = (
    *("experts", "plain_experts"),
    *(f"{how}:{by}" for how in ("threads", "transformers") for by in ("eager", "grouped_mm")),
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
    # 440M parameters each: 8 experts, of which a token takes 2; and 8 of 64
    "mixtral": dict(zip(_FIELDS, (1024, 2048, 8, 16, 8, 8192), strict=True)),
    "qwen3_moe": {
        **dict(zip(_FIELDS, (1024, 2816, 8, 16, 8, 8192), strict=True)),
        **{"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 256},
        **{"norm_topk_prob": True, "head_dim": 64},
    },
}
_models: dict[str, Any] = {}  # of this process


def save(size: str, folder: str, layers: int | None = None) -> None:
    """Writes the model with random weights in bf16."""
    import transformers

    torch.manual_seed(0)
    fields = SIZES[size] if layers is None else {**SIZES[size], "num_hidden_layers": layers}
    kind = size if size in ("mixtral", "qwen3_moe") else "llama"
    config = transformers.AutoConfig.for_model(kind, **fields, max_position_embeddings=2048)
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config).bfloat16()
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.02) if parameter.dim() > 1 else parameter.data.fill_(1)
    model.save_pretrained(folder, max_shard_size="300MB")


def make(how: str, folder: str, compiled: bool) -> None:
    """The model as this process has it: whole, or its shard of it."""
    import transformers

    load = transformers.AutoModelForCausalLM.from_pretrained
    how = how.partition(":")[0]
    if how in _models:
        return
    if how in ("threads", "thread"):
        model = load(folder, dtype=torch.bfloat16)
    elif how == "transformers":
        model = load(folder, dtype=torch.bfloat16, tp_plan="auto")
    elif how == "torch":
        model = load(folder, dtype=torch.bfloat16)
        _split_by_torch(model)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        rows = "prefill" if how in ("prefill", "both") else False
        model = tpkernels.from_pretrained(
            folder,
            mesh,
            sequence_parallel=rows,
            pack=how in ("packed", "both", "experts"),
            expert_parallel=how.endswith("experts"),
        )
    _models[how] = torch.compile(model.eval()) if compiled else model.eval()


def _split_by_torch(model: torch.nn.Module) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    columns, rows = ColwiseParallel(), RowwiseParallel()
    plan = {
        **dict.fromkeys([f"self_attn.{name}_proj" for name in "qkv"], columns),
        **{"mlp.gate_proj": columns, "mlp.up_proj": columns},
        **{"self_attn.o_proj": rows, "mlp.down_proj": rows},
    }
    parallelize_module(model, mesh, {f"model.layers.*.{name}": each for name, each in plan.items()})
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


def once(how: str, new: int, compiled: bool, batches: list[int]) -> dict[str, float]:
    """Milliseconds of a forward, and tokens per second of `generate`."""
    how, _, implementation = how.partition(":")
    model, found = _models[how], {}
    if implementation:
        model.set_experts_implementation(implementation)
    with torch.inference_mode():
        for length in FORWARDS if compiled else (PREFILL,):
            ids = _tokens(1, length)
            seconds = _seconds(functools.partial(model, ids, use_cache=False))
            found[f"forward of {length}, ms"] = 1e3 * seconds
        for batch in () if compiled else batches:
            options = {"do_sample": False, "pad_token_id": 0, "min_new_tokens": new}
            ids = _tokens(batch, PROMPT)
            run = functools.partial(model.generate, ids, max_new_tokens=new, **options)
            found[f"decode, batch {batch}, tokens/s"] = batch * new / _seconds(run)
    return found


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
        Ranks(1, threads=args.nproc) as whole,
        Ranks(1, threads=1) as single,
        Ranks(args.nproc, threads=1) as ranks,
    ):
        single.run(save, args.size, folder, timeout=600)
        processes = {
            how: {"threads": whole, "thread": single}.get(how.partition(":")[0], ranks)
            for how in args.setups
        }
        for how, each in processes.items():
            each.run(make, how, folder, args.compile, timeout=600)
        found: dict[str, list[dict[str, float]]] = {how: [] for how in processes}
        for repetition in range(args.warmup + args.repeat):
            for how, each in processes.items():
                options = how, args.tokens, args.compile, args.batches
                result = each.run(once, *options, timeout=600)[0]
                if repetition >= args.warmup:
                    found[how].append(result)
    speedups: dict[str, dict[str, float]] = {}
    for what in next(iter(found.values()))[0]:
        medians = {how: statistics.median(one[what] for one in found[how]) for how in found}
        base = next(iter(medians.values()))
        speedups[what] = {
            how: base / value if what.endswith("ms") else value / base
            for how, value in medians.items()
        }
        print(
            what,
            *(f"{how} {medians[how]:.1f} ({speedups[what][how]:.2f}x)" for how in medians),
            sep="; ",
        )
    if args.chart is not None:
        names = {how: NAMES.get(how, f"tpkernels, {how}") for how in processes}
        title = f"Llama, {args.size.upper()} parameters, bf16: speed-up over {args.nproc} threads"
        groups = {what.rpartition(",")[0]: ratios for what, ratios in speedups.items()}
        args.chart.write_text(
            bars(title, groups, names, ours={"ranks", "packed", "prefill", "both"})
        )


if __name__ == "__main__":
    main()
