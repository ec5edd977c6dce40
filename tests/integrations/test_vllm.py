"""The vLLM plugin against stand-ins for the classes of vLLM 0.32 that it uses. The stand-ins have
the same names, arguments and call order, and compute with plain torch."""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import tpkernels
from tests.support.cases import PACKABLE
from tests.support.ranked import on_ranks, record_calls, separate_hosts
from tpkernels.integrations import vllm

WORLD = 2
PARTS = "tpkernels.integrations.vllm_parts"
MOE = "vllm.model_executor.layers.fused_moe"
tensor_parallel = SimpleNamespace(device_group=None)  # result of get_tp_group()
tokens = SimpleNamespace(sizes=[0])  # tokens per rank
config = SimpleNamespace(  # result of get_current_vllm_config()
    parallel_config=SimpleNamespace(enable_elastic_ep=False),
    compilation_config=SimpleNamespace(mode=0, cudagraph_mode=0),
)


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
        self.stock_calls = 0

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        self.stock_calls += 1
        dist.all_reduce(input_, group=self.device_group)
        return input_


class UnquantizedLinearMethod:
    def process_weights_after_loading(self, layer: Any) -> None:
        utils: Any = importlib.import_module("vllm.model_executor.layers.utils")
        utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        return layer.cpu_linear(x, layer.weight, bias)


def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = F.linear


class CPUUnquantizedExperts:
    def __init__(self, w1_bias: torch.Tensor | None, w2_bias: torch.Tensor | None) -> None:
        self.w1_bias, self.w2_bias = w1_bias, w2_bias

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return True


class MoEPrepareAndFinalizeNaiveDPEPModular:
    def __init__(self, is_sequence_parallel: bool = False, num_dispatchers: int = 1) -> None:
        self.is_sequence_parallel = is_sequence_parallel

    def post_init_setup(self, fused_experts: Any) -> None:
        pass

    def prepare(self, *arguments: Any) -> None:
        raise NotImplementedError("all_gatherv")

    def finalize(self, *arguments: Any) -> None:
        raise NotImplementedError("reduce_scatterv")


def make_moe_prepare_and_finalize_naive_dp_ep(
    use_monolithic: bool, is_sequence_parallel: bool = False, num_dispatchers: int = 1
) -> Any:
    return None if use_monolithic else MoEPrepareAndFinalizeNaiveDPEPModular()


