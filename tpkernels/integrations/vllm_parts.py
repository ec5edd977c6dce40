"""What replaces parts of vLLM. Imported by `tpkernels.integrations.vllm` within vLLM only."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm.distributed import get_tp_group
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.distributed.utils import split_tensor_along_last_dim
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.oracle import unquantized
from vllm.model_executor.layers.linear import RowParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.utils import replace_parameter

import tpkernels
from tpkernels import dtypes, groups
from tpkernels.integrations.vllm import logger
from tpkernels.local import packed
from tpkernels.ops.autograd import matmul
from tpkernels.ops.experts import ACTIVATIONS

# s: a rank that compiles may keep the others waiting; one that dies is noticed at once.
TIMEOUT = 1800.0


@functools.cache
def report(text: str) -> None:
    """Log a text once in each process."""
    logger.info("tpkernels: %s", text)


def group_for(group: torch.distributed.ProcessGroup) -> str | None:
    """Return the name of a group that is set up for the ops; None: its ranks share no memory. The
    first call is collective."""
    name = groups.name_of(group)
    tpkernels.init(name, timeout=TIMEOUT)
    if groups.get(name).shared_memory:
        return name
    report("all-reduces are left to vLLM, because the ranks share no memory")
    return None


class Communicator(CpuCommunicator):
    """vLLM's communicator of CPU tensors, with another all-reduce for tensor parallelism."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        replaced = self.unique_name.startswith("tp") and self.world_size > 1
        self._group = group_for(self.device_group) if replaced else None
        if self._group is not None:
            report(f"all-reduces of {self.world_size} ranks")

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        reducible = input_.dtype in dtypes.CODES and input_.is_contiguous()
        if self._group is None or not reducible:
            return super().all_reduce(input_)
        tpkernels.all_reduce_(input_, self._group)
        return input_


def replace_communicator(platform: type) -> None:
    """Make vLLM's ``platform`` use `Communicator`."""
    name = f"{Communicator.__module__}.{Communicator.__qualname__}"
    platform.get_device_communicator_cls = classmethod(lambda cls: name)  # type: ignore[attr-defined]


def drop_weight(layer: Any) -> None:
    """Free the plain weight, of which vLLM still asks dtype and device."""
    layer.weight = nn.Parameter(layer.weight.new_empty(0), requires_grad=False)


class PackedLinearMethod(UnquantizedLinearMethod):
    """Holds the packed weight of a layer on a CPU, in place of what vLLM packs. ``apply`` is for
    what multiplies without the layer, such as LoRA."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.tpkernels_weight = tpkernels.pack(layer.weight.detach().t())
        drop_weight(layer)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return matmul(x, layer.tpkernels_weight, bias=bias)


class FusedRowParallelLinear(RowParallelLinear):
    """vLLM's row-parallel layer, as `matmul_all_reduce` where it is not quantised."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._group, reason = None, self._reason_to_keep()
        if reason is None:
            self._group = group_for(get_tp_group().device_group)
        else:
            report(f"row-parallel layers are left to vLLM: {reason}")
        if self._group is None:
            return
        report("row-parallel layers are fused with their all-reduce")
        if self.weight.device.type == "cpu":
            self.quant_method = PackedLinearMethod()

    def _reason_to_keep(self) -> str | None:
        """Return why vLLM's layer stays as it is."""
        if not self.reduce_results or self.tp_size == 1:
            return "there is nothing to reduce"
        if type(self.quant_method) is not UnquantizedLinearMethod:
            return f"{type(self.quant_method).__name__} multiplies otherwise"
        if self.weight.device.type == "cpu":
            try:
                packed.check_packable(self.weight.t(), "the weight")
            except NotImplementedError as error:
                return str(error)
        return None

    def forward(self, input_: torch.Tensor) -> Any:
        if self._group is None:
            return super().forward(input_)
        x = input_
        if not self.input_is_parallel:
            x = split_tensor_along_last_dim(input_, self.tp_size)[self.tp_rank].contiguous()
        on_cpu = self.weight.device.type == "cpu"
        w = self.tpkernels_weight if on_cpu else self.weight.t()
        bias = None if self.skip_bias_add else self.bias
        output = tpkernels.matmul_all_reduce(x, w, self._group, bias=bias)
        if not self.return_bias:
            return output
        return output, self.bias if self.skip_bias_add else None


