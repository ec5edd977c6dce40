"""The parts of vLLM 0.32 that the plugin meets, on any machine: the same names, arguments and order
of calls, computed with plain torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

PARTS = "tpkernels.integrations.vllm_parts"
MOE = "vllm.model_executor.layers.fused_moe"
tensor_parallel = SimpleNamespace(device_group=None)  # what get_tp_group() returns


class CpuCommunicator:
    def __init__(
        self,
        cpu_group: dist.ProcessGroup,
        device: torch.device | None = None,
        device_group: dist.ProcessGroup | None = None,
        unique_name: str = "",
        use_all2all: bool = False,
    ) -> None:
        self.device_group, self.unique_name = device_group or cpu_group, unique_name
        self.world_size = dist.get_world_size(self.device_group)
        self.own_calls = 0

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        self.own_calls += 1
        dist.all_reduce(input_, group=self.device_group)
        return input_


class UnquantizedLinearMethod:
    def process_weights_after_loading(self, layer: Any) -> None:
        pass

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, layer.weight, bias)


def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = F.linear


class CPUUnquantizedExperts:
    def __init__(self, w1_bias: torch.Tensor | None, w2_bias: torch.Tensor | None) -> None:
        self.w1_bias, self.w2_bias = w1_bias, w2_bias

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return True


def replace_parameter(layer: nn.Module, name: str, new: torch.Tensor) -> None:
    layer.register_parameter(name, nn.Parameter(new, requires_grad=False))


class QuantizedLinearMethod(UnquantizedLinearMethod):
    pass


class RowParallelLinear(nn.Module):
    out_of_tree: ClassVar[dict[str, type]] = {}

    @classmethod
    def register_oot(cls, layer: type) -> type:
        assert cls.__name__ not in cls.out_of_tree, f"Duplicate layer name: {cls.__name__}"
        cls.out_of_tree[cls.__name__] = layer
        return layer

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        reduce_results: bool = True,
        quantized: bool = False,
        *,
        return_bias: bool = True,
    ) -> None:
        super().__init__()
        group = tensor_parallel.device_group
        self.tp_rank, self.tp_size = dist.get_rank(group), dist.get_world_size(group)
        self.input_is_parallel, self.skip_bias_add = input_is_parallel, skip_bias_add
        self.reduce_results, self.return_bias = reduce_results, return_bias
        self.quant_method = QuantizedLinearMethod() if quantized else UnquantizedLinearMethod()
        local = input_size // self.tp_size
        self.weight = nn.Parameter(torch.empty(output_size, local), requires_grad=False)
        own = nn.Parameter(torch.empty(output_size), requires_grad=False) if bias else None
        self.register_parameter("bias", own)

    def forward(self, input_: torch.Tensor) -> Any:
        x = input_
        if not self.input_is_parallel:
            x = split_tensor_along_last_dim(input_, self.tp_size)[self.tp_rank].contiguous()
        bias = None if (self.tp_rank > 0 or self.skip_bias_add) else self.bias
        output = self.quant_method.apply(self, x, bias)
        if self.reduce_results and self.tp_size > 1:
            dist.all_reduce(output, group=tensor_parallel.device_group)
        if not self.return_bias:
            return output
        return output, self.bias if self.skip_bias_add else None


def split_tensor_along_last_dim(x: torch.Tensor, num_partitions: int) -> tuple[torch.Tensor, ...]:
    return x.split(x.shape[-1] // num_partitions, -1)


class CpuPlatform:
    device_type = "cpu"

    def is_cuda(self) -> bool:
        return False

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "vllm's own"


@contextmanager
def installed(version: str = "0.32.0") -> Iterator[type[CpuPlatform]]:
    """Makes ``import vllm`` find these parts within the block; gives the class of the platform."""

    class Platform(CpuPlatform):
        pass

    class Experts(CPUUnquantizedExperts):
        pass

    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": version},
        "vllm.platforms": {"current_platform": Platform()},
        "vllm.distributed": {"get_tp_group": lambda: tensor_parallel},
        "vllm.distributed.device_communicators": {},
        "vllm.distributed.device_communicators.cpu_communicator": {
            "CpuCommunicator": CpuCommunicator
        },
        "vllm.distributed.utils": {"split_tensor_along_last_dim": split_tensor_along_last_dim},
        "vllm.model_executor": {},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.utils": {
            "dispatch_cpu_unquantized_gemm": dispatch_cpu_unquantized_gemm
        },
        "vllm.model_executor.utils": {"replace_parameter": replace_parameter},
        MOE: {},
        f"{MOE}.experts": {},
        f"{MOE}.experts.cpu_moe": {"CPUUnquantizedExperts": Experts},
        f"{MOE}.oracle": {},
        f"{MOE}.oracle.unquantized": {"backend_to_kernel_cls": lambda backend: [Experts]},
        "vllm.model_executor.layers.linear": {
            "RowParallelLinear": RowParallelLinear,
            "UnquantizedLinearMethod": UnquantizedLinearMethod,
        },
    }
    assert "vllm" not in sys.modules
    for name, attributes in contents.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(attributes, __path__=[])
    try:
        yield Platform
    finally:
        for name in (*contents, PARTS):
            sys.modules.pop(name, None)
        RowParallelLinear.out_of_tree.clear()
