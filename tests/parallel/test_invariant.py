"""``numerics="invariant"`` of `tpkernels.parallelize`: the logits of a token are bitwise identical
on any number of ranks, in any batch, with left padding, in chunks of the prompt, in decoding, and
in continuous batching. The reference is a model on one rank that runs the whole prompt. Negative
controls show that the comparison fails without each part.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel

import tpkernels
from tests.support import hf_models
from tests.support.ranked import find_unexpected_messages, fresh_group, on_ranks
from tests.support.tiers import sweep, thorough
from tpkernels.parallel import decoder, invariant

transformers = pytest.importorskip("transformers")

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
VOCAB, TOKENS, PREFIX = 101, 70, 62  # decoding crosses a block of 64 keys
LENGTHS = [TOKENS, 3, 17, 40, 64, 65, 1, 68]  # of a batch
#: 108 and 200 are no multiples of a vector, and 9 heads in 3 groups are uneven on 2 and 5 ranks.
SIZES = dict(
    hidden_size=108,
    head_dim=8,
    intermediate_size=200,
    vocab_size=VOCAB,
    max_position_embeddings=128,
)
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": dict(
        attention="eager",
        sliding_window=16,
        attn_logit_softcapping=20.0,
        final_logit_softcapping=30.0,
        query_pre_attn_scalar=4,
    ),
    "mixtral": dict(num_local_experts=5, num_experts_per_tok=2),
    "qwen3": {},
    "phi3": {},  # the attention is not split
    "glm4_moe": dict(  # casts the weight of the router to float32
        n_routed_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=1,
    ),
    "qwen2_moe": dict(  # only the mask has the sliding window
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=40,
        use_sliding_window=True,
        sliding_window=16,
        max_window_layers=1,
    ),
}
#: Dtype of the weights, and ``pack``.
WEIGHTS: list[tuple[torch.dtype, bool | str]] = [
    (F32, False),
    (BF16, False),
    (F16, False),
    (BF16, "int8"),
]


def make(model_type: str, dtype: torch.dtype = F32) -> Any:
    return hf_models.make(model_type, **SIZES | MODELS[model_type]).to(dtype).eval()


def make_own_mesh() -> DeviceMesh:
    """Create a mesh that consists of this rank. Collective."""
    group, _ = dist.new_subgroups(1)
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))


def parallelize(model: Any, mesh: DeviceMesh, **options: Any) -> Any:
    """Parallelize a copy of a model."""
    return tpkernels.parallelize(copy.deepcopy(model), mesh, **{"numerics": "invariant", **options})


def draw_ids(rows: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(1, VOCAB, (rows, TOKENS), generator=generator)


def run_prompt(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits [TOKENS, vocabulary] of a forward of all tokens."""
    with torch.no_grad():
        logits: torch.Tensor = model(ids).logits[0]
    return logits