@functools.cache  # vLLM refuses a second one
def replace_row_parallel() -> None:
    """Make vLLM use `FusedRowParallelLinear`."""
    RowParallelLinear.register_oot(FusedRowParallelLinear)


def packed_linear(w: torch.Tensor) -> Callable[..., torch.Tensor] | None:
    """Return what vLLM calls with rows, its weight and a bias, on CPUs: it multiplies by a packed
    copy of w [K, N] in place of that weight. None: w cannot be packed."""
    try:
        packed_w = tpkernels.pack(w)
    except (ValueError, RuntimeError) as error:  # NotImplementedError among them
        report(f"products of {list(w.shape)} are left to vLLM: {error}")
        return None
    return lambda x, weight, bias=None: matmul(x, packed_w, bias=bias)


@functools.cache
def replace_products() -> None:
    """Replace the products of unquantised layers and heads on CPUs."""
    dispatch_of_vllm = utils.dispatch_cpu_unquantized_gemm

    def dispatch(layer: Any, remove_weight: bool) -> None:
        weight = layer.weight
        linear = packed_linear(weight.detach().t()) if weight.dim() == 2 else None
        if linear is None:
            dispatch_of_vllm(layer, remove_weight)
            return
        report("unquantised layers multiply by packed weights")
        layer.cpu_linear = linear
        if remove_weight:
            drop_weight(layer)

    utils.dispatch_cpu_unquantized_gemm = dispatch


class PackedExperts(CPUUnquantizedExperts):
    """vLLM's unquantised experts on a CPU, as `local_experts` by packed weights. vLLM's own read
    beyond their weights if a rank has some of the experts. Of their time it takes 0.75 for 1 token
    and 0.41 for 64 on one thread, 0.95 and 0.56 on two (8 experts of 1024 x 512, k 2, bf16; AMD
    EPYC Zen 5, vLLM 0.32, 2026-11-26)."""

    only_whole = False  #: leave experts of which each rank has a part to vLLM

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return activation.value in ACTIVATIONS

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return moe_parallel_config.use_ep or not PackedExperts.only_whole

    def process_weights_after_loading(self, layer: Any) -> None:
        report("experts multiply by packed weights")
        stacks = [layer.w13_weight, layer.w2_weight]
        self._stacks = [tpkernels.pack(w.detach().transpose(1, 2)) for w in stacks]
        for name, w in zip(("w13_weight", "w2_weight"), stacks, strict=True):
            replace_parameter(layer, name, w.new_empty(*w.shape[:2], 0))

    def apply(self, *, output: torch.Tensor, **options: Any) -> None:
        ids, weights = options["topk_ids"], options["topk_weights"]
        if options["expert_map"] is not None:
            ids = options["expert_map"][ids]
        if options["apply_router_weight_on_input"]:  # and not to the result
            weights = torch.ones_like(weights)
        local_experts = torch.ops.tpkernels._local_experts.default
        operands = options["hidden_states"], ids, weights, *self._stacks
        biases = self.w1_bias, self.w2_bias
        output.copy_(local_experts(*operands, *biases, options["activation"].value))


@functools.cache
def replace_experts(only_whole: bool) -> None:
    """Make vLLM take `PackedExperts` where it can on CPUs, or ``only_whole`` experts, and refuse
    whole experts that it would compute itself."""
    PackedExperts.only_whole = only_whole
    CPUUnquantizedExperts._supports_parallel_config = staticmethod(lambda config: not config.use_ep)
    classes_of_vllm = unquantized.backend_to_kernel_cls

    def classes(backend: Any) -> list[type]:
        ours = [PackedExperts] if backend.name == "CPU" else []
        return [*ours, *classes_of_vllm(backend)]

    unquantized.backend_to_kernel_cls = classes
