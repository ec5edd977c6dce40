"""Processes of ``tpkernels serve``: one process starts and watches the ranks. All ranks generate,
and rank 0 also serves HTTP.

Shutdown: rank 0 stops on SIGTERM or if generation fails. The last message of the transformers loop
stops its peers. If a rank dies or hangs, the loop fails on the remaining ranks.
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

from tpkernels.common.text import pluralize
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
# Limit the number of primitives that oneDNN and torch cache. There is one primitive of 0.5 MiB
# (bf16) per shape of a plain weight and number of rows. The default limit is 1024. Batches have all
# sizes, so a rank would grow by hundreds of MiB. Creating a primitive takes 1 ms.
_CACHE_VARIABLES = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"
_WATCH_S = 0.5  # interval between checks of the ranks
_FAILED_S = 10.0  # time for rank 0 to send errors to its clients after a rank has failed
_FOLLOW_S = 2.0  # time for the remaining ranks to end after rank 0
_LEAVE_S = 15.0  # time for rank 0 to end, added to the grace period of its clients
_PAGE_TOKENS = 64  # tokens per cache page
_BATCH_TOKENS = 512  # max tokens per step; a longer prompt needs several steps
_PEER_S = 30.0  # timeout for a peer, equal to the timeout of the ops
_STOP_S = 10.0  # time for generation to end
_POLL_S = 0.5  # interval between checks of generation
_IDLE_S, _STOPPING_S = 1.0, 0.1  # interval between rounds of idle ranks
_REPLY_S = 3  # time to send the errors of interrupted answers


@dataclass(frozen=True)
class ServerOptions:
    """Options of ``tpkernels serve``."""

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
    """Serve until SIGINT or SIGTERM. Running requests then get ``options.grace`` seconds. A second
    signal ends the server immediately.

    Raises:
        UsageError: the address cannot be used.
        RankError: a rank failed.
        KeyboardInterrupt: a second signal arrived.
    """
    with _bind(host, port) as listener, _block_signal(signal.SIGTERM) as unblock:
        fork_server(_PRELOAD)
        with (
            Ranks(ranks, threads=threads, env=limits(), shared=listener) as started,
            _forward_signals(started.pids[0]) as stopping,
        ):
            listener.close()
            unblock()
            started.submit(run_rank, options)
            outcomes = _wait_for_ranks(started, stopping, options.grace)
            failed = [outcome for outcome in outcomes if not outcome.ok]
            # The signal may end rank 0 before it serves. The remaining ranks then fail.
            if failed and not (stopping.requested and outcomes[0].exitcode == -signal.SIGTERM):
                # Dead ranks first: they have an exit code.
                failed.sort(key=lambda outcome: outcome.exitcode is None)
                sections = [f"serve failed on {len(failed)} of {ranks} ranks"]
                raise RankError("\n\n".join([*sections, *started.describe(failed)]), outcomes)


def limits() -> dict[str, str]:
    """Return environment variables that limit the memory of the ranks, unless the user has set
    them."""
    return {name: os.environ.get(name, "64") for name in _CACHE_VARIABLES}


@contextlib.contextmanager
def _bind(host: str, port: int) -> Iterator[socket.socket]:
    """Bind a socket to an address, before any slow initialization."""
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
def _block_signal(number: signal.Signals) -> Iterator[Callable[[], object]]:
    """Block a signal until the ``with`` block ends or the yielded function is called. A supervisor
    may send SIGTERM to all its processes. The signal must not end the fork server or ranks other
    than 0, and they inherit the mask."""

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})

    # Otherwise the fork server would start the tracker, and that unblocks SIGTERM.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield unblock
    finally:
        unblock()


@contextlib.contextmanager
def _forward_signals(rank_0: int) -> Iterator[SimpleNamespace]:
    """Forward SIGINT and SIGTERM to rank 0, and set ``stopping.requested``."""
    stopping = SimpleNamespace(requested=False)

    def request_stop(*_: object) -> None:
        if stopping.requested:
            raise KeyboardInterrupt
        stopping.requested = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank_0, signal.SIGTERM)

    old_handlers = {
        number: signal.signal(number, request_stop) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield stopping
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


def _wait_for_ranks(ranks: Ranks, stopping: SimpleNamespace, grace: float) -> list[Outcome]:
    """Return the outcomes when all ranks have ended, or at a deadline."""
    deadline = math.inf
    while True:
        outcomes = ranks.collect(_WATCH_S)
        running = [outcome.rank for outcome in outcomes if outcome.timed_out]
        now = time.monotonic()
        if len(running) < ranks.world:
            deadline = min(deadline, now + (_FAILED_S if 0 in running else _FOLLOW_S))
        elif stopping.requested:
            deadline = min(deadline, now + grace + _LEAVE_S)
        if not running or now > deadline:
            return outcomes


# The ranks.


def run_rank(options: ServerOptions, shared: socket.socket) -> None:
    """Serve on ``shared``, a bound socket, until rank 0 is stopped. Raise RuntimeError if
    generation failed."""
    is_rank_0 = dist.get_rank() == 0
    if is_rank_0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    tokenizer = load_tokenizer(options.model.path) if is_rank_0 else None
    dist.barrier()  # loading the tokenizer of a GGUF file may take longer than the peer timeout
    model = load_model(options.model)
    manager = make_manager(model, options)
    _report_once(manager)
    if is_rank_0:
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
    """Return a transformers manager with a cache of fixed size. Collective."""
    import transformers

    from tpkernels.integrations.transformers.serving.choices import Choices, Scheduler

    manager = model.init_continuous_batching(
        # Requests pass their end tokens and limits.
        transformers.GenerationConfig(do_sample=False, eos_token_id=-1),
        transformers.ContinuousBatchingConfig(
            page_size=_PAGE_TOKENS,
            num_blocks=-(-options.cache_tokens // _PAGE_TOKENS),
            max_batch_tokens=_BATCH_TOKENS,
            max_requests_per_batch=options.max_requests,
            cpu_group_timeout=_PEER_S,
            disable_nccl_graph_mixing=False,
            scheduler_type=Scheduler.__name__,
            # Sampling depends on values of the requests, so it cannot run in a graph.
            use_cuda_graph=False,
            use_async_batching=False,
        ),
    )
    manager.logit_processor = Choices(model)
    return manager


class _Wake(threading.Event):
    """The event that the transformers loop of an idle rank waits for, at most ``seconds`` long.

    After the wait, the rank asks rank 0 for requests in a gloo collective. transformers waits 0.1 s
    on all ranks, and two idle ranks then use 2.6 % of a core (AMD EPYC (Zen 1), 2026-11-27). Here
    rank 0 waits longer, and its peers wait in the collective. A new request wakes rank 0, so it
    starts immediately.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(self.seconds)


