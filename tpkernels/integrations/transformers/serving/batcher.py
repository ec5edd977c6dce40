"""Requests into transformers' manager of continuous batching, and text out of it. Rank 0 only.

Problem: the manager generates in a thread of its own; HTTP requests live in an event loop. A client
may hang up at any moment, read slowly, or never; the generation may fail or be stopped.

Sync: the thread hands its outputs to the loop (`Router`). All else here runs in the loop, so no
state is shared. An output has all tokens so far, and of each request only the latest is kept: a
client that reads slowly costs no memory.

Invariant: a request is in `live` until its last output has come, or it was cancelled. An output of
a request that is not in `live` cancels it once more: transformers forgets a cancellation that
overtakes its request.
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
from tpkernels.integrations.transformers.serving.api import ApiError, TextPiece, Wanted
from tpkernels.integrations.transformers.text_stream import TextStream

if TYPE_CHECKING:
    from transformers import ContinuousBatchingManager, PreTrainedTokenizerFast
    from transformers.generation.continuous_batching.requests import GenerationOutput

FAILED = 500, "the generation failed; see the log of the server"
STOPPING = 503, "the server is stopping"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Router(OutputRouter):
    """Calls ``receive`` with outputs, in the event loop that runs now; None drops them.

    transformers' own router keeps, on every rank, all that nobody asks for: each token of each
    request, with all tokens before it.
    """

    def __init__(self, receive: Callable[[list[GenerationOutput]], object] | None = None) -> None:
        super().__init__()
        self._receive = receive
        self._loop = None if receive is None else asyncio.get_running_loop()

    def deliver(self, output: GenerationOutput) -> None:
        self.deliver_batch([output])

    def deliver_batch(self, outputs: list[GenerationOutput]) -> None:
        if self._receive is not None and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and all requests with it
                self._loop.call_soon_threadsafe(self._receive, outputs)


class Metrics:
    """The numbers of one server, in Prometheus' format."""

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

    def text(self) -> bytes:
        """Return all of them."""
        return generate_latest(self._registry)


@dataclass
class Batcher:
    """Generates text for requests."""

    manager: ContinuousBatchingManager  #: not started yet
    tokenizer: PreTrainedTokenizerFast
    _: KW_ONLY
    end_tokens: Collection[int]  #: which end an answer
    most: int  #: requests at a time, those that wait included
    timeout: float  #: seconds for an answer

    def __post_init__(self) -> None:
        self.live: dict[str, Answer] = {}
        self._reported: str | None = None
        self._numbers = itertools.count()
        self.metrics = Metrics(lambda: self._count(True), lambda: self._count(False))

    def start(self) -> None:
        """Start the generation; called in the event loop."""
        self.manager.output_router = Router(self.receive)
        self.manager.start()

    def failure(self) -> str | None:
        """Return why no text can be generated; None as long as it can."""
        error = self.manager.background_thread_status.fatal_error
        if error is not None:
            return f"{type(error).__name__}: {error}"
        return None if self.manager.is_running() else "the generation thread has ended"

    def submit(self, wanted: Sequence[Wanted]) -> Answers:
        """Add requests, all or none: raise ApiError if there are too many or none is taken any
        more."""
        if len(wanted) > self.most:
            raise ApiError(
                400, f"{len(wanted)} answers in one request; at most {self.most} are accepted"
            )
        if len(self.live) + len(wanted) > self.most:
            raise ApiError(
                429,
                f"the server has {len(self.live)} of at most {self.most} requests; try again later",
            )
        answers = Answers(self.timeout)
        for each in wanted:
            name = f"request-{next(self._numbers)}"
            answer = Answer(self, name, len(answers.all), each, answers.arrived)
            added = None
            if self.failure() is None:
                added = self.manager.add_request(
                    list(each.prompt.tokens),
                    request_id=name,
                    max_new_tokens=max(each.sampling.max_new_tokens, 1),
                    streaming=True,
                    eos_token_id=list(self.end_tokens),
                    sampling=each.sampling,
                    logprobs=each.logprobs,
                    scored=each.scored,
                )
            if added is None:
                answers.close()
                raise ApiError(*STOPPING)
            self.live[name] = answer
            answers.all.append(answer)
            self.metrics.prompt_tokens.inc(len(each.prompt.tokens))
        return answers

    def fail(self, status: int, why: str) -> None:
        """End all answers with an error."""
        for answer in list(self.live.values()):
            answer.end(status, why)
        self.live.clear()

    def receive(self, outputs: Sequence[Any]) -> None:
        """Take outputs of the manager."""
        for output in outputs:
            answer = self.live.get(output.request_id)
            if answer is not None:
                answer.receive(output)
                if output.is_finished():
                    del self.live[output.request_id]
            elif not output.is_finished():
                self.manager.cancel_request(output.request_id)

    def report(self, error: str) -> None:
        """Log why requests have failed, once if it is the same for all."""
        if error != self._reported:
            logging.getLogger("uvicorn.error").error("requests have failed: %s", error)
        self._reported = error

    def forget(self, name: str) -> None:
        """Cancel a request unless it has ended."""
        if self.live.pop(name, None) is not None:
            self.manager.cancel_request(name)

    def _count(self, begun: bool) -> int:
        return sum(bool(answer.tokens) is begun for answer in self.live.values())


