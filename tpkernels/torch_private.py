"""All private names of torch that this package uses. To support a new torch, adapt this module.

Each entry says what it is needed for and, after "Public:", which public name can take its place;
"none" was checked for torch 2.11 and 2.13. `tests/test_torch_private.py` finds uses elsewhere.

Not here, because their own classes must have these names: methods that torch lets subclasses
override, such as ``nn.Module._apply``, ``_save_to_state_dict`` and ``_load_from_state_dict``.
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

# What the extension takes by name (csrc/calls): whether a tensor may have a tangent; whether a
# profiler runs; the process groups that torch has not destroyed, and the one of a name; whether a
# transform of `torch.func` or a function mode is active. Public: none.
OF_EXTENSION = (
    ("torch.autograd.forward_ad", "_current_level"),
    ("torch.autograd.profiler", "_is_profiler_enabled"),
    ("torch.distributed.distributed_c10d", "_pg_map"),
    ("torch.distributed.distributed_c10d", "_resolve_process_group"),
    ("torch._C", "_are_functorch_transforms_active"),
    ("torch._C", "_is_torch_function_mode_enabled"),
)

# Modules that take long to import: `__getattr__` imports them where one is asked for.
_LAZY = {
    # What `control_dependencies` takes for a set. Public: none.
    "ordered_set": "torch.utils._ordered_set",
    # The shard of a tensor that is split by placements. Public: none; `__create_chunk_list__` of a
    # DTensor imports `torch.distributed.checkpoint`, which takes half a second.
    "tensor_utils": "torch.distributed.tensor._utils",
    # Ties a node to the one before it, so that inductor keeps their order. Public: none.
    "control_dependencies": "torch._inductor.fx_passes.control_dependencies",
    # The base class of passes; the passes that are set already, not in torch 2.11. Public: none.
    "custom_graph_pass": "torch._inductor.custom_graph_pass",
    # Makes a DTensor. Public: `DTensor.from_local`, which takes longer.
    "dtensor_spec": "torch.distributed.tensor._dtensor_spec",
    # Where a pass is set for a block of code. Public: `torch.compile(options=...)`,
    # for one model.
    "inductor_config": "torch._inductor.config",
    # Which nodes write into an argument; the order in which nodes can run. Public: none.
    "pattern_matcher": "torch._inductor.pattern_matcher",
    # Memory that the GPUs of several ranks address. Public: none.
    "symmetric_memory": "torch.distributed._symmetric_memory",
    # The floor divisions among symbolic sizes. Public: none.
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

# The type of an op, such as `torch.ops.aten.mm.default`. Public: none.
OpOverload = _ops.OpOverload

# Functional collectives, as graphs contain them. Public: none; torch documents them for compilers.
c10d_functional = torch.ops._c10d_functional
#: An exchange of DTensor, as graphs name it. Public: none.
SHARD_DIM_EXCHANGE = "_dtensor.shard_dim_alltoall.default"

# Ops that graphs and ``__torch_dispatch__`` contain for `torch.nn.functional.scaled_mm`,
# `torch.Tensor.view` and `torch.Tensor.to`. Public: none.
aten_scaled_mm = torch.ops.aten._scaled_mm.default
aten_unsafe_view = torch.ops.aten._unsafe_view.default
aten_to_copy = torch.ops.aten._to_copy.default

# A matmul of fp8. Public: `torch.nn.functional.scaled_mm`, which has no ``out``.
scaled_mm = torch._scaled_mm

# The norms of several tensors in one call, and their search for infinities, which `clip_grad_norm_`
# and `GradScaler` call. Public: none.
foreach_norm = torch._foreach_norm
foreach_find_infinities_and_unscale = torch._amp_foreach_non_finite_check_and_unscale_

# An assertion that does not wait for the GPU, and that graphs keep. Public: none.
assert_async = torch._assert_async


def schema_of(op: OpOverload) -> torch.FunctionSchema:
    """Return the schema of an op. Public: none."""
    return op._schema


def call_of(op: OpOverload) -> Callable[..., Any]:
    """Return what calls an op. Public: the op itself, which takes 0.65 us more (AMD EPYC Zen 1,
    torch 2.13, 2026-11-27)."""
    return op._op


# The schema that a text describes, before an op is defined by it. Public: none.
parse_schema = torch._C.parse_schema


def elements_overlap(x: torch.Tensor) -> bool:
    """Return whether elements of x are known to share memory. Public: none."""
    return torch._debug_has_internal_overlap(x) == 1  # 0 is no, 2 is too hard to tell


def onednn_supports(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies bfloat16 or float16 on this processor. Public:
    none; `torch.cpu.get_capabilities` tells what the processor has, not what oneDNN uses."""
    kinds = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    try:
        return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{kinds[dtype]}_supported")())
    except (KeyError, AttributeError, RuntimeError):  # another dtype, or torch without oneDNN
        return False


# Tensors.

# The tensors of a graph that is being traced, and what makes them. Public: none.
FakeTensor = _subclasses.FakeTensor
detect_fake_mode = _guards.detect_fake_mode

# A tensor of another shape than its memory. Public: none; torch's tutorials use it.
make_wrapper_subclass = torch.Tensor._make_wrapper_subclass

# Runs a block as if a subclass had no ``__torch_function__``. Public: none; torch documents it.
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass

# Whether a tensor is contiguous, without a guard on symbolic sizes. Public: none.
is_contiguous_or_false = _prims_common.is_contiguous_or_false

# The tensors in nested lists and dicts. Public: none.
tree_leaves = _pytree.tree_leaves