def run_chunks(model: Any, ids: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """Return the logits of one forward per chunk of the sequence. ``ends`` of the chunks."""
    cache, parts = None, []
    with torch.no_grad():
        for begin, end in itertools.pairwise([0, *ends]):
            out = model(ids[:, begin:end], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            parts.append(out.logits[0])
    return torch.cat(parts)


def run_batch(model: Any, ids: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the logits of the entries of a left-padded batch. Even entries are prefixes of
    ``ids``."""
    batch = draw_ids(len(LENGTHS)).flip(1)
    mask = torch.zeros_like(batch)
    for i, length in enumerate(LENGTHS):
        mask[i, TOKENS - length :] = 1
        if i % 2 == 0:
            batch[i, TOKENS - length :] = ids[0, :length]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(batch * mask, attention_mask=mask, position_ids=positions).logits
    for i, length in [*enumerate(LENGTHS)][::2]:
        yield logits[i, TOKENS - length :]


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def decode(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return run_chunks(model, ids, [*range(PREFIX, TOKENS + 1)])


def find_differences(results: dict[str, torch.Tensor], expected: torch.Tensor) -> list[str]:
    """Compare logits by kind of call with those of the prompt."""
    return [
        f"{name}: {int((logits != expected[: len(logits)]).sum())} of {logits.numel()} differ"
        for name, logits in results.items()
        if not torch.equal(logits, expected[: len(logits)])
    ]


def find_variations(model: Any, ids: torch.Tensor, expected: torch.Tensor) -> list[str]:
    """Compare the logits of ``ids`` in all kinds of calls with the expected logits."""
    results = {
        "prompt": run_prompt(model, ids),
        "decoding": decode(model, ids),
        "chunks of 7": run_chunks(model, ids, [*range(7, TOKENS + 1, 7)]),
        "chunks of 64": run_chunks(model, ids, [64, TOKENS]),
    }
    for threads in (1, 3):  # parts of 3 threads do not end at the end of a vector
        with torch_threads(threads):
            for logits in run_batch(model, ids):
                results[f"batch entry of {len(logits)}, {threads} threads"] = logits
    return find_differences(results, expected)


QUICK_CASES = [("llama", *WEIGHTS[0], 3), ("gemma2", *WEIGHTS[1], 2)]
THOROUGH_CASES = [("mixtral", *WEIGHTS[3], 5), ("qwen2_moe", *WEIGHTS[2], 3)]
CASES = [
    *QUICK_CASES,
    *(thorough(*case) for case in THOROUGH_CASES),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            (name, *weight, world) for world in (2, 3, 5) for name in MODELS for weight in WEIGHTS
        )
        if case not in QUICK_CASES + THOROUGH_CASES
    ),
]


@pytest.mark.parametrize(("model_type", "dtype", "pack", "world"), CASES)
@on_ranks(timeout=240)
def test_logits_depend_only_on_the_preceding_tokens(
    model_type: str, dtype: torch.dtype, pack: bool | str
) -> list[str]:
    """Prompts, chunks, decoding, batches and threads, also with joined norms. These round
    differently from separate norms, so they have their own reference."""
    model, ids, failures = make(model_type, dtype), draw_ids(), []
    alone = parallelize(model, make_own_mesh(), pack=pack)
    parallel = parallelize(model, hf_models.make_world_mesh(), pack=pack)
    for joined in [False, True][: 1 + (model_type in decoder.JOINABLE_MODEL_TYPES)]:
        if joined:
            decoder.join_norms(alone)
            decoder.join_norms(parallel)
        expected = run_prompt(alone, ids)
        assert expected.isfinite().all() and expected.std() > 0.1
        failures += [f"{joined=} {text}" for text in find_variations(parallel, ids, expected)]
    return failures


@pytest.mark.parametrize(
    ("model_type", "world"), sweep([("gemma2", 2), ("llama", 3), ("qwen2_moe", 5)], num_thorough=1)
)
@on_ranks()
def test_generated_logits_equal_those_of_a_prompt(model_type: str) -> None:
    """Generate from a batch of padded prompts. The logits of each step equal the logits of one
    forward of the prompt and the generated tokens on one rank."""
    model = make(model_type, BF16)
    alone, parallel = (
        parallelize(model, mesh) for mesh in (make_own_mesh(), hf_models.make_world_mesh())
    )
    lengths, ids = (20, 5, 13), draw_ids(3)[:, :20]
    mask = torch.tensor([[0] * (20 - n) + [1] * n for n in lengths])
    out = parallel.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=6,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    got = torch.stack(out.logits, 1)
    for i, length in enumerate(lengths):
        expected = run_prompt(alone, out.sequences[i : i + 1, 20 - length :])
        assert torch.equal(got[i], expected[length - 1 : -1].float()), (i, length)


# Continuous batching in transformers.


def generate_continuously(model: Any, prompts: list[list[int]]) -> list[tuple[list[int], Any]]:
    """Return the tokens and their log-probabilities."""
    outputs = model.generate_batch(
        prompts,
        transformers.GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=-1),
        transformers.ContinuousBatchingConfig(
            num_blocks=48,
            page_size=64,
            max_batch_tokens=32,
            return_logprobs=True,
            disable_nccl_graph_mixing=False,
        ),
    )
    errors = {name: output.error for name, output in outputs.items() if output.error}
    assert not errors, errors
    return [(output.generated_tokens, output.logprobs) for output in outputs.values()]


@pytest.mark.parametrize(
    ("model_type", "world"),
    sweep([("gemma2", 3), ("llama", 2), ("qwen2_moe", 2), ("llama", 5)], num_thorough=1),
)
@on_ranks(timeout=240)
def test_other_requests_do_not_change_a_request(model_type: str) -> None:
    """A request alone on one rank, and with 8 others on all ranks. The prompts exceed the tokens of
    a batch, so they are split at different places. The log-probabilities equal those of one forward
    of the prompt and the generated tokens."""
    model = make(model_type)
    alone, parallel = (
        parallelize(model, mesh) for mesh in (make_own_mesh(), hf_models.make_world_mesh())
    )
    prompts = [
        row[:length].tolist() for row, length in zip(draw_ids(9), (40, *LENGTHS), strict=True)
    ]
    (expected,) = generate_continuously(alone, prompts[:1])
    assert len(expected[1]) == 5 and expected[1][0] < 0
    results = generate_continuously(parallel, prompts)
    assert len(results) == 9 and results[0] == expected, (results[0], expected)
    for prompt, (tokens, log_probabilities) in zip(prompts, results, strict=True):
        logits = run_prompt(alone, torch.tensor([prompt + tokens]))[len(prompt) - 1 : -1]
        want = logits.softmax(-1).log()[torch.arange(5), tokens]
        assert torch.equal(torch.tensor(log_probabilities), want), len(prompt)


# Negative controls: without one of the parts, the comparison finds differences.


def use_ordered_sums(model: Any) -> Any:
    return parallelize(model, hf_models.make_world_mesh(), numerics="ordered", pack=True)


def use_sdpa(model: Any) -> Any:
    parallel = parallelize(model, hf_models.make_world_mesh())
    parallel.set_attn_implementation("sdpa")
    parallel.base_model._forward_pre_hooks.clear()  # they refuse this attention
    return parallel


def use_partial_vectors(model: Any) -> Any:
    parallel = parallelize(model, hf_models.make_world_mesh())
    for module in parallel.modules():
        if isinstance(module, invariant.PaddedActivation):
            module.forward = module.activation.forward  # type: ignore[method-assign]
    return parallel


#: Change of the model, and calls that it must change.
CONTROLS: list[tuple[Callable[[Any], Any], set[str]]] = [
    (use_ordered_sums, {"prompt"}),
    (use_sdpa, {"decoding"}),
    (use_partial_vectors, {"decoding"}),
]


@on_ranks(3)
def test_the_comparison_detects_each_missing_part() -> None:
    model, ids = make("llama"), draw_ids()
    expected = run_prompt(parallelize(model, make_own_mesh()), ids)
    for change, calls in CONTROLS:
        if change is use_partial_vectors and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
            continue  # torch uses no vectors
        parallel = change(model)
        results = {"prompt": run_prompt(parallel, ids), "decoding": decode(parallel, ids)}
        found = {text.partition(":")[0] for text in find_differences(results, expected)}
        assert calls <= found, (change.__name__, found)


@on_ranks(2)
def test_the_comparison_detects_plain_routers_and_windows() -> None:
    """Without the router mode, and with a different sliding window, logits differ."""
    ids, mesh, own_mesh = draw_ids(), hf_models.make_world_mesh(), make_own_mesh()
    mixtral = make("mixtral")
    expected = run_prompt(parallelize(mixtral, own_mesh), ids)
    with mock.patch.object(invariant, "make_router_invariant", lambda parent: None):
        parallel = parallelize(mixtral, mesh)
    assert find_differences({"decoding": decode(parallel, ids)}, expected)
    gemma = make("gemma2", BF16)
    expected = run_prompt(parallelize(gemma, own_mesh), ids)
    gemma.config.sliding_window = 15
    for layer in gemma.model.layers:
        layer.self_attn.sliding_window = layer.self_attn.sliding_window and 15
    assert find_differences({"prompt": run_prompt(parallelize(gemma, mesh), ids)}, expected)


def find_dependence_on_position(function: Callable[[torch.Tensor], torch.Tensor]) -> list[str]:
    """Apply a function to rows in different orders and on different numbers of threads."""
    failures = []
    for width, rows in itertools.product((8, 72, 128, 200), range(521, 551, 6)):
        x = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)) * 3
        want = function(x)
        for threads in (1, 3):
            with torch_threads(threads):
                same = torch.equal(function(x), want)
                same &= torch.equal(function(x.flip(0)).flip(0), want)
                same &= torch.equal(function(x[5:6]), want[5:6])
            failures += [] if same else [f"[{rows}, {width}], {threads} threads"]
    return failures


@pytest.mark.parametrize("name", ["silu", "gelu", "sigmoid", "softplus"])
def test_padded_activations_do_not_depend_on_the_position(name: str) -> None:
    """3 threads, and rows that do not fill vectors. Without padding, silu differs."""
    function = getattr(torch.nn.functional, name)
    assert not find_dependence_on_position(partial(invariant.apply_padded, function))
    if name == "silu" and torch.backends.cpu.get_cpu_capability() != "DEFAULT":
        assert any("3 threads" in text for text in find_dependence_on_position(function))


# Copies of models.


@pytest.mark.parametrize("model_type", ["mixtral", "glm4_moe"])
@on_ranks(2)
def test_copies_and_new_router_weights(model_type: str) -> None:
    """Copy and pickle a model before and after a call, then load other weights. Routers use the new
    weights, and copies keep their own. Later calls do not pack the weights again."""
    mesh, ids = hf_models.make_world_mesh(), draw_ids()
    models = [make(model_type, BF16) for _ in range(2)]
    with torch.no_grad():
        for name, weight in models[1].named_parameters():
            if "mlp.gate." in name:
                weight.copy_(weight.flip(0))
    first, second = (run_prompt(parallelize(model, make_own_mesh()), ids) for model in models)
    assert not torch.equal(first, second)
    parallel = parallelize(models[0], mesh)
    candidates = {"copied before a call": copy.deepcopy(parallel)}
    candidates["pickled before a call"] = pickle.loads(pickle.dumps(parallel))
    assert torch.equal(run_prompt(parallel, ids), first)
    with mock.patch.object(invariant, "pack", None):
        assert torch.equal(run_prompt(parallel, ids), first)
    candidates["copied after a call"] = copy.deepcopy(parallel)
    candidates["pickled after a call"] = pickle.loads(pickle.dumps(parallel))
    weights = {
        name: weight for name, weight in models[1].state_dict().items() if "mlp.gate." in name
    }
    parallel.load_state_dict(weights, strict=False)
    assert torch.equal(run_prompt(parallel, ids), second), "the old router weights are used"
    for name, weight in models[0].named_parameters():
        if "mlp.gate." in name:
            parallel.get_parameter(name).data = weight.detach().clone()
    assert torch.equal(run_prompt(parallel, ids), first), "the replaced router weights are used"
    for name, candidate in candidates.items():
        assert torch.equal(run_prompt(candidate, ids), first), name
        candidate.load_state_dict(weights, strict=False)
        assert torch.equal(run_prompt(candidate, ids), second), name


# Refusals.


@on_ranks(2)
def test_options_and_models_that_cannot_be_invariant_are_refused() -> list[str]:
    """Each message names the option or module. The model stays unchanged."""
    mesh = hf_models.make_world_mesh()

    def attempt(model: Any, **options: Any) -> Callable[[], None]:
        return hf_models.attempt(model, mesh, numerics="invariant", **options)

    extra = make("llama")
    extra.model.layers[1].adapter = nn.Linear(108, 4)
    scaled = make("llama")
    scaled.model.layers[0].scale = nn.Parameter(torch.ones(1))
    no_module = make("llama")
    del no_module.model.layers[0].mlp.act_fn
    no_module.model.layers[0].mlp.act_fn = torch.nn.functional.silu
    old_attention, dynamic = make("llama"), make("llama")
    dynamic.model.rotary_emb.rope_type = "dynamic"
    mixed = make("llama")
    mixed.model.norm.double()
    attempts = {
        "does not support sequence_parallel=True; leave it out": attempt(
            make("llama"), sequence_parallel=True
        ),
        "does not support sequence_parallel='prefill'": attempt(
            make("llama"), sequence_parallel="prefill"
        ),
        "and ffn_only=True does not create them; leave it out": attempt(
            make("llama"), ffn_only=True
        ),
        "and a plan of torch styles does not create them; leave it out": attempt(
            make("llama"), plan={"model.layers.0.mlp.up_proj": ColwiseParallel()}
        ),
        "q_proj.weight is float64, which cannot be packed": attempt(make("llama", torch.float64)),
        "model.norm: it has float64 weights": attempt(mixed),
        "model.layers.1.adapter: a Linear may round differently": attempt(extra),
        "model.layers.0: a LlamaDecoderLayer may round differently": attempt(scaled),
        "a.b: its head size 11 is odd": lambda: invariant.check_block("a.b", nn.Module(), [], 11),
        "model.layers.0.mlp: its activation function is not a module": attempt(no_module),
        "model.rotary_emb: its frequencies depend on the longest": attempt(dynamic),
        'numerics is \'exact\'; expected "ordered" or "invariant"': lambda: parallelize(
            make("llama"), mesh, numerics="exact"
        ),
    }
    failures = find_unexpected_messages(attempts, (NotImplementedError, ValueError))
    with mock.patch.object(type(old_attention), "_supports_attention_backend", False):
        failures += find_unexpected_messages(
            {"LlamaForCausalLM: its attention does not use": attempt(old_attention)}
        )
    return failures


@on_ranks(2)
def test_calls_that_cannot_be_invariant_are_refused() -> list[str]:
    """Gradients, padding on the right, packed sequences and custom masks."""
    model = parallelize(make("llama"), hf_models.make_world_mesh())
    ids = draw_ids(2)[:, :8]
    right_padding = torch.ones_like(ids)
    right_padding[1, 5:] = 0
    packed = torch.arange(4).repeat(1, 2)
    full = torch.ones(2, 1, 8, 8, dtype=torch.bool)
    failures = find_unexpected_messages({"no_grad": lambda: model(ids)})
    other_attention = parallelize(make("llama"), hf_models.make_world_mesh())
    other_attention.set_attn_implementation("sdpa")
    with torch.no_grad():
        return failures + find_unexpected_messages(
            {
                "does not support the attention 'sdpa'": lambda: other_attention(ids),
                "padding after a token; pad on the left": lambda: model(
                    ids, attention_mask=right_padding
                ),
                "masks that are not causal": lambda: model(
                    ids[:1], position_ids=packed, use_cache=False
                ),
                "does not support masks that are not": lambda: model(ids, attention_mask=full),
            },
            NotImplementedError,
        )


@on_ranks(2)
def test_reductions_that_cannot_be_invariant_are_refused() -> list[str]:
    """On a group with invariant numerics, plain weights, scattered sums and K that does not match
    are refused. Calls with packed weights give the result of explicit ``k_sizes``."""
    with fresh_group(numerics="invariant") as group, torch.no_grad():
        x, plain = torch.ones(4, 128), torch.ones(128, 8)
        w = tpkernels.pack(plain)
        low = x[:, :126].bfloat16(), tpkernels.pack(plain[:126].bfloat16())
        int8 = tpkernels.pack(plain, torch.int8)
        scattered = tpkernels.nn.RowParallelLinear(256, 8, group, k_unit=64, sequence_parallel=True)
        scattered.pack_()

        def call(x: Any = x, w: Any = w, **options: Any) -> Callable[[], Any]:
            return lambda: tpkernels.matmul_all_reduce(x, w, group, **options)

        assert torch.equal(call()(), call(k_sizes=[128, 128])())
        return find_unexpected_messages(
            {
                "GEMMs with plain weights round differently": call(w=plain),
                "k_unit) does not support sequence parallelism": lambda: scattered(x),
                "matmul_reduce_scatter with numerics 'invariant' is not supported": (
                    lambda: tpkernels.matmul_reduce_scatter(x, w, group)
                ),
                "k_unit must divide all sizes except the last": call(k_sizes=[128, 128], k_unit=96),
                f"but x of rank {dist.get_rank()} has K=128": call(k_sizes=[64, 64]),
                "k_unit is 0": call(k_sizes=[128, 128], k_unit=0),
                "it must be a multiple of 2": call(*low, k_sizes=[126, 126], k_unit=63),
                "k_sizes has 3 entries": call(k_sizes=[128, 128, 128]),
                "it must be a multiple of 128": call(w=int8, k_sizes=[128, 128], k_unit=8),
                "but wire_dtype is bfloat16": call(
                    *low, k_sizes=[126, 126], k_unit=2, wire_dtype=BF16
                ),
                "numerics is 'invariant'; leave out the algorithm": call(algorithm="ring"),
                "'ring' of matmul_all_reduce sums in rank order": call(
                    k_sizes=[128, 128], algorithm="ring"
                ),
            }
        )
