"""Attention of transformers models on CPUs, with `tpkernels.ops.attention`.

transformers selects the attention function and the function that creates its mask by the name in
``config._attn_implementation``. `ATTENTION` falls back to SDPA for gradients, dropout, and masks
that are not causal. `INVARIANT_ATTENTION` raises NotImplementedError instead.

The mask of this kernel is an int64 tensor [S, 1, 1, 7]: the argument ``sequences`` of
`tpkernels.ops.attention.attention`, and the sliding window, or 0, as the last column. Some models
pass the window only in the mask. The mask is None if each query sees all keys before it, and the
last key belongs to the last query.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from tpkernels.ops.attention import attention

ATTENTION, INVARIANT_ATTENTION = "tpkernels", "tpkernels_invariant"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def register() -> None:
    """Register the attention in transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for name in (ATTENTION, INVARIANT_ATTENTION):
        AttentionInterface.register(name, forward)
        AttentionMaskInterface.register(name, make_mask)


def use(model: Any, *, invariant: bool) -> None:
    """Use this attention in a transformers model. Without ``invariant``, it only replaces SDPA."""
    if not invariant and model.config._attn_implementation != "sdpa":
        return
    register()
    model.set_attn_implementation(INVARIANT_ATTENTION if invariant else ATTENTION)
    if invariant:
        model.base_model.register_forward_pre_hook(_check_name)


def _check_name(model: Any, args: object) -> None:
    """Forward pre-hook of a model with invariant numerics."""
    if not _is_invariant(model.config):
        raise NotImplementedError(
            'numerics="invariant" does not support the attention '
            f"{model.config._attn_implementation!r}; load the model without invariant numerics"
        )


@contextlib.contextmanager
def as_sdpa(model: Any) -> Iterator[None]:
    """Name the attention of a model "sdpa" within the block, if it is one of this module."""
    name = model.config._attn_implementation
    if name not in (ATTENTION, INVARIANT_ATTENTION):
        yield
        return
    # `set_attn_implementation` rejects "sdpa" for models with soft caps.
    model.config._attn_implementation = "sdpa"
    try:
        yield
    finally:
        model.config._attn_implementation = name


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor | None:
    """Create the mask of the kernel, or of SDPA [batch, 1, queries, keys] if the kernel does not
    support the pattern. Continuous batching ignores the result.

    Args:
        q_offset, kv_offset: positions of the first query and key.
        mask_function: pattern of the mask.
        attention_mask: [batch, positions], False for padding.
        options: further arguments of transformers for mask functions.
    """
    from transformers.masking_utils import sdpa_mask

    uses_sdpa = not _is_invariant(options.get("config")) and (
        torch.is_grad_enabled() or torch.compiler.is_compiling()
    )
    begin = 0 if uses_sdpa else int(q_offset)
    padding = None
    if attention_mask is not None and not uses_sdpa:
        padding = attention_mask[:, : begin + q_length]
        uses_sdpa = padding.shape[1] < begin + q_length or bool(
            (padding[:, 1:] < padding[:, :-1]).any()  # padding after a token
        )
        if padding.all():
            padding = None
    if uses_sdpa or not _is_causal(mask_function):
        if q_length not in (1, kv_length):
            options["allow_is_causal_skip"] = False  # None would mean that q_offset is 0
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **options,
        )
    own_key, window = begin - kv_offset, 0
    if mask_function is not _causal_mask_function():
        window = options.get("local_size") or 0
    is_full = padding is None and kv_offset == 0 and own_key + q_length == kv_length
    if is_full and (not window or kv_length <= window):
        return None
    firsts = [0] * batch_size if padding is None else (~padding).sum(1).tolist()
    rows = []
    for index, first in enumerate(firsts):
        hidden = min(max(0, first - begin), q_length)  # queries that are padding
        first_key, skipped = max(0, first - kv_offset), max(0, kv_offset - first)
        rows.append(
            (index, hidden, q_length - hidden, first_key, own_key + hidden, skipped, window)
        )
    # Four dims: transformers uses such a mask unchanged if it is passed as ``attention_mask``.
    return torch.tensor(rows)[:, None, None]


def _causal_mask_function() -> Callable[..., Any]:
    from transformers.masking_utils import causal_mask_function

    function: Callable[..., Any] = causal_mask_function
    return function


def _is_causal(mask_function: Callable[..., Any] | None) -> bool:
    """Return whether a mask is causal, possibly with a sliding window."""
    from transformers import masking_utils

    causal = _causal_mask_function()
    if mask_function is causal:
        return True
    window = masking_utils.sliding_window_causal_mask_function(1)
    if getattr(mask_function, "__code__", None) is not window.__code__:  # of `and_masks`
        return False
    [cell] = mask_function.__closure__ or [None]  # type: ignore[union-attr]
    overlay, *rest = cell.cell_contents if cell is not None else (None,)
    is_window = (
        getattr(overlay, "__code__", None) is masking_utils.sliding_window_overlay(1).__code__
    )
    return is_window and rest == [causal]


def forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    cache: Any = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function of transformers. See `tpkernels.ops.attention.attention`.

    Args:
        query: [batch, heads, queries, D].
        key, value: [batch, kv_heads, keys, D].
        attention_mask: a result of `make_mask`.
        sliding_window: ignored. The mask or the paged cache has the window: some models pass none,
            or one that their mask ignores.
        s_aux: attention sinks [heads].
        cache: paged cache of continuous batching. Its keys and values are those of all requests.
        options: further arguments of transformers. Continuous batching passes cumulative lengths
            and positions.

    Returns:
        ([batch, queries, heads, D], None).
    """
    is_paged = hasattr(cache, "cache_allocators")
    mask = None if is_paged else attention_mask
    reason = _find_obstacle(module, query, mask, dropout, is_causal, options)
    if reason is not None:
        if is_paged or _is_invariant(getattr(module, "config", None)):
            raise NotImplementedError(
                f"the attention of tpkernels with invariant numerics, or in continuous batching, "
                f"does not support {reason}"
            )
        return _sdpa(
            module,
            query,
            key,
            value,
            _make_dense(mask, query, key) if _has_causal_mask(module, is_causal) else mask,
            scaling=scaling,
            dropout=dropout,
            softcap=softcap,
            is_causal=is_causal,
            cache=cache,
            **options,
        )
    sequences, window = None, 0
    if mask is not None:
        table = mask.flatten(0, 2)
        sequences, window = table[:, :6].contiguous(), int(table[0, 6])
    if is_paged:
        key, value = cache.update(
            key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=options
        )
        window = getattr(cache.layer_to_allocator[module.layer_idx], "sliding_window", None) or 0
        sequences = _packed_sequences(
            tuple(options["cu_seq_lens_q"].tolist()),
            tuple(options["cu_seq_lens_k"].tolist()),
            tuple(options["position_ids"].flatten().tolist()),
        )
    out = attention(
        query,
        key,
        value,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sequences=sequences,
        window=window,
        cap=softcap or 0.0,
        sinks=None if s_aux is None else s_aux.float(),
    )
    return out, None


@functools.lru_cache(maxsize=64)
def _packed_sequences(
    query_ends: Sequence[int], key_ends: Sequence[int], positions: Sequence[int]
) -> torch.Tensor:
    """Return ``sequences`` of requests that are concatenated along the queries and keys.

    Args:
        query_ends, key_ends: 0, then the end of each request.
        positions: position of each query in its request.
    """
    rows = []
    for i, (query, query_end) in enumerate(itertools.pairwise(query_ends)):
        if query == query_end:
            continue
        own_key = key_ends[i + 1] - (query_end - query)
        skipped = positions[query] - (own_key - key_ends[i])
        rows.append((0, query, query_end - query, key_ends[i], own_key, skipped))
    return torch.tensor(rows)


def _make_dense(
    mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor | None:
    """Convert a result of `make_mask` to a mask of SDPA.

    Without a mask, SDPA assumes that the first key belongs to the first query.
    """
    queries, keys = query.shape[2], key.shape[2]
    if mask is None and queries in (1, keys):
        return None
    if mask is not None and mask.dtype != torch.int64:
        return mask
    entries: Any = [(i, 0, queries, 0, keys - queries, 0, 0) for i in range(len(query))]
    if mask is not None:
        entries = mask.flatten(0, 2).tolist()
    visible = torch.zeros(len(query), 1, queries, keys, dtype=torch.bool, device=query.device)
    key_index = torch.arange(keys, device=query.device)
    for i, first, count, first_key, own_key, _, window in entries:
        own_keys = own_key + torch.arange(count, device=query.device)[:, None]
        seen = (key_index >= first_key) & (key_index <= own_keys)
        visible[i, 0, first : first + count] = seen & (key_index > own_keys - (window or keys))
    return visible | ~visible.any(-1, keepdim=True)  # SDPA returns NaN for queries without keys


def _find_obstacle(
    module: nn.Module,
    query: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    is_causal: bool | None,
    options: dict[str, Any],
) -> str | None:
    """Return the reason why the kernel cannot compute an attention, or None."""
    if query.device.type != "cpu" or query.dtype not in _DTYPES:
        return f"{query.dtype} on {query.device}"
    if torch.is_grad_enabled() and query.requires_grad:
        return "gradients; call the model under torch.no_grad()"
    if dropout:
        return "dropout; call model.eval()"
    if mask is not None and mask.dtype != torch.int64:
        return "masks that are not causal, or padding after a token; pad on the left"
    if not _has_causal_mask(module, is_causal):
        return "a mask that is not causal"
    if options.get("position_bias") is not None:
        return "a position bias"
    if "cu_seq_lens_q" in options and options.get("position_ids") is None:
        return f"a {type(module).__name__} that does not pass position_ids"
    return None


def _has_causal_mask(module: nn.Module, is_causal: bool | None) -> bool:
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _is_invariant(config: Any) -> bool:
    """Return whether the attention of a model must be invariant."""
    return getattr(config, "_attn_implementation", None) == INVARIANT_ATTENTION


def _sdpa(*args: Any, **options: Any) -> tuple[torch.Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    result: tuple[torch.Tensor, None] = sdpa_attention_forward(*args, **options)
    return result
