"""What the tests of the tuner share: calls, and the algorithms that run in them."""

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
ROWS = 16 * WORLD  # 16 of each rank, the fewest that are split
MATMULS = [op for op, spec in OPS.items() if spec.has_matmul and not spec.scaled]
WAYS = ("unfused", "direct", "pipelined", "ring")


@contextlib.contextmanager
def watched(
    seconds: Mapping[str, float] | None = None,
    before: Callable[[str], None] = lambda name: None,
    *,
    sleep: bool = False,
) -> Iterator[Counter[str]]:
    """The algorithms that run within the block, on CPU tensors.

    Args:
        seconds: how long each takes by the clock that the tuner reads, which stands still
            meanwhile; by default that is the real one.
        before: called with the name before it runs.
        sleep: they take that time by the real clock.
    """
    made: Counter[str] = Counter()
    now = 1000.0

    def watching(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            nonlocal now
            made[name] += 1
            before(name)
            spent = (seconds or {}).get(name, 0.0)
            now += spent
            time.sleep(spent if sleep else 0.0)
            return function(*args)

        return run

    table = TABLES["cpu"]
    wrapped = {key: watching(key[1], function) for key, function in table.items()}
    clock = mock.Mock(perf_counter=lambda: now) if seconds and not sleep else tuner.time
    with (
        mock.patch.dict(table, wrapped),
        mock.patch.object(tuner, "_MAX_FLUSH_BYTES", 1 << 10),
        mock.patch.object(tuner, "time", clock),
    ):
        yield made


def operands(op: str, rows: int = ROWS, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """x and, for a matmul, w of this rank; every rank has the same columns."""
    numbers = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(rows // WORLD if "all_gather" in op else rows, 64, generator=numbers)
    w = torch.randn(40, 64, generator=numbers)
    found = [x.to(dtype), w.to(dtype).t()] if "matmul" in op else [x.to(dtype)]
    if op.endswith("_rms_norm"):
        found.append(torch.ones(40 if "matmul" in op else 64))
    return found


def call(op: str, group: dist.ProcessGroup, rows: int = ROWS, **options: Any) -> torch.Tensor:
    result: Any = getattr(tpkernels, op)(*operands(op, rows), group, **options)
    return torch.cat(result) if isinstance(result, tuple) else result


def own(group: dist.ProcessGroup) -> Group:
    return groups.get(group.group_name)


def plan_of(group: dist.ProcessGroup) -> Any:
    return own(group).planned_calls()[-1].plan
