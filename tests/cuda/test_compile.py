"""The CUDA kernels that the extension holds, for GPUs that need not be here: registers, vectors,
the order of memory; and how they are built."""

from __future__ import annotations

import functools
import re
import runpy
import subprocess
from pathlib import Path

import pytest

from tests.support import cuda_builds
from tests.support.paths import ROOT
from tests.support.tiers import sweep
from tpkernels import _C
from tpkernels.kernels import all_gather_matmul, sync

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
SINCE_90 = ("litmus_bulk",)
FENCED = ("two_shot_all_reduce", "two_shot_all_reduce_rms_norm")
SHARDS = ("one_shot_all_gather", "one_shot_reduce_scatter", "litmus_messages", "litmus_bulk")
SHARDS += ("routed_dispatch", "routed_combine")
LL_ROWS = ("ll_all_reduce_rms_norm", "ll_two_shot_all_reduce_rms_norm")
LL = ("ll_all_reduce", "ll_two_shot_all_reduce", *LL_ROWS)
LL += ("ll_all_gather", "ll_reduce_scatter", "litmus_words")
ROWS = ("two_shot_all_reduce_rms_norm", *LL_ROWS, "rms_norm_of_rows")
LOCAL = ("sum_of_partials", "rms_norm_of_rows")  # of one rank alone
RELEASE, ACQUIRE = r"st\.release\.sys\.global\.u64", r"ld\.acquire\.sys\.global\.u64"
BARRIER = r"bar\.(?:sync|red)|barrier\."


def embedded() -> bytes:
    """What the build compiled; skips where it had no nvcc."""
    if not _C.cuda.architectures():
        pytest.skip("this extension was built without nvcc")
    return _C.cuda.image()


@functools.cache
def ptx_of_kernels() -> dict[str, str]:
    return cuda_builds.kernels_of(cuda_builds.ptx_of(embedded()))


@functools.cache
def ptx_of_calls() -> dict[str, str]:
    """Without the records of failures."""
    pieces = ptx_of_kernels().items()
    return {name: re.sub(cuda_builds.RECORD, "record", text) for name, text in pieces}


def neighbours(lines: list[str], at: int, wanted: str, step: int) -> str:
    """The nearest line before (-1) or after (1) one that has something of what is ``wanted``."""
    beside = lines[at + 1 :] if step > 0 else reversed(lines[:at])
    return next(line for line in beside if re.search(wanted, line))


def entries() -> set[str]:
    """The kernels that the source has."""
    return set(
        re.findall(r"TPK_KERNEL\(\w+\)\s+(\w+)\(", dict(_C.cuda.sources())["cuda/kernels.cu"])
    )


def test_there_is_code_for_every_architecture_without_spills() -> None:
    """A kernel that waits beside a matmul has one warp. With 32 registers a thread it takes 1024 of
    the 65536 of a multiprocessor, which a block of 384 threads with 168 registers each leaves."""
    found = cuda_builds.usage(embedded())
    assert sorted(found) == sorted(ARCHITECTURES)
    for arch, kernels in found.items():
        missing = entries() - set(kernels)
        assert missing == (set(SINCE_90) if arch == "sm_80" else set()), arch
        for kernel, used in kernels.items():
            assert used.stack == 0 and used.local == 0, f"{kernel} on {arch}: {used}"
        for name in ("call_wait", "call_publish", "call_flag"):
            assert kernels[name].registers <= 32, f"{name} on {arch}: {kernels[name]}"
    assert ".target sm_100" in cuda_builds.ptx_of(embedded())
    assert _C.cuda.architectures().startswith("sm_80 sm_90 sm_100 compute_100, nvcc")


def test_the_table_of_launches_has_the_kernels_threads_and_arguments() -> None:
    """The host launches by csrc/cuda/kernels.h, and passes what it says."""
    if not (ROOT / "csrc").is_dir():
        pytest.skip("no sources here")
    table = re.sub(r"\s*\\\n\s*", " ", (ROOT / "csrc/cuda/kernels.h").read_text())
    rows = re.findall(r"each\((\w+), (\w+), ([\w, ]+)\)", table)
    kernel = r"TPK_KERNEL\((\w+)\)\s+(\w+)\(([^)]*)\)"
    source = re.findall(kernel, dict(_C.cuda.sources())["cuda/kernels.cu"])
    wanted = {
        (name, threads, ", ".join(re.findall(r"TPK_PARAM (\w+)", parameters)))
        for threads, name, parameters in source
    }
    assert len(rows) == len(entries()) and set(rows) == wanted


