"""Replacements of vLLM components. Only `tpkernels.integrations.vllm` imports this module, inside
vLLM."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.config import CompilationMode, CUDAGraphMode, get_current_vllm_config
from vllm.distributed import get_ep_group, get_tp_group
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.distributed.utils import split_tensor_along_last_dim
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.fused_moe import all2all_utils
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.oracle import unquantized
from vllm.model_executor.layers.fused_moe.prepare_finalize.naive_dp_ep import (
    MoEPrepareAndFinalizeNaiveDPEPModular,
)
from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input
from vllm.model_executor.layers.linear import RowParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.utils import replace_parameter

import tpkernels
from tpkernels import groups
from tpkernels.common import dtypes
from tpkernels.integrations.vllm import logger
from tpkernels.ops.autograd import matmul
from tpkernels.ops.experts import ACTIVATIONS

if TYPE_CHECKING:
    from vllm.model_executor.layers import fused_moe as moe

# seconds; long, because a rank may compile while its peers wait. Dead ranks are detected at once.
TIMEOUT = 1800.0


@functools.cache
def report(message: str) -> None:
    """Log a message once per process."""
    logger.info("tpkernels: %s", message)


def group_for(group: torch.distributed.ProcessGroup, operation: str = "all-reduces") -> str | None:
    """Initialize a group for the ops. The first call is collective.

    Returns:
        The group name, or None if the ranks do not share memory. vLLM then runs ``operation``.
    """
    name = groups.group_name(group)
    tpkernels.init(name, timeout=TIMEOUT)
    if groups.get(name).shared_memory:
        return name
    report(f"vLLM runs {operation}: the ranks do not share memory")
    return None


class VllmCommunicator(CpuCommunicator):
    """vLLM CPU communicator with `all_reduce_` as the tensor-parallel all-reduce."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        replaced = self.unique_name.startswith("tp") and self.world_size > 1
        self._group = group_for(self.device_group) if replaced else None
        if self._group is not None:
            report(f"replaced all-reduces of {self.world_size} ranks")

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        reducible = input_.dtype in dtypes.CODES and input_.is_contiguous()
        if self._group is None or not reducible:
            return super().all_reduce(input_)
        tpkernels.all_reduce_(input_, self._group)
        return input_


def replace_communicator(platform: type) -> None:
    """Make a vLLM ``platform`` use `VllmCommunicator`."""
    name = f"{VllmCommunicator.__module__}.{VllmCommunicator.__qualname__}"
    platform.get_device_communicator_cls = classmethod(lambda cls: name)  # type: ignore[attr-defined]