def is_zero_tensor(x: torch.Tensor) -> bool:
    """Return whether x is of zeros, without memory, as gradients may be. Public: none."""
    return x._is_zerotensor()


def in_dual_level() -> bool:
    """Return whether a tensor may have a tangent, of forward-mode differentiation. Public: none."""
    return forward_ad._current_level >= 0


def has_hooks(x: torch.Tensor) -> bool:
    """Return whether hooks run for a tensor's gradient. Public: none."""
    return bool(x._backward_hooks or x._post_accumulate_grad_hooks)


# Modules. `named_parameters` and its like leave out what is None, and what has two names.


def parameters_of(module: nn.Module) -> dict[str, Any]:
    """Return a module's own parameters, to read, or to lend it other tensors. Public: none."""
    return module._parameters


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return a module's own modules. Public: none; reading an attribute takes longer."""
    return module._modules


def state_of(module: nn.Module) -> list[str]:
    """Return the names of a module's own parameters, buffers and modules. Public: none."""
    return [*module._parameters, *module._buffers, *module._modules]


def probe_of(module: _Module, **state: Any) -> _Module:
    """Return a copy of a module that has other ``parameters``, ``buffers`` or ``modules``. Public:
    none; `torch.func.functional_call` calls the module, with its hooks."""
    probe = copy.copy(module)
    probe.__dict__ |= {f"_{kind}": values for kind, values in state.items()}
    return probe


# Process groups.


# The process groups that torch has not destroyed, with their names. Public: none;
# `get_process_group_ranks` raises for others, but copies the ranks of these.
REGISTERED_GROUPS: Mapping[dist.ProcessGroup, str] = distributed_c10d._pg_names


def resolve_process_group(name: str) -> dist.ProcessGroup:
    """Return the process group of that name, or raise. Public: none."""
    return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def backend_of(pg: dist.ProcessGroup, device: str) -> _distributed_c10d.Backend | None:
    """Return a process group's backend for a device type, or None. Public: none;
    `get_backend_config` returns names, and raises for a group that was destroyed."""
    try:
        return pg._get_backend(torch.device(device))
    except RuntimeError:
        return None


def timeout_of(pg: dist.ProcessGroup, device: str) -> timedelta | None:
    """Return how long the collectives on a device type may take, or None if there is no backend
    for it, or one without options. Public: none."""
    try:
        return pg._get_backend(torch.device(device)).options._timeout
    except (RuntimeError, AttributeError):
        return None


def all_gather_single(
    pg: dist.ProcessGroup, gathered: torch.Tensor, x: torch.Tensor, options: AllgatherOptions
) -> dist.Work:
    """Gather tensors of one size. Public: `ProcessGroup.all_gather_single`, not in torch 2.11."""
    return pg._allgather_base(gathered, x, options)


def reduce_scatter_single(
    pg: dist.ProcessGroup, out: torch.Tensor, x: torch.Tensor, options: ReduceScatterOptions
) -> dist.Work:
    """Sum shards of one size. Public: `ProcessGroup.reduce_scatter_single`, not in torch 2.11."""
    return pg._reduce_scatter_base(out, x, options)


# Meshes and DTensors.


def group_made_for(mesh: DeviceMesh, group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the process group of a group's name that a mesh was created with. Public:
    none; `DeviceMesh.get_group` looks the name up, and may return a later group."""
    made: dict[str, dist.ProcessGroup] = getattr(mesh._get_root_mesh(), "_pg_registry", {})
    return made.get(group.group_name, group)


def flattened_mesh(mesh: DeviceMesh, dim: str) -> DeviceMesh:
    """Return the mesh of a dim that several dims of ``mesh`` were flattened into. Public: none."""
    return mesh._get_root_mesh()._flatten_mapping[dim]


def flatten_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Make the dims of a mesh one dim. Collective at the first call. Public: none."""
    return mesh._flatten()


def spec_of(x: DTensor) -> dtensor_spec.DTensorSpec:
    """Return the mesh, placements, shape and dtype of a DTensor, as a key of a cache. Public:
    the attributes; a key of these takes 4 us more, as its hash is not kept. AMD EPYC Zen, torch
    2.13, 2026-11-27."""
    return x._spec


# GPUs.

# Allocates symmetric memory outside torch's pool, and knows what the GPUs can do. Public: none.
SymmetricMemory = _distributed_c10d._SymmetricMemory

# Keeps a GPU busy for a number of cycles. Public: none.
gpu_sleep = torch.cuda._sleep

# Profiler.

#: ATen ops that move data and compute nothing, as a profile names them. Public: none.
PROFILED_COPIES = ("_to_copy", "_local_scalar_dense")

# A range of a profile. Public: `torch.profiler.record_function`, which takes 25 us, not 0.4.
RecordFunctionFast = torch._C._profiler._RecordFunctionFast


def profiling() -> bool:
    """Return whether one of torch's profilers is running in this process. Public: none."""
    return profiler._is_profiler_enabled


# Compiler.


def tracing() -> bool:
    """Return whether a graph is being traced. Public: none for the code below the dispatcher."""
    return _guards.TracingContext.try_get() is not None


def skip_in_graphs(function: _Function) -> _Function:
    """Break graphs at calls of a function. Public: `torch.compiler.disable`, which imports the
    whole compiler."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def assume_constant_result(function: _Function) -> _Function:
    """Let graphs contain the result of a function. Public: `torch.compiler.assume_constant_result`,
    which imports the whole compiler, and Triton before it is known whether its interpreter is
    wanted."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def is_erased(node: fx.Node) -> bool:
    """Return whether a node is no longer in its graph. Public: none."""
    return node._erased
