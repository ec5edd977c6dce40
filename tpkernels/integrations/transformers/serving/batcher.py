"""Add requests to the continuous batching manager of transformers, and stream the generated text.
Runs only on rank 0.

Problem: the manager generates in a separate thread, and HTTP requests run in an event loop. A
client may disconnect at any time, or read slowly or not at all. Generation may fail or be stopped.

Sync: the thread passes its outputs to the event loop (`Router`). Everything else runs in the loop,
so no state is shared. An output contains all tokens so far, and only the latest output of a request
is stored. A slow client therefore needs no additional memory.

Invariant: a request is in `live` until its last output has arrived or it was canceled. An output of
a request that is not in `live` cancels the request again, because transformers ignores a
cancellation that arrives before its request.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from transformers.generation.continuous_batching.continuous_api import OutputRouter

from tpkernels.integrations.transformers.sampling import Logprob
from tpkernels.integrations.transformers.serving.api import AnswerDelta, AnswerSpec, ApiError
from tpkernels.integrations.transformers.text_stream import TextStream

if TYPE_CHECKING:
    from transformers import ContinuousBatchingManager, PreTrainedTokenizerFast
    from transformers.generation.continuous_batching.requests import GenerationOutput

FAILED = 500, "the generation failed; see the log of the server"
STOPPING = 503, "the server is stopping"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Router(OutputRouter):
    """Calls ``receive`` with outputs in the running event loop, or drops them if it is None.

    The default router of transformers stores, on every rank, all outputs that no caller fetches:
    for each token of a request, all tokens before it.
    """

    def __init__(self, receive: Callable[[list[GenerationOutput]], object] | None = None) -> None:
        super().__init__()
        self._receive = receive
        self._loop = None if receive is None else asyncio.get_running_loop()

    def deliver(self, output: GenerationOutput) -> None:
        self.deliver_batch([output])

    def deliver_batch(self, outputs: list[GenerationOutput]) -> None:
        if self._receive is not None and self._loop is not None:
            # Raised if the event loop has ended, and with it all requests.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._receive, outputs)


class Metrics:
    """Metrics of one server in the Prometheus format."""

    def __init__(self, running: Callable[[], int], waiting: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        counter = partial(Counter, registry=self._registry)
        seconds = partial(Histogram, registry=self._registry, buckets=_SECONDS)
        self.requests = counter(
            "tpkernels_requests",
            "Requests by HTTP status; 499: the client disconnected",
            ["status"],
        )
        self.prompt_tokens = counter("tpkernels_prompt_tokens", "Prompt tokens")
        self.generated_tokens = counter("tpkernels_generated_tokens", "Generated tokens")
        self.first_token_seconds = seconds(
            "tpkernels_time_to_first_token_seconds", "Time from the request to its first token"
        )
        self.token_seconds = seconds(
            "tpkernels_time_per_output_token_seconds", "Time between two tokens of a request"
        )
        for name, meaning, count in (
            ("running", "Requests with at least one generated token", running),
            ("waiting", "Requests without a generated token", waiting),
        ):
            gauge = Gauge(f"tpkernels_requests_{name}", meaning, registry=self._registry)
            gauge.set_function(count)

    def render(self) -> bytes:
        """Return all metrics."""
        return generate_latest(self._registry)


@dataclass
class Batcher:
    """Generates text for requests."""

    manager: ContinuousBatchingManager  #: a manager that was not started
    tokenizer: PreTrainedTokenizerFast
    _: KW_ONLY
    end_tokens: Collection[int]  #: tokens that end an answer
    max_requests: int  #: max number of running and waiting requests
    timeout: float  #: seconds per answer

    def __post_init__(self) -> None:
        self.live: dict[str, Answer] = {}
        self._reported: str | None = None
        self._numbers = itertools.count()
        self.metrics = Metrics(lambda: self._count(True), lambda: self._count(False))

    def start(self) -> None:
        """Start generation. Call it in the event loop."""
        self.manager.output_router = Router(self.receive)
        self.manager.start()

    def failure(self) -> str | None:
        """Return the reason why generation has failed, or None while it runs."""
        error = self.manager.background_thread_status.fatal_error
        if error is not None:
            return f"{type(error).__name__}: {error}"
        return None if self.manager.is_running() else "the generation thread has ended"

    def submit(self, specs: Sequence[AnswerSpec]) -> Answers:
        """Add all requests, or none: raise ApiError if there are too many or the server is
        stopping."""
        if len(specs) > self.max_requests:
            raise ApiError(
                400,
                f"{len(specs)} answers in one request; at most {self.max_requests} are accepted",
            )
        if len(self.live) + len(specs) > self.max_requests:
            raise ApiError(
                429,
                f"the server has {len(self.live)} of at most {self.max_requests} requests; "
                "try again later",
            )
        answers = Answers(self.timeout)
        for spec in specs:
            request_id = f"request-{next(self._numbers)}"
            answer = Answer(self, request_id, len(answers.all), spec, answers.arrived)
            added = None
            if self.failure() is None:
                added = self.manager.add_request(
                    list(spec.prompt.tokens),
                    request_id=request_id,
                    max_new_tokens=max(spec.sampling.max_new_tokens, 1),
                    streaming=True,
                    eos_token_id=list(self.end_tokens),
                    sampling=spec.sampling,
                    logprobs=spec.logprobs,
                    scored=spec.scored,
                )
            if added is None:
                answers.close()
                raise ApiError(*STOPPING)
            self.live[request_id] = answer
            answers.all.append(answer)
            self.metrics.prompt_tokens.inc(len(spec.prompt.tokens))
        return answers

    def fail(self, status: int, message: str) -> None:
        """End all answers with an error."""
        for answer in list(self.live.values()):
            answer.end(status, message)
        self.live.clear()

    def receive(self, outputs: Sequence[Any]) -> None:
        """Process outputs of the manager."""
        for output in outputs:
            answer = self.live.get(output.request_id)
            if answer is not None:
                answer.receive(output)
                if output.is_finished():
                    del self.live[output.request_id]
            elif not output.is_finished():
                self.manager.cancel_request(output.request_id)

    def report(self, error: str) -> None:
        """Log an error of requests, unless it was the last logged error."""
        if error != self._reported:
            logging.getLogger("uvicorn.error").error("requests have failed: %s", error)
        self._reported = error

    def cancel(self, request_id: str) -> None:
        """Cancel a request unless it has ended."""
        if self.live.pop(request_id, None) is not None:
            self.manager.cancel_request(request_id)

    def _count(self, begun: bool) -> int:
        return sum(bool(answer.tokens) is begun for answer in self.live.values())


class Answer:
    """The answer to one prompt."""

    def __init__(
        self,
        batcher: Batcher,
        request_id: str,
        index: int,
        spec: AnswerSpec,
        arrived: asyncio.Event,
    ) -> None:
        self._batcher, self._request_id, self._index = batcher, request_id, index
        self._spec, self._arrived = spec, arrived
        self._stream = TextStream(batcher.tokenizer, spec.stop, batcher.end_tokens)
        self._begin = self._latest = time.monotonic()
        self._finished = False
        self._error: tuple[int, str] | None = None  # HTTP status and message
        self._seen = self._sent = 0  # numbers of tokens and of log-probabilities in previous deltas
        self._echo = spec.prompt.echo or ""  # prompt text that was not sent yet
        self._logprobs: list[Logprob] = []
        self.tokens: list[int] = []

    def receive(self, output: GenerationOutput) -> None:
        """Process an output. Only in the event loop."""
        now, metrics = time.monotonic(), self._batcher.metrics
        new = len(output.generated_tokens) - len(self.tokens)
        if new > 0:
            if self.tokens:
                metrics.token_seconds.observe((now - self._latest) / new)
            else:
                metrics.first_token_seconds.observe(now - self._begin)
            metrics.generated_tokens.inc(new)
            self._latest, self.tokens = now, output.generated_tokens
            self._logprobs = self._spec.select_logprobs(output.logprobs)
        if output.error is not None:
            self._error = FAILED
            self._batcher.report(output.error)
        self._finished = output.is_finished()
        self._arrived.set()

    def end(self, status: int, message: str) -> None:
        """End the answer with an error."""
        self._error, self._finished = (status, message), True
        self._arrived.set()

    def next_delta(self) -> AnswerDelta | None:
        """Return the new text since the last call, or None. The last delta has a finish reason.
        Raise ApiError if generation failed."""
        if self._error is not None:
            raise ApiError(*self._error)
        last = self._finished
        tokens = self.tokens[self._seen : self._spec.sampling.max_new_tokens]
        self._seen += len(tokens)
        content = self._stream.feed(tokens, last)
        if self.tokens:
            content, self._echo = self._echo + content, ""
        finish = "stop" if self._stream.stopped else "length" if last else None
        if not (content or finish):
            return None
        if finish:
            self.close()
        logprobs = self._logprobs[self._sent :]
        self._sent += len(logprobs)
        return AnswerDelta(self._index, content, self._seen, finish, logprobs)

    def close(self) -> None:
        """Cancel the request unless it has ended. Idempotent."""
        self._batcher.cancel(self._request_id)


class Answers:
    """The answers to one HTTP request. They must be closed in any case."""

    def __init__(self, timeout: float) -> None:
        self._begin, self._limit = time.monotonic(), timeout
        self.arrived = asyncio.Event()  #: set when any answer has received an output
        self.all: list[Answer] = []

    async def deltas(self) -> AsyncIterator[AnswerDelta]:
        """Yield text as it is generated. Raise ApiError if generation failed or timed out."""
        unfinished = list(self.all)
        while unfinished:
            seconds = self._begin + self._limit - time.monotonic()
            try:
                await asyncio.wait_for(self.arrived.wait(), max(seconds, 0))
            except TimeoutError as error:
                raise ApiError(504, f"the answer took longer than {self._limit:g} s") from error
            self.arrived.clear()
            for answer in list(unfinished):
                delta = answer.next_delta()
                if delta is not None:
                    yield delta
                    if delta.finish_reason:
                        unfinished.remove(answer)

    def close(self) -> None:
        """Cancel the requests that have not ended. Idempotent."""
        for answer in self.all:
            answer.close()
