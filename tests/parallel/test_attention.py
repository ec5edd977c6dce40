"""Attention of parallelized transformers models on CPUs: the masks of
`tpkernels.parallel.attention`, and logits that match the original attention of transformers in all
kinds of calls.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import tpkernels
from tests.support import hf_models
from tests.support.nn_reference import find_mismatch
from tpkernels.parallel import attention

transformers = pytest.importorskip("transformers")
masking_utils = pytest.importorskip("transformers.masking_utils")

TOKENS, WINDOW = 24, 8
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": dict(
        attention="eager",
        sliding_window=WINDOW,
        attn_logit_softcapping=2.0,
        query_pre_attn_scalar=4,
    ),
    # With attention sinks.
    "gpt_oss": dict(
        attention="eager", sliding_window=WINDOW, num_local_experts=3, num_experts_per_tok=2
    ),
    # Only the mask has the sliding window.
    "phimoe": dict(sliding_window=WINDOW, num_local_experts=3),
    "qwen2_moe": dict(
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=10,
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=1,
    ),
    # The mask ignores the window of the configuration.
    "olmoe": dict(sliding_window=WINDOW, num_experts=5, num_experts_per_tok=2),
}


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of this process, which uses one thread as the ranks do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield hf_models.make_world_mesh()
    dist.destroy_process_group()
    torch.set_num_threads(threads)


# Masks.


def make_rows(queries: int, keys: int, begin: int = 0, **options: Any) -> Any:
    """Return `make_mask` of 2 sequences as a list, or None. ``begin``: position of the first
    query."""
    with torch.no_grad():
        mask = attention.make_mask(2, queries, keys, q_offset=begin, **causal(**options))
    if mask is None:
        return None
    assert mask.dtype == torch.int64 and mask.shape[1:] == (1, 1, 7)
    return [tuple(row) for row in mask.flatten(0, 2).tolist()]


def causal(window: int = 0, padding: list[int] | None = None, **options: Any) -> dict[str, Any]:
    """Return arguments of a mask function. ``padding``: number of padding tokens on the left."""
    if window:
        options["mask_function"] = masking_utils.sliding_window_causal_mask_function(window)
        options["local_size"] = window
    options.setdefault("mask_function", masking_utils.causal_mask_function)
    if padding is not None:
        options["attention_mask"] = torch.arange(12) >= torch.tensor(padding)[:, None]
    return options


def test_masks_without_padding() -> None:
    """No mask for a prompt, decoding, and a window that contains all keys."""
    assert make_rows(6, 6) is None
    assert make_rows(1, 6, begin=5) is None
    assert make_rows(3, 6, begin=3) is None
    assert make_rows(3, 6, begin=3, window=6) is None
    assert make_rows(6, 6, padding=[0, 0]) is None
    assert make_rows(6, 6, window=4) == [(0, 0, 6, 0, 0, 0, 4), (1, 0, 6, 0, 0, 0, 4)]


def test_masks_with_padding_on_the_left() -> None:
    assert make_rows(6, 6, padding=[0, 4]) == [(0, 0, 6, 0, 0, 0, 0), (1, 4, 2, 4, 4, 0, 0)]
    assert make_rows(1, 8, begin=7, padding=[0, 4]) == [
        (0, 0, 1, 0, 7, 0, 0),
        (1, 0, 1, 4, 7, 0, 0),
    ]
    # The first chunk of the second sequence is padding.
    assert make_rows(3, 3, padding=[1, 5])[1] == (1, 3, 0, 3, 3, 0, 0)
    assert make_rows(3, 6, begin=3, padding=[1, 5])[1] == (1, 2, 1, 5, 5, 0, 0)


def test_masks_of_caches_that_drop_or_reserve_keys() -> None:
    """A sliding-window cache holds the keys from ``kv_offset`` on. A static cache also holds keys
    that are not yet computed."""
    assert make_rows(1, 4, begin=9, window=4, kv_offset=6) == [
        (0, 0, 1, 0, 3, 6, 4),
        (1, 0, 1, 0, 3, 6, 4),
    ]
    assert make_rows(1, 4, begin=9, window=4, kv_offset=6, padding=[2, 8]) == [
        (0, 0, 1, 0, 3, 4, 4),
        (1, 0, 1, 2, 3, 0, 4),
    ]
    assert make_rows(2, 12, begin=3) == [(0, 0, 2, 0, 3, 0, 0), (1, 0, 2, 0, 3, 0, 0)]
    assert make_rows(6, 12) == [(0, 0, 6, 0, 0, 0, 0), (1, 0, 6, 0, 0, 0, 0)]


def other_masks() -> dict[str, dict[str, Any]]:
    """Return arguments that the kernel does not support."""
    functions = masking_utils
    packed = torch.tensor([[0, 0, 0, 1, 1, 1]] * 2)
    return {
        "right padding": causal(attention_mask=torch.tensor([[1] * 6, [1] * 4 + [0] * 2]).bool()),
        "packed": causal(
            mask_function=functions.and_masks(
                functions.causal_mask_function, functions.packed_sequence_mask_function(packed)
            )
        ),
        "bidirectional": causal(mask_function=functions.bidirectional_mask_function),
        "chunked": causal(
            mask_function=functions.chunked_causal_mask_function(2, torch.zeros(2, dtype=torch.int))
        ),
        "both ways": causal(
            mask_function=functions.or_masks(
                functions.causal_mask_function, functions.sliding_window_overlay(3)
            )
        ),
    }


@pytest.mark.parametrize("name", other_masks())
def test_other_masks_are_those_of_sdpa(name: str) -> None:
    arguments = {"allow_is_causal_skip": False, "device": "cpu", **other_masks()[name]}
    with torch.no_grad():
        mask: Any = attention.make_mask(2, 6, 6, **arguments)
    want = masking_utils.sdpa_mask(2, 6, 6, **arguments)
    assert mask.shape[2:] == (6, 6) and torch.equal(mask, want)


def test_masks_for_gradients_are_those_of_sdpa() -> None:
    """A static cache and several queries after the first need a mask, because SDPA without a mask
    would assume that the first query belongs to the first key."""
    with torch.enable_grad():
        assert attention.make_mask(2, 6, 6, device="cpu", **causal()) is None
        for begin, keys in ((3, 9), (0, 12)):
            mask: Any = attention.make_mask(2, 6, keys, q_offset=begin, device="cpu", **causal())
            own = begin + torch.arange(6)[:, None]
            assert torch.equal(mask, (torch.arange(keys) <= own).expand(2, 1, 6, keys))


# Logits.


def run_chunks(model: Any, ids: torch.Tensor, ends: list[int], **inputs: Any) -> torch.Tensor:
    cache, parts = None, []
    for begin, end in itertools.pairwise([0, *ends]):
        masks = {name: mask[:, :end] for name, mask in inputs.items()}
        out = model(ids[:, begin:end], past_key_values=cache, use_cache=True, **masks)
        cache = out.past_key_values
        parts.append(out.logits)
    return torch.cat(parts, 1)


def run_static(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Run a prompt and a second chunk with a static cache."""
    cache = transformers.StaticCache(config=model.config, max_cache_len=64)
    parts = [
        model(chunk, past_key_values=cache, use_cache=True).logits for chunk in ids.split(15, 1)
    ]
    return torch.cat(parts, 1)


