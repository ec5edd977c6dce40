"""Flags by which the copy engines' streams tell a product of its chunks, also in captured graphs.
Run on the CPU (support/emulated.py), the product under Triton's interpreter."""

from __future__ import annotations

import ctypes
import functools
import threading
import time

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support import faults
from tests.support.cuda_rehearsal import copy_engines, pretending
from tests.support.emulated import (
    F32,
    count_of,
    driver_that,
    interpreted,
    library,
    on_ranks,
    space_of,
)
from tests.support.tiers import sweep
from tpkernels import _C, cuda
from tpkernels.symm import streams
from tpkernels.symm.device import FLAGS, FLAGS_AT


@on_ranks(2)
def test_a_call_begins_with_no_flag_raised() -> None:
    """The host gives the second call up."""
    space, found = space_of(), []

    def look() -> None:
        found.append(space.state[FLAGS_AT : FLAGS_AT + 3].tolist())

    def call(gives_up: bool = False) -> None:
        with cuda.CopyCall(space, 7, flags=2) as copies:
            look()
            copies.raise_flag(1)
            if gives_up:  # so that the peer goes on
                copies._kernels.launch("call_end", 0, copies._words, _C.cuda.Results([]))
                raise KeyError("given up")
            copies.raise_flag(0)
        look()

    call()
    with pytest.raises(KeyError):
        call(gives_up=True)
    call()
    assert found == [[0, 0, 0], [1, 1, 0], [0, 0, 0], [0, 0, 0], [1, 1, 0]], found


@pytest.mark.parametrize("late", [True, False])
@interpreted(2)
def test_a_product_waits_for_the_flag_of_each_chunk(late: bool) -> None:
    """Chunks come one by one, the last first. Negative control: flags that are raised before."""
    from tpkernels.kernels import all_gather_matmul as kernel
    from tpkernels.kernels.configs import INTERPRETER

    space = space_of(buffer_bytes=1 << 14)
    rank, sizes, k = space.rank, (90, 50), 8
    shards = torch.arange(140.0 * k).remainder(11).view(-1, k).split(sizes)
    whole, w, out = torch.full((140, k), torch.nan), torch.ones(k, 33), torch.empty(140, 33)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "_CHUNK_BYTES", 1)  # a row of tiles
        arriving = kernel.prepare_arriving(INTERPRETER, w, whole, F32, sizes)
    theirs, begin = 1 - rank, (90, 0)[rank]
    whole.split(sizes)[rank].copy_(shards[rank])
    tops = range(0, sizes[theirs], arriving.chunk_rows)

    def bring(copies: cuda.CopyCall) -> None:
        for chunk in reversed(range(len(tops))):
            rows = slice(tops[chunk], tops[chunk] + arriving.chunk_rows)
            if late:
                time.sleep(0.05)
            piece = shards[theirs][rows]
            whole[begin + tops[chunk] :][: len(piece)] = piece
            copies.raise_flag(theirs * arriving.chunks + chunk)

    with cuda.CopyCall(space, 9, [out], flags=2 * arriving.chunks) as copies:
        thread = threading.Thread(target=bring, args=[copies])
        if late:
            thread.start()
        else:
            space.state[FLAGS_AT : FLAGS_AT + 2 * arriving.chunks] = 1
        arriving.prepared.bind(space, 9)(whole, w, None, out)
        right = torch.equal(out, torch.cat(shards).sum(1, True).expand(-1, 33))
        if not late:
            thread.start()
        thread.join()
    assert right == late and space.failure() is None


CHUNKS = 5
# By case: whether the call is captured, what the driver lacks, and the kernels and writes expected.
TOLD = {
    "eager": (False, {}, (4, CHUNKS)),
    "captured": (True, {}, (4 + CHUNKS, 0)),
    "unable": (False, {"streams_write": 0}, (4 + CHUNKS, 0)),
    "refused": (False, {"fails": "cuStreamWriteValue64", "code": 801}, (4 + CHUNKS, 0)),
}


