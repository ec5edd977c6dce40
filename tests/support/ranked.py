"""What the correctness tests run in the ranks: many cases per job, with the failures as text."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
import re
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import tpkernels
from tests.support import reference
from tests.support.cases import Case, RanksFixture
from tests.support.reference import Operand, scale_of_w, scale_of_x
from tpkernels import CustomMatmul, groups
from tpkernels.algorithms import backends, point_to_point
from tpkernels.algorithms.point_to_point import PeerLinks
from tpkernels.groups import GroupLike
from tpkernels.launch import Ranks
from tpkernels.ops import execution
from tpkernels.ops.reference import Expected
from tpkernels.symm import colocation

SMALLEST_WORKSPACE = 1 << 16
TIMEOUT = 20.0  # s, after which ranks no longer wait for one that failed alone


@contextlib.contextmanager
def fresh_group(
    workspace_bytes: int = 1 << 20, autotune: bool | None = None, numerics: str | None = None
) -> Iterator[dist.ProcessGroup]:
    """A group of all ranks that no other test can have broken."""
    group = dist.new_group()
    assert group is not None
    tpkernels.init(
        group,
        timeout=TIMEOUT,
        workspace_bytes=workspace_bytes,
        autotune=autotune,
        numerics=numerics,
    )
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Groups that are set up within the block share no memory, like groups that span hosts."""
    probe = colocation._why_not_reached
    colocation._why_not_reached = lambda *_: "is kept apart by a test"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="the ranks are on one machine but do not share"
            )
            yield
    finally:
        colocation._why_not_reached = probe


@contextlib.contextmanager
def on_hosts(host_of: str) -> Iterator[None]:
    """Groups of all ranks that are set up within the block share memory only with the ranks of the
    same host; ``host_of[rank]`` names it."""

    def why_not_reached(name: str | None, seconds: float) -> str | None:
        found = re.match(r"tpkernels-host-(\d+)-", name or "")
        if found is not None and host_of[int(found[1])] == host_of[dist.get_rank()]:
            return None
        return "is kept apart by a test"

    with apart(), mock.patch.object(colocation, "_why_not_reached", why_not_reached):
        yield


@contextlib.contextmanager
def bytes_sent() -> Iterator[Counter[int]]:
    """What this rank sends over `torch.distributed` within the block, by receiver; greetings
    aside."""
    sent, start = Counter[int](), PeerLinks._start

    def counting(link: PeerLinks, sends: Any, receives: Any, tag: int) -> Any:
        if tag != point_to_point._GREETING_TAG:
            for tensor, to in sends:
                sent[to] += tensor.nbytes
        return start(link, sends, receives, tag)

    with mock.patch.object(PeerLinks, "_start", counting):
        yield sent


@contextlib.contextmanager
def planned_in_python() -> Iterator[None]:
    """No call within is run by the extension alone: what the test replaces has an effect."""

    def forget() -> None:
        for group in list(groups._groups.values()):  # others may be ending in a thread
            group.forget_calls()

    forget()
    with mock.patch.object(execution, "bind", lambda *_: None):
        yield
    forget()


@contextlib.contextmanager
def recorded_calls() -> Iterator[list[str]]:
    """The ops of the calls that run within the block."""
    made: list[str] = []
    run = backends.run

    def recording(call: Any, *args: Any) -> Any:
        made.append(call.problem.op)
        return run(call, *args)

    with planned_in_python(), mock.patch.object(backends, "run", recording):
        yield made


def place(x: torch.Tensor, layout: str) -> torch.Tensor:
    """A copy of x with this layout in memory. It is surrounded by NaN, which must not be read."""
    if x.is_floating_point() and x.itemsize == 1:  # torch copies few of these dtypes
        return place(x.view(torch.uint8), layout).view(x.dtype)
    nan = math.nan if x.is_floating_point() else 0x7F
    if layout == "transposed" and x.dim() > 1:
        swapped = x.transpose(-1, -2).clone(memory_format=torch.contiguous_format)
        return swapped.transpose(-1, -2)
    if layout == "sliced":
        around = x.new_full([2 * size + 3 for size in x.shape], nan)
        inside = around[tuple(slice(1, 1 + 2 * size, 2) for size in x.shape)]
        return inside.copy_(x)
    if layout == "offset":  # contiguous, at an odd element
        flat = x.new_full([x.numel() + 3], nan)
        return flat[1 : 1 + x.numel()].view(x.shape).copy_(x)
    return x.clone(memory_format=torch.contiguous_format)