def moe_kernel_quantize_input(
    x: torch.Tensor, scale: None, dtype: torch.dtype, per_row: bool, block: list[int] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = x.float().unflatten(1, (-1, x.shape[1] if block is None else block[1]))
    scales = blocks.abs().amax(2).clamp(min=1e-12) / 448
    return (blocks / scales.unsqueeze(2)).flatten(1).to(dtype), scales


def replace_parameter(layer: nn.Module, name: str, new: torch.Tensor) -> None:
    layer.register_parameter(name, nn.Parameter(new, requires_grad=False))


class QuantizedLinearMethod(UnquantizedLinearMethod):
    def process_weights_after_loading(self, layer: Any) -> None:
        layer.cpu_linear = F.linear


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
        bias_parameter = (
            nn.Parameter(torch.empty(output_size), requires_grad=False) if bias else None
        )
        self.register_parameter("bias", bias_parameter)

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


def module(name: str, *objects: Any, **attributes: Any) -> None:
    """Register a module with these objects in ``sys.modules``."""
    for parent in itertools.accumulate(name.split("."), "{}.{}".format):
        vars(sys.modules.setdefault(parent, ModuleType(parent)))["__path__"] = []
    vars(sys.modules[name]).update({obj.__name__: obj for obj in objects}, **attributes)


@contextmanager
def installed(version: str = "0.32.0") -> Iterator[type[CpuPlatform]]:
    """Install the stand-ins as ``vllm`` within the block. Yield the class of the platform."""
    platform = type("Platform", (CpuPlatform,), {})
    experts = type("CPUUnquantizedExperts", (CPUUnquantizedExperts,), {})
    none = SimpleNamespace(NONE=0)
    assert "vllm" not in sys.modules
    module("vllm", __version__=version)
    module("vllm.platforms", current_platform=platform())
    module(
        "vllm.config",
        CompilationMode=none,
        CUDAGraphMode=none,
        get_current_vllm_config=lambda: config,
    )
    get_group = lambda: tensor_parallel  # noqa: E731
    module("vllm.distributed", get_tp_group=get_group, get_ep_group=get_group)
    module("vllm.distributed.device_communicators.cpu_communicator", CpuCommunicator)
    module("vllm.distributed.utils", split_tensor_along_last_dim)
    context = lambda: SimpleNamespace(dp_metadata=SimpleNamespace(local_sizes=tokens.sizes))  # noqa: E731
    module("vllm.forward_context", get_forward_context=context)
    module("vllm.model_executor.utils", replace_parameter)
    module("vllm.model_executor.layers.utils", dispatch_cpu_unquantized_gemm)
    module("vllm.model_executor.layers.linear", RowParallelLinear, UnquantizedLinearMethod)
    module(f"{MOE}.all2all_utils", make_moe_prepare_and_finalize_naive_dp_ep)
    module(f"{MOE}.prepare_finalize.naive_dp_ep", MoEPrepareAndFinalizeNaiveDPEPModular)
    module(f"{MOE}.utils", moe_kernel_quantize_input)
    module(f"{MOE}.experts.cpu_moe", experts)
    module(f"{MOE}.oracle.unquantized", backend_to_kernel_cls=lambda backend: [experts])
    try:
        yield platform
    finally:
        for name in [PARTS, *(loaded for loaded in sys.modules if loaded.split(".")[0] == "vllm")]:
            sys.modules.pop(name, None)
        RowParallelLinear.out_of_tree.clear()


# Tests.


@pytest.mark.parametrize(
    ("requested", "version", "platform", "mode", "reason"),
    [
        ("auto", "0.32.0", "cpu", "fused", "packed weights are fast"),
        ("auto", "0.32.0", "slow cpu", "all_reduce", "the matmuls of vLLM may be faster"),
        ("auto", "0.32.1", "cuda", "off", "no mode was measured to be faster"),
        ("all_reduce", "0.32.0", "cuda", "off", "no mode was measured to be faster"),
        ("fused", "0.32.0", "cpu", "fused", "TPKERNELS_VLLM=fused"),
        ("fused", "0.32.0", "cuda", "fused", "not measured on GPUs"),
        ("fused", "0.32.0", "tpu", "off", "platform 'tpu' is not supported"),
        ("off", "0.32.0", "cpu", "off", "TPKERNELS_VLLM=off"),
        ("fused", "0.33.0", "cpu", "off", "vLLM 0.33.0 is not supported; tested versions: 0.32.*"),
        ("auto", "0.3.2", "cpu", "off", "is not supported; tested versions"),
    ],
)
def test_choice_of_the_mode(
    requested: str, version: str, platform: str, mode: str, reason: str
) -> None:
    fast, platform = "slow" not in platform, platform.removeprefix("slow ")
    choice = vllm.choose(requested, version, platform, fast)
    assert choice.mode == mode and reason in choice.reason
    explicit = requested in ("all_reduce", "fused")
    assert choice.warn == (mode == "off" and (explicit or "tested" in reason))


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="is 'on'; it must be one of off, all_reduce, fused, auto"):
        vllm.choose("on", "0.32.0", "cpu", True)


def supported_experts() -> tuple[bool, bool, bool]:
    """Return whether the plugin supports tensor-parallel experts and expert-parallel experts, and
    whether the vLLM class supports expert-parallel experts."""
    oracle: Any = importlib.import_module(f"{MOE}.oracle.unquantized")
    *plugin_classes, stock_class = oracle.backend_to_kernel_cls(SimpleNamespace(name="CPU"))
    assert oracle.backend_to_kernel_cls(SimpleNamespace(name="TRITON")) == [stock_class]
    expert_parallel, tensor_parallel = SimpleNamespace(use_ep=True), SimpleNamespace(use_ep=False)
    supported = [
        any(cls._supports_parallel_config(parallel) for cls in plugin_classes)
        for parallel in (tensor_parallel, expert_parallel)
    ]
    return supported[0], supported[1], stock_class._supports_parallel_config(expert_parallel)


