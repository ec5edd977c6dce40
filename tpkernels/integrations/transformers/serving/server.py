"""The processes of ``tpkernels serve``: one starts the ranks and watches them; all ranks generate,
and rank 0 also speaks HTTP.

End: rank 0 stops on SIGTERM, or if the generation fails, and with the last message of transformers'
loop the others stop too. A rank that dies or hangs fails the loop on the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from tpkernels.common.text import counted
from tpkernels.integrations.transformers.loading import (
    LoadOptions,
    end_tokens,
    load_model,
    load_tokenizer,
)
from tpkernels.launch import Outcome, RankError, Ranks, fork_server
from tpkernels.launch.terminal import UsageError

if TYPE_CHECKING:
    from transformers import ContinuousBatchingManager, PreTrainedModel

_PRELOAD = [
    "transformers.generation.continuous_batching",
    "transformers.modeling_utils",
    "tpkernels.integrations.transformers.serving.server",
    "fastapi",
    "uvicorn",
]
# Bound how many prepared products oneDNN keeps, and torch in front of it. There is one for each
# shape of a plain weight and number of rows, of half a MiB in bf16. By default they keep 1024, and
# a rank grows by hundreds of MiB: its batches have all sizes. Preparing takes 1 ms.
_CAPACITIES = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"
_WATCH_S = 0.5  # between two looks at the ranks
_FAILED_S = 10.0  # for rank 0 to answer its clients after a rank has failed
_FOLLOW_S = 2.0  # for the other ranks to end after rank 0
_LEAVE_S = 15.0  # for rank 0 to end, in addition to the grace for its clients
_PAGE_TOKENS = 64  # of the cache, which requests take page by page
_BATCH_TOKENS = 512  # of prompts and answers in one step; a longer prompt takes several
_PEER_S = 30.0  # for a rank that does not answer; the same as for the ops
_STOP_S = 10.0  # for the generation to end
_LOOK_S = 0.5  # between two looks at the generation
_IDLE_S, _STOPPING_S = 1.0, 0.1  # between two rounds of idle ranks
_REPLY_S = 3  # for clients to get the errors of answers that are cut off


@dataclass(frozen=True)
class ServerOptions:
    """What ``tpkernels serve`` was asked for. See its options."""

    model: LoadOptions
    name: str
    max_requests: int
    max_waiting: int
    max_length: int | None
    cache_tokens: int
    request_timeout: float
    grace: int
    key: str | None


# The process of the command.


def serve(options: ServerOptions, *, ranks: int, threads: int, host: str, port: int) -> None:
    """Serve until SIGINT or SIGTERM, on which running requests get ``options.grace`` seconds. A
    second signal ends everything at once.

    Raises:
        UsageError: the address cannot be used.
        RankError: a rank failed.
        KeyboardInterrupt: the second signal.
    """
    with _bound(host, port) as listener, _blocked(signal.SIGTERM) as unblock:
        fork_server(_PRELOAD)
        with (
            Ranks(ranks, threads=threads, env=limits(), shared=listener) as started,
            _passed_on(started.pids[0]) as stopping,
        ):
            listener.close()
            unblock()
            started.submit(run_rank, options)
            outcomes = _outcomes(started, stopping, options.grace)
            failed = [outcome for outcome in outcomes if not outcome.ok]
            # The signal may end rank 0 before it serves; the others fail without it.
            if failed and not (stopping.asked and outcomes[0].exitcode == -signal.SIGTERM):
                failed.sort(key=lambda outcome: outcome.exitcode is None)  # the dead come first
                parts = [f"serve failed on {len(failed)} of {ranks} ranks"]
                raise RankError("\n\n".join([*parts, *started.describe(failed)]), outcomes)


def limits() -> dict[str, str]:
    """Return environment of the ranks that bounds their memory, where the user has set none."""
    return {name: os.environ.get(name, "64") for name in _CAPACITIES}


@contextlib.contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    """Bind a socket to an address, before anything slow begins."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(f"cannot resolve --host {host}: {error.strerror or error}") from error
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            raise UsageError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        yield listener


@contextlib.contextmanager
def _blocked(number: signal.Signals) -> Iterator[Callable[[], object]]:
    """Let a signal wait until the end of the block, or a call of what it yields. A supervisor may
    send SIGTERM to all its processes: it must not end the fork server, nor ranks other than 0,
    which inherit the mask."""

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})

    resource_tracker.ensure_running()  # the fork server starts it, and it would unblock SIGTERM
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield unblock
    finally:
        unblock()


@contextlib.contextmanager
def _passed_on(rank_0: int) -> Iterator[SimpleNamespace]:
    """Pass SIGINT and SIGTERM on to rank 0, and note in ``stopping.asked`` that one has come."""
    stopping = SimpleNamespace(asked=False)

    def ask(*_: object) -> None:
        if stopping.asked:
            raise KeyboardInterrupt
        stopping.asked = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank_0, signal.SIGTERM)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _outcomes(ranks: Ranks, stopping: SimpleNamespace, grace: float) -> list[Outcome]:
    """Return the outcomes, once all ranks have ended or have had the time to."""
    deadline = math.inf
    while True:
        outcomes = ranks.collect(_WATCH_S)
        late = [outcome.rank for outcome in outcomes if outcome.timed_out]
        now = time.monotonic()
        if len(late) < ranks.world:
            deadline = min(deadline, now + (_FAILED_S if 0 in late else _FOLLOW_S))
        elif stopping.asked:
            deadline = min(deadline, now + grace + _LEAVE_S)
        if not late or now > deadline:
            return outcomes


