"""All private names of torch that this package uses. To support a new torch, adapt this module.

Each entry states its purpose and the public replacement. "No public API" was checked for torch 2.11
and 2.13. `tests/test_torch_private.py` fails if a different module uses a private name.

Not listed: private methods that subclasses override, such as ``nn.Module._apply``,
``_save_to_state_dict`` and ``_load_from_state_dict``. The subclasses must use these names.
"""

# ruff: noqa: F401

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import _guards, _ops, _prims_common, _subclasses, fx, nn
from torch._C import _distributed_c10d
from torch.autograd import forward_ad, profiler
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceScatterOptions
from torch.utils import _pytree

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Module = TypeVar("_Module", bound=nn.Module)

# Names that the extension imports (csrc/calls). They give: whether a tensor may have a tangent,
# whether a profiler runs, the process groups that torch has not destroyed, the process group of a
# name, and whether a `torch.func` transform or a function mode is active. No public API.
EXTENSION_NAMES = (
    ("torch.autograd.forward_ad", "_current_level"),
    ("torch.autograd.profiler", "_is_profiler_enabled"),
    ("torch.distributed.distributed_c10d", "_pg_map"),
    ("torch.distributed.distributed_c10d", "_resolve_process_group"),
    ("torch._C", "_are_functorch_transforms_active"),
    ("torch._C", "_is_torch_function_mode_enabled"),
)

# Modules that are slow to import. `__getattr__` imports them at the first access.
_LAZY = {
    # The set type for arguments of `control_dependencies`. No public API.
    "ordered_set": "torch.utils._ordered_set",
    # Computes the local shard of a tensor from its placements. No public API;
    # `DTensor.__create_chunk_list__` imports `torch.distributed.checkpoint` (0.5 s).
    "tensor_utils": "torch.distributed.tensor._utils",
    # Adds a dependency between two nodes, so that inductor keeps their order. No public API.
    "control_dependencies": "torch._inductor.fx_passes.control_dependencies",
    # The base class of passes, and, except in torch 2.11, the configured passes. No public API.
    "custom_graph_pass": "torch._inductor.custom_graph_pass",
    # Creates a DTensor. Public: `DTensor.from_local`, which is slower.
    "dtensor_spec": "torch.distributed.tensor._dtensor_spec",
    # Sets a pass for a block of code. Public: `torch.compile(options=...)`, for one model.
    "inductor_config": "torch._inductor.config",
    # Finds nodes that mutate an argument, and sorts nodes topologically. No public API.
    "pattern_matcher": "torch._inductor.pattern_matcher",
    # Memory that the GPUs of several ranks address. No public API.
    "symmetric_memory": "torch.distributed._symmetric_memory",
    # The floor divisions among symbolic sizes. No public API.
    "sympy_functions": "torch.utils._sympy.functions",
}

if TYPE_CHECKING:
    from torch._inductor import config as inductor_config
    from torch._inductor import custom_graph_pass, pattern_matcher
    from torch._inductor.fx_passes import control_dependencies
    from torch.distributed import _symmetric_memory as symmetric_memory
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor import _dtensor_spec as dtensor_spec
    from torch.distributed.tensor import _utils as tensor_utils
    from torch.utils import _ordered_set as ordered_set
    from torch.utils._sympy import functions as sympy_functions
else:

    def __getattr__(name):
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return importlib.import_module(_LAZY[name])


# Ops.

# The type of an op, such as `torch.ops.aten.mm.default`. No public API.
OpOverload = _ops.OpOverload

# Functional collectives in graphs. No public API; torch documents them for compilers.
c10d_functional = torch.ops._c10d_functional
#: The all-to-all of DTensor in graphs. No public API.
SHARD_DIM_EXCHANGE = "_dtensor.shard_dim_alltoall.default"

# The ops of `torch.nn.functional.scaled_mm`, `torch.Tensor.view` and `torch.Tensor.to` in graphs
# and in ``__torch_dispatch__``. No public API.
aten_scaled_mm = torch.ops.aten._scaled_mm.default
aten_unsafe_view = torch.ops.aten._unsafe_view.default
aten_to_copy = torch.ops.aten._to_copy.default

# A matmul of fp8. Public: `torch.nn.functional.scaled_mm`, which has no ``out``.
scaled_mm = torch._scaled_mm

# Norms and non-finite checks of a list of tensors. `clip_grad_norm_` and `GradScaler` call them.
# No public API.
foreach_norm = torch._foreach_norm
foreach_find_infinities_and_unscale = torch._amp_foreach_non_finite_check_and_unscale_

# An assertion that does not synchronize with the GPU and stays in graphs. No public API.
assert_async = torch._assert_async


