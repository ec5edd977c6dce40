"""Overlap on one GPU: one real rank, emulated peers, and paced copies in place of links.

One process holds the regions of all ranks. Rank 0 runs the real algorithms. The peers only send
their signals, from their own streams, when an equally fast peer would send them. A copy from a peer
waits for the peer's signal and then takes as long as the link would. Paced copies take
multiprocessors from the matmul, unlike copy engines, so real links should do better. Copies that
peers fetch from rank 0 are not modelled.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import torch

from benchmarks.gpu.stage import Result, Setting, random, stage, times_ms
from tpkernels import cuda
from tpkernels.algorithms import fused
from tpkernels.algorithms.pipelined import cuda as pipelined_cuda
from tpkernels.cuda.copies import CopyCall
from tpkernels.symm.device import DeviceWorkspace, region_bytes
from tpkernels.symm.streams import SideStream

RATES = (50.0, 150.0, 300.0, 450.0)  # GB/s into a rank
LATENCY_US, COPY_SMS = 2.0, 16
WORLD, WORDS = 8, 1 << 10
SHAPES = [(4096, 28672, 8192), (8192, 28672, 8192)]  # M, and N, K before the split
TIMEOUT = 20.0


class EmulatedRanks:
    """The regions of ``world`` ranks; only rank 0 is real."""

    def __init__(self, device: str, world: int, buffer_bytes: int) -> None:
        self.world = world
        place = torch.device(device)
        nbytes = region_bytes(world, WORDS, buffer_bytes)
        memory = [torch.zeros(nbytes, dtype=torch.uint8, device=place) for _ in range(world)]
        addresses = [region.data_ptr() for region in memory]
        self.spaces = [
            DeviceWorkspace(addresses, own, rank, WORDS, buffer_bytes, TIMEOUT)
            for rank, own in enumerate(memory)
        ]
        self.side = SideStream(place)
        self.peers = list(range(1, world))
        self.streams = [torch.cuda.Stream() for _ in self.peers] if place.type == "cuda" else []


class PacedCall(CopyCall):
    """Rank 0's call. In an all-gather all peers publish ``word`` immediately. In a reduction (None)
    one peer publishes after each publish of rank 0, in the order in which the peers would finish
    rank 0's partials."""

    def __init__(
        self, ranks: EmulatedRanks, signature: int, rate: float, word: int | None, flags: int = 0
    ) -> None:
        super().__init__(ranks.spaces[0], signature, flags=flags)
        self._ranks, self._rate, self._word = ranks, rate, word
        self._theirs = [CopyCall(space, signature) for space in ranks.spaces[1:]]
        self._published = 0
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> PacedCall:
        if not self._ranks.streams:  # a rehearsal: peers wait in threads
            self._threads = [threading.Thread(target=self._all_of, args=(p,)) for p in self._theirs]
            for thread in self._threads:
                thread.start()
        for stream, peer in zip(self._ranks.streams, self._theirs, strict=False):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                peer.__enter__()
                if self._word is not None:
                    peer.publish(self._word)
        super().__enter__()
        return self

    def _all_of(self, peer: CopyCall) -> None:
        with peer:
            peer.publish(pipelined_cuda.DATA if self._word is None else self._word)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        for stream, peer in zip(self._ranks.streams, self._theirs, strict=False):
            stream.wait_stream(torch.cuda.current_stream())  # or it would hold a multiprocessor
            with torch.cuda.stream(stream):
                peer.__exit__(kind, *rest)
        super().__exit__(kind, *rest)
        for thread in self._threads:
            thread.join()

    def publish(self, index: int, to: int | None = None) -> None:
        super().publish(index, to)
        if self._word is None and self._ranks.streams:
            self._published += 1
            peer = self._ranks.world - self._published
            stream = self._ranks.streams[peer - 1]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._theirs[peer - 1].publish(index, 0)

    def copy_from(self, source: int, dst: torch.Tensor, offset: int) -> None:
        theirs = self._ranks.spaces[source].view(dst.dtype, tuple(dst.shape), offset)
        cuda.paced_copy(dst, theirs, self._rate, LATENCY_US, COPY_SMS)


