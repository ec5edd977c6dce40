"""Measure the bytes that cross the links between hosts, by op and algorithm.

    python -m benchmarks.host_traffic --hosts 2 --nproc 2 --mib 8

Hosts are network namespaces (benchmarks/hosts.py). The link counters of the hosts include headers,
acknowledgements and handshakes. Prints MiB per call, summed over all hosts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tpkernels
from benchmarks.hosts import Hosts

ALGORITHMS = ("unfused", "ring", "hierarchical")
OPS = ("all_gather", "reduce_scatter", "all_reduce")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_SENT = Path("/sys/class/net/eth/statistics/tx_bytes")
_CALLS = 3
_SETTLE_S = 0.2  # time for the last acknowledgements


def measure(mib: int) -> dict[str, int]:
    """Return the bytes that this host sends per call, by op, dtype and algorithm."""
    group = dist.group.WORLD
    assert group is not None
    world, sent = group.size(), {}
    for (name, dtype), op in ((pair, op) for pair in DTYPES.items() for op in OPS):
        rows = (mib << 20) // dtype.itemsize // 256 // world
        x = torch.ones(rows if op == "all_gather" else world * rows, 256, dtype=dtype)
        for algorithm in ALGORITHMS:
            for calls in (1, _CALLS):  # the first call may include setup
                start = _read_sent_bytes()
                for _ in range(calls):
                    getattr(tpkernels, op)(x, group, algorithm=algorithm)
                sent[f"{op} {name} {algorithm}"] = (_read_sent_bytes() - start) // calls
    return sent


def _read_sent_bytes() -> int:
    """Read the bytes that this host has sent, between two calls."""
    dist.barrier()
    time.sleep(_SETTLE_S)
    count = int(_SENT.read_text())
    dist.barrier()
    return count


def run(hosts: int, nproc: int, mib: int) -> dict[str, int]:
    """Return the bytes of one call, summed over all hosts, by op, dtype and algorithm.

    Raises:
        OSError: network namespaces cannot be created.
        RuntimeError: a rank failed. The message is its error output.
    """
    with tempfile.TemporaryDirectory() as folder, Hosts(hosts) as namespaces:
        arguments = ["benchmarks.host_traffic", "--mib", str(mib), "--out", folder]
        processes = [namespaces.torchrun(host, nproc, *arguments) for host in range(hosts)]
        for process in processes:
            _, errors = process.communicate(timeout=600)
            if process.returncode:
                raise RuntimeError(errors)
        host_bytes = [json.loads(path.read_text()) for path in Path(folder).iterdir()]
    return {case: sum(host[case] for host in host_bytes) for case in host_bytes[0]}


def _rank(mib: int, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sent: dict[str, Any] = measure(mib)
    if os.environ["LOCAL_RANK"] == "0":
        (out / f"{os.environ['RANK']}.json").write_text(json.dumps(sent))
    dist.barrier()
    tpkernels.finalize()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2, help="number of hosts (%(default)s)")
    parser.add_argument("--nproc", type=int, default=2, help="ranks per host (%(default)s)")
    parser.add_argument(
        "--mib", type=int, default=8, help="size of the full tensor in MiB (%(default)s)"
    )
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)  # set in ranks
    args = parser.parse_args()
    if args.out is not None:
        _rank(args.mib, args.out)
        return
    sent = run(args.hosts, args.nproc, args.mib)
    print("| op | dtype |", " | ".join(ALGORITHMS), "|\n|---|---|" + "---|" * len(ALGORITHMS))
    for op in OPS:
        for dtype in DTYPES:
            cells = [f"{sent[f'{op} {dtype} {algorithm}'] / 2**20:.2f}" for algorithm in ALGORITHMS]
            print(f"| {op} | {dtype} |", " | ".join(cells), "|")


if __name__ == "__main__":
    sys.exit(main())
