"""Measure time and peak memory of loading a 1 GB checkpoint by shards, compared with a full load.

    python -m benchmarks.loading --tp 4 --repeat 5
    python -m benchmarks.loading --tp 4 --repeat 5 --cold
    python -m benchmarks.loading --tp 4 --repeat 5 --gguf FILE

The checkpoint is a random TinyLlama of 8 layers in bfloat16, in a temporary folder. Peak memory is
the growth of VmHWM (/proc/self/status) during the load. VmHWM counts anonymous memory and mapped
files; all packages are imported first. Every load runs in new processes. The variants are
interleaved. --cold drops the files from the page cache before each load, if the system permits it.
--gguf loads that file, by shards only.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tpkernels
from benchmarks import llama
from tpkernels.launch import Ranks, fork_server
from tpkernels.nn.sharding import ShardedModule
from tpkernels.parallel.shard_files import plan_shards, write_shards

VARIANTS = ("by shards", "by shards, per-rank files", "whole, then cut")


def read_status(name: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise LookupError(name)


def load(variant: str, folder: str) -> dict[str, Any]:
    """Load the model on this rank and return its time and memory."""
    import transformers

    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tpkernels.all_reduce(torch.ones(1), mesh)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    start_rss = read_status("VmRSS")
    dist.barrier()
    begin = time.perf_counter()
    if variant == "whole, then cut":
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        model = tpkernels.parallelize(model, mesh)
    else:
        model = tpkernels.from_pretrained(folder, mesh)
    seconds = time.perf_counter() - begin
    peak = read_status("VmHWM") - start_rss
    sizes = [p.numel() * p.dtype.itemsize for p in model.parameters()]
    assert any(isinstance(module, ShardedModule) for module in model.modules())
    return {"seconds": seconds, "peak": peak, "shard": sum(sizes), "largest": max(sizes)}


def drop_from_page_cache(checkpoint: Path) -> None:
    """Drop a file, or the files of a folder, from the page cache."""
    os.sync()
    for path in checkpoint.iterdir() if checkpoint.is_dir() else [checkpoint]:
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def write_checkpoints(base: Path, layers: int, tp: int) -> dict[str, Path]:
    """Write the checkpoint in the Hugging Face layout and in the `tpkernels shard` layout. Returns
    the folder of each variant."""
    full, sharded = base / "whole", base / "pieces"
    with Ranks(1) as maker:
        maker.run(llama.save, "1b", str(full), layers, timeout=600)
    write_shards(plan_shards(full, tp), sharded)
    return {variant: sharded if "files" in variant else full for variant in VARIANTS}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tp", type=int, default=4, help="number of ranks (%(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="layers of the model (%(default)s)")
    parser.add_argument("--repeat", type=int, default=5, help="loads per variant (%(default)s)")
    parser.add_argument(
        "--cold", action="store_true", help="drop the files from the page cache before each load"
    )
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="load this GGUF file instead")
    options = parser.parse_args()
    fork_server(preload=["transformers.models.llama.modeling_llama", "safetensors.torch", "gguf"])
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/var/tmp")) as base:
        if options.gguf is not None:
            checkpoints = {VARIANTS[0]: options.gguf}
        else:
            checkpoints = write_checkpoints(Path(base), options.layers, options.tp)
        first = checkpoints[VARIANTS[0]]
        files = first.glob("*.safetensors") if first.is_dir() else [first]
        nbytes = sum(path.stat().st_size for path in files)
        print(f"{nbytes / 1e9:.3f} GB, {options.tp} ranks, 1 thread each, cold={options.cold}")
        results: dict[str, list[list[dict[str, Any]]]] = {variant: [] for variant in checkpoints}
        for _ in range(options.repeat):
            for variant, checkpoint in checkpoints.items():
                if options.cold:
                    drop_from_page_cache(checkpoint)
                with Ranks(options.tp) as ranks:
                    results[variant].append(ranks.run(load, variant, str(checkpoint), timeout=600))
        for variant, runs in results.items():
            slowest = statistics.median(max(rank["seconds"] for rank in run) for run in runs)
            print(f"{variant}: {slowest:.2f} s (median of {len(runs)}, slowest rank)")
            for rank, stats in enumerate(runs[0]):
                peak, limit = (
                    max(run[rank]["peak"] for run in runs),
                    1.1 * stats["shard"] + stats["largest"],
                )
                print(
                    f"  rank {rank}: shard {stats['shard'] / 1e6:.1f} MB, largest slice "
                    f"{stats['largest'] / 1e6:.1f} MB, peak {peak / 1e6:.1f} MB "
                    f"({peak / stats['shard']:.3f} of the shard; limit {limit / 1e6:.1f} MB)"
                )


if __name__ == "__main__":
    main()