def test_the_kernels_that_wait_acquire_and_those_that_tell_release() -> None:
    kernels = ptx_of_calls()
    assert set(kernels) == entries()
    waits = entries() - {*LOCAL, *LL, "call_publish", "call_flag"}
    tells = entries() - {*LOCAL, *LL, "call_wait"}
    assert {name for name, ptx in kernels.items() if re.search(ACQUIRE, ptx)} == waits
    assert {name for name, ptx in kernels.items() if re.search(RELEASE, ptx)} == tells
    for name, ptx in kernels.items():
        assert not re.search(r"ld\.global\.nc|ldu\.|trap", ptx), name
        words = re.findall(r"(?:ld|st)\.(?:acquire|release)\.\w+", ptx)
        assert all(word.endswith(".sys") for word in words), name


def test_words_and_data_have_barriers_between_them() -> None:
    """Before each release there is a barrier, and between the two no store of data; after each
    acquire there is a barrier before the next load of data."""
    stores = rf"{BARRIER}|st\.global\.v4|st\.(?:global\.)?[ufb]\d+"
    loads = rf"{BARRIER}|ld\.global\.v4|ret;"
    for calls, word, kernels, data, expected, step in (
        (ptx_of_calls(), RELEASE, ("call_publish", "call_flag"), stores, BARRIER, -1),
        (
            ptx_of_kernels(),
            ACQUIRE,
            ("call_wait", "call_begin", "call_end"),
            loads,
            rf"{BARRIER}|ret;",
            1,
        ),
    ):
        for kernel in (*FENCED, *SHARDS, *kernels):
            lines = calls[kernel].splitlines()
            found = [at for at, line in enumerate(lines) if re.search(word, line)]
            for at in found:
                nearest = neighbours(lines, at, data, step)
                assert re.search(expected, nearest), "\n".join([kernel, *lines[at - 30 : at + 30]])
            assert found, kernel


def test_bulk_copies_of_a_litmus_test_are_complete_before_the_word() -> None:
    order = rf"fence\.proxy\.async|cp\.async\.bulk\.(?:global|commit|wait)|{RELEASE}"
    steps = [step.split(".")[-1] for step in re.findall(order, ptx_of_calls()["litmus_bulk"])]
    assert steps == ["u64", "async", "global", "commit", "wait", "u64"], steps


def test_the_host_is_told_of_a_failure_that_it_can_read() -> None:
    """It may copy the record while the kernel still runs, on another stream."""
    for name, ptx in ptx_of_kernels().items():
        records = len(re.findall(cuda_builds.RECORD, ptx))
        assert records == len(re.findall(r"atom\S*\.cas", ptx)), name
        assert (records > 0) == (name not in (*LOCAL, "call_publish", "call_flag")), name


def test_a_call_by_ll_has_no_fence() -> None:
    """Data go and come by strong accesses to two words of 8 bytes, never by others. What orders
    memory is the count of blocks that have ended and the record of a failure; in litmus tests also
    the counts of what a thread has seen, and of what was wrong."""
    ends = BARRIER.replace("|barrier", r"|barrier(?!\.cluster)")
    for kernel in LL:
        ptx = ptx_of_calls()[kernel]
        assert re.search(r"st\.relaxed\.sys\.global\.v2\.u64", ptx), kernel
        assert re.search(r"ld\.relaxed\.sys\.global\.v2\.u64", ptx), kernel
        others = r"fence|membar|(?<!bar\.)\bred\.|\.(?:acquire|release)\."
        assert not re.search(others, ptx), kernel
        adds = len(re.findall(r"atom\.acq_rel\.gpu\.global\.add", ptx))
        assert adds == 1 or kernel.startswith("litmus"), kernel
        rows = 3 if kernel in ROWS else 0  # one of the block for each of the dtypes
        assert len(re.findall(ends, ptx)) == 2 + rows, kernel  # two at the end


def test_a_clusters_blocks_store_before_their_barrier_and_read_after_it() -> None:
    """On sm_80 there are no clusters: a row has one block."""
    shared = r"barrier\.cluster\.(arrive|wait)|(st)\.shared::cluster|(ld)\.shared\.(?:f32|v4)"
    for kernel in ROWS:
        lines = ptx_of_kernels()[kernel].splitlines()
        found = [match[0] for line in lines if (match := re.search(shared, line))]
        stores = [at for at, what in enumerate(found) if what.startswith("st.")]
        assert len(stores) == 3 and found[0] == "barrier.cluster.arrive", kernel  # the dtypes
        for at in stores:
            assert found[at + 1 : at + 3] == ["barrier.cluster.arrive", "barrier.cluster.wait"]
            assert found[at + 3].startswith("ld.shared"), (kernel, found)


