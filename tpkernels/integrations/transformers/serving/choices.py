"""Sampling within the steps of transformers continuous batching, with `sampling.choose` on all
ranks, and log-probabilities of generated and prompt tokens.

The model computes only the logits of new tokens. If the tokens of a prompt are scored, a hook
requests their logits as well (`Choices._request_prompt_logits`). Such a prompt does not reuse cache
blocks of earlier requests (`Scheduler`), because no logits are computed for reused tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.continuous_batching import scheduler
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
from transformers.generation.logits_process import LogitsProcessorList
from transformers.utils import ModelOutput

from tpkernels.integrations.transformers.sampling import TokenSequence, choose, logprobs


class Choices(ContinuousBatchingLogitsProcessorList):
    """The ``logit_processor`` of a manager for greedy generation.

    Requests pass the arguments ``sampling``, a `Sampling`, and ``logprobs``, the number of top
    log-probabilities or None. With ``scored`` they also get the log-probabilities of the prompt
    after its first token. The results are `Logprob` in ``GenerationOutput.logprobs``.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(LogitsProcessorList())
        self.do_processing = True
        self._batch: list[Any] = []
        # Requests, and their tokens with logits in this step.
        self._scored: list[tuple[RequestState, list[int]]] = []
        model.register_forward_pre_hook(self._request_prompt_logits, with_kwargs=True)
        model.register_forward_hook(self._collect_prompt_logprobs)

    def check_kwargs(self, kwargs: dict[str, Any]) -> None:
        """Accept all arguments: they were checked when the request arrived."""

    def prepare_tensor_args(
        self, requests_in_batch: list[Any], arg_storage: torch.Tensor
    ) -> torch.Tensor:
        self._batch = requests_in_batch
        return arg_storage

    def _request_prompt_logits(
        self, _: object, args: object, kwargs: dict[str, Any]
    ) -> tuple[object, Any]:
        """Request the logits of scored prompts, ahead of the logits of new tokens."""
        self._scored = []
        rows: list[int] = []
        offset = 0
        for request in self._batch:
            state, length = request.state, request.query_length
            if state.logit_processor_kwargs.get("scored"):
                begin = state.position_offset - length
                # A restarted request already has log-probabilities of its first tokens.
                first = max(begin, len(state.logprobs))
                tokens = state.initial_tokens[first + 1 : begin + length + 1]
                self._scored.append((state, tokens))
                rows += range(offset + first - begin, offset + first - begin + len(tokens))
            offset += length
        if rows:
            logits_to_keep = kwargs["logits_to_keep"]
            kwargs["logits_to_keep"] = torch.cat([logits_to_keep.new_tensor(rows), logits_to_keep])
        return args, kwargs

    def _collect_prompt_logprobs(self, _: object, args: object, output: ModelOutput) -> ModelOutput:
        begin = 0
        for state, tokens in self._scored:
            if tokens:
                logits = output.logits[0, begin : begin + len(tokens)]
                num_top = state.logit_processor_kwargs["logprobs"]
                state.logprobs.extend(logprobs(logits, tokens, num_top))
                begin += len(tokens)
        output.logits = output.logits[:, begin:]
        return output

    def __call__(self, _: object, scores: torch.Tensor, __: object) -> torch.Tensor:
        """Give the sampled tokens the highest scores. Rows after the new tokens are undefined."""
        states = [request.state for request in self._batch if request.has_new_token]
        tokens = choose(scores[: len(states)], [_token_sequence(state) for state in states])
        chosen = tokens.tolist()
        for row, state in enumerate(states):
            num_top = state.logit_processor_kwargs.get("logprobs")
            if num_top is not None:
                state.logprobs += logprobs(scores[row : row + 1], chosen[row : row + 1], num_top)
        scores[torch.arange(len(states)), tokens] = torch.inf
        return scores


def _token_sequence(state: RequestState) -> TokenSequence:
    """Return the tokens of a request. In a restarted request, ``initial_tokens`` contains the
    prompt and the tokens that were generated before the restart."""
    prompt_length = state._true_initial_tokens or len(state.initial_tokens)
    prompt, generated = state.initial_tokens[:prompt_length], state.initial_tokens[prompt_length:]
    return TokenSequence(
        state.logit_processor_kwargs["sampling"], prompt, generated + state.generated_tokens
    )


class Scheduler(scheduler.FIFOScheduler):
    """Computes scored prompts in full, and starts new requests when no request is active.

    After its cache was full, transformers starts no request until an active request finishes. A
    canceled request does not count as finished.
    """

    def schedule_batch(self, *args: Any) -> tuple[object, ...]:
        if not self.active_requests:
            self.block_new_requests = False
        return super().schedule_batch(*args)

    def _infer_request_tokens(self, state: RequestState, removed: set[str]) -> list[int]:
        scored = state.logit_processor_kwargs.get("scored")
        if scored and state.status == RequestStatus.PENDING:
            return list(state.remaining_prefill_tokens)
        return list(super()._infer_request_tokens(state, removed))


scheduler.SCHEDULER_MAPPING[Scheduler.__name__] = Scheduler
