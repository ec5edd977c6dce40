"""Measure the bytes that cross the links between hosts, by op and algorithm.

    python -m benchmarks.host_traffic --hosts 2 --nproc 2 --mib 8

Hosts are network namespaces (benchmarks/hosts.py). The counter of the link of each host gives the
bytes that it sent, including headers, acknowledgements and handshakes. Prints MiB per call, summed
over all hosts.
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

WAYS = ("unfused", "ring", "hierarchical")
OPS = ("all_gather", "reduce_scatter", "all_reduce")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_SENT = Path("/sys/class/net/eth/statistics/tx_bytes")
_CALLS = 3
_SETTLE_S = 0.2  # until the last acknowledgements have been sent


def measure(mib: int) -> dict[str, int]:
    """Bytes that this host sends in one call, by op, dtype and algorithm. The same on its ranks."""
    group = dist.group.WORLD
    assert group is not None
    world, sent = group.size(), {}
    for (name, dtype), op in ((pair, op) for pair in DTYPES.items() for op in OPS):
        rows = (mib << 20) // dtype.itemsize // 256 // world
        x = torch.ones(rows if op == "all_gather" else world * rows, 256, dtype=dtype)
        for way in WAYS:
            for calls in (1, _CALLS):  # the first may set something up
                before = _settled()
                for _ in range(calls):
                    getattr(tpkernels, op)(x, group, algorithm=way)
                sent[f"{op} {name} {way}"] = (_settled() - before) // calls
    return sent


def _settled() -> int:
    """What this host has sent so far, with no call under way."""
    dist.barrier()
    time.sleep(_SETTLE_S)
    count = int(_SENT.read_text())
    dist.barrier()
    return count


def run(hosts: int, nproc: int, mib: int) -> dict[str, int]:
    """Bytes of one call over all hosts, by op, dtype and algorithm.

    Raises:
        OSError: there can be no network namespaces here.
        RuntimeError: a rank failed; the message is its error output.
    """
    with tempfile.TemporaryDirectory() as folder, Hosts(hosts) as namespaces:
        arguments = ["benchmarks.host_traffic", "--mib", str(mib), "--out", folder]
        started = [namespaces.torchrun(host, nproc, *arguments) for host in range(hosts)]
        for process in started:
            _, errors = process.communicate(timeout=600)
            if process.returncode:
                raise RuntimeError(errors)
        each = [json.loads(path.read_text()) for path in Path(folder).iterdir()]
    return {case: sum(host[case] for host in each) for case in each[0]}


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
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)  # of a rank
    args = parser.parse_args()
    if args.out is not None:
        _rank(args.mib, args.out)
        return
    sent = run(args.hosts, args.nproc, args.mib)
    print("| op | dtype |", " | ".join(WAYS), "|\n|---|---|" + "---|" * len(WAYS))
    for op in OPS:
        for dtype in DTYPES:
            cells = [f"{sent[f'{op} {dtype} {way}'] / 2**20:.2f}" for way in WAYS]
            print(f"| {op} | {dtype} |", " | ".join(cells), "|")


if __name__ == "__main__":
    sys.exit(main())
