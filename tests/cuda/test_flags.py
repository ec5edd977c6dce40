"""Flags that tell a matmul which chunks have arrived, also in captured graphs.

The streams of the copy engines set them. The emulated driver runs them on the CPU
(support/emulated.py). The matmul runs under the Triton interpreter.
"""

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
from tests.support.cuda_rehearsal import cuda_code_path, use_copy_engines
from tests.support.emulated import (
    F32,
    configure_driver,
    get_counter,
    interpreted,
    library,
    make_workspace,
    on_ranks,
)
from tests.support.tiers import sweep
from tpkernels import _C, cuda
from tpkernels.symm import streams
from tpkernels.symm.device import FLAGS_OFFSET, MAX_FLAGS


@on_ranks(2)
def test_call_begins_with_cleared_flags() -> None:
    """Abandon the second of three calls. Each call must begin with all flags cleared."""
    workspace, flag_values = make_workspace(), []

    def record_flags() -> None:
        flag_values.append(workspace.state[FLAGS_OFFSET : FLAGS_OFFSET + 3].tolist())

    def call(gives_up: bool = False) -> None:
        with cuda.CopyCall(workspace, 7, flags=2) as copies:
            record_flags()
            copies.set_flag(1)
            if gives_up:  # the peer waits for the end of the call
                copies._kernels.launch("call_end", 0, copies._workspace_args, _C.cuda.Results([]))
                raise KeyError("given up")
            copies.set_flag(0)
        record_flags()

    call()
    with pytest.raises(KeyError):
        call(gives_up=True)
    call()
    assert flag_values == [[0, 0, 0], [1, 1, 0], [0, 0, 0], [0, 0, 0], [1, 1, 0]], flag_values


@pytest.mark.parametrize("late", [True, False])
@interpreted(2)
def test_matmul_waits_for_each_chunk_flag(late: bool) -> None:
    """Produce chunks one by one, last chunk first.

    Negative control: flags that are set in advance.
    """
    from tpkernels.kernels import all_gather_matmul as kernel
    from tpkernels.kernels.configs import INTERPRETER

    workspace = make_workspace(buffer_bytes=1 << 14)
    rank, sizes, k = workspace.rank, (90, 50), 8
    shards = torch.arange(140.0 * k).remainder(11).view(-1, k).split(sizes)
    gathered, w, out = torch.full((140, k), torch.nan), torch.ones(k, 33), torch.empty(140, 33)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "_CHUNK_BYTES", 1)  # a row of tiles
        arriving = kernel.prepare_with_copy_engines(INTERPRETER, w, gathered, F32, sizes)
    peer, begin = 1 - rank, (90, 0)[rank]
    gathered.split(sizes)[rank].copy_(shards[rank])
    chunk_begins = range(0, sizes[peer], arriving.chunk_rows)

    def produce_chunks(copies: cuda.CopyCall) -> None:
        for chunk in reversed(range(len(chunk_begins))):
            rows = slice(chunk_begins[chunk], chunk_begins[chunk] + arriving.chunk_rows)
            if late:
                time.sleep(0.05)
            chunk_data = shards[peer][rows]
            gathered[begin + chunk_begins[chunk] :][: len(chunk_data)] = chunk_data
            copies.set_flag(peer * arriving.chunks + chunk)

    with cuda.CopyCall(workspace, 9, [out], flags=2 * arriving.chunks) as copies:
        thread = threading.Thread(target=produce_chunks, args=[copies])
        if late:
            thread.start()
        else:
            workspace.state[FLAGS_OFFSET : FLAGS_OFFSET + 2 * arriving.chunks] = 1
        arriving.prepared.bind(workspace, 9)(gathered, w, None, out)
        correct = torch.equal(out, torch.cat(shards).sum(1, True).expand(-1, 33))
        if not late:
            thread.start()
        thread.join()
    assert correct == late and workspace.failure() is None


CHUNKS = 5
# Per case: captured, driver settings, expected (kernels, stream writes).
SIGNAL_CASES = {
    "eager": (False, {}, (4, CHUNKS)),
    "captured": (True, {}, (4 + CHUNKS, 0)),
    "unable": (False, {"streams_write": 0}, (4 + CHUNKS, 0)),
    "refused": (False, {"fails": "cuStreamWriteValue64", "code": 801}, (4 + CHUNKS, 0)),
}