def test_no_data_is_touched_before_the_previous_kernel_has_ended() -> None:
    """An early launch announces itself, and looks at the state of its group; no more."""
    data = r"(?:ld|st)\.global\.v4|\.v2\.u64|(?:ld|st)\.global\.[fbu](?:8|16|32)\b"
    for kernel in (*FENCED, *(name for name in LL if "all_reduce" in name)):
        before, after = ptx_of_kernels()[kernel].split("griddepcontrol.wait;")  # which comes once
        assert not re.search(data, before), (kernel, re.search(data, before))
        assert re.search(data, after), kernel
        assert re.search(r"st\.(?:relaxed|release)\.sys\.global\.u64", before), kernel


def test_the_epoch_is_read_past_the_first_cache() -> None:
    """An early launch may begin before a kernel boundary has emptied it."""
    last = int(sync.LAST_EPOCH.value)
    for name in entries() - set(LOCAL):
        ptx = ptx_of_kernels()[name]
        (epoch,) = set(re.findall(rf"setp\.eq\.s64 %p\d+, (%rd\d+), {last};", ptx))
        assert f"ld.relaxed.gpu.global.u64 {epoch}," in ptx, name


@pytest.mark.parametrize("arch", sweep(("sm_90", "sm_80", "sm_100")))
def test_the_machine_code_has_vectors_and_fences(arch: str) -> None:
    kernels = cuda_builds.sass_of(embedded(), arch)
    quiet = ("call_wait", *LOCAL, *LL)
    for name in entries() & set(kernels):
        code, moves = kernels[name], name in (*FENCED, *SHARDS, *LL, *LOCAL)
        assert ("LDG.E.128.STRONG.SYS" in code) == (name in LL), name
        assert "STG.E.128.STRONG.SYS" in code or name not in LL, name
        stores = moves and name != "litmus_bulk"  # whose data TMA stores
        assert ("LDG.E.128" in code, "STG.E.128" in code) == (moves, stores), name
        assert ("UBLKCP" in code) == (name == "litmus_bulk"), name
        assert ".CONSTANT" not in code and not re.search(r"\b(LDL|STL)\b", code), name
        assert ("UCGABAR_WAIT" in code) == (name in ROWS and arch != "sm_80"), name
        early = name in (*FENCED, *SHARDS, *LL) and arch != "sm_80"
        assert ("ACQBULK" in code) == early, name
        fences, records = (
            len(re.findall(what, code)) for what in (r"MEMBAR\.\w+\.SYS", r"ATOM\S*\.CAS")
        )
        assert fences >= records and (fences > records) == (name not in quiet), name


def setup_values() -> dict[str, object]:
    """What setup.py defines, without a build."""
    if not (ROOT / "setup.py").is_file():
        pytest.skip("no setup.py here")
    return runpy.run_path(str(ROOT / "setup.py"), run_name="setup")


def test_a_warning_ends_the_build(tmp_path: Path) -> None:
    values = setup_values()
    nvcc = values["find_nvcc"]()  # type: ignore[operator]
    if nvcc is None:
        pytest.skip("no nvcc")
    source = tmp_path / "unused.cu"
    source.write_text('extern "C" __global__ void kernel() { int unused; }\n')
    command = [nvcc, *values["NVCC_FLAGS"], "-fatbin", str(source), "-o", str(tmp_path / "out")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode != 0 and "unused" in ended.stderr, ended.stderr


def test_both_protocols_have_the_same_places() -> None:
    """csrc/cuda/sync.cuh and kernels/sync.py share workspaces."""
    sources = dict(_C.cuda.sources())
    text = sources["cuda/arguments.h"] + sources["cuda/sync.cuh"]
    constants = re.findall(r"\bk(\w+) = (0x[0-9a-f]+|\d+)", text)
    found = {name: int(value, 0) for name, value in constants}
    named = {
        "LastEpoch": sync.LAST_EPOCH,
        "StateEpoch": sync.STATE_EPOCH,
        "StateEnded": sync.STATE_ENDED,
        "StateStatus": sync.STATE_STATUS,
        "StatePeer": sync.STATE_PEER,
        "StateExpected": sync.STATE_EXPECTED,
        "StateSeen": sync.STATE_SEEN,
        "StateLost": sync.STATE_LOST,
        "StateLooked": sync.STATE_LOOKED,
        "StateFlags": all_gather_matmul._FLAGS_AT,
        "LookNs": sync.LOOK_NS,
        "Abort": sync.ABORT,
        "ControlFailed": sync.FAILED,
        "FailedMismatch": sync.FAILED_MISMATCH,
        "FailedTimeout": sync.FAILED_TIMEOUT,
        "FailedAbort": sync.FAILED_ABORT,
        "Entered": sync.ENTERED,
        "Tiles": sync.TILES,
    }
    assert {name: found[name] for name in named} == {
        name: constant.value for name, constant in named.items()
    }