def get_schema(op: OpOverload) -> torch.FunctionSchema:
    """Return the schema of an op. No public API."""
    return op._schema


def get_op_function(op: OpOverload) -> Callable[..., Any]:
    """Return the function that calls an op. Public: the op, which is 0.65 us slower (AMD EPYC Zen
    1, torch 2.13, 2026-11-27)."""
    return op._op


# Parses a schema string before the op is defined. No public API.
parse_schema = torch._C.parse_schema


def elements_overlap(x: torch.Tensor) -> bool:
    """Return whether elements of x certainly share memory. No public API."""
    return torch._debug_has_internal_overlap(x) == 1  # 0: no overlap, 2: too hard to decide


def onednn_supports(dtype: torch.dtype) -> bool:
    """Return whether oneDNN supports bfloat16 or float16 matmuls on this processor. No public API;
    `torch.cpu.get_capabilities` lists the instructions of the processor, not their use in
    oneDNN."""
    kinds = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    try:
        return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{kinds[dtype]}_supported")())
    except (KeyError, AttributeError, RuntimeError):  # unsupported dtype, or torch without oneDNN
        return False


# Tensors.

# The tensors of a graph that is being traced, and their mode. No public API.
FakeTensor = _subclasses.FakeTensor
detect_fake_mode = _guards.detect_fake_mode

# Creates a tensor subclass with a shape independent of its storage. No public API; torch tutorials
# use it.
make_wrapper_subclass = torch.Tensor._make_wrapper_subclass

# Disables ``__torch_function__`` of subclasses in a block. No public API; torch documents it.
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass

# Whether a tensor is contiguous, without a guard on symbolic sizes. No public API.
is_contiguous_or_false = _prims_common.is_contiguous_or_false

# The tensors in nested lists and dicts. No public API.
tree_leaves = _pytree.tree_leaves


def is_zero_tensor(x: torch.Tensor) -> bool:
    """Return whether x is a zero tensor without memory, such as some gradients. No public API."""
    return x._is_zerotensor()


def in_dual_level() -> bool:
    """Return whether a tensor may have a forward-mode tangent. No public API."""
    return forward_ad._current_level >= 0


def has_hooks(x: torch.Tensor) -> bool:
    """Return whether hooks run for a tensor's gradient. No public API."""
    return bool(x._backward_hooks or x._post_accumulate_grad_hooks)


# Modules. The public iterators such as `named_parameters` omit None entries and duplicates.


def direct_parameters(module: nn.Module) -> dict[str, Any]:
    """Return the dict of direct parameters of a module. Callers read it or swap tensors. No public
    API."""
    return module._parameters


def tensor_version(x: torch.Tensor) -> int:
    """Return the number of in-place changes of a tensor. 0 for inference tensors, which do not
    count them. No public API."""
    return 0 if x.is_inference() else x._version