def make_calls() -> dict[str, Callable[[Any], torch.Tensor]]:
    ids = torch.randint(1, hf_models.VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    left = torch.ones_like(ids)
    left[1, :6] = 0
    packed = torch.arange(TOKENS // 2).repeat(1, 2)
    ends = [13, 14, 15, TOKENS]
    return {
        "prompt": lambda m: m(ids).logits,
        "chunks": lambda m: run_chunks(m, ids, ends),
        "static cache": lambda m: run_static(m, ids),
        "left padding": lambda m: m(ids, attention_mask=left).logits[:, 6:],
        "left padding in chunks": lambda m: run_chunks(m, ids, ends, attention_mask=left)[:, 6:],
        "right padding": lambda m: m(ids, attention_mask=left.flip(1)).logits[:, :-6],
        "packed": lambda m: m(ids[:1], position_ids=packed, use_cache=False).logits,
    }


def test_generation_with_a_static_cache(mesh: DeviceMesh) -> None:
    """transformers creates the masks before the call, and passes them to the model. Tokens equal
    those of a dynamic cache."""
    model = tpkernels.parallelize(hf_models.make("llama").eval(), mesh, sequence_parallel=False)
    ids, left = torch.arange(1, 13).view(2, 6), torch.ones(2, 6, dtype=torch.long)
    left[1, :2] = 0
    options = dict(attention_mask=left, max_new_tokens=8, do_sample=False, disable_compile=True)
    dynamic, static = (
        model.generate(ids, **options, cache_implementation=kind) for kind in (None, "static")
    )
    assert torch.equal(dynamic, static)


@pytest.mark.parametrize("model_type", MODELS)
def test_logits_match_the_original_attention(mesh: DeviceMesh, model_type: str) -> None:
    """Prompts, chunks, caches, padding and packed sequences. Both implementations round in fp32,
    but in a different order. So the error against float64 may be 4 times the error of the original,
    which is about 1e-6. An error of a mask or of the softmax changes some logits by more than
    1 %."""
    model = hf_models.make(model_type, **MODELS[model_type]).eval()
    exact = copy.deepcopy(model).double()
    parallel = tpkernels.parallelize(copy.deepcopy(model), mesh, sequence_parallel=False)
    calls = make_calls()
    if "attention" in MODELS[model_type]:
        assert parallel.config._attn_implementation == "eager"
        parallel = as_invariant(parallel)
        # SDPA supports neither soft caps nor sinks.
        del calls["right padding"], calls["packed"]
    else:
        assert parallel.config._attn_implementation == attention.ATTENTION
    failures = []
    with torch.no_grad():
        for name, call in calls.items():
            with hf_models.UpcastToFloat64():
                want = call(exact)
            error = hf_models.relative_error(call(parallel), want, want)
            original = hf_models.relative_error(call(model), want, want)
            if not error <= 4 * original < 1e-4:
                failures.append(f"{name} is off by {error:.3g}, the original by {original:.3g}")
    assert not failures, failures


def as_invariant(model: Any) -> Any:
    """Use the attention of invariant models, without other changes."""
    attention.use(model, invariant=True)
    assert model.config._attn_implementation == attention.INVARIANT_ATTENTION
    return model


def test_float64_and_dropout_fall_back_to_sdpa(mesh: DeviceMesh) -> None:
    """Without gradients. The masks of the kernel are converted to masks of SDPA. In float64 the
    logits are those of the original up to rounding. The kernel must not be called."""
    for model_type in ("llama", "phimoe"):
        model = hf_models.make(model_type, **MODELS[model_type]).double().eval()
        parallel = tpkernels.parallelize(copy.deepcopy(model), mesh, sequence_parallel=False)
        with torch.no_grad(), mock.patch.object(attention, "attention", None):
            for name, call in make_calls().items():
                want = call(model)
                error = hf_models.relative_error(call(parallel), want, want)
                assert error < 1e-12, (model_type, name, error)
    model = hf_models.make("llama", attention_dropout=1e-9)  # in training mode
    parallel = tpkernels.parallelize(copy.deepcopy(model), mesh, sequence_parallel=False)
    with torch.no_grad(), mock.patch.object(attention, "attention", None):
        for name, call in make_calls().items():
            mismatch = find_mismatch(call(parallel), call(model), 1e-4)
            assert mismatch is None, (name, mismatch)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "phimoe"])
