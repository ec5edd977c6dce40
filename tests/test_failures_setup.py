"""Failures while ranks set up what they share: the first workspace, a larger one, symmetric
tensors. No memory, ranks that do not come, die or stop, strangers."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import faults
import pytest
import torch
import torch.distributed as dist
from cases import RanksFixture
from faults import PROMPT, Ending, Report

import tpkernels
from tpkernels.symm import host, rendezvous

WORLD = 4
TIMEOUT = 0.6


def _first_call(group: dist.ProcessGroup) -> None:
    tpkernels.init(group, timeout=TIMEOUT, workspace_bytes=faults.WORKSPACE_BYTES)


def _grow(group: dist.ProcessGroup) -> None:
    tpkernels.all_gather_matmul(
        torch.ones(256, 1024), torch.ones(1024, 2), group, algorithm="pipelined"
    )


def _make_symmetric(group: dist.ProcessGroup) -> None:
    tpkernels.empty(1 << 20, group=group)


STEPS: dict[str, Callable[[dist.ProcessGroup], None]] = {
    "first": _first_call,
    "growth": _grow,
    "symmetric": _make_symmetric,
}


def disturbed_job(step: str, where: str, victim: int, number: int, timeout: float) -> object:
    """The victim sends itself a signal: before it comes, or when it is to map the memory."""
    group, rank = faults.group_of(dist.new_group()), dist.get_rank()
    survivors = [r for r in range(WORLD) if r != victim]
    others = [faults.new_group(ranks=survivors)] if rank != victim else []
    if step != "first":
        tpkernels.init(group, timeout, faults.WORKSPACE_BYTES)

    def disturb(*args: object) -> None:
        time.sleep(0.1)
        faults.disturb_now(number)

    if rank == victim:
        if where == "before":
            vars(host)["make_arena" if step != "first" else "torch"] = None
            host.make_arena = disturb  # type: ignore[assignment]
            if step == "first":
                disturb()
        else:
            rendezvous._map = disturb  # type: ignore[assignment]
    report = faults.report_of(lambda: STEPS[step](group), group, others)
    return report, faults.disturbed_at()
