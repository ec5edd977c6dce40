"""The CUDA kernels in the extension, for GPUs that this machine need not have.

Covers registers, vector instructions, memory ordering, and the build.
"""

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
LOCAL = ("sum_of_partials", "rms_norm_of_rows")  # kernels without peers
RELEASE, ACQUIRE = r"st\.release\.sys\.global\.u64", r"ld\.acquire\.sys\.global\.u64"
BARRIER = r"bar\.(?:sync|red)|barrier\."


def embedded() -> bytes:
    """Return the compiled kernels, or skip if the build had no nvcc."""
    if not _C.cuda.architectures():
        pytest.skip("this extension was built without nvcc")
    return _C.cuda.image()


@functools.cache
def get_kernel_ptx() -> dict[str, str]:
    return cuda_builds.split_kernels(cuda_builds.get_ptx(embedded()))


@functools.cache
def get_ptx_without_records() -> dict[str, str]:
    """Return the PTX of each kernel without failure records."""
    kernels = get_kernel_ptx().items()
    return {name: re.sub(cuda_builds.FAILURE_RECORD, "record", ptx) for name, ptx in kernels}


def nearest_line(lines: list[str], index: int, pattern: str, step: int) -> str:
    """Return the nearest line before (-1) or after (1) ``index`` that matches the pattern."""
    candidates = lines[index + 1 :] if step > 0 else reversed(lines[:index])
    return next(line for line in candidates if re.search(pattern, line))


def kernel_names() -> set[str]:
    """Return the kernels in the source."""
    return set(
        re.findall(r"TPK_KERNEL\(\w+\)\s+(\w+)\(", dict(_C.cuda.sources())["cuda/kernels.cu"])
    )


def test_every_architecture_has_code_without_spills() -> None:
    """Check the resources of each kernel.

    A kernel that waits while a matmul runs has one warp. At 32 registers per thread it uses 1024 of
    the 65536 registers of a multiprocessor. A block of 384 threads with 168 registers each leaves
    these free.
    """
    usages = cuda_builds.usage(embedded())
    assert sorted(usages) == sorted(ARCHITECTURES)
    for arch, kernels in usages.items():
        missing = kernel_names() - set(kernels)
        assert missing == (set(SINCE_90) if arch == "sm_80" else set()), arch
        for kernel, used in kernels.items():
            assert used.stack == 0 and used.local == 0, f"{kernel} on {arch}: {used}"
        for name in ("call_wait", "call_publish", "call_flag"):
            assert kernels[name].registers <= 32, f"{name} on {arch}: {kernels[name]}"
    assert ".target sm_100" in cuda_builds.get_ptx(embedded())
    assert _C.cuda.architectures().startswith("sm_80 sm_90 sm_100 compute_100, nvcc")


def test_the_launch_table_matches_the_kernels() -> None:
    """The host launches kernels with the threads and arguments in csrc/cuda/kernels.h."""
    if not (ROOT / "csrc").is_dir():
        pytest.skip("no sources here")
    table = re.sub(r"\s*\\\n\s*", " ", (ROOT / "csrc/cuda/kernels.h").read_text())
    rows = re.findall(r"each\((\w+), (\w+), ([\w, ]+)\)", table)
    kernel = r"TPK_KERNEL\((\w+)\)\s+(\w+)\(([^)]*)\)"
    source = re.findall(kernel, dict(_C.cuda.sources())["cuda/kernels.cu"])
    expected = {
        (name, threads, ", ".join(re.findall(r"TPK_PARAM (\w+)", parameters)))
        for threads, name, parameters in source
    }
    assert len(rows) == len(kernel_names()) and set(rows) == expected


def test_waits_acquire_and_signals_release() -> None:
    kernels = get_ptx_without_records()
    assert set(kernels) == kernel_names()
    waits = kernel_names() - {*LOCAL, *LL, "call_publish", "call_flag"}
    signals = kernel_names() - {*LOCAL, *LL, "call_wait"}
    assert {name for name, ptx in kernels.items() if re.search(ACQUIRE, ptx)} == waits
    assert {name for name, ptx in kernels.items() if re.search(RELEASE, ptx)} == signals
    for name, ptx in kernels.items():
        assert not re.search(r"ld\.global\.nc|ldu\.|trap", ptx), name
        instructions = re.findall(r"(?:ld|st)\.(?:acquire|release)\.\w+", ptx)
        assert all(instruction.endswith(".sys") for instruction in instructions), name