class FusedRowParallelLinear(RowParallelLinear):
    """Row-parallel layer of vLLM that runs `matmul_all_reduce` if it is not quantized. On CPUs it
    uses the packed weight of `replace_matmuls`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._group, reason = None, self._reason_to_keep()
        if reason is None:
            self._group = group_for(get_tp_group().device_group)
        else:
            report(f"vLLM runs row-parallel layers: {reason}")
        if self._group is not None:
            report("replaced row-parallel layers by a matmul fused with the all-reduce")

    def _reason_to_keep(self) -> str | None:
        """Return the reason to keep the vLLM layer, or None."""
        if not self.reduce_results or self.tp_size == 1:
            return "their outputs are not reduced"
        if type(self.quant_method) is not UnquantizedLinearMethod:
            return f"their quantization method is {type(self.quant_method).__name__}"
        return None

    def forward(self, input_: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
        if self._group is None:
            return super().forward(input_)
        on_cpu = self.weight.device.type == "cpu"
        w = getattr(self, "tpkernels_weight", None) if on_cpu else self.weight.t()
        if w is None:  # the weight could not be packed
            return super().forward(input_)
        x = input_
        if not self.input_is_parallel:
            x = split_tensor_along_last_dim(input_, self.tp_size)[self.tp_rank].contiguous()
        bias = None if self.skip_bias_add else self.bias
        output = tpkernels.matmul_all_reduce(x, w, self._group, bias=bias)
        if not self.return_bias:
            return output
        return output, self.bias if self.skip_bias_add else None


@functools.cache  # vLLM rejects a second registration
def replace_row_parallel() -> None:
    """Make vLLM use `FusedRowParallelLinear`."""
    RowParallelLinear.register_oot(FusedRowParallelLinear)


@functools.cache
def replace_matmuls() -> None:
    """Replace the matmuls of unquantized layers and heads on CPUs by matmuls with a packed copy of
    the weight, ``layer.tpkernels_weight``."""
    vllm_dispatch = utils.dispatch_cpu_unquantized_gemm

    def dispatch(layer: Any, remove_weight: bool) -> None:
        weight = layer.weight
        if weight.dim() != 2:
            vllm_dispatch(layer, remove_weight)
            return
        try:
            w = tpkernels.pack(weight.detach().t())
        except (ValueError, RuntimeError) as error:  # includes NotImplementedError
            report(f"vLLM runs matmuls with weights of shape {list(weight.shape)}: {error}")
            vllm_dispatch(layer, remove_weight)
            return
        report("unquantized layers use packed weights")
        layer.tpkernels_weight = w
        layer.cpu_linear = lambda x, weight, bias=None: matmul(x, w, bias=bias)
        if remove_weight:  # vLLM still reads its dtype and device
            layer.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)

    utils.dispatch_cpu_unquantized_gemm = dispatch


class PackedExperts(CPUUnquantizedExperts):
    """Unquantized experts of vLLM on a CPU, as `local_experts` with packed weights.

    The vLLM kernel reads out of bounds if a rank holds only some of the experts. Time relative to
    the vLLM kernel: 0.75 for 1 token and 0.41 for 64 tokens on one thread, 0.95 and 0.56 on two
    threads (8 experts of 1024 x 512, k 2, bf16; AMD EPYC Zen 5, vLLM 0.32, 2026-11-26).
    """

    only_expert_parallel = False  #: leave tensor-parallel experts to vLLM

    @staticmethod
    def _supports_activation(activation: moe.activation.MoEActivation) -> bool:
        return activation.value in ACTIVATIONS

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: moe.config.FusedMoEParallelConfig) -> bool:
        return moe_parallel_config.use_ep or not PackedExperts.only_expert_parallel

    def process_weights_after_loading(self, layer: Any) -> None:
        report("experts use packed weights")
        stacks = [layer.w13_weight, layer.w2_weight]
        self._stacks = [tpkernels.pack(w.detach().transpose(1, 2)) for w in stacks]
        for name, w in zip(("w13_weight", "w2_weight"), stacks, strict=True):
            replace_parameter(layer, name, w.new_empty(*w.shape[:2], 0))

    def apply(self, *, output: torch.Tensor, **options: Any) -> None:
        ids, weights = options["topk_ids"], options["topk_weights"]
        if options["expert_map"] is not None:
            ids = options["expert_map"][ids]
        if options["apply_router_weight_on_input"]:  # instead of the output
            weights = torch.ones_like(weights)
        local_experts = torch.ops.tpkernels._local_experts.default
        operands = options["hidden_states"], ids, weights, *self._stacks
        biases = self.w1_bias, self.w2_bias
        output.copy_(local_experts(*operands, *biases, options["activation"].value))


@functools.cache
def replace_experts(only_expert_parallel: bool) -> None:
    """Make vLLM use `PackedExperts` on CPUs for the layers that they support. Expert-parallel
    layers never use the CPU kernel of vLLM.

    Args:
        only_expert_parallel: do not use `PackedExperts` for tensor-parallel experts.
    """
    PackedExperts.only_expert_parallel = only_expert_parallel
    CPUUnquantizedExperts._supports_parallel_config = staticmethod(lambda config: not config.use_ep)
    vllm_classes = unquantized.backend_to_kernel_cls

    def classes(backend: unquantized.UnquantizedMoeBackend) -> list[type]:
        packed = [PackedExperts] if backend.name == "CPU" else []
        return [*packed, *vllm_classes(backend)]

    unquantized.backend_to_kernel_cls = classes


class ExpertParallel(MoEPrepareAndFinalizeNaiveDPEPModular):
    """Token exchange of data-parallel ranks: `moe_dispatch` sends tokens to their experts, and
    `moe_combine` returns the outputs. vLLM instead gathers all tokens on all ranks and reduces over
    the ranks.

    To the vLLM experts each row is a token with one expert of weight 1. It therefore does not
    matter whether they apply weights and reduce; `moe_combine` does both, with the router weights.
    The receive buffer of each rank has capacity for all assignments, so the host never waits for
    token counts, and shapes do not depend on the routing. No GPU has run it.
    """

    _group: str | None = None  # None: vLLM exchanges the tokens

    def post_init_setup(self, fused_experts: moe.modular_kernel.FusedMoEExperts) -> None:
        super().post_init_setup(fused_experts)
        operation, reason = "MoE dispatch and combine", self._reason_to_gather(fused_experts)
        if reason is None:
            self._group = group_for(get_ep_group().device_group, operation)
            reason = self._capture_obstacle()
        if reason is not None:
            report(f"vLLM runs {operation}: {reason}")
            self._group = None
        if self._group is not None:
            report(f"replaced {operation} by moe_dispatch and moe_combine")

    @staticmethod
    def _reason_to_gather(experts: moe.modular_kernel.FusedMoEExperts) -> str | None:
        """Return the reason to keep the token exchange of vLLM, or None. Identical on all ranks."""
        config, quant, vllm = experts.moe_config, experts.quant_config, get_current_vllm_config()
        parallel = config.moe_parallel_config
        scaled = quant.per_act_token_quant or quant.block_shape == [128, 128]
        fp8 = quant.quant_dtype == torch.float8_e4m3fn and scaled
        if not parallel.use_ep:
            return "the experts are tensor-parallel"
        if parallel.ep_size != parallel.dp_size * parallel.sp_size:
            return "the ranks of an engine hold the same tokens"
        if config.is_lora_enabled or vllm.parallel_config.enable_elastic_ep:
            return "LoRA and elastic expert parallelism are not supported"
        if not (quant.quant_dtype is None or fp8 or experts.expects_unquantized_inputs):
            return (
                f"activations of {quant.quant_dtype} are supported only as fp8 with scales per "
                "row or block of 128"
            )
        compiled = vllm.compilation_config.mode != CompilationMode.NONE
        if compiled and torch.device(config.device).type == "cpu":
            return (
                "compiled code on CPUs would keep the token counts of a call; pass --enforce-eager"
            )
        return None

    def _capture_obstacle(self) -> str | None:
        """Return the reason why CUDA graphs of vLLM cannot contain the ops, or None."""
        graphs = get_current_vllm_config().compilation_config.cudagraph_mode
        if self._group is None or graphs == CUDAGraphMode.NONE:
            return None
        reason = groups.get(self._group).qualification().reason_against("moe_dispatch", "direct")
        return (
            reason
            and f"CUDA graphs need algorithm 'direct', which {reason}; or pass --enforce-eager"
        )

    def prepare(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: moe.config.FusedMoEQuantConfig,
        defer_input_quant: bool = False,
    ) -> tuple[object, ...]:
        options = apply_router_weight_on_input, quant_config, defer_input_quant
        if self._group is None:
            return super().prepare(a1, topk_weights, topk_ids, num_experts, expert_map, *options)
        if apply_router_weight_on_input:  # instead of the output
            a1, topk_weights = a1 * topk_weights.to(a1.dtype), torch.ones_like(topk_weights)
        scale = None
        if quant_config.quant_dtype is not None and not defer_input_quant:
            scale_options = quant_config.per_act_token_quant, quant_config.block_shape
            a1, scale = moe_kernel_quantize_input(
                a1, None, quant_config.quant_dtype, *scale_options
            )
        group, sizes = groups.get(self._group), get_forward_context().dp_metadata.local_sizes
        first = sum(tpkernels.shard_sizes(num_experts, group.world)[: group.rank])
        padding = topk_ids < 0  # padding of a batch stays on this rank, with weight 0
        capacity = sum(sizes) * topk_ids.shape[1]
        rows, counts, self._handle = tpkernels.moe_dispatch(
            a1,
            topk_ids.masked_fill(padding, min(first, num_experts - 1)),
            topk_weights.masked_fill(padding, 0),
            num_experts,
            self._group,
            scale_x=scale,
            shard_sizes=sizes,
            max_rows=capacity,
        )
        # Rows are sorted by expert, from the first local expert. Rows past the counts get an expert
        # id of a different rank.
        row_ids = torch.arange(capacity, device=rows.device)
        ids = torch.searchsorted(counts.cumsum(0), row_ids, right=True).add_(first)
        ids = ids.remainder_(num_experts).to(topk_ids.dtype).unsqueeze(1)
        return rows, self._handle.scales, None, ids, topk_weights.new_ones(capacity, 1)

    def finalize(
        self, output: torch.Tensor, fused_expert_output: torch.Tensor, *options: Any
    ) -> None:
        if self._group is None:
            super().finalize(output, fused_expert_output, *options)
            return
        rows = fused_expert_output.reshape(-1, output.shape[1])
        output.copy_(tpkernels.moe_combine(rows, self._handle))


@functools.cache
def replace_exchange() -> None:
    """Make vLLM use `ExpertParallel` for ``--all2all-backend allgather_reducescatter``."""
    vllm_make = all2all_utils.make_moe_prepare_and_finalize_naive_dp_ep

    def make(use_monolithic: bool, *arguments: Any, **options: Any) -> object:
        if not use_monolithic:
            return ExpertParallel(*arguments, **options)
        report("vLLM runs MoE dispatch and combine: its experts do the routing")
        return vllm_make(use_monolithic, *arguments, **options)

    all2all_utils.make_moe_prepare_and_finalize_naive_dp_ep = make