@contextlib.contextmanager
def placed(case: Case, x: torch.Tensor, group: dist.ProcessGroup) -> Iterator[torch.Tensor]:
    """x with the case's layout in memory. With "symmetric" it lies at the start of symmetric
    memory, with "symmetric_end" at its end, with "mixed" at its start on odd ranks only; these are
    collective."""
    if case.layout not in ("symmetric", "symmetric_end", "mixed"):
        yield place(x, case.layout)
        return
    largest = x.numel()
    if "all_gather" in case.op:
        whole = list(case.shape)
        whole[case.dim] = max(case.shards(group.size()))
        largest = math.prod(whole)
    elif case.k:
        largest = x[..., 0].numel() * max(case.k)
    memory = tpkernels.empty(largest, dtype=x.dtype, group=group)  # kept until all have read it
    memory.fill_(math.nan)
    at = largest - x.numel() if case.layout == "symmetric_end" else 0
    inside = memory[at : at + x.numel()].view(x.shape).copy_(x)
    yield place(x, "plain") if case.layout == "mixed" and group.rank() % 2 == 0 else inside


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        torch.equal(a, b) if a.itemsize > 1 else torch.equal(*(t.view(torch.uint8) for t in (a, b)))
    )


def _placed_weight(w: Any, layout: str) -> torch.Tensor | CustomMatmul:
    if isinstance(w, Operand):
        return place(w.elements, layout).t()
    if layout == "packed" or (layout == "packed_on_even_ranks" and dist.get_rank() % 2 == 0):
        return tpkernels.pack(w)
    if layout == "caller's":
        return CustomMatmul(lambda x: x @ w, w.shape, w.dtype)
    return place(w, "transposed" if layout == "linear" else layout)


def options_of(case: Case) -> dict[str, Any]:
    """The options of a case's call that are no tensors."""
    options: dict[str, Any] = {"algorithm": case.algorithm}
    if "all_gather" in case.op:
        options |= {"gather_dim": case.dim, "shard_sizes": case.sizes}
        if case.n:
            options |= {"out_dtype": case.out_dtype, "return_gathered": case.return_gathered}
        return options
    if case.scattered:
        options |= {"scatter_dim": case.dim, "shard_sizes": case.sizes}
    if case.normalises:
        return options | {"eps": reference.NORM_EPS}
    if case.op != "all_reduce_":
        options["out_dtype"] = case.out_dtype
    return options | ({"wire_dtype": case.wire_dtype} if case.k else {})


def _gather(case: Case, group: dist.ProcessGroup, group_like: GroupLike) -> list[torch.Tensor]:
    rank, world = group.rank(), group.size()
    whole = reference.gathered_x(case)
    shard = case.shard(whole.elements if case.scales else whole, rank, world)
    options = options_of(case)
    with placed(case, shard, group) as x:
        if not case.n:
            results = [tpkernels.all_gather(x, group_like, **options)]
        else:
            pairs = reference.column_weights(case, rank)
            if case.biases:
                options["biases"] = [None if b is None else place(b, case.layout) for _, b in pairs]
            scales: list[Any] = []
            if case.scales:
                shared = case.replicated or not whole.scale.dim()
                of_x = whole.scale if shared else case.shard(whole.scale, rank, world)
                scales = [scale_of_x(case, of_x), [scale_of_w(case, w) for w, _ in pairs]]
            results = getattr(tpkernels, case.op)(
                x,
                [_placed_weight(w, case.weight_layout) for w, _ in pairs],
                *scales,
                group_like,
                **options,
            )
            if case.return_gathered:
                assert results[0].dtype == x.dtype
                gathered = results[0].view(torch.uint8) if case.scales else results[0]
                results = [gathered, *results[1]]
        assert _same_bytes(x, shard), "the input was changed"
    return results