def test_barriers_separate_signals_and_data() -> None:
    """Inspect the lines around signals.

    A barrier precedes each release, without a data store between them. A barrier follows each
    acquire before the next data load.
    """
    stores = rf"{BARRIER}|st\.global\.v4|st\.(?:global\.)?[ufb]\d+"
    loads = rf"{BARRIER}|ld\.global\.v4|ret;"
    for calls, signal, kernels, data, expected, step in (
        (get_ptx_without_records(), RELEASE, ("call_publish", "call_flag"), stores, BARRIER, -1),
        (
            get_kernel_ptx(),
            ACQUIRE,
            ("call_wait", "call_begin", "call_end"),
            loads,
            rf"{BARRIER}|ret;",
            1,
        ),
    ):
        for kernel in (*FENCED, *SHARDS, *kernels):
            lines = calls[kernel].splitlines()
            indices = [index for index, line in enumerate(lines) if re.search(signal, line)]
            for index in indices:
                nearest = nearest_line(lines, index, data, step)
                assert re.search(expected, nearest), "\n".join(
                    [kernel, *lines[index - 30 : index + 30]]
                )
            assert indices, kernel


def test_bulk_copies_of_a_litmus_test_complete_before_the_signal() -> None:
    order = rf"fence\.proxy\.async|cp\.async\.bulk\.(?:global|commit|wait)|{RELEASE}"
    steps = [
        step.split(".")[-1] for step in re.findall(order, get_ptx_without_records()["litmus_bulk"])
    ]
    assert steps == ["u64", "async", "global", "commit", "wait", "u64"], steps


def test_the_host_can_read_failure_records() -> None:
    """Each failure record is complete before its signal.

    The host may copy the record on a second stream while the kernel runs.
    """
    for name, ptx in get_kernel_ptx().items():
        records = len(re.findall(cuda_builds.FAILURE_RECORD, ptx))
        assert records == len(re.findall(r"atom\S*\.cas", ptx)), name
        assert (records > 0) == (name not in (*LOCAL, "call_publish", "call_flag")), name


def test_ll_has_no_fence() -> None:
    """Inspect memory accesses of LL kernels.

    All data accesses are strong accesses to two 8-byte words. Memory is ordered only by the count
    of completed blocks and by the failure record, and in litmus tests also by the counts of
    observed lines and of errors.
    """
    ends = BARRIER.replace("|barrier", r"|barrier(?!\.cluster)")
    for kernel in LL:
        ptx = get_ptx_without_records()[kernel]
        assert re.search(r"st\.relaxed\.sys\.global\.v2\.u64", ptx), kernel
        assert re.search(r"ld\.relaxed\.sys\.global\.v2\.u64", ptx), kernel
        forbidden = r"fence|membar|(?<!bar\.)\bred\.|\.(?:acquire|release)\."
        assert not re.search(forbidden, ptx), kernel
        adds = len(re.findall(r"atom\.acq_rel\.gpu\.global\.add", ptx))
        assert adds == 1 or kernel.startswith("litmus"), kernel
        rows = 3 if kernel in ROWS else 0  # one block barrier per dtype
        assert len(re.findall(ends, ptx)) == 2 + rows, kernel  # 2 at the end


def test_cluster_barriers_separate_stores_and_loads() -> None:
    """Inspect the order of instructions on cluster memory.

    A cluster barrier separates stores to the cluster from the loads after them. sm_80 has no
    clusters: a row has one block.
    """
    shared = r"barrier\.cluster\.(arrive|wait)|(st)\.shared::cluster|(ld)\.shared\.(?:f32|v4)"
    for kernel in ROWS:
        lines = get_kernel_ptx()[kernel].splitlines()
        instructions = [match[0] for line in lines if (match := re.search(shared, line))]
        stores = [
            index for index, instruction in enumerate(instructions) if instruction.startswith("st.")
        ]
        # One store per dtype.
        assert len(stores) == 3 and instructions[0] == "barrier.cluster.arrive", kernel
        for index in stores:
            assert instructions[index + 1 : index + 3] == [
                "barrier.cluster.arrive",
                "barrier.cluster.wait",
            ]
            assert instructions[index + 3].startswith("ld.shared"), (kernel, instructions)


