"""Loading by shards needs memory for the shard, and for no more than the largest slice besides."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tpkernels
from tests.support import hf_folders, hf_models
from tpkernels.launch import Ranks

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")
RESET = Path("/proc/self/clear_refs")


def memory(name: str) -> int:
    """Bytes in a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1]) << 10


def growth_job(small: str, path: str, dtype: torch.dtype | None) -> tuple[int, int, int]:
    """Growth of the peak, size of the shard, and size of its largest parameter."""
    mesh = hf_models.mesh_of_all()
    tpkernels.from_pretrained(small, mesh)  # imports, and the group's memory
    RESET.write_text("5")  # VmHWM starts again
    before = memory("VmRSS")
    model = tpkernels.from_pretrained(path, mesh, dtype=dtype)
    grown = memory("VmHWM") - before
    sizes = [parameter.numel() * parameter.dtype.itemsize for parameter in model.parameters()]
    return grown, sum(sizes), max(sizes)


@pytest.mark.slow
@pytest.mark.skipif(not RESET.exists(), reason="the system does not measure peak memory anew")
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_peak_memory(tmp_path: Path, dtype: torch.dtype | None) -> None:
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
        model = model.bfloat16()  # read in chunks, and converted
    model.save_pretrained(tmp_path / "large")
    del model
    small = hf_folders.folder(tmp_path)
    with Ranks(2) as ranks:
        results = ranks.run(growth_job, str(small), str(tmp_path / "large"), dtype, timeout=200)
    for grown, shard, largest in results:
        assert shard > 150 << 20
        assert shard <= grown + (4 << 20) and grown <= 1.1 * shard + largest, (
            grown,
            shard,
            largest,
        )