class Answer:
    """What is generated for one prompt."""

    def __init__(
        self, batcher: Batcher, name: str, index: int, wanted: Wanted, arrived: asyncio.Event
    ) -> None:
        self._batcher, self._name, self._index = batcher, name, index
        self._wanted, self._arrived = wanted, arrived
        self._text = TextStream(batcher.tokenizer, wanted.stop, batcher.end_tokens)
        self._begin = self._latest = time.monotonic()
        self._finished = False
        self._error: tuple[int, str] | None = None  # its HTTP status and text
        self._seen = self._sent = 0  # tokens in the text, and log-probabilities, of pieces
        self._echo = wanted.prompt.echo or ""  # text that is still to be sent
        self._logprobs: list[Logprob] = []
        self.tokens: list[int] = []

    def receive(self, output: GenerationOutput) -> None:
        """Take an output; only in the event loop."""
        now, metrics = time.monotonic(), self._batcher.metrics
        new = len(output.generated_tokens) - len(self.tokens)
        if new > 0:
            if self.tokens:
                metrics.token_seconds.observe((now - self._latest) / new)
            else:
                metrics.first_token_seconds.observe(now - self._begin)
            metrics.generated_tokens.inc(new)
            self._latest, self.tokens = now, output.generated_tokens
            self._logprobs = self._wanted.kept(output.logprobs)
        if output.error is not None:
            self._error = FAILED
            self._batcher.report(output.error)
        self._finished = output.is_finished()
        self._arrived.set()

    def end(self, status: int, why: str) -> None:
        """End the answer with an error."""
        self._error, self._finished = (status, why), True
        self._arrived.set()

    def take(self) -> TextPiece | None:
        """Return the text that has come since the last call, if any; the last piece has
        `TextPiece.finish`. Raise ApiError if the generation failed."""
        if self._error is not None:
            raise ApiError(*self._error)
        last = self._finished
        tokens = self.tokens[self._seen : self._wanted.sampling.max_new_tokens]
        self._seen += len(tokens)
        text = self._text.feed(tokens, last)
        if self.tokens:
            text, self._echo = self._echo + text, ""
        finish = "stop" if self._text.stopped else "length" if last else None
        if not (text or finish):
            return None
        if finish:
            self.close()
        logprobs = self._logprobs[self._sent :]
        self._sent += len(logprobs)
        return TextPiece(self._index, text, self._seen, finish, logprobs)

    def close(self) -> None:
        """Cancel the request unless it has ended. Idempotent."""
        self._batcher.forget(self._name)


class Answers:
    """What is generated for one HTTP request. Close it, whatever happens."""

    def __init__(self, timeout: float) -> None:
        self._begin, self._limit = time.monotonic(), timeout
        self.arrived = asyncio.Event()  #: set when one of them has received something
        self.all: list[Answer] = []

    async def pieces(self) -> AsyncIterator[TextPiece]:
        """Yield the texts as they are generated. Raise ApiError if the generation failed or took
        too long."""
        left = list(self.all)
        while left:
            seconds = self._begin + self._limit - time.monotonic()
            try:
                await asyncio.wait_for(self.arrived.wait(), max(seconds, 0))
            except TimeoutError as error:
                raise ApiError(504, f"the answer took longer than {self._limit:g} s") from error
            self.arrived.clear()
            for answer in list(left):
                piece = answer.take()
                if piece is not None:
                    yield piece
                    if piece.finish:
                        left.remove(answer)

    def close(self) -> None:
        """Cancel the requests that have not ended. Idempotent."""
        for answer in self.all:
            answer.close()
