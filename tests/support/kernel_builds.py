"""Compiles the Triton kernels for GPUs that this machine need not have, and reads the result."""

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
    "matmul": (matmul.matmul_kernel, {"before": None}),
    "shard": (all_gather_matmul.shard_kernel, {"BLOCK": all_gather_matmul._COPY_BLOCK}),
    "all_gather_matmul": (all_gather_matmul.all_gather_matmul_kernel, {"PART": False}),
    "multiply_arriving": (
        all_gather_matmul.all_gather_matmul_kernel,
        {"PART": True, "fetching": all_gather_matmul.NO_FETCHING},
    ),
    "matmul_reduce_scatter": (matmul_reduce_scatter.matmul_reduce_scatter_kernel, {}),
    "one_shot": (matmul_all_reduce.matmul_all_reduce_kernel, {"ONE_SHOT": True}),
    "two_shot": (matmul_all_reduce.matmul_all_reduce_kernel, {"ONE_SHOT": False}),
}
COMMUNICATING = sorted(set(KERNELS) - {"matmul", "shard"})
# No product, or tiles that wait for their rows.
UNSPECIALIZED = ("shard", "all_gather_matmul", "multiply_arriving")


@triton.jit
def do_nothing(context, owner, tile_m):  # type: ignore[no-untyped-def]
    pass


_DATA = {"a", "b", "bias", "residual", "out", "gathered", "x"}
_WORDS = {"regions", "state", "control"}
_ALIGNED = _DATA | _WORDS | {"starts", "slot_bytes", "results_at", "buffers_at", "buffer_stride"}
_TUPLES: dict[str, Any] = {"segments": matmul.RowSegments, "workspace": Workspace}


@dataclass(frozen=True)
class Build:
    """A compiled kernel: its PTX, and what cuobjdump reports about the cubin."""

    ptx: str = field(repr=False)
    cubin: bytes = field(repr=False)
    registers: int
    stack: int
    local: int
    shared: int
    threads: int
    scratch: int  # bytes of device memory, of a program
    ttgir: str = field(repr=False)

    def count(self, pattern: str) -> int:
        """How often an instruction occurs in the PTX."""
        return len(re.findall(pattern, self.ptx))

    def depth(self, instruction: str) -> int:
        """How many loops the last such instruction of the PTX is in, without the one in which warps
        that are specialised wait for work."""
        *before, _ = re.split(instruction, self.ptx)
        return int(re.findall(r"Depth=(\d)", "".join(before))[-1]) - self.specialized

    @property
    def specialized(self) -> bool:
        """Whether registers are divided among warps with parts of their own."""
        return self.count("setmaxnreg") > 0

    @functools.cached_property
    def sass(self) -> str:
        """What the GPU runs: ptxas orders and removes instructions."""
        return dump(self.cubin, "-sass")


@functools.cache
def build(name: str, dtype: Any, arch: int, config: MatmulConfig, **options: Any) -> Build:
    """Compiles one kernel, once in a process. The options are those of `_source`."""
    source, launch = _source(name, dtype, config, **options)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch)
    ptx, cubin = compiled.asm["ptx"], compiled.asm["cubin"]
    threads = int(re.findall(r"\.reqntid (\d+)", ptx)[0])
    scratch = compiled.metadata.global_scratch_size
    (used_by,) = (kernel for kernels in usage(cubin).values() for kernel in kernels.values())
    used_memory = used_by.registers, used_by.stack, used_by.local, compiled.metadata.shared
    return Build(ptx, cubin, *used_memory, threads, scratch, compiled.asm["ttgir"])


def lower(name: str, dtype: Any, arch: int, config: MatmulConfig, **options: Any) -> Any:
    """Runs Triton's front end, in a fifth of the time of `build`, and returns the module in Triton
    IR. The options are those of `_source`."""
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
    **changed: Any,
) -> tuple[Any, dict[str, int]]:
    """Returns a kernel as Triton compiles it, and its launch options. Addresses are multiples of
    16, and so are sizes if ``divisible``. ``even``: all segments have as many rows. ``changed``:
    arguments that are known at compile time, None for tensors that are not given."""
    kernel, own = KERNELS[name]
    wire = changed.get("WIRE", dtype)
    bits = dtype.primitive_bitwidth, wire.primitive_bitwidth
    store_tma = config.stores_by_tma(*bits, 16 if divisible else 1)
    waits = name in UNSPECIALIZED or changed.get("before") is not None
    specialized = not waits and config.specializes(config.tma)
    constants: dict[str, Any] = {
        "WIRE": dtype,
        "world": WORLD,
        "chaos": 2000 if delays else 0,
        "stride_bk" if b_major == "k" else "stride_bn": 1,
        "fetching": all_gather_matmul.fetching_of(
            config, dtype.primitive_bitwidth // 8, 1 << 30, WORLD
        ),
        "tiling": Tiling(
            *(config.block_m, config.block_n, config.block_k, config.group_m, config.sum_m),
            *(config.tma, b_major if config.tma else "no", store_tma, specialized),
        ),
        **own,
    } | changed
    constants["number"] = 1 if constants.get("ONE_SHOT") else constants["world"]
    in_tuples = constants | ({"starts": None} if even else {})
    tiles = _descriptors(config, NAMES[dtype], b_major)
    used: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}

    def type_of(arg: str, *path: int) -> Any:
        """The type of an argument or a field, as a launch would find it."""
        if arg in _TUPLES:
            fields = enumerate(_TUPLES[arg]._fields)
            return _TUPLES[arg](*(type_of(field, *path, at) for at, field in fields))
        if arg in tiles:
            return tiles[arg]
        known = in_tuples if len(path) > 1 else constants
        if arg in known:
            used[path] = known[arg]
            return "constexpr"
        if arg not in SCALARS and (divisible or arg in _ALIGNED):
            attributes[path] = [["tt.divisibility", 16]]
        if arg in _DATA:
            return f"*{NAMES[dtype]}"
        if arg in _WORDS:
            return "*i64"
        if arg == "starts":
            return "*i32"
        return "i64" if arg == "timeout_ns" else "i32"

    signature = {arg: type_of(arg, at) for at, arg in enumerate(kernel.arg_names)}
    source = triton.compiler.ASTSource(kernel, signature, used, attributes)
    return source, config.launch(specialized)


def _descriptors(config: MatmulConfig, dtype: str, b_major: str) -> dict[str, str]:
    """The types of the operands that TMA loads."""
    m, n, k = config.block_m, config.block_n, config.block_k
    b = (n, k) if b_major == "k" else (k, n)
    return (
        {"a": f"tensordesc<{dtype}[{m}, {k}]>", "b": f"tensordesc<{dtype}[{b[0]}, {b[1]}]>"}
        if config.tma
        else {}
    )