def _report_once(manager: ContinuousBatchingManager) -> None:
    """Keep the manager from printing errors that `run_rank` raises: it logs the error that ends its
    loop, and often fails again while it notifies its peers."""
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    default_hook = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if manager.background_thread_status.fatal_error is None:
            default_hook(args)

    threading.excepthook = hook


async def _serve_http(
    options: ServerOptions, model: Any, tokenizer: Any, manager: Any, listener: socket.socket
) -> None:
    import uvicorn

    from tpkernels.integrations.transformers.serving.api import Prompts
    from tpkernels.integrations.transformers.serving.app import Protocol, Service, make_app
    from tpkernels.integrations.transformers.serving.batcher import FAILED, STOPPING, Batcher

    manager._wake_up_loop = wake = _Wake(_IDLE_S)
    longest = model.config.max_position_embeddings
    max_length = min(options.max_length or longest, longest, options.cache_tokens)
    end = tokenizer.eos_token_id
    batcher = Batcher(
        manager,
        tokenizer,
        end_tokens=frozenset([*end_tokens(model), *([] if end is None else [end])]),
        max_requests=options.max_requests + options.max_waiting,
        timeout=options.request_timeout,
    )
    prompts = Prompts(tokenizer, vocabulary=model.config.vocab_size, max_length=max_length)

    async def watch() -> None:
        """Stop the server and end all answers if generation fails. While the server stops, end the
        remaining answers after the grace period."""
        deadline = math.inf
        while batcher.failure() is None and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
            if server.should_exit and deadline == math.inf:
                deadline = time.monotonic() + options.grace
        batcher.fail(*(STOPPING if batcher.failure() is None else FAILED))
        server.should_exit = True

    @contextlib.asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[None]:
        batcher.start()
        watching = asyncio.create_task(watch())
        host, port = listener.getsockname()[:2]
        url_host = f"[{host}]" if ":" in host else host
        print(
            f"Serving {options.name} on http://{url_host}:{port} with "
            f"{pluralize(dist.get_world_size(), 'rank')}; at most {max_length} tokens per request",
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
    # uvicorn stops on SIGTERM and raises the signal again at its end. That would kill this rank.
    signal.signal(signal.SIGTERM, lambda *_: None)
    await server.serve(sockets=[listener])
    wake.seconds = _STOPPING_S
    wake.set()
    manager.stop(hard_stop=True, timeout=_STOP_S)