def test_gradients_match_the_original_attention(mesh: DeviceMesh, model_type: str) -> None:
    """Train in fp32 with the default attention, with padding. `test_parallelize` compares gradients
    in float64."""
    model = hf_models.make(model_type, **MODELS[model_type])
    parallel = tpkernels.parallelize(copy.deepcopy(model), mesh, sequence_parallel=False)
    logits, loss, grads = hf_models.run(model, 12)
    got_logits, got_loss, got = hf_models.run(parallel, 12)
    assert find_mismatch(got_logits, logits, 1e-4) is None
    assert find_mismatch(got_loss, loss, 1e-4) is None
    mismatches = {name: find_mismatch(got.get(name), grads[name], 1e-4) for name in grads}
    assert not any(mismatches.values()), mismatches


def test_eager_models_stay_eager(mesh: DeviceMesh) -> None:
    """Models that return attention weights keep their attention. Copies that are changed later do
    not affect the original."""
    model = hf_models.make("llama", attention="eager").eval()
    parallel = tpkernels.parallelize(copy.deepcopy(model), mesh, sequence_parallel=False)
    assert parallel.config._attn_implementation == "eager"
    ids = torch.arange(1, 9).view(1, 8)
    with torch.no_grad():
        want, got = (m(ids, output_attentions=True).attentions for m in (model, parallel))
    assert len(got) == 2 and got[0].shape == (1, 9, 8, 8)
    assert all(find_mismatch(a, b, 1e-5) is None for a, b in zip(got, want, strict=True))


def test_continuous_batching_accepts_the_attention(mesh: DeviceMesh) -> None:
    """`as_sdpa` names the attention "sdpa", also for models that do not support SDPA, and restores
    the name after an error."""
    for model_type in ("llama", "gemma2"):
        model = as_invariant(hf_models.make(model_type, **MODELS[model_type]))
        with pytest.raises(ZeroDivisionError), attention.as_sdpa(model):
            assert model.config._attn_implementation == "sdpa"
            raise ZeroDivisionError
        assert model.config._attn_implementation == attention.INVARIANT_ATTENTION
    eager = hf_models.make("llama", attention="eager")
    with attention.as_sdpa(eager):
        assert eager.config._attn_implementation == "eager"