@pytest.mark.parametrize("mode", ["off", "all_reduce", "fused", "auto"])
def test_register_follows_the_mode(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(vllm.VARIABLE, mode)
    with installed() as platform:
        vllm.register()
        vllm.register()  # vLLM may load plugins again
        communicator = platform.get_device_communicator_cls()
        if mode == "off":
            assert communicator == "vllm's own"
        else:
            module, _, name = communicator.rpartition(".")
            cls = getattr(importlib.import_module(module), name)
            assert issubclass(cls, CpuCommunicator)
        fused = mode == "fused" or (mode == "auto" and vllm._has_fast_matmul())
        layers = RowParallelLinear.out_of_tree
        assert list(layers) == (["RowParallelLinear"] if fused else [])
        assert supported_experts() == (fused, mode != "off", mode == "off")
        make = sys.modules[f"{MOE}.all2all_utils"].make_moe_prepare_and_finalize_naive_dp_ep
        assert (make is make_moe_prepare_and_finalize_naive_dp_ep) == (mode == "off")
        utils = importlib.import_module("vllm.model_executor.layers.utils")
        is_stock = utils.dispatch_cpu_unquantized_gemm is dispatch_cpu_unquantized_gemm
        assert is_stock != fused


def test_an_unknown_version_stays_unchanged_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(vllm.VARIABLE, "fused")
    with installed("0.99.0") as platform, caplog.at_level(logging.INFO):
        vllm.register()
        assert platform.get_device_communicator_cls() == "vllm's own"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "0.99.0 is not supported; tested" in record.message


def test_the_entry_point_exists() -> None:
    (point,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="tpkernels")
    assert point.load() is vllm.register


@contextmanager
def new_group() -> Iterator[dist.ProcessGroup]:
    """Yield the tensor-parallel group of the stand-ins, which the plugin initializes."""
    group = dist.new_group()
    assert group is not None
    tensor_parallel.device_group = group
    yield group
    tensor_parallel.device_group = None
    dist.destroy_process_group(group)


@on_ranks(WORLD)
def test_all_reduces_of_tensor_parallelism() -> None:
    with installed(), new_group() as group:
        communicator: Any = importlib.import_module(PARTS).VllmCommunicator
        tp_communicator = communicator(group, device_group=group, unique_name="tp:0")
        dp_communicator = communicator(group, device_group=group, unique_name="dp:0")
        with separate_hosts():
            remote_group = dist.new_group()
            remote_communicator = communicator(
                remote_group, device_group=remote_group, unique_name="tp:0"
            )
        draw = torch.Generator().manual_seed(dist.get_rank())
        operand = torch.randn(5, 6, generator=draw)
        cases = {
            "float32": (tp_communicator, operand, 0),
            "bfloat16": (tp_communicator, operand.bfloat16(), 0),
            "integers": (tp_communicator, operand.int(), 1),
            "not contiguous": (tp_communicator, operand.t(), 2),
            "another dimension": (dp_communicator, operand, 1),
            "hosts": (remote_communicator, operand, 1),
        }
        for name, (case_communicator, case_operand, stock_calls) in cases.items():
            x = case_operand.clone(memory_format=torch.preserve_format)
            gathered = [torch.empty(x.shape, dtype=x.dtype) for _ in range(WORLD)]
            dist.all_gather(gathered, x.contiguous())
            result = case_communicator.all_reduce(x)
            want = sum(x_of_rank.double() for x_of_rank in gathered).to(x.dtype)  # type: ignore[union-attr]
            assert result is x and torch.allclose(result, want), f"{name}: {result}, not {want}"
            assert case_communicator.stock_calls == stock_calls, (
                f"{name}: vLLM's own ran {case_communicator.stock_calls} times"
            )
        dist.destroy_process_group(remote_group)


LAYERS: dict[str, dict[str, bool]] = {
    "plain": {"bias": False},
    "bias": {},
    "bias returned": {"skip_bias_add": True},
    "result alone": {"return_bias": False},
    "whole input": {"input_is_parallel": False},
    "partial": {"reduce_results": False, "bias": False},
    "quantized": {"quantized": True},
}


@on_ranks(WORLD)
def test_row_parallel_layers() -> None:
    """Fused layers give the results of the vLLM layers. Unsupported layers stay unchanged."""
    with installed(), new_group(), torch.inference_mode():
        parts: Any = importlib.import_module(PARTS)
        parts.replace_matmuls()
        for name, options in LAYERS.items():
            fused = parts.FusedRowParallelLinear(8, 6, **options)
            stock = RowParallelLinear(8, 6, **options)
            draw = torch.Generator().manual_seed(1 + dist.get_rank())
            stock.weight.data.normal_(generator=draw)
            if stock.bias is not None:
                stock.bias.data.fill_(2.0)  # equal on all ranks
            stock.cpu_linear = F.linear
            fused.load_state_dict(stock.state_dict())
            fused.quant_method.process_weights_after_loading(fused)
            full_input = not options.get("input_is_parallel", True)
            x = torch.randn(
                3, 8 if full_input else 4, generator=draw.manual_seed(5 if full_input else 7)
            )
            with record_calls() as calls:
                got, want = fused(x), stock(x)
            if not options.get("return_bias", True):
                got, want = (got,), (want,)
            for actual, expected in zip(got, want, strict=True):
                equal = (
                    actual is expected
                    if expected is None
                    else torch.allclose(actual, expected, atol=1e-5)
                )
                assert equal, f"{name}: {actual}, not {expected}"
            is_fused = name not in ("partial", "quantized")
            assert calls == ["matmul_all_reduce"] * is_fused, f"{name}: {calls}"
            assert (fused.weight.numel() == 0) == (name != "quantized"), name
            local = fused.quant_method.apply(fused, torch.ones(2, 4))
            assert torch.allclose(local, stock.weight.sum(1).expand(2, 6), atol=1e-5), name


@pytest.mark.parametrize("dtype", PACKABLE, ids=str)
@pytest.mark.parametrize("remove", [False, True])
def test_matmuls_of_plain_layers(dtype: torch.dtype, remove: bool) -> None:
    """Replace the matmul of a layer, which drops its plain weight, and of a head, which keeps it.
    Unsupported weights keep the vLLM matmul."""
    with installed():
        parts: Any = importlib.import_module(PARTS)
        parts.replace_matmuls()
        dispatch = parts.utils.dispatch_cpu_unquantized_gemm
        layer: Any = nn.Linear(40, 70, dtype=dtype)
        weight, bias = layer.weight.detach().clone(), layer.bias.detach()
        dispatch(layer, remove)
        assert layer.cpu_linear is not F.linear
        assert layer.weight.numel() == (0 if remove else weight.numel())
        for x in (torch.randn(1, 40).to(dtype), torch.randn(2, 9, 40).to(dtype)):
            for added_bias in (None, bias):
                got = layer.cpu_linear(x, layer.weight if remove else weight, added_bias)
                want = F.linear(x, weight, added_bias)
                torch.testing.assert_close(got, want)
        for unsupported in (torch.randn(3, 4, 5), torch.randn(4, 5).double()):
            layer = SimpleNamespace(weight=unsupported)
            dispatch(layer, remove)
            assert layer.cpu_linear is F.linear and layer.weight is unsupported


@pytest.mark.parametrize("dtype", PACKABLE, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("bias", [False, True])
def test_local_experts(dtype: torch.dtype, activation: str, bias: bool) -> None:
    """Three ranks hold 2, 1 and 1 of 4 experts. The expert of the last rank gets no tokens. The
    outputs add up to the layer. An infinite weight affects only tokens of its expert."""
    draw = torch.Generator().manual_seed(3)
    hidden, width, ids = 20, 12, torch.tensor([[3, 0], [1, 3], [1, 1]], dtype=torch.int32)
    x, weights = torch.randn(3, hidden, generator=draw).to(dtype), torch.rand(3, 2, generator=draw)
    shapes = [(4, 2 * width, hidden), (4, hidden, width)]
    tensors = [torch.randn(shape, generator=draw).div(4).to(dtype) for shape in shapes]
    biases = [torch.randn(w.shape[:2], generator=draw).to(dtype) if bias else None for w in tensors]
    tensors[1][0, 3] = torch.inf
    want = torch.zeros(3, hidden, dtype=torch.float64)
    activate = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}[activation]
    for token, slot in itertools.product(range(3), range(2)):
        expert = int(ids[token, slot])
        w1, w2 = (w[expert].double() for w in tensors)
        b1, b2 = (0 if b is None else b[expert].double() for b in biases)
        gate, up = (w1 @ x[token].double() + b1).chunk(2)
        want[token] += weights[token, slot] * (w2 @ (activate(gate) * up) + b2)
    total = torch.zeros_like(want)
    with installed(), torch.inference_mode():
        parts: Any = importlib.import_module(PARTS)
        for local in ([0, 1], [3], [2]):
            layer: Any = nn.Module()
            layer.w13_weight, layer.w2_weight = (nn.Parameter(w[local]) for w in tensors)
            local_biases = [None if b is None else b[local] for b in biases]
            experts = parts.PackedExperts(*local_biases)
            experts.process_weights_after_loading(layer)
            assert layer.w13_weight.shape == (len(local), 2 * width, 0)
            expert_map = torch.full((4,), -1, dtype=torch.int32)
            expert_map[local] = torch.arange(len(local), dtype=torch.int32)
            output = torch.full_like(x, torch.nan)
            experts.apply(
                output=output,
                hidden_states=x,
                topk_ids=ids,
                topk_weights=weights,
                expert_map=expert_map,
                activation=SimpleNamespace(value=activation),
                apply_router_weight_on_input=False,
            )
            total += output
    finite = torch.isfinite(want)
    assert not finite[0, 3] and finite.sum() == finite.numel() - 1
    assert not total[0, 3].isfinite()
    tolerance = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
    torch.testing.assert_close(total[finite], want[finite], rtol=tolerance, atol=tolerance)


def unquantized_experts(**changes: Any) -> SimpleNamespace:
    """Return unquantized experts with the attributes that the plugin reads."""
    ranks = SimpleNamespace(use_ep=True, ep_size=WORLD, dp_size=WORLD, sp_size=1)
    quant = SimpleNamespace(quant_dtype=None, per_act_token_quant=False, block_shape=None)
    moe = SimpleNamespace(moe_parallel_config=ranks, is_lora_enabled=False, device="cpu")
    experts = SimpleNamespace(moe_config=moe, quant_config=quant, expects_unquantized_inputs=False)
    for namespace in (ranks, quant, moe, experts):
        vars(namespace).update(
            {name: changes[name] for name in vars(namespace).keys() & changes.keys()}
        )
    return experts


FP8 = torch.float8_e4m3fn
#: Tokens per rank, number of experts, options.
EXCHANGES: dict[str, tuple[list[int], int, dict[str, Any]]] = {
    "uneven": ([1, 4], 5, {}),
    "a rank without tokens": ([0, 3], 4, {}),
    "one expert": ([2, 3], 1, {"padding": 2}),
    "padding": ([3, 4], 5, {"padding": 2}),
    "weights of the input": ([3, 2], 3, {"k": 1}),
    "rows of fp8": ([3, 2], 3, {"quant_dtype": FP8, "per_act_token_quant": True}),
    "blocks of fp8": ([3, 2], 3, {"quant_dtype": FP8, "block_shape": [128, 128]}),
    "experts quantise": ([3, 2], 3, {"quant_dtype": "nvfp4", "expects_unquantized_inputs": True}),
}


@on_ranks(WORLD)
def test_tokens_of_data_parallel_ranks() -> None:
    """Expert e returns (e + 1) * min(x, 4), as [rows, hidden] or [rows, 1, hidden]. Rows without a
    token contain garbage. The exchange returns the weighted sum of each token."""
    rank = dist.get_rank()
    with installed(), new_group():
        parts: Any = importlib.import_module(PARTS)
        parts.replace_exchange()
        make = parts.all2all_utils.make_moe_prepare_and_finalize_naive_dp_ep
        for name, (sizes, num_experts, options) in EXCHANGES.items():
            experts, k, on_input = (
                unquantized_experts(**options),
                options.get("k", 3),
                "k" in options,
            )
            exchange = make(use_monolithic=False, num_dispatchers=WORLD)
            exchange.post_init_setup(experts)
            draw = torch.Generator().manual_seed(rank)
            x = torch.randint(-4, 5, (sizes[rank], 256), generator=draw).bfloat16()
            ids = torch.randint(0, num_experts, (sizes[rank], k), generator=draw).int()
            weights = torch.randint(1, 4, ids.shape, generator=draw).float()
            ids[len(ids) - options.get("padding", 0) :] = -1
            tokens.sizes = sizes
            num_local = tpkernels.shard_sizes(num_experts, WORLD)
            expert_map = torch.full((num_experts,), -1)
            expert_map[sum(num_local[:rank]) :][: num_local[rank]] = torch.arange(num_local[rank])
            args = num_experts, expert_map, on_input, experts.quant_config
            defer = experts.expects_unquantized_inputs
            rows, scales, _, row_ids, row_weights = exchange.prepare(x, weights, ids, *args, defer)
            assert (scales is None) == (rows.dtype == torch.bfloat16) != ("fp8" in name), name
            if scales is not None:
                blocks = rows.float().unflatten(1, (scales.shape[1], -1))
                rows = (blocks * scales.unsqueeze(2)).flatten(1)
            is_local = expert_map[row_ids.long()] >= 0
            assert (
                num_local[rank] == num_experts or is_local.sum() == exchange._handle.counts.sum()
            ), name
            factor = row_ids.where(is_local, torch.nan) + 1
            product = (rows.float().clamp(max=4) * factor * row_weights).bfloat16()
            on_x, on_y = (weights, 1.0) if on_input else (1.0, weights)
            factors = (ids + 1) * on_y  # 0 for padding
            want = (x * on_x).clamp(max=4) * factors.sum(1, keepdim=True)
            tolerance = 0.0 if scales is None else 0.07
            for result in (product, product.unsqueeze(1)):
                output = torch.full_like(x, torch.nan)
                exchange.finalize(output, result, row_weights, row_ids, on_input, None)
                torch.testing.assert_close(output, want.bfloat16(), rtol=tolerance, atol=tolerance)


UNSUPPORTED: dict[str, dict[str, Any]] = {
    "the experts are tensor-parallel": {"use_ep": False},
    "the ranks of an engine hold the same tokens": {"ep_size": 2 * WORLD},
    "LoRA and elastic": {"is_lora_enabled": True},
    "activations of nvfp4 are supported only as fp8": {"quant_dtype": "nvfp4"},
    f"activations of {FP8} are supported only as fp8 with scales per row": {"quant_dtype": FP8},
    "pass --enforce-eager": {"mode": 3},
    "CUDA graphs need algorithm 'direct', which is not qualified": {"cudagraph_mode": 1},
    "the ranks do not share memory": {},
    "its experts do the routing": {"monolithic": True},
}


@on_ranks(WORLD)
def test_unsupported_exchanges_stay_in_vllm() -> None:
    """The log gives the reason."""
    saved = dict(vars(config.compilation_config))
    for reason, changes in UNSUPPORTED.items():
        settings = {name: changes.get(name, saved[name]) for name in saved}
        vars(config.compilation_config).update(settings)
        log: list[str] = []
        with installed(), new_group(), nullcontext() if changes else separate_hosts():
            parts: Any = importlib.import_module(PARTS)
            parts.report = log.append
            parts.replace_exchange()
            make = parts.all2all_utils.make_moe_prepare_and_finalize_naive_dp_ep
            exchange = make("monolithic" in changes)
            if exchange is not None:
                exchange.post_init_setup(unquantized_experts(**changes))
                for method, collective in (
                    ("prepare", "all_gatherv"),
                    ("finalize", "reduce_scatterv"),
                ):
                    with pytest.raises(NotImplementedError, match=collective):
                        getattr(exchange, method)(*[None] * 6, None, None)
        assert len(log) == 1 and reason in log[0], (reason, log)
    vars(config.compilation_config).update(saved)


def test_the_experts_op_in_a_graph() -> None:
    stacks = [tpkernels.pack(torch.randn(shape)) for shape in ((2, 8, 12), (2, 6, 8))]
    ids = torch.tensor([[0, -1], [1, 0]])
    arguments = (torch.randn(2, 8), ids, torch.rand(2, 2), *stacks, None, None, "silu")
    op = torch.ops.tpkernels._local_experts.default
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))
    with pytest.raises(
        ValueError, match="topk_ids contains expert 2, which is out of range; expected 0 to 1"
    ):
        op(arguments[0], ids.where(ids != 1, 2), *arguments[2:])
