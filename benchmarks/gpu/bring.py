"""How `fused` brings rows, for the GPU suite: by fetchers or by copy engines, in pieces or chunks
of several sizes. It times the constants that were chosen without a GPU."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

import tpkernels
from benchmarks.gpu.stage import Result, Setting, median_ms, over_ranks, random
from tpkernels import groups

KIB, MIB = 1 << 10, 1 << 20
# Fields of the config of a call by fetchers.
FETCHERS: list[dict[str, int]] = [
    {"fetchers": fetchers, "piece_bytes": piece}
    for fetchers in (8, 12, 16)
    for piece in (64 * KIB, 128 * KIB, 256 * KIB)
]
CHUNKS = (2 * MIB, 4 * MIB, 8 * MIB)


def _bring_job(device: str, rows: int, n: int, k: int, ways: int) -> list[tuple[str, float]]:
    """(way, ms) of a gather of ``rows`` rows of each rank and a product with n columns in bf16:
    unfused, then `fused` in ``ways`` ways with fetchers and as many with copy engines."""
    from benchmarks.gpu.calls import Calls
    from tpkernels.algorithms import fused
    from tpkernels.kernels import all_gather_matmul as kernel

    made = Calls(device, "fused")
    own, group = groups.get(made.group.group_name), made.group
    x, w, choose = random(device, rows, k), random(device, k, n), fused._config

    def time(algorithm: str, fields: dict[str, Any], engines_from: int, chunk: int) -> float:
        own.forget_calls()  # which are bound to their block sizes
        call = functools.partial(tpkernels.all_gather_matmul, x, w, group, algorithm=algorithm)
        with (
            mock.patch.object(fused, "_config", lambda *given: replace(choose(*given), **fields)),
            mock.patch.object(fused, "COPY_ENGINE_BYTES", engines_from),
            mock.patch.object(kernel, "_CHUNK_BYTES", chunk),
        ):
            return median_ms(group, device, call)

    never = 1 << 62
    found = [("unfused", time("unfused", {}, never, MIB))]
    for fields in FETCHERS[:ways]:
        what = f"{fields['fetchers']} fetchers, pieces of {fields['piece_bytes'] // KIB} KiB"
        found.append((what, time("fused", fields, never, MIB)))
    for chunk in CHUNKS[:ways]:
        found.append((f"copy engines, chunks of {chunk // MIB} MiB", time("fused", {}, 0, chunk)))
    return found


def bring_speed(setting: Setting) -> Iterator[Result]:
    """An all-gather and product by `fused`, next to `unfused`, as the peers' rows are brought."""
    world = 2 if setting.rehearsal else torch.cuda.device_count()
    if world < 2:
        yield Result("bring_speed", "needs two GPUs: links between ranks", ok=None)
        return
    n, k = 28672 // world, 8192
    shapes = [(rows, n, k, len(FETCHERS)) for rows in (16, 64, 128, 256, 512, 1024)]
    for rows, n, k, ways in [(40, 16, 24, 1)] if setting.small else shapes:
        backend = "gloo" if setting.rehearsal else "nccl"
        ranks = over_ranks(setting, world, _bring_job, rows, n, k, ways, backend=backend)
        for what, ms in ranks[0]:
            shard = f"shards of {rows * k * 2 // KIB} KiB, N {n}, {world} ranks"
            yield Result("bring_speed", f"{shard}: {what}", f"{ms:.4f} ms", ok=None)
