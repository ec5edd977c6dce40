"""What the tests of ``tpkernels.autotune`` share: calls, and the algorithms that run in them."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import tpkernels
from tpkernels import groups
from tpkernels.backends import TABLES
from tpkernels.groups.group import Group
from tpkernels.op_spec import OPS
from tpkernels.tuning import tuner

WORLD = 3
ROWS = 16 * WORLD  # 16 of each rank, the fewest that are split
MATMULS = [op for op, spec in OPS.items() if spec.has_matmul and not spec.scaled]
WAYS = ("unfused", "direct", "pipelined", "ring")


@contextlib.contextmanager
def watched(
    seconds: dict[str, float] | None = None, before: Callable[[str], None] = lambda name: None
) -> Iterator[Counter[str]]:
    """The algorithms that run within the block, on CPU tensors.

    Args:
        seconds: how long each sleeps.
        before: called with the name before it runs.
    """
    made: Counter[str] = Counter()

    def watching(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            made[name] += 1
            before(name)
            time.sleep((seconds or {}).get(name, 0.0))
            return function(*args)

        return run

    table = TABLES["cpu"]
    wrapped = {key: watching(key[1], function) for key, function in table.items()}
    scratch = mock.patch.object(tuner, "_MOST_SCRATCH_BYTES", 1 << 10)  # a clock tells
    with mock.patch.dict(table, wrapped), scratch:
        yield made


def call(op: str, group: dist.ProcessGroup, rows: int = ROWS, **options: Any) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(rows // WORLD if "all_gather" in op else rows, 64, generator=numbers)
    w = torch.randn(40, 64, generator=numbers)
    operands = [x.bfloat16(), w.bfloat16().t()] if "matmul" in op else [x.bfloat16()]
    if op.endswith("_rms_norm"):
        operands.append(torch.ones(40 if "matmul" in op else 64))
    result: Any = getattr(tpkernels, op)(*operands, group, **options)
    return torch.cat(result) if isinstance(result, tuple) else result


def own(group: dist.ProcessGroup) -> Group:
    return groups.get(group.group_name)


def plan_of(group: dist.ProcessGroup) -> Any:
    return own(group).planned_calls()[-1].plan
