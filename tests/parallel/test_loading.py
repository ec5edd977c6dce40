"""``tpkernels.from_pretrained`` from folders, from shards for a different number of ranks, and from
GGUF files. Logits and tokens match transformers for any number of ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle

import tpkernels
from tests.support import hf_folders, hf_models
from tests.support.cases import RanksFixture
from tests.support.ranked import on_ranks
from tests.support.tiers import sweep
from tpkernels import nn as tnn
from tpkernels.launch import Ranks
from tpkernels.nn.linear import ParallelLinear
from tpkernels.nn.sharding import Box
from tpkernels.parallel import FusedColwiseParallel, FusedRowwiseParallel, pretrained
from tpkernels.parallel.shard_files import plan_shards, write_shards

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")
RESET = Path("/proc/self/clear_refs")


def compare_job(path: str, unsharded_path: str, options: dict[str, Any]) -> None:
    """Compare a model that is loaded by shards with the model that transformers loads."""
    model = tpkernels.from_pretrained(path, hf_models.make_world_mesh(), **options)
    file = Path(unsharded_path)
    source = {"gguf_file": file.name} if file.is_file() else {}
    folder = file.parent if file.is_file() else file
    unsharded = transformers.AutoModelForCausalLM.from_pretrained(folder, **source)
    ids = torch.arange(3 * 11).view(3, 11) % (unsharded.config.vocab_size - 1) + 1
    with torch.no_grad():
        assert (error := hf_models.find_logit_error(model(ids).logits, unsharded, ids)) is None, (
            error
        )
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids[:1], **settings), unsharded.generate(ids[:1], **settings))
    weights, state = unsharded.state_dict(), tnn.full_state_dict(model)
    assert set(weights) == set(state)
    assert all(torch.equal(weights[name], state[name]) for name in weights)
    tied = [
        candidate.lm_head.weight is candidate.model.embed_tokens.weight
        for candidate in (unsharded, model)
    ]
    bos_tokens = [candidate.generation_config.bos_token_id for candidate in (unsharded, model)]
    assert tied[0] == tied[1] and bos_tokens[0] == bos_tokens[1] and not model.training


def check(ranks: RanksFixture, world: int, path: Path, reference: Path, **options: Any) -> None:
    ranks(world).run(compare_job, str(path), str(reference), options, timeout=120)


@pytest.mark.parametrize(
    ("model_type", "world", "options"),
    sweep(
        [
            ("qwen3", 2, {}),
            ("llama", 2, {"ffn_only": True}),
            ("llama", 4, {}),
            ("mistral", 1, {"sequence_parallel": False}),
            ("qwen2", 3, {}),
        ],
        2,
    ),
)
def test_a_folder(
    ranks: RanksFixture, tmp_path: Path, model_type: str, world: int, options: dict[str, Any]
) -> None:
    path = hf_folders.folder(tmp_path, model_type, tied=model_type == "qwen3", files=3)
    assert len(list(path.glob("*.safetensors"))) >= 3
    check(ranks, world, path, path, **options)


@pytest.mark.parametrize(("made_for", "world"), sweep([(3, 2), (1, 2), (4, 3), (2, 4)]))
def test_shards_for_a_different_number_of_ranks(
    ranks: RanksFixture, tmp_path: Path, made_for: int, world: int
) -> None:
    for model_type, options in (("qwen2", {}), ("llama", {"ffn_only": True})):
        path = hf_folders.folder(tmp_path, model_type, tied=model_type == "llama")
        shards = tmp_path / f"{model_type}-shards"
        assert len(write_shards(plan_shards(path, made_for, **options), shards)) == made_for
        check(ranks, world, shards, path)


def test_shards_of_a_model_with_router_buffers(tmp_path: Path) -> None:
    """The buffers are identical in the folder and in its shard files."""
    path = hf_folders.folder(tmp_path, "glm4_moe", n_routed_experts=5, num_experts_per_tok=3)
    write_shards(plan_shards(path, 2), tmp_path / "shards")
    values = []
    for folder in (path, tmp_path / "shards"):
        buffers = plan_shards(folder, 1).blueprint.buffers
        values.append({name: torch.empty(stored.shape) for name, stored in buffers.items()})
        for name, stored in buffers.items():
            stored.read(Box.full(stored.shape), values[-1][name])
    original, written = values
    assert original and original.keys() == written.keys()
    assert all(
        original[name].any() and torch.equal(original[name], written[name]) for name in original
    )


@pytest.mark.thorough
def test_a_gguf_file_and_its_shards(ranks: RanksFixture, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    path = hf_folders.gguf_file(tmp_path / "model.gguf", "Q4_1")
    check(ranks, 2, path, path)
    write_shards(plan_shards(path, 3), tmp_path / "shards")
    check(ranks, 2, tmp_path / "shards", path)


def integers_job(path: str, group: int) -> None:
    """Check that the integers of a GGUF file are packed without requantization."""
    file = Path(path)
    unsharded = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    names: set[str] = set()
    read = pretrained._read

    def record_read(slot: pretrained.Slot, device: torch.device) -> None:
        if slot.boxes()[0].size and "norm" not in slot.name:
            names.add(slot.name)
        read(slot, device)

    mesh, ids = hf_models.make_world_mesh(), torch.arange(3 * 11).view(3, 11) % 46 + 1
    for dtype in (torch.float32, torch.bfloat16):
        names.clear()
        with mock.patch.object(pretrained, "_read", record_read):
            model = tpkernels.from_pretrained(path, mesh, dtype=dtype, pack="int8")
        # Only the embedding is read as floats.
        assert names == {"model.embed_tokens.weight"}, names
        layers = [layer for layer in model.modules() if isinstance(layer, ParallelLinear)]
        packed = [layer._packed["weight"] for layer in layers if not layer.empty]
        assert {weight.shape[2] - 4 for weight in packed} == {group}
        tied = model.lm_head.weight is model.model.embed_tokens.weight
        assert tied == unsharded.config.tie_word_embeddings
        requantized = tpkernels.parallelize(copy.deepcopy(unsharded).to(dtype), mesh, pack="int8")
        with torch.no_grad():
            want = unsharded(ids).logits
            once_off, twice_off = (
                (candidate(ids).logits - want).norm() for candidate in (model, requantized)
            )
        assert once_off < twice_off < 0.1 * want.norm(), (once_off, twice_off)
        for candidate in (model, model.to("cpu"), model.bfloat16()):
            state = tnn.full_state_dict(candidate)
            for name, value in unsharded.state_dict().items():
                assert torch.equal(state[name], value.to(candidate.dtype)), (
                    dtype,
                    candidate.dtype,
                    name,
                )


@pytest.mark.parametrize(
    ("kind", "world"),
    sweep([("Q8_0", 2), ("Q6_K", 1), ("Q4_0", 2), ("Q5_0", 1), ("IQ4_NL", 1), ("Q6_K", 2)], 2),
)
def test_integers_of_a_gguf_file(
    ranks: RanksFixture, tmp_path: Path, kind: str, world: int
) -> None:
    path = hf_folders.gguf_file(tmp_path / "model.gguf", kind, tied=world == 1)
    ranks(world).run(integers_job, str(path), 16 if kind == "Q6_K" else 32, timeout=120)


def save_on_rank_0(save: Callable[[Path], Any], path: Path) -> Path:
    """Call ``save(path)`` on rank 0 only, and return ``path`` on all ranks."""
    if dist.get_rank() == 0:
        save(path)
    dist.barrier()
    return path


@on_ranks(2)
def test_dtypes_and_packing(tmp_path: Path) -> None:
    path = save_on_rank_0(hf_models.make("llama").bfloat16().save_pretrained, tmp_path)
    mesh = hf_models.make_world_mesh()
    for dtype, want in ((None, torch.bfloat16), (torch.float32, torch.float32)):
        model = tpkernels.from_pretrained(path, mesh, dtype=dtype, pack=dtype is not None)
        dtypes = {parameter.dtype for parameter in model.parameters()} | {model.dtype}
        assert dtypes == {want} and model.model.rotary_emb.inv_freq.dtype == torch.float32
        packed = model.model.layers[0].mlp.up_proj._packed.values()
        assert [weight.dtype for weight in packed] == ([] if dtype is None else [dtype])
    model = tpkernels.from_pretrained(path, mesh, pack="int8")
    assert model.model.layers[0].mlp.up_proj._packed["weight"].dtype == torch.int8
    layers = [layer for layer in model.modules() if isinstance(layer, ParallelLinear)]
    assert all(layer.weight.dim() == 3 for layer in layers), "plain weights are kept"


@on_ranks(2)
def test_a_plan(tmp_path: Path) -> None:
    """Load with a plan of styles. The parameters are DTensors with the unsharded values."""
    path = save_on_rank_0(lambda path: hf_models.make("llama").save_pretrained(path), tmp_path)
    plan: dict[str, ParallelStyle] = {
        "model.layers.*.mlp.gate_proj": ColwiseParallel(),
        "model.layers.*.mlp.up_proj": FusedColwiseParallel(),
        "model.layers.*.mlp.down_proj": FusedRowwiseParallel(),
    }
    model = tpkernels.from_pretrained(path, hf_models.make_world_mesh(), plan)
    unsharded = transformers.AutoModelForCausalLM.from_pretrained(path)
    ids = torch.arange(12).view(1, 12)
    error = hf_models.find_logit_error(model(ids).logits.detach(), unsharded, ids)
    assert error is None, error
    weight = model.model.layers[1].mlp.down_proj.weight
    assert weight.to_local().shape[1] == (22 + 1) // dist.get_world_size()
    assert torch.equal(weight.full_tensor(), unsharded.model.layers[1].mlp.down_proj.weight)


def test_a_base_model_and_unused_tensors(ranks: RanksFixture, tmp_path: Path) -> None:
    """Load a folder that was saved from the base model, so its names lack the prefix."""
    from safetensors.torch import load_file, save_file

    model = hf_models.make("llama", tied=True).eval()
    model.model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert "norm.weight" in weights
    weights["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    check(ranks, 2, tmp_path, tmp_path, pack=True)


def status_bytes(name: str) -> int:
    """Return the bytes in a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1]) << 10


