"""The tokens of each step of transformers' continuous batching, chosen by `sampling.choose` on all
ranks, and how likely they and the tokens of prompts were.

The model computes the logits of new tokens only. For a prompt whose tokens are scored it is asked
for the others too (`Choices._before`), and no part of that prompt is taken from the cache of other
requests (`Scheduler`), for which nothing would be computed.
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

from tpkernels.integrations.transformers.sampling import Text, choose, logprobs


class Choices(ContinuousBatchingLogitsProcessorList):
    """What a manager of greedy generation takes as ``logit_processor``. Requests have the arguments
    ``sampling``, a `Sampling`, and ``logprobs``: None, or of how many likeliest tokens they want
    the log-probabilities; with ``scored`` also those of the prompt after its first token. These are
    `Logprob` in ``GenerationOutput.logprobs``."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(LogitsProcessorList())
        self.do_processing = True
        self._batch: list[Any] = []
        self._scored: list[tuple[RequestState, list[int]]] = []  # and tokens with logits
        model.register_forward_pre_hook(self._before, with_kwargs=True)
        model.register_forward_hook(self._after)

    def check_kwargs(self, kwargs: dict[str, Any]) -> None:
        """Take them: they are checked where the request comes in."""

    def prepare_tensor_args(
        self, requests_in_batch: list[Any], arg_storage: torch.Tensor
    ) -> torch.Tensor:
        self._batch = requests_in_batch
        return arg_storage

    def _before(self, _: object, args: object, kwargs: dict[str, Any]) -> tuple[object, Any]:
        """Ask for the logits of scored prompts, ahead of those of new tokens."""
        self._scored = []
        rows: list[int] = []
        offset = 0
        for request in self._batch:
            state, length = request.state, request.query_length
            if state.logit_processor_kwargs.get("scored"):
                begin = state.position_offset - length
                first = max(begin, len(state.logprobs))  # one that is begun anew has some already
                tokens = state.initial_tokens[first + 1 : begin + length + 1]
                self._scored.append((state, tokens))
                rows += range(offset + first - begin, offset + first - begin + len(tokens))
            offset += length
        if rows:
            kept = kwargs["logits_to_keep"]
            kwargs["logits_to_keep"] = torch.cat([kept.new_tensor(rows), kept])
        return args, kwargs

    def _after(self, _: object, args: object, output: ModelOutput) -> ModelOutput:
        begin = 0
        for state, tokens in self._scored:
            if tokens:
                logits = output.logits[0, begin : begin + len(tokens)]
                most = state.logit_processor_kwargs["logprobs"]
                state.logprobs.extend(logprobs(logits, tokens, most))
                begin += len(tokens)
        output.logits = output.logits[:, begin:]
        return output

    def __call__(self, _: object, scores: torch.Tensor, __: object) -> torch.Tensor:
        """Give the chosen tokens the highest scores; rows beyond the new tokens mean nothing."""
        states = [request.state for request in self._batch if request.has_new_token]
        tokens = choose(scores[: len(states)], [_text(state) for state in states])
        chosen = tokens.tolist()
        for row, state in enumerate(states):
            most = state.logit_processor_kwargs.get("logprobs")
            if most is not None:
                state.logprobs += logprobs(scores[row : row + 1], chosen[row : row + 1], most)
        scores[torch.arange(len(states)), tokens] = torch.inf
        return scores


def _text(state: RequestState) -> Text:
    """Return the text of a request. One that was begun anew has its tokens in its prompt."""
    true = state._true_initial_tokens or len(state.initial_tokens)
    prompt, generated = state.initial_tokens[:true], state.initial_tokens[true:]
    return Text(
        state.logit_processor_kwargs["sampling"], prompt, generated + state.generated_tokens
    )


class Scheduler(scheduler.FIFOScheduler):
    """Computes the whole of a prompt that is scored. Begins requests when none is active:
    transformers begins no more once the cache was full, until an active one has ended by itself,
    and one that is cancelled does not count."""

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
