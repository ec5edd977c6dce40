"""A Llama of 100 million parameters: tensor-parallel ranks of one thread against one process with
as many threads.

    python -m benchmarks.llama --tokens 24 --repeat 7
    python -m benchmarks.llama --compile --repeat 7

One process with as many threads is what a user of one socket would take instead. Both stay up, and
take turns. Random weights, bf16, greedy. Prints medians: the prefill of 512 tokens and, at each
batch size, decoding by `generate`; with --compile, forwards of 1, 8 and 512 tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tpkernels
from tpkernels.launch import Ranks

PREFILL, PROMPT, BATCHES, FORWARDS = 512, 32, (1, 8), (1, 8, 512)
_models: dict[str, Any] = {}  # of this process


def make(how: str, compiled: bool) -> None:
    """The model as this process has it: whole, or its shard of it (``packed``: for inference)."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=8192,
        max_position_embeddings=2048,
    )
    model = transformers.LlamaForCausalLM(config).bfloat16().eval()
    if how != "threads":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        options = {"pack": True} if how == "packed" else {}
        model = tpkernels.parallelize(model, mesh, sequence_parallel=False, **options)
    _models[how] = torch.compile(model) if compiled else model


def _seconds(run: Callable[[], object]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _tokens(batch: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 8192, (batch, length), generator=generator)


def once(how: str, new: int, compiled: bool) -> dict[str, float]:
    """Milliseconds of a forward, and tokens per second of `generate`."""
    model, found = _models[how], {}
    with torch.inference_mode():
        for length in FORWARDS if compiled else (PREFILL,):
            ids = _tokens(1, length)
            seconds = _seconds(lambda ids=ids: model(ids, use_cache=False))
            found[f"forward of {length}, ms"] = 1e3 * seconds
        for batch in () if compiled else BATCHES:
            ids, options = _tokens(batch, PROMPT), {"do_sample": False, "pad_token_id": 0}
            seconds = _seconds(
                lambda ids=ids, o=options: model.generate(
                    ids, max_new_tokens=new, min_new_tokens=new, **o
                )
            )
            found[f"decode, batch {batch}, tokens/s"] = batch * new / seconds
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nproc", type=int, default=2, help="ranks, and threads of the process")
    parser.add_argument("--tokens", type=int, default=24, help="new tokens of each generate")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=4, help="repetitions before: auto's trials")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    with Ranks(1, threads=args.nproc) as whole, Ranks(args.nproc, threads=1) as ranks:
        setups = {"threads": whole, "ranks": ranks, "packed": ranks}
        for how, processes in setups.items():
            processes.run(make, how, args.compile, timeout=600)
        found: dict[str, list[dict[str, float]]] = {how: [] for how in setups}
        for repetition in range(args.warmup + args.repeat):
            for how, processes in setups.items():
                result = processes.run(once, how, args.tokens, args.compile, timeout=600)[0]
                if repetition >= args.warmup:
                    found[how].append(result)
    for what in found["threads"][0]:
        medians = {how: statistics.median(one[what] for one in found[how]) for how in setups}
        base = medians.pop("threads")
        faster = {
            how: base / value if what.endswith("ms") else value / base
            for how, value in medians.items()
        }
        print(
            f"{what}: {args.nproc} threads {base:.1f}, "
            + ", ".join(f"{how} {medians[how]:.1f} ({faster[how]:.2f}x)" for how in medians)
        )


if __name__ == "__main__":
    main()