def growth_job(small: str, path: str, options: dict[str, Any]) -> tuple[int, int, int]:
    """Return the peak memory growth, the shard size and the largest parameter size, in bytes."""
    mesh = hf_models.make_world_mesh()
    tpkernels.from_pretrained(small, mesh, **options)  # warm-up: imports and group memory
    RESET.write_text("5")  # resets VmHWM
    before = status_bytes("VmRSS")
    model = tpkernels.from_pretrained(path, mesh, **options)
    grown = status_bytes("VmHWM") - before
    sizes = [parameter.numel() * parameter.dtype.itemsize for parameter in model.parameters()]
    return grown, sum(sizes), max(sizes)


@pytest.mark.slow
@pytest.mark.skipif(not RESET.exists(), reason="the system does not measure peak memory anew")
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_peak_memory(tmp_path: Path, dtype: torch.dtype | None) -> None:
    """Peak memory grows by at most 1.1 times the shard plus its largest parameter."""
    config = transformers.LlamaConfig(
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=4,
        num_attention_heads=12,
        num_key_value_heads=4,
        vocab_size=40000,
    )
    model = transformers.LlamaForCausalLM(config)
    if dtype is not None:
        model = model.bfloat16()  # loading reads it in chunks and converts
    model.save_pretrained(tmp_path / "large")
    del model
    small = hf_folders.folder(tmp_path)
    with Ranks(2) as ranks:
        paths = str(small), str(tmp_path / "large")
        results = ranks.run(growth_job, *paths, {"dtype": dtype}, timeout=200)
    for grown, shard, largest in results:
        assert 150 << 20 < shard <= grown + (4 << 20) and grown <= 1.1 * shard + largest
