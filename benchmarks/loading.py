"""Measure peak memory and time of loading a 1 GB checkpoint by shards, against loading it in full.

    python -m benchmarks.loading --tp 4 --repeat 5
    python -m benchmarks.loading --tp 4 --repeat 5 --cold
    python -m benchmarks.loading --tp 4 --repeat 5 --gguf FILE

The checkpoint is a random TinyLlama of 8 layers in bfloat16, in a temporary folder. Peak memory is
the growth of VmHWM (/proc/self/status) during loading, which counts anonymous memory and mapped
files; all packages are imported before. Every load runs in new processes. The variants are
interleaved. With --cold, the files are dropped from the page cache before each load, which the
system may refuse. With --gguf, that file is loaded by shards only.
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

WAYS = ("by shards", "by shards, per-rank files", "whole, then cut")


def status(name: str) -> int:
    """Bytes that a line of /proc/self/status has."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise LookupError(name)


def load(way: str, folder: str) -> dict[str, Any]:
    """Loads the model in one way, on one of the ranks."""
    import transformers

    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tpkernels.all_reduce(torch.ones(1), mesh)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts from here
    before = status("VmRSS")
    dist.barrier()
    begin = time.perf_counter()
    if way == "whole, then cut":
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        model = tpkernels.parallelize(model, mesh)
    else:
        model = tpkernels.from_pretrained(folder, mesh)
    seconds = time.perf_counter() - begin
    peak = status("VmHWM") - before
    slices = [p.numel() * p.dtype.itemsize for p in model.parameters()]
    assert any(isinstance(module, ShardedModule) for module in model.modules())
    return {"seconds": seconds, "peak": peak, "shard": sum(slices), "largest": max(slices)}


def forget(place: Path) -> None:
    """Drops a file, or the files of a folder, from the page cache."""
    os.sync()
    for path in place.iterdir() if place.is_dir() else [place]:
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def make_all(base: Path, layers: int, tp: int) -> dict[str, Path]:
    """Writes the checkpoint as Hugging Face does and as `tpkernels shard` does; the folder of each
    way."""
    whole, pieces = base / "whole", base / "pieces"
    with Ranks(1) as maker:
        maker.run(llama.save, "1b", str(whole), layers, timeout=600)
    write_shards(plan_shards(whole, tp), pieces)
    return {way: pieces if "files" in way else whole for way in WAYS}


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
            places = {WAYS[0]: options.gguf}
        else:
            places = make_all(Path(base), options.layers, options.tp)
        first = places[WAYS[0]]
        files = first.glob("*.safetensors") if first.is_dir() else [first]
        nbytes = sum(path.stat().st_size for path in files)
        print(f"{nbytes / 1e9:.3f} GB, {options.tp} ranks, 1 thread each, cold={options.cold}")
        results: dict[str, list[list[dict[str, Any]]]] = {way: [] for way in places}
        for _ in range(options.repeat):
            for way, place in places.items():
                if options.cold:
                    forget(place)
                with Ranks(options.tp) as ranks:
                    results[way].append(ranks.run(load, way, str(place), timeout=600))
        for way, runs in results.items():
            slowest = statistics.median(max(rank["seconds"] for rank in run) for run in runs)
            print(f"{way}: {slowest:.2f} s (median of {len(runs)}, slowest rank)")
            for rank, one in enumerate(runs[0]):
                peak, limit = (
                    max(run[rank]["peak"] for run in runs),
                    1.1 * one["shard"] + one["largest"],
                )
                print(
                    f"  rank {rank}: shard {one['shard'] / 1e6:.1f} MB, largest slice "
                    f"{one['largest'] / 1e6:.1f} MB, peak {peak / 1e6:.1f} MB "
                    f"({peak / one['shard']:.3f} of the shard; limit {limit / 1e6:.1f} MB)"
                )


if __name__ == "__main__":
    main()