def test_no_data_is_touched_before_the_previous_kernel_has_ended() -> None:
    """Inspect the code before the grid dependency wait.

    Before that wait, an early launch only sends ENTERED and reads the group state.
    """
    data = r"(?:ld|st)\.global\.v4|\.v2\.u64|(?:ld|st)\.global\.[fbu](?:8|16|32)\b"
    for kernel in (*FENCED, *(name for name in LL if "all_reduce" in name)):
        # The instruction occurs exactly once.
        before, after = get_kernel_ptx()[kernel].split("griddepcontrol.wait;")
        assert not re.search(data, before), (kernel, re.search(data, before))
        assert re.search(data, after), kernel
        assert re.search(r"st\.(?:relaxed|release)\.sys\.global\.u64", before), kernel


def test_the_epoch_load_bypasses_l1() -> None:
    """An early launch may start before a kernel boundary invalidates the L1 cache."""
    last = int(sync.LAST_EPOCH.value)
    for name in kernel_names() - set(LOCAL):
        ptx = get_kernel_ptx()[name]
        (epoch,) = set(re.findall(rf"setp\.eq\.s64 %p\d+, (%rd\d+), {last};", ptx))
        assert f"ld.relaxed.gpu.global.u64 {epoch}," in ptx, name


@pytest.mark.parametrize("arch", sweep(("sm_90", "sm_80", "sm_100")))
def test_the_machine_code_has_vectors_and_fences(arch: str) -> None:
    kernels = cuda_builds.get_sass(embedded(), arch)
    quiet = ("call_wait", *LOCAL, *LL)
    for name in kernel_names() & set(kernels):
        code, moves = kernels[name], name in (*FENCED, *SHARDS, *LL, *LOCAL)
        assert ("LDG.E.128.STRONG.SYS" in code) == (name in LL), name
        assert "STG.E.128.STRONG.SYS" in code or name not in LL, name
        stores = moves and name != "litmus_bulk"  # TMA stores its data
        assert ("LDG.E.128" in code, "STG.E.128" in code) == (moves, stores), name
        assert ("UBLKCP" in code) == (name == "litmus_bulk"), name
        assert ".CONSTANT" not in code and not re.search(r"\b(LDL|STL)\b", code), name
        assert ("UCGABAR_WAIT" in code) == (name in ROWS and arch != "sm_80"), name
        early = name in (*FENCED, *SHARDS, *LL) and arch != "sm_80"
        assert ("ACQBULK" in code) == early, name
        fences, records = (
            len(re.findall(pattern, code)) for pattern in (r"MEMBAR\.\w+\.SYS", r"ATOM\S*\.CAS")
        )
        assert fences >= records and (fences > records) == (name not in quiet), name


def setup_values() -> dict[str, object]:
    """Return the definitions in setup.py without a build."""
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
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert completed.returncode != 0 and "unused" in completed.stderr, completed.stderr


def test_both_protocols_have_equal_offsets() -> None:
    """csrc/cuda/sync.cuh and kernels/sync.py share workspaces."""
    sources = dict(_C.cuda.sources())
    source = sources["cuda/arguments.h"] + sources["cuda/sync.cuh"]
    constants = re.findall(r"\bk(\w+) = (0x[0-9a-f]+|\d+)", source)
    values = {name: int(value, 0) for name, value in constants}
    expected = {
        "LastEpoch": sync.LAST_EPOCH,
        "StateEpoch": sync.STATE_EPOCH,
        "StateEnded": sync.STATE_ENDED,
        "StateStatus": sync.STATE_STATUS,
        "StatePeer": sync.STATE_PEER,
        "StateExpected": sync.STATE_EXPECTED,
        "StateSeen": sync.STATE_SEEN,
        "StateLost": sync.STATE_LOST,
        "StateLastCheck": sync.STATE_LAST_CHECK,
        "StateFlags": all_gather_matmul._FLAGS_OFFSET,
        "CheckIntervalNs": sync.CHECK_INTERVAL_NS,
        "Abort": sync.ABORT,
        "ControlFailed": sync.FAILED,
        "FailedMismatch": sync.FAILED_MISMATCH,
        "FailedTimeout": sync.FAILED_TIMEOUT,
        "FailedAbort": sync.FAILED_ABORT,
        "Entered": sync.ENTERED,
        "Tiles": sync.TILES,
    }
    assert {name: values[name] for name in expected} == {
        name: constant.value for name, constant in expected.items()
    }
