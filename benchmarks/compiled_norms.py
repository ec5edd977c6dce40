"""A compiled Llama, with and without norms in the all-reduces that precede them.

    python -m benchmarks.compiled_norms --size 100m --repeat 60

Ranks of one thread, split by `tpkernels.from_pretrained`; random weights, bf16. Forwards of one
and eight tokens, as in decoding. The variants differ in ``norms`` of
`tpkernels.compile.fuse_collectives`; they are interleaved in a random order, and before each call
the ranks meet in a small all-reduce. Prints the slowest rank's median and lower quartile.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tpkernels
from benchmarks.interleaved import interleaved
from benchmarks.llama import SIZES, save
from tpkernels.launch import Ranks

TOKENS, WARMUP = (1, 8), 3


def run(folder: str, repeat: int) -> dict[str, list[float]]:
    """Milliseconds of this rank's calls, by variant and what the pass did in it."""
    group = dist.group.WORLD
    assert group is not None
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model: Any = tpkernels.from_pretrained(folder, mesh, sequence_parallel=False).eval()
    found = {}
    for tokens in TOKENS:
        variants = {}
        with torch.inference_mode():
            ids = torch.zeros(1, tokens, dtype=torch.long)
            for norms in (False, True):
                fusion = tpkernels.compile.fuse_collectives(group, norms=norms)
                compiled = torch.compile(model.forward, dynamic=False, options=fusion.options)
                call = functools.partial(compiled, input_ids=ids, use_cache=False)
                call()
                variants[f"{tokens} tokens, norms={norms} {fusion.report.counts}"] = call
        times = interleaved(variants, range(WARMUP + repeat), group)
        found |= {name: [1e3 * each for each in times[name][WARMUP:]] for name in times}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="100m")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=60)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Ranks(given.nproc, threads=1) as ranks:
        save(given.size, folder)
        found = ranks.run(run, folder, given.repeat, timeout=600)
    for name in found[0]:
        slowest = [max(each) for each in zip(*(rank[name] for rank in found), strict=True)]
        quartile, median, _ = statistics.quantiles(slowest, n=4)
        print(f"{name}: median {median:.2f} ms, lower quartile {quartile:.2f} ms")


if __name__ == "__main__":
    main()
