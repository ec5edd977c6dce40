"""Compile the Triton kernels for GPUs that this machine need not have, and inspect the result."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from typing import Any

import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend

from tests.support.cuda_builds import dump, usage
from tpkernels.kernels import (
    all_gather_matmul,
    matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from tpkernels.kernels.configs import MatmulConfig, Tiling
from tpkernels.kernels.sync import SCALARS, Workspace

NAMES = {tl.float32: "fp32", tl.float16: "fp16", tl.bfloat16: "bf16"}
WORLD = 4

KERNELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "matmul": (matmul.matmul_kernel, {"prologue": None}),
    "shard": (all_gather_matmul.shard_kernel, {"BLOCK": all_gather_matmul._COPY_BLOCK}),
    "all_gather_matmul": (all_gather_matmul.all_gather_matmul_kernel, {"MULTI_LAUNCH": False}),
    "multiply_arriving": (
        all_gather_matmul.all_gather_matmul_kernel,
        {"MULTI_LAUNCH": True, "copy_plan": all_gather_matmul.NO_COPIES},
    ),
    "matmul_reduce_scatter": (matmul_reduce_scatter.matmul_reduce_scatter_kernel, {}),
    "one_shot": (matmul_all_reduce.matmul_all_reduce_kernel, {"ONE_SHOT": True}),
    "two_shot": (matmul_all_reduce.matmul_all_reduce_kernel, {"ONE_SHOT": False}),
}
COMMUNICATING = sorted(set(KERNELS) - {"matmul", "shard"})
# Kernels that are never warp-specialized: no matmul, or tiles that wait for their rows.
UNSPECIALIZED = ("shard", "all_gather_matmul", "multiply_arriving")


@triton.jit
def do_nothing(context, owner, tile_m):  # type: ignore[no-untyped-def]
    pass


_DATA_POINTERS = {"a", "b", "bias", "residual", "out", "gathered", "x"}
_INT64_POINTERS = {"regions", "state", "control"}
_ALIGNED = (
    _DATA_POINTERS
    | _INT64_POINTERS
    | {"starts", "slot_bytes", "results_offset", "buffers_offset", "buffer_stride"}
)
_TUPLES: dict[str, Any] = {"segments": matmul.RowSegments, "workspace": Workspace}


@dataclass(frozen=True)
class Build:
    """A compiled kernel: its PTX, and the resources that cuobjdump reports for the cubin."""

    ptx: str = field(repr=False)
    cubin: bytes = field(repr=False)
    registers: int
    stack: int
    local: int
    shared: int
    threads: int
    scratch: int  # bytes of device memory per program
    ttgir: str = field(repr=False)

    def count(self, pattern: str) -> int:
        """Count the occurrences of an instruction in the PTX."""
        return len(re.findall(pattern, self.ptx))

    def depth(self, instruction: str) -> int:
        """Return the loop depth of the last such instruction in the PTX.

        The loop in which specialized warps wait for work does not count.
        """
        *preceding, _ = re.split(instruction, self.ptx)
        return int(re.findall(r"Depth=(\d)", "".join(preceding))[-1]) - self.specialized

    @property
    def specialized(self) -> bool:
        """Return True if the warps are specialized, with separate register counts."""
        return self.count("setmaxnreg") > 0

    @functools.cached_property
    def sass(self) -> str:
        """Return the machine code. ptxas reorders and removes instructions."""
        return dump(self.cubin, "-sass")


@functools.cache
def build(name: str, dtype: Any, arch: int, config: MatmulConfig, **options: Any) -> Build:
    """Compile one kernel, once per process. See `_source` for the options."""
    source, launch = _source(name, dtype, config, **options)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch)
    ptx, cubin = compiled.asm["ptx"], compiled.asm["cubin"]
    threads = int(re.findall(r"\.reqntid (\d+)", ptx)[0])
    scratch = compiled.metadata.global_scratch_size
    (kernel_usage,) = (kernel for kernels in usage(cubin).values() for kernel in kernels.values())
    used_memory = (
        kernel_usage.registers,
        kernel_usage.stack,
        kernel_usage.local,
        compiled.metadata.shared,
    )
    return Build(ptx, cubin, *used_memory, threads, scratch, compiled.asm["ttgir"])


def lower(name: str, dtype: Any, arch: int, config: MatmulConfig, **options: Any) -> Any:
    """Run the front end of Triton and return the module in Triton IR.

    This costs a fifth of the time of `build`. See `_source` for the options.
    """
    source, launch = _source(name, dtype, config, **options)
    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    parsed = backend.parse_options(launch)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(parsed)
    return source.make_ir(target, parsed, functions, backend.get_module_map(), context)


def _source(
    name: str,
    dtype: Any,
    config: MatmulConfig,
    *,
    b_major: str = "k",
    delays: bool = False,
    divisible: bool = True,
    even: bool = True,
    **overrides: Any,
) -> tuple[Any, dict[str, int]]:
    """Return a kernel as Triton compiles it, and its launch options.

    Addresses are multiples of 16.

    Args:
        divisible: sizes are multiples of 16.
        even: all segments have equally many rows.
        overrides: compile-time arguments. None for omitted tensors.
    """
    kernel, kernel_constants = KERNELS[name]
    wire = overrides.get("WIRE", dtype)
    bits = dtype.primitive_bitwidth, wire.primitive_bitwidth
    store_tma = config.stores_by_tma(*bits, 16 if divisible else 1)
    waits = name in UNSPECIALIZED or overrides.get("prologue") is not None
    specialized = not waits and config.specializes(config.tma)
    constants: dict[str, Any] = {
        "WIRE": dtype,
        "world": WORLD,
        "chaos": 2000 if delays else 0,
        "stride_bk" if b_major == "k" else "stride_bn": 1,
        "copy_plan": all_gather_matmul.plan_copies(
            config, dtype.primitive_bitwidth // 8, 1 << 30, WORLD
        ),
        "tiling": Tiling(
            *(config.block_m, config.block_n, config.block_k, config.group_m, config.sum_m),
            *(config.tma, b_major if config.tma else "no", store_tma, specialized),
        ),
        **kernel_constants,
    } | overrides
    constants["num_segments"] = 1 if constants.get("ONE_SHOT") else constants["world"]
    tuple_constants = constants | ({"starts": None} if even else {})
    tiles = _descriptors(config, NAMES[dtype], b_major)
    constexpr_values: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}

    def get_type(arg: str, *path: int) -> Any:
        """Return the type of an argument or field, as a launch determines it."""
        if arg in _TUPLES:
            fields = enumerate(_TUPLES[arg]._fields)
            return _TUPLES[arg](*(get_type(field, *path, index) for index, field in fields))
        if arg in tiles:
            return tiles[arg]
        constexprs = tuple_constants if len(path) > 1 else constants
        if arg in constexprs:
            constexpr_values[path] = constexprs[arg]
            return "constexpr"
        if arg not in SCALARS and (divisible or arg in _ALIGNED):
            attributes[path] = [["tt.divisibility", 16]]
        if arg in _DATA_POINTERS:
            return f"*{NAMES[dtype]}"
        if arg in _INT64_POINTERS:
            return "*i64"
        if arg == "starts":
            return "*i32"
        return "i64" if arg == "timeout_ns" else "i32"

    signature = {arg: get_type(arg, index) for index, arg in enumerate(kernel.arg_names)}
    source = triton.compiler.ASTSource(kernel, signature, constexpr_values, attributes)
    return source, config.launch(specialized)


def _descriptors(config: MatmulConfig, dtype: str, b_major: str) -> dict[str, str]:
    """Return the types of the operands that TMA loads."""
    m, n, k = config.block_m, config.block_n, config.block_k
    b = (n, k) if b_major == "k" else (k, n)
    return (
        {"a": f"tensordesc<{dtype}[{m}, {k}]>", "b": f"tensordesc<{dtype}[{b[0]}, {b[1]}]>"}
        if config.tma
        else {}
    )