@pytest.mark.parametrize("case", sweep(SIGNAL_CASES, 1, 1))
@interpreted(2)
def test_chunk_flags_need_no_kernel(case: str) -> None:
    """Count the kernels and stream writes of a warm gather.

    Kernels of csrc/cuda are begin, publish, a wait per peer, and end, for any number of results. If
    supported, the stream writes one flag per chunk. Otherwise kernels do.
    """
    captured, lacks, expected = SIGNAL_CASES[case]
    with configure_driver(**lacks), cuda_code_path() as patch:
        use_copy_engines(patch)
        x, ws = torch.ones(150, 8), [torch.ones(8, 4)] * 3
        group = faults.new_group()
        call = functools.partial(tpkernels.all_gather_matmul, x, ws, group, algorithm="fused")
        call()
        dist.barrier()
        patch.setattr(streams, "is_captured", lambda _: captured)
        launches, writes = get_counter("launches"), get_counter("writes")
        assert all(bool((out == 8).all()) for out in call())
        counts = get_counter("launches") - launches, get_counter("writes") - writes
        assert counts == expected, counts
        # The launches are bound, so the next call does not prepare them.
        patch.setattr("tpkernels.kernels.all_gather_matmul.prepare_with_copy_engines", None)
        assert all(bool((out == 8).all()) for out in call())


@on_ranks(2)
def test_refusals() -> None:
    call = functools.partial(cuda.CopyCall, make_workspace(), 3)
    with call(flags=2) as copies:
        with pytest.raises(NotImplementedError, match="needs 65 results and 0 flags, but"):
            call([torch.empty(1)] * 65)
        with pytest.raises(
            NotImplementedError, match=f"needs 0 results and {MAX_FLAGS + 1} flags, but"
        ):
            call(flags=MAX_FLAGS + 1)
        for flag in (2, -1):
            with pytest.raises(ValueError, match=f"^flag index is {flag}; it must be 0 to 1$"):
                copies.set_flag(flag)


@interpreted(1)
def test_chunk_counts_fit_the_flags() -> None:
    """Plan chunks of large shards.

    Chunks are larger for large shards, and if kernels set the flags. The remaining kernels of such
    a call are begin, publish, end, and a wait per peer.
    """
    from tpkernels.kernels import all_gather_matmul as kernel
    from tpkernels.kernels.configs import INTERPRETER

    x, w = torch.empty(16384, 8192, dtype=torch.bfloat16), torch.empty(8192, 1)  # shards of 32 MiB
    cases = [((2048,) * 8, x, w, by_kernels) for by_kernels in (False, True)]
    x, w = torch.empty(8, 1 << 18), torch.empty(1 << 18, 1)  # more rows than flags
    cases += [((1 << 22, *[5] * (world - 1)), x, w, False) for world in (2, 3, 72)]
    chunk_counts = []
    for sizes, x, w, by_kernels in cases:
        _, rows, chunks = kernel.prepare_with_copy_engines(
            INTERPRETER, w, x, x.dtype, sizes, by_kernels
        )
        assert rows * chunks >= max(sizes)
        chunk_counts.append((chunks, len(sizes) * chunks))
    (by_streams, _), (by_kernels, _), *large = chunk_counts
    assert (by_streams, by_kernels, 3 + 7 * (1 + by_kernels)) == (8, 4, 38), chunk_counts
    assert all(MAX_FLAGS // 2 < flags <= MAX_FLAGS for _, flags in large), chunk_counts


@on_ranks(2)
def test_replays_clear_and_set_flags() -> None:
    """Replay a captured call four times.

    Check the fetched data, and the flags after begin and before end. The capture launches as many
    kernels as the eager call: begin, publish, wait, end.
    """
    workspace, driver = make_workspace(), library()
    x, got = torch.empty(50, dtype=torch.int64), torch.empty(50, dtype=torch.int64)
    flags = workspace.state[FLAGS_OFFSET:][:3]
    flags_at_begin, flags_at_end = torch.empty(2, 3, dtype=torch.int64).unbind()

    def call() -> None:
        with cuda.CopyCall(workspace, 5, flags=2) as copies:
            copy_flags = functools.partial(copies._kernels.copy, 0, src=flags.data_ptr(), nbytes=24)
            copy_flags(dst=flags_at_begin.data_ptr())
            copies.put(x, 0)
            copies.publish(1)
            copies.fetch(1 - workspace.rank, 1, got, 0)
            copies.set_flag(1)
            copies.set_flag(0)
            copy_flags(dst=flags_at_end.data_ptr())

    call()
    graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
    launches = get_counter("launches")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "is_captured", lambda _: True)
        driver.cuStreamBeginCapture_v2(None, 0)
        call()
        driver.cuStreamEndCapture(None, ctypes.byref(graph))
    assert get_counter("launches") - launches == 4 + 2
    driver.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, ctypes.c_uint64(0))
    for i in range(4):
        x.fill_(10 * i + workspace.rank)
        driver.cuGraphLaunch(executable, None)
        assert got.unique().tolist() == [10 * i + 1 - workspace.rank]
        assert (flags_at_begin.tolist(), flags_at_end.tolist()) == ([0, 0, 0], [1, 1, 0])
    driver.cuGraphExecDestroy(executable)
    driver.cuGraphDestroy(graph)
