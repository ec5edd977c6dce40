"""Helpers of the tuner tests: run calls and record the algorithms that run in them."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import tpkernels
from tpkernels import groups
from tpkernels.algorithms.backends import TABLES
from tpkernels.groups.group import Group
from tpkernels.ops import tuner
from tpkernels.planning.op_spec import OPS

WORLD = 3
ROWS = 16 * WORLD  # 16 rows per rank, the minimum that is split
MATMULS = [op for op, spec in OPS.items() if spec.has_matmul and not spec.scaled]
CANDIDATES = ("unfused", "direct", "pipelined", "ring")


@contextlib.contextmanager
def watch_algorithms(
    seconds: Mapping[str, float] | None = None,
    before: Callable[[str], None] = lambda name: None,
    *,
    sleep: bool = False,
) -> Iterator[Counter[str]]:
    """Record the algorithms that run within the block on CPU tensors.

    Args:
        seconds: duration of each algorithm on a fake clock for the tuner. By default the tuner
            reads the real clock.
        before: called with the name before each run.
        sleep: algorithms sleep this long, and the clock is real.
    """
    runs: Counter[str] = Counter()
    now = 1000.0

    def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            nonlocal now
            runs[name] += 1
            before(name)
            duration = (seconds or {}).get(name, 0.0)
            now += duration
            time.sleep(duration if sleep else 0.0)
            return function(*args)

        return run

    table = TABLES["cpu"]
    wrapped = {key: wrap(key[1], function) for key, function in table.items()}
    clock = mock.Mock(perf_counter=lambda: now) if seconds and not sleep else tuner.time
    with (
        mock.patch.dict(table, wrapped),
        mock.patch.object(tuner, "_MAX_FLUSH_BYTES", 1 << 10),
        mock.patch.object(tuner, "time", clock),
    ):
        yield runs


def operands(op: str, rows: int = ROWS, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Create x and, for a matmul, w of this rank. All ranks have equal columns."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(rows // WORLD if "all_gather" in op else rows, 64, generator=generator)
    w = torch.randn(40, 64, generator=generator)
    tensors = [x.to(dtype), w.to(dtype).t()] if "matmul" in op else [x.to(dtype)]
    if op.endswith("_rms_norm"):
        tensors.append(torch.ones(40 if "matmul" in op else 64))
    return tensors


def call(op: str, group: dist.ProcessGroup, rows: int = ROWS, **options: Any) -> torch.Tensor:
    result: Any = getattr(tpkernels, op)(*operands(op, rows), group, **options)
    return torch.cat(result) if isinstance(result, tuple) else result


def get_group(group: dist.ProcessGroup) -> Group:
    return groups.get(group.group_name)


def last_plan(group: dist.ProcessGroup) -> Any:
    return get_group(group).planned_calls()[-1].plan