def _reduce(case: Case, group: dist.ProcessGroup, group_like: GroupLike) -> list[torch.Tensor]:
    rank, world = group.rank(), group.size()
    mine, w = reference.partial_factors(case, rank, world)
    scales: list[torch.Tensor] = []
    if case.scales:
        scales = [scale_of_x(case, mine.scale), scale_of_w(case, w)]
        mine = mine.elements
    options = options_of(case)
    bias, residual = reference.reduction_bias(case), reference.reduction_residual(case)
    if residual is not None and case.scattered:
        residual = case.shard(residual, rank, world)
    if w is not None:
        options["bias"] = None if bias is None else place(bias, case.layout)
    if w is not None or case.normalises:
        options["residual"] = None if residual is None else place(residual, case.layout)
    with placed(case, mine, group) as x:
        factors = [x] if w is None else [x, _placed_weight(w, case.weight_layout)]
        if case.normalises:
            factors.append(place(reference.norm_weight(case), case.layout))
        result: Any = getattr(tpkernels, case.op)(*factors, *scales, group_like, **options)
        if case.op == "all_reduce_":
            assert result is x, "not the tensor that was passed"
            return [result.contiguous().clone()]
        assert _same_bytes(x, mine), "the input was changed"
    return list(result) if case.normalises else [result]


def call(
    case: Case, group: dist.ProcessGroup, group_like: GroupLike | None = None
) -> list[torch.Tensor]:
    """Runs one case; its results. ``group_like``: what to pass to the op as its group."""
    function = _gather if "all_gather" in case.op else _reduce
    return function(case, group, group if group_like is None else group_like)


def difference(got: torch.Tensor, want: Expected) -> str | None:
    """What is wrong with a result, or None."""
    exact = want.exact
    if got.shape != exact.shape or got.dtype != want.dtype or not got.is_contiguous():
        return (
            f"{list(got.shape)} {got.dtype} strides {got.stride()}, "
            f"expected contiguous {list(exact.shape)} {want.dtype}"
        )
    if not want.wrong(got).any():
        return None
    return str(tpkernels.numerics.compare(exact, got, atol=want.bound, rtol=0.0))


def check(case: Case, group: dist.ProcessGroup, group_like: GroupLike | None = None) -> list[str]:
    """Runs one case; what is wrong with its results, as text."""
    rank, world = group.rank(), group.size()
    results, wanted = call(case, group, group_like), reference.expected(case, rank, world)
    if case.normalises:
        wanted = [reference.normalised(case, results[1]), *wanted]
    errors = [difference(got, want) for got, want in zip(results, wanted, strict=True)]
    return [f"rank {rank} of {world}: {case}: {error}" for error in errors if error is not None]


def check_cases(
    cases: Sequence[Case], group: dist.ProcessGroup, group_like: GroupLike | None = None
) -> list[str]:
    """Runs cases up to the first exception; what is wrong, as text."""
    failures: list[str] = []
    for case in cases:
        try:
            failures += check(case, group, group_like)
        except Exception as error:
            failures.append(f"{case}: {traceback.format_exc()}")
            groups.get(group.group_name).mark_broken(error)  # so that no peer waits for this rank
            break
    return failures


def cases_job(cases: Sequence[Case], workspace_bytes: int, hosts: str) -> list[str]:
    with on_hosts(hosts) if hosts else nullcontext(), fresh_group(workspace_bytes) as group:
        assert not (hosts and groups.get(group.group_name).shared_memory)
        return check_cases(cases, group)


def run_cases(
    ranks: RanksFixture,
    world: int,
    cases: Sequence[Case],
    workspace_bytes: int = 1 << 20,
    hosts: str = "",
) -> None:
    """Runs the cases on ``world`` ranks, on one host or as `on_hosts` has it, and fails with the
    failures of all."""
    assert cases
    check_job(ranks(world), cases_job, list(cases), workspace_bytes, hosts, timeout=240)