# The ranks.


def run_rank(options: ServerOptions, shared: socket.socket) -> None:
    """Serve on ``shared``, a bound socket, until rank 0 is told to stop. Raise RuntimeError if the
    generation failed."""
    first = dist.get_rank() == 0
    if first:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    tokenizer = load_tokenizer(options.model.path) if first else None
    dist.barrier()  # a GGUF file's tokenizer may take longer than ranks wait for one another
    model = load_model(options.model)
    manager = make_manager(model, options)
    _report_once(manager)
    if first:
        asyncio.run(_serve_http(options, model, tokenizer, manager, shared))
    else:
        from tpkernels.integrations.transformers.serving.batcher import Router

        shared.close()
        manager.output_router, manager._wake_up_loop = Router(), _Wake(0)
        manager.start()
        manager.join(time.perf_counter())
    error = manager.background_thread_status.fatal_error
    if isinstance(error, MemoryError):
        raise UsageError(
            f"not enough memory for the KV cache ({error}); --cache-tokens is "
            f"{options.cache_tokens}: pass a smaller number"
        ) from error
    if error is not None:
        raise RuntimeError("the generation failed") from error
    manager.destroy()


def make_manager(model: PreTrainedModel, options: ServerOptions) -> ContinuousBatchingManager:
    """Return a manager of transformers, with a cache of a fixed size. Collective."""
    import transformers

    from tpkernels.integrations.transformers.serving.choices import Choices, Scheduler

    manager = model.init_continuous_batching(
        # Each request has its own end tokens and limits.
        transformers.GenerationConfig(do_sample=False, eos_token_id=-1),
        transformers.ContinuousBatchingConfig(
            page_size=_PAGE_TOKENS,
            num_blocks=-(-options.cache_tokens // _PAGE_TOKENS),
            max_batch_tokens=_BATCH_TOKENS,
            max_requests_per_batch=options.max_requests,
            cpu_group_timeout=_PEER_S,
            disable_nccl_graph_mixing=False,
            scheduler_type=Scheduler.__name__,
            # Tokens are chosen by their requests' values, which a graph cannot do.
            use_cuda_graph=False,
            use_async_batching=False,
        ),
    )
    manager.logit_processor = Choices(model)
    return manager


class _Wake(threading.Event):
    """What the loop of a rank without requests waits for, for ``seconds`` at most. Then it asks
    rank 0 for requests, in a collective of gloo. transformers waits 0.1 s, on all ranks, which
    takes 2.6 % of a core with two of them (AMD EPYC (Zen 1), 2026-11-27). Here rank 0 waits for
    longer, and the others wait in the collective: a request, which wakes rank 0, starts at once."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(self.seconds)


def _report_once(manager: ContinuousBatchingManager) -> None:
    """Keep the manager from printing what `run_rank` raises: it logs the error that ends its loop,
    and often fails again while it tells the other ranks."""
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    report = threading.excepthook

    def other(args: threading.ExceptHookArgs) -> None:
        if manager.background_thread_status.fatal_error is None:
            report(args)

    threading.excepthook = other


async def _serve_http(
    options: ServerOptions, model: Any, tokenizer: Any, manager: Any, listener: socket.socket
) -> None:
    import uvicorn

    from tpkernels.integrations.transformers.serving.api import Prompts
    from tpkernels.integrations.transformers.serving.app import Protocol, Service, make_app
    from tpkernels.integrations.transformers.serving.batcher import FAILED, STOPPING, Batcher

    manager._wake_up_loop = wake = _Wake(_IDLE_S)
    longest = model.config.max_position_embeddings
    most = min(options.max_length or longest, longest, options.cache_tokens)
    end = tokenizer.eos_token_id
    batcher = Batcher(
        manager,
        tokenizer,
        end_tokens=frozenset([*end_tokens(model), *([] if end is None else [end])]),
        most=options.max_requests + options.max_waiting,
        timeout=options.request_timeout,
    )
    prompts = Prompts(tokenizer, vocabulary=model.config.vocab_size, most=most)

    async def watch() -> None:
        """End the server if the generation has failed, and all answers then, or when those of a
        server that stops have had their time."""
        limit = math.inf
        while batcher.failure() is None and time.monotonic() < limit:
            await asyncio.sleep(_LOOK_S)
            if server.should_exit and limit == math.inf:
                limit = time.monotonic() + options.grace
        batcher.fail(*(STOPPING if batcher.failure() is None else FAILED))
        server.should_exit = True

    @contextlib.asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[None]:
        batcher.start()
        watching = asyncio.create_task(watch())
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print(
            f"Serving {options.name} on http://{shown}:{port} with "
            f"{counted(dist.get_world_size(), 'rank')}; at most {most} tokens per request",
            flush=True,
        )
        yield
        watching.cancel()

    config = uvicorn.Config(
        make_app(Service(options.name, batcher, prompts, options.key), lifespan),
        http=Protocol,
        log_level="warning",
        access_log=False,
        lifespan="on",
        server_header=False,
        timeout_graceful_shutdown=options.grace + _REPLY_S,
    )
    server = uvicorn.Server(config)
    # uvicorn stops on SIGTERM, and raises it once more at its end, which would kill this rank.
    signal.signal(signal.SIGTERM, lambda *_: None)
    await server.serve(sockets=[listener])
    wake.seconds = _STOPPING_S
    wake.set()
    manager.stop(hard_stop=True, timeout=_STOP_S)