def direct_children(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the dict of direct submodules. No public API; attribute access is slower."""
    return module._modules


def state_names(module: nn.Module) -> list[str]:
    """Return the names of the direct parameters, buffers and submodules. No public API."""
    return [*module._parameters, *module._buffers, *module._modules]


def make_probe(module: _Module, **state: Any) -> _Module:
    """Return a shallow copy of a module with replaced ``parameters``, ``buffers`` or ``modules``.
    No public API; `torch.func.functional_call` also runs the hooks of the module."""
    probe = copy.copy(module)
    probe.__dict__ |= {f"_{kind}": values for kind, values in state.items()}
    return probe


# Process groups.


# The process groups that torch has not destroyed, with their names. No public API;
# `get_process_group_ranks` raises for destroyed groups, but copies the ranks of all groups.
REGISTERED_GROUPS: Mapping[dist.ProcessGroup, str] = distributed_c10d._pg_names


def resolve_process_group(name: str) -> dist.ProcessGroup:
    """Return the process group of that name, or raise. No public API."""
    return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def get_backend(pg: dist.ProcessGroup, device: str) -> _distributed_c10d.Backend | None:
    """Return the backend of a process group for a device type, or None. No public API;
    `get_backend_config` returns names, and raises if the group was destroyed."""
    try:
        return pg._get_backend(torch.device(device))
    except RuntimeError:
        return None


def get_timeout(pg: dist.ProcessGroup, device: str) -> timedelta | None:
    """Return the timeout of collectives on a device type, or None if the group has no backend for
    it or the backend has no options. No public API."""
    try:
        return pg._get_backend(torch.device(device)).options._timeout
    except (RuntimeError, AttributeError):
        return None


# What torch passes to the constructor of a backend: store, rank, size, timeout and names. No public
# API; torch documents it for third-party backends.
BackendOptions = _distributed_c10d._DistributedBackendOptions


def make_gloo_group(
    options: BackendOptions,
) -> tuple[dist.ProcessGroupGloo, dist.ProcessGroup]:
    """Return a gloo backend for the ranks of a backend, and a process group for CPU tensors that
    uses it and is not registered. No public API: `new_group` registers the group."""
    store = dist.PrefixStore("gloo", options.store)
    rank, size = options.group_rank, options.group_size
    gloo = dist.ProcessGroupGloo(store, rank, size, options.timeout)
    gloo._set_sequence_number_for_group()
    group = dist.ProcessGroup(store, rank, size)
    use_gloo(group, gloo)
    return gloo, group


def use_gloo(group: dist.ProcessGroup, gloo: dist.ProcessGroupGloo) -> None:
    """Use a gloo backend for the CPU tensors of a process group. No public API."""
    kind = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, gloo)


def pybind11_abi() -> list[str]:
    """Return the compiler flags for a module that shares classes with torch. No public API;
    `torch.utils.cpp_extension` has them for its own compilations."""
    names = {name: f"_PYBIND11_{name}" for name in ("COMPILER_TYPE", "STDLIB", "BUILD_ABI")}
    values = {name: getattr(torch._C, attribute, None) for name, attribute in names.items()}
    return [f'-DPYBIND11_{name}="{value}"' for name, value in values.items() if value is not None]


def all_gather_single(
    pg: dist.ProcessGroup, gathered: torch.Tensor, x: torch.Tensor, options: AllgatherOptions
) -> dist.Work:
    """Gather tensors of equal size. Public: `ProcessGroup.all_gather_single`, not in torch 2.11."""
    return pg._allgather_base(gathered, x, options)


def reduce_scatter_single(
    pg: dist.ProcessGroup, out: torch.Tensor, x: torch.Tensor, options: ReduceScatterOptions
) -> dist.Work:
    """Reduce-scatter shards of equal size. Public: `ProcessGroup.reduce_scatter_single`, not in
    torch 2.11."""
    return pg._reduce_scatter_base(out, x, options)


# Meshes and DTensors.


def original_mesh_group(mesh: DeviceMesh, group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the process group that a mesh was created with, for a group of the same name. No
    public API; `DeviceMesh.get_group` looks up the name and may return a later group."""
    registry: dict[str, dist.ProcessGroup] = getattr(mesh._get_root_mesh(), "_pg_registry", {})
    return registry.get(group.group_name, group)


def flattened_mesh(mesh: DeviceMesh, dim: str) -> DeviceMesh:
    """Return the mesh of a flattened dim of ``mesh``. No public API."""
    return mesh._get_root_mesh()._flatten_mapping[dim]


def flatten_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Flatten a mesh to one dim. Collective at the first call. No public API."""
    return mesh._flatten()


def get_dtensor_spec(x: DTensor) -> dtensor_spec.DTensorSpec:
    """Return the mesh, placements, shape and dtype of a DTensor as a cache key. Public: the
    attributes; a key of these costs 4 us more, because its hash is not cached. AMD EPYC Zen, torch
    2.13, 2026-11-27."""
    return x._spec


# GPUs.

# Allocates symmetric memory outside the torch pool, and queries GPU capabilities. No public API.
SymmetricMemory = _distributed_c10d._SymmetricMemory

# Keeps a GPU busy for a number of cycles. No public API.
gpu_sleep = torch.cuda._sleep

# Profiler.

#: Names of ATen ops in profiles that only copy data. No public API.
PROFILED_COPIES = ("_to_copy", "_local_scalar_dense")

# A profiler range that costs 0.4 us. Public: `torch.profiler.record_function`, 25 us.
RecordFunctionFast = torch._C._profiler._RecordFunctionFast


def profiling() -> bool:
    """Return whether a torch profiler is running in this process. No public API."""
    return profiler._is_profiler_enabled


# Compiler.


def tracing() -> bool:
    """Return whether a graph is being traced. No public API for code below the dispatcher."""
    return _guards.TracingContext.try_get() is not None


def skip_in_graphs(function: _Function) -> _Function:
    """Break graphs at calls of a function. Public: `torch.compiler.disable`, which imports the
    full compiler."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def assume_constant_result(function: _Function) -> _Function:
    """Treat the result of a function as a constant in graphs. Public:
    `torch.compiler.assume_constant_result`, which imports the full compiler. That imports Triton
    before the choice of its interpreter is made."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def is_erased(node: fx.Node) -> bool:
    """Return whether a node is no longer in its graph. No public API."""
    return node._erased