def messages_of(attempts: Iterable[Callable[[], Any]], kind: Any = Exception) -> list[str]:
    """What each attempt raises, as "type: message"; "nothing" where it raises nothing. Errors that
    are not of ``kind`` pass."""
    messages = []
    for attempt in attempts:
        try:
            attempt()
            messages.append("nothing")
        except kind as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def unlike(attempts: Mapping[str, Callable[[], Any]], kind: Any = Exception) -> list[str]:
    """The messages of attempts that lack the text under which each stands; "nothing" is said where
    one raises nothing."""
    pairs = zip(attempts, messages_of(attempts.values(), kind), strict=True)
    return [f"{message!r} lacks {text!r}" for text, message in pairs if text not in message]


def on_ranks(
    world: int | None = None, timeout: float = 120.0, fixture: str = "ranks", driver: bool = False
) -> Callable[[Any], Any]:
    """Make a test of a function that runs on every rank and returns what is wrong there, as texts,
    or None. Its parameters are the test's. Without ``world``, a parameter of the test of that name
    says on how many ranks. With ``driver`` the ranks load the emulated CUDA driver."""

    def decorate(job: Callable[..., list[str] | None]) -> Callable[..., None]:
        def test(**values: Any) -> None:
            ranks, count = values.pop(fixture), world or values.pop("world")
            path = values.pop("cuda_driver", None)
            job_of = (job.__module__, job.__name__, path, values)
            check_job(ranks(count), _run_job, *job_of, timeout=timeout)

        own = [fixture, *(["cuda_driver"] if driver else []), *(["world"] if world is None else [])]
        names = [*own, *inspect.signature(job).parameters]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        test.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in names])  # type: ignore[attr-defined]
        test.job = job  # type: ignore[attr-defined]
        test.__name__, test.__qualname__, test.__doc__ = job.__name__, job.__name__, job.__doc__
        test.__module__ = job.__module__
        return test

    return decorate


def _run_job(
    module: str, name: str, driver: str | None, values: dict[str, Any]
) -> list[str] | None:
    if driver is not None:
        from tests.support import emulated

        emulated.load(driver)
    failures: list[str] | None = getattr(importlib.import_module(module), name).job(**values)
    return failures


def check_job(
    ranks: Ranks, job: Callable[..., list[str] | None], *arguments: Any, timeout: float = 120.0
) -> None:
    """Run a job on all ranks and fail with what it returns, as texts, on any of them."""
    results = ranks.run(job, *arguments, timeout=timeout)
    report(failure for failures in results for failure in failures or ())


def report(failures: Iterator[str]) -> None:
    texts = list(failures)
    assert not texts, f"{len(texts)} failures\n" + "\n".join(texts[:10])


def report_cases(
    ranks: Ranks, failure: Callable[..., str | None], cases: Iterable[Any], **options: Any
) -> None:
    """Report what ``failure(case, group)`` finds on ranks, in one group with these options of
    `fresh_group`; ``hosts``: whose ranks share no memory."""
    results = ranks.run(_failures_of, failure, list(cases), timeout=120, **options)
    report(found for rank in results for found in rank if found)


def _failures_of(
    failure: Callable[..., str | None], cases: list[Any], hosts: bool = False, **options: Any
) -> list[str | None]:
    with apart() if hosts else contextlib.nullcontext(), fresh_group(**options) as group:
        return [failure(case, group) for case in cases]


# Which Python functions run.


@contextmanager
def functions_called(package: str = "") -> Iterator[list[str]]:
    """The functions that are called within, of a module, of a package and its modules, or all. A
    generator counts each time that it goes on."""
    called: list[str] = []

    def trace(frame: Any, event: str, argument: object) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and (not package or f"{module}.".startswith(f"{package}.")):
            called.append(f"{module}.{frame.f_code.co_name}")

    sys.setprofile(trace)
    try:
        yield called
    finally:
        sys.setprofile(None)
