"""``tpkernels shard``: the sharding of a model, without ranks, and the files with the shard of each
rank."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import Result

from tests.cli import test_cli
from tests.support import hf_folders
from tpkernels.parallel import shard_files
from tpkernels.parallel.checkpoints import INDEX

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

invoke = partial(test_cli.invoke, "shard")


def lines(result: Result) -> list[str]:
    assert result.exit_code == 0, result.output
    return [" ".join(line.split()) for line in result.output.splitlines()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return hf_folders.folder(tmp_path)


def test_uneven_splits_and_a_rank_without_attention(folder: Path) -> None:
    """Nine heads in three key-value groups. On four ranks, two ranks share a group. On ten ranks,
    one rank has no heads."""
    shown = lines(invoke("--model", folder, "--tp", 4, "--dry-run"))
    name = "model.layers.0..1.self_attn.q_proj.weight (2)"  # one line for both layers
    assert not any("layers.1." in line for line in shown)
    split = "36x8 on rank 0; 36x4 on rank 1; 36x12 on ranks 2-3"
    assert f"{name} 36x36 {split} output features" in shown
    rows = "6x36 on ranks 0-1; 5x36 on ranks 2-3"
    assert f"model.layers.0..1.mlp.down_proj.weight (2) 22x36 {rows} input features" in shown
    assert "model.embed_tokens.weight 47x36 12x36 on ranks 0-2; 11x36 on rank 3 vocabulary" in shown
    assert "model.norm.weight 36 36 replicated" in shown
    assert "Parameters on each rank: 16272 bytes (15.89 KiB) on rank 0" in shown
    assert not any("Rank 3" in line for line in shown)
    shown = lines(invoke("--model", folder, "--tp", 10, "--dry-run"))
    sentence = (
        "Rank 3 holds no shard of k_proj, o_proj, q_proj, v_proj and contributes zeros there. "
    )
    assert f"{sentence}Attention is sharded by heads, and this model has 9 heads." in shown
    only = lines(invoke("--model", folder, "--tp", 4, "--dry-run", "--ffn-only"))
    assert f"{name} 36x36 36x36 replicated" in only
    assert not any("Rank 3" in line for line in only)


def test_expert_parallel_and_tensor_parallel_experts(tmp_path: Path) -> None:
    folder = hf_folders.folder(tmp_path, "mixtral", num_local_experts=2)
    experts, name = ["--expert-parallel"], "model.layers.0..1.mlp.experts."
    shown = lines(invoke("--model", folder, "--tp", 3, "--dry-run", *experts))
    shapes = "2x44x36 1x44x36 on ranks 0-1; 0x44x36 on rank 2 experts"
    assert f"{name}gate_up_proj (2) {shapes}" in shown
    sentence = (
        "Rank 2 holds no shard of experts and contributes zeros there. With --expert-parallel, "
    )
    assert f"{sentence}each expert is on one rank." in shown
    shown = lines(invoke("--model", folder, "--tp", 2, "--dry-run"))
    assert f"{name}gate_up_proj (2) 2x44x36 2x22x36 output features" in shown
    assert f"{name}down_proj (2) 2x36x22 2x36x11 input features" in shown
    result = invoke("--model", folder, "--tp", 3, "--out", tmp_path / "out", *experts)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    shards = index["weight_map"]["model.layers.1.mlp.experts.down_proj"]
    assert result.exit_code == 0 and [p["offsets"] for p in shards] == [[0, 0, 0], [1, 0, 0]]


def test_a_gguf_file_keeps_its_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    path = hf_folders.gguf_file(tmp_path / "model.gguf", "F32")
    assert invoke("--model", path, "--out", tmp_path / "out").exit_code == 0
    by_file = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    by_folder = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert by_folder("the cat")["input_ids"] == by_file("the cat")["input_ids"] != []


def test_json(folder: Path) -> None:
    plan = json.loads(invoke("--model", folder, "--tp", 3, "--dry-run", "--json").stdout)
    by_name = {parameter["name"]: parameter for parameter in plan["parameters"]}
    assert by_name["model.layers.0.mlp.down_proj.weight"] == {
        "name": "model.layers.0.mlp.down_proj.weight",
        "dtype": "float32",
        "shape": [36, 22],
        "split_dim": 1,
        "local_shapes": [[36, 8], [36, 7], [36, 7]],
    }
    assert by_name["model.norm.weight"]["split_dim"] is None
    total_bytes = sum(
        4 * torch.Size(shape).numel()
        for parameter in plan["parameters"]
        for shape in parameter["local_shapes"]
    )
    assert plan["tp"] == 3 and sum(plan["bytes"]) == total_bytes


def test_output_files(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_text("not copied")
    out = tmp_path / "out"
    shown = lines(invoke("--model", folder, "--tp", 4, "--out", out, "--dtype", "bf16"))
    assert f"Wrote 4 shards to {out}" in shown
    shards = [f"model-rank-0000{rank}-of-00004.safetensors" for rank in range(4)]
    others = ["config.json", "generation_config.json", INDEX, "tokenizer.json"]
    assert sorted(path.name for path in out.iterdir()) == sorted(others + shards)
    assert transformers.AutoConfig.from_pretrained(out).dtype == torch.bfloat16
    index = json.loads((out / INDEX).read_text())
    name = "model.layers.0.mlp.down_proj.weight"
    assert index["shapes"][name] == [36, 22]
    full = safetensors.load_file(folder / "model.safetensors")[name].bfloat16()
    entries = zip(index["weight_map"][name], (0, 6, 12, 17), (6, 6, 5, 5), strict=True)
    for entry, begin, size in entries:
        assert entry["offsets"] == [0, begin]
        shard = safetensors.load_file(out / entry["file"])[name]
        assert torch.equal(shard, full[:, begin : begin + size])
    assert [len(index["weight_map"][n]) for n in index["weight_map"] if "q_proj" in n] == [4, 4]
    assert [entry["file"] for entry in index["weight_map"]["model.norm.weight"]] == shards[:1]


def test_overwriting_needs_force(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    assert invoke("--model", folder, "--tp", 4, "--out", out).exit_code == 0
    before = sorted(path.name for path in out.iterdir())
    result = invoke("--model", folder, "--tp", 2, "--out", out)
    assert result.exit_code == 2 and "overwrite it with --force" in result.stderr
    assert sorted(path.name for path in out.iterdir()) == before

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shard_files, "_write_weights", fail)
        failed = invoke("--model", folder, "--tp", 2, "--out", out, "--force")
    assert failed.exit_code == 2 and "No space left on device" in failed.stderr
    assert sorted(path.name for path in out.iterdir()) == before  # without temporary files
    assert invoke("--model", folder, "--tp", 2, "--out", out, "--force").exit_code == 0
    assert len(list(out.glob("*.safetensors"))) == 2
    same = invoke("--model", out, "--tp", 2, "--out", out, "--force")
    assert (
        same.exit_code == 2
        and "is the folder of the checkpoint; choose a different output folder" in same.stderr
    )


MLP = {
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
}


def test_a_plan_in_a_file(folder: Path, tmp_path: Path) -> None:
    """The plan replaces the plan of the model. An error in the plan is one line."""
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(MLP))
    arguments = ["--model", folder, "--dry-run", "--tp", 2, "--plan", file]
    plan = json.loads(invoke(*arguments, "--json").stdout)
    dims = {parameter["name"]: parameter["split_dim"] for parameter in plan["parameters"]}
    layer = "model.layers.1."
    assert (dims[layer + "mlp.up_proj.weight"], dims[layer + "mlp.down_proj.weight"]) == (0, 1)
    assert dims[layer + "self_attn.q_proj.weight"] is None
    for content, message in (
        ("{", "is not JSON: "),
        (b"\xff", "is not JSON: "),
        ("[]", "is not a plan; expected an object that maps module names to styles, such as "),
        ('{"model.layers.*.mlp.up_proj": "colwize"}', "is 'colwize'; expected one of colwise, "),
        ('{"layers.*.mlp.up_proj": "colwise"}', "; did you mean model.layers.*.mlp.up_proj, "),
        (
            '{"model.layers.*.mlp.up_proj": "colwise"}',
            "projections followed by one row-parallel projection",
        ),
        (None, "No such file"),
    ):
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content if isinstance(content, bytes) else content.encode())
        result = invoke(*arguments)
        assert result.exit_code == 2 and message in result.stderr, result.output
        assert "Traceback" not in result.stderr and result.stderr.strip().count("\n") == 0


def test_refusals(folder: Path, tmp_path: Path) -> None:
    bert = tmp_path / "bert"
    transformers.BertConfig().save_pretrained(bert)
    for arguments, message in (
        (["--model", folder], "pass --out DIR to write the shards to, or --dry-run"),
        (["--model", folder, "--dry-run", "--dtype", "int8"], "unknown dtype 'int8'"),
        (
            ["--model", folder, "--dry-run", "--expert-parallel"],
            "the plan of LlamaForCausalLM does not contain any",
        ),
        (["--model", tmp_path / "none", "--dry-run"], "none does not exist; pass a local folder, "),
        (["--model", folder / "config.json", "--dry-run"], "is not a GGUF file"),
        (["--model", tmp_path, "--dry-run"], "has no config.json"),
        (["--model", bert, "--dry-run"], "(model_type 'bert') is not supported without a plan"),
    ):
        result = invoke(*arguments)
        assert result.exit_code == 2 and message in result.stderr, result.output