@pytest.mark.parametrize("case", sweep(TOLD, 1, 1))
@interpreted(2)
def test_a_chunk_is_told_without_a_kernel(case: str) -> None:
    """Kernels of csrc/cuda in a warm gather: begin, publish, a wait for each peer, end, whatever
    the number of results; and a word that the stream writes for each chunk, where it can."""
    captured, lacks, expected = TOLD[case]
    with driver_that(**lacks), pretending() as patch:
        copy_engines(patch)
        x, ws = torch.ones(150, 8), [torch.ones(8, 4)] * 3
        group = faults.new_group()
        call = functools.partial(tpkernels.all_gather_matmul, x, ws, group, algorithm="fused")
        call()
        dist.barrier()
        patch.setattr(streams, "is_captured", lambda _: captured)
        launches, writes = count_of("launches"), count_of("writes")
        assert all(bool((out == 8).all()) for out in call())
        found = count_of("launches") - launches, count_of("writes") - writes
        assert found == expected, found
        patch.setattr("tpkernels.kernels.all_gather_matmul.prepare_arriving", None)  # it is bound
        assert all(bool((out == 8).all()) for out in call())


@on_ranks(2)
def test_refusals() -> None:
    call = functools.partial(cuda.CopyCall, space_of(), 3)
    with call(flags=2) as copies:
        with pytest.raises(NotImplementedError, match="needs 65 results and 0 flags, but"):
            call([torch.empty(1)] * 65)
        with pytest.raises(
            NotImplementedError, match=f"needs 0 results and {FLAGS + 1} flags, but"
        ):
            call(flags=FLAGS + 1)
        for flag in (2, -1):
            with pytest.raises(ValueError, match=f"^flag index is {flag}; it must be 0 to 1$"):
                copies.raise_flag(flag)


@interpreted(1)
def test_chunks_have_flags_enough() -> None:
    """Large shards come in larger chunks. So do chunks whose flags take kernels; others of such a
    call are begin, publish and end, and a wait for each peer."""
    from tpkernels.kernels import all_gather_matmul as kernel
    from tpkernels.kernels.configs import INTERPRETER

    x, w = torch.empty(16384, 8192, dtype=torch.bfloat16), torch.empty(8192, 1)  # shards of 32 MiB
    cases = [((2048,) * 8, x, w, by_kernels) for by_kernels in (False, True)]
    x, w = torch.empty(8, 1 << 18), torch.empty(1 << 18, 1)  # more rows than there are flags
    cases += [((1 << 22, *[5] * (world - 1)), x, w, False) for world in (2, 3, 72)]
    found = []
    for sizes, x, w, by_kernels in cases:
        _, rows, chunks = kernel.prepare_arriving(INTERPRETER, w, x, x.dtype, sizes, by_kernels)
        assert rows * chunks >= max(sizes)
        found.append((chunks, len(sizes) * chunks))
    (by_streams, _), (by_kernels, _), *large = found
    assert (by_streams, by_kernels, 3 + 7 * (1 + by_kernels)) == (8, 4, 38), found
    assert all(FLAGS // 2 < flags <= FLAGS for _, flags in large), found


@on_ranks(2)
def test_replays_clear_and_raise_flags() -> None:
    """What four replays of a call fetch, and its flags behind its begin and before its end; with as
    many kernels as the eager call: begin, publish, wait, end."""
    space, driver = space_of(), library()
    x, got = torch.empty(50, dtype=torch.int64), torch.empty(50, dtype=torch.int64)
    flags = space.state[FLAGS_AT:][:3]
    begun, ended = torch.empty(2, 3, dtype=torch.int64).unbind()

    def call() -> None:
        with cuda.CopyCall(space, 5, flags=2) as copies:
            keep = functools.partial(copies._kernels.copy, 0, src=flags.data_ptr(), nbytes=24)
            keep(dst=begun.data_ptr())
            copies.put(x, 0)
            copies.publish(1)
            copies.fetch(1 - space.rank, 1, got, 0)
            copies.raise_flag(1)
            copies.raise_flag(0)
            keep(dst=ended.data_ptr())

    call()
    graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
    launches = count_of("launches")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "is_captured", lambda _: True)
        driver.cuStreamBeginCapture_v2(None, 0)
        call()
        driver.cuStreamEndCapture(None, ctypes.byref(graph))
    assert count_of("launches") - launches == 4 + 2
    driver.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, ctypes.c_uint64(0))
    for i in range(4):
        x.fill_(10 * i + space.rank)
        driver.cuGraphLaunch(executable, None)
        assert got.unique().tolist() == [10 * i + 1 - space.rank]
        assert (begun.tolist(), ended.tolist()) == ([0, 0, 0], [1, 1, 0])
    driver.cuGraphExecDestroy(executable)
    driver.cuGraphDestroy(graph)