class Gather:
    """An all-gather and matmul: M rows over all ranks, and this rank's columns."""

    def __init__(self, device: str, world: int, m: int, n: int, k: int) -> None:
        self.sizes = (m // world,) * world
        self.ranks = EmulatedRanks(device, world, m // world * k)  # 2 bytes each, 2 buffers
        self.rows = random(device, m // world, k)
        self.w = random(device, n // world, k).t()
        for space in self.ranks.spaces[1:]:
            space.view(torch.bfloat16, tuple(self.rows.shape)).normal_()
        self.whole = torch.empty(m, k, dtype=torch.bfloat16, device=device)
        self.out = torch.empty(m, self.w.shape[1], dtype=torch.bfloat16, device=device)

    def serial(self, rate: float) -> None:
        """The whole transfer, then torch.matmul."""
        shard = self.rows.shape[0]
        self.whole[:shard].copy_(self.rows)
        for peer in self.ranks.peers:
            theirs = self.ranks.spaces[peer].view(torch.bfloat16, tuple(self.rows.shape))
            to = self.whole.narrow(0, peer * shard, shard)
            cuda.paced_copy(to, theirs, rate, LATENCY_US, COPY_SMS)
        torch.matmul(self.whole, self.w, out=self.out)

    def pipelined(self, rate: float) -> None:
        factors = [(self.w, None, self.out)]
        with PacedCall(self.ranks, 1, rate, pipelined_cuda.DATA) as copies:
            pipelined_cuda.gather_and_multiply(
                copies, self.ranks.side, self.ranks.peers, list(self.sizes), self.rows, self.whole,
                factors,
            )  # fmt: skip

    def fused(self, rate: float) -> None:
        from tpkernels.kernels import all_gather_matmul as kernel
        from tpkernels.kernels.configs import choose

        space, side = self.ranks.spaces[0], self.ranks.side
        config = choose(self.rows.device, self.rows.dtype, self.whole.shape[0])
        # A paced copy must be resident beside the kernel, whose programs fill the others.
        config = replace(config, programs=max(config.programs - COPY_SMS, config.fetchers + 1))
        prepared, step, chunks = kernel.prepare_arriving(
            config, self.w, self.whole, self.out.dtype, self.sizes
        )
        call = PacedCall(self.ranks, 2, rate, space.words - 2, len(self.sizes) * chunks)
        with call as copies, ExitStack() as after:
            fused.bring_rows(
                copies, side, self.ranks.peers, self.rows, self.whole, self.sizes,
                step, chunks,
            )  # fmt: skip
            after.callback(side.join)
            prepared.launch(self.whole, self.w, None, self.out).run(space, 2)

    def matmul(self) -> None:
        torch.matmul(self.whole, self.w, out=self.out)


class Scatter:
    """A matmul and reduce-scatter: M rows over all ranks, and this rank's part of K."""

    def __init__(self, device: str, world: int, m: int, n: int, k: int) -> None:
        self.sizes = [m // world] * world
        self.ranks = EmulatedRanks(device, world, m * n)
        self.x = random(device, m, k // world)
        self.w = random(device, n, k // world).t()
        for space in self.ranks.spaces[1:]:
            space.view(torch.bfloat16, (m, n)).normal_()
        self.whole = torch.empty(m, n, dtype=torch.bfloat16, device=device)
        self.out = torch.empty(m // world, n, dtype=torch.bfloat16, device=device)

    def serial(self, rate: float) -> None:
        """torch.matmul, then the whole transfer and the sum."""
        torch.matmul(self.x, self.w, out=self.whole)
        rows, n = self.out.shape
        partials = [torch.empty_like(self.out) for _ in self.ranks.peers]
        for peer, partial in zip(self.ranks.peers, partials, strict=True):
            theirs = self.ranks.spaces[peer].view(torch.bfloat16, (rows, n))
            cuda.paced_copy(partial, theirs, rate, LATENCY_US, COPY_SMS)
        cuda.sum_partials(self.out, [self.whole[:rows], *partials])

    def pipelined(self, rate: float) -> None:
        with PacedCall(self.ranks, 3, rate, None) as copies:
            partials = pipelined_cuda.multiply_and_scatter(
                copies, self.ranks.side, self.ranks.peers, self.sizes, self.x, self.w,
                torch.bfloat16,
            )  # fmt: skip
            cuda.sum_partials(self.out, partials)

    def matmul(self) -> None:
        torch.matmul(self.x, self.w, out=self.whole)


def check(case: Gather | Scatter, name: str) -> bool:
    """Whether an overlapped variant equals the serial one, up to the order of its matmuls."""
    case.serial(1e3)
    expected = case.out.clone()
    case.whole.fill_(math.nan)
    case.out.fill_(math.nan)
    getattr(case, name)(1e3)
    error = (case.out.float() - expected.float()).abs().max()
    right = bool(error <= 0.02 * expected.float().abs().max())
    return right and case.ranks.spaces[0].failure() is None


@stage(gpus=1)
def paced_link(setting: Setting) -> Iterator[Result]:
    """`pipelined` and `fused` compared with the serial transfer and matmul, at several rates."""
    for m, n, k in [(256, 1024, 512)] if setting.small else SHAPES:
        gather, scatter = (make(setting.device, WORLD, m, n, k) for make in (Gather, Scatter))
        variants: list[tuple[str, Gather | Scatter, str]] = [
            ("all_gather_matmul", gather, "pipelined"),
            ("all_gather_matmul", gather, "fused"),
            ("matmul_reduce_scatter", scatter, "pipelined"),
        ]
        for op, case, name in variants:
            right, run = check(case, name), getattr(case, name)
            for rate in RATES:
                jobs = [functools.partial(job, rate) for job in (run, case.serial)]
                ours, serial, matmul = times_ms(setting.device, [*jobs, case.matmul])
                overlap = 1 - (ours - matmul) / (serial - matmul)
                yield Result(
                    f"{op} by {name}, M {m}, {WORLD} ranks, {rate:g} GB/s",
                    f"{ours:.4f} ms, serial {serial:.4f} ms, torch.matmul {matmul:.4f} ms, "
                    f"E_overlap {overlap:.0%}",
                    right,
                )
