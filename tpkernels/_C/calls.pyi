from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from tpkernels._C.host import Channel, Segments, ShardLayout

# Bindings of csrc/calls, the functions on tensors. Only they import torch, at the first use.

class SumTree:
    max_nodes: int
    def __init__(self, sizes: Sequence[int], unit: int, rank: int) -> None: ...

def multiply_nodes(x: torch.Tensor, w: torch.Tensor, tree: SumTree) -> torch.Tensor: ...

class Collective:
    def __init__(
        self,
        channel: Channel,
        segments: Segments,
        signature: int,
        description: str,
        name: str,
        layout: ShardLayout = ...,
        out_layout: ShardLayout = ...,
        max_slice_numel: int = 0,
        tree: SumTree | None = None,
    ) -> None: ...
    def run(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        normed: torch.Tensor | None = None,
        norm_weight: torch.Tensor | None = None,
        eps: float = 0.0,
        routing: Routing | None = None,
        weights: torch.Tensor | None = None,
    ) -> None: ...

def weigh_rows(
    rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
) -> None: ...

class Routing:
    def __init__(
        self, topk_ids: torch.Tensor, tokens: Sequence[int], experts_per_rank: Sequence[int]
    ) -> None: ...
    @property
    def counts(self) -> list[int]: ...
    @property
    def rows(self) -> list[int]: ...

class BoundCall: ...

class Direct(BoundCall):
    def __init__(
        self,
        collective: Collective,
        arguments: Arguments,
        *,
        in_place: bool,
        shape: tuple[int, ...],
        has_matmul: bool,
        gathers: bool,
        return_gathered: bool,
        eps: float,
    ) -> None: ...

class Alarm:
    def __init__(self) -> None: ...
    def watch(self, flag: int) -> None: ...
    def unwatch(self, flag: int) -> None: ...
    def is_set(self) -> bool: ...
    raised: bool

class PythonCall(BoundCall):
    def __init__(
        self,
        arguments: Arguments,
        execute: Callable[..., Any],
        call: Any,
        alarm: Alarm | None,
        deterministic: bool | None,
    ) -> None: ...

def find_caller() -> str: ...

class Lock:
    def acquire(self, blocking: bool = True) -> bool: ...
    def release(self) -> None: ...
    def is_held(self) -> bool: ...
    def __enter__(self) -> bool: ...
    def __exit__(self, *args: object) -> None: ...

class GroupCalls:
    def __init__(self) -> None: ...
    def register_group(self, name: str, group: Callable[[], object]) -> None: ...
    def unregister(self) -> None: ...
    def clear_planned_calls(self) -> None: ...
    def planned_calls(self) -> list[Any]: ...
    @property
    def generation(self) -> int: ...
    lock: Lock
    def renew_lock(self) -> None: ...
    in_call: bool
    has_pending_calls: bool
    open: bool
    untuned_in_capture: bool

class Arguments:
    def __init__(
        self,
        op: str,
        specs: Sequence[tuple[str, bool, Any, bool, bool]],
        cls: Callable[..., Any],
    ) -> None: ...
    def to_named_tuple(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor: ...

PANEL_COLUMNS: int

def matmul(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor: ...
def make_columns_kernel(run: Callable[..., Any]) -> Callable[..., Any]: ...
def has_matmul_kernel(
    dtype: int, layout: Literal["rows", "columns", "packed"], rows: int
) -> bool: ...
def multiply(
    x: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    full_shape: tuple[int, int],
) -> bool: ...
def grouped_multiply(
    x: torch.Tensor, w: torch.Tensor, counts: torch.Tensor, out: torch.Tensor
) -> list[int]: ...
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    sequences: torch.Tensor | None = None,
    window: int = 0,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor: ...
def open_exchange(tensor_class: type) -> bool: ...
def make_kernel(
    arguments: Arguments,
    plan: Callable[..., Any],
    run: Callable[..., Any],
    on_failure: Callable[..., Any],
    check: Callable[..., Any] | None = None,
    overwrites: bool = False,
) -> Callable[..., Any]: ...
def make_entry(
    arguments: Arguments,
    op: Callable[..., Any],
    record: Callable[[Any], Any],
    custom: Callable[[Any], Any] | None,
    dispatched_op: Callable[..., Any] | None = None,
) -> Callable[..., Any]: ...
