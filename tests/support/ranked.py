"""Run correctness tests in the ranks: many cases per job.

Failures are returned as text.
"""

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
from tests.support.reference import Operand, format_w_scale, format_x_scale
from tpkernels import CustomMatmul, groups
from tpkernels.algorithms import backends, point_to_point
from tpkernels.algorithms.point_to_point import PeerLinks
from tpkernels.groups import GroupLike
from tpkernels.launch import Ranks
from tpkernels.ops import execution
from tpkernels.ops.reference import Expected
from tpkernels.symm import colocation

SMALLEST_WORKSPACE = 1 << 16
TIMEOUT = 20.0  # s, limit of waits for a failed rank


@contextlib.contextmanager
def fresh_group(
    workspace_bytes: int = 1 << 20, autotune: bool | None = None, numerics: str | None = None
) -> Iterator[dist.ProcessGroup]:
    """Create a group of all ranks that no other test can have broken."""
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
def separate_hosts() -> Iterator[None]:
    """Let groups that are set up within the block share no memory, like groups that span hosts."""
    original = colocation._find_connect_obstacle
    colocation._find_connect_obstacle = lambda *_: "is kept apart by a test"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="the ranks are on one machine but do not share"
            )
            yield
    finally:
        colocation._find_connect_obstacle = original


@contextlib.contextmanager
def on_hosts(host_names: str) -> Iterator[None]:
    """Let groups of all ranks that are set up within the block share memory per host.

    ``host_names[rank]`` is the host of a rank.
    """

    def find_obstacle(name: str | None, seconds: float) -> str | None:
        match = re.match(r"tpkernels-host-(\d+)-", name or "")
        if match is not None and host_names[int(match[1])] == host_names[dist.get_rank()]:
            return None
        return "is kept apart by a test"

    with separate_hosts(), mock.patch.object(colocation, "_find_connect_obstacle", find_obstacle):
        yield


@contextlib.contextmanager
def bytes_sent() -> Iterator[Counter[int]]:
    """Count the bytes that this rank sends over `torch.distributed` within the block.

    Counts are by receiver and exclude handshakes.
    """
    sent, start = Counter[int](), PeerLinks._start

    def counting(link: PeerLinks, sends: Any, receives: Any, tag: int) -> Any:
        if tag != point_to_point._HANDSHAKE_TAG:
            for tensor, dst in sends:
                sent[dst] += tensor.nbytes
        return start(link, sends, receives, tag)

    with mock.patch.object(PeerLinks, "_start", counting):
        yield sent


@contextlib.contextmanager
def disable_bound_calls() -> Iterator[None]:
    """Plan and run all calls within the block in Python.

    Calls that run in the extension would ignore functions that a test replaces.
    """

    def clear_plans() -> None:
        for group in list(groups._groups.values()):  # a copy: groups may end in other threads
            group.clear_planned_calls()

    clear_plans()
    with mock.patch.object(execution, "bind", lambda *_: None):
        yield
    clear_plans()


@contextlib.contextmanager
def record_calls() -> Iterator[list[str]]:
    """Record the ops of the calls within the block."""
    ops: list[str] = []
    run = backends.run

    def recording(call: Any, *args: Any) -> Any:
        ops.append(call.problem.op)
        return run(call, *args)

    with disable_bound_calls(), mock.patch.object(backends, "run", recording):
        yield ops


def copy_to_layout(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Copy x to memory with this layout, surrounded by NaN that no op may read."""
    if x.is_floating_point() and x.itemsize == 1:  # torch supports few copies of these dtypes
        return copy_to_layout(x.view(torch.uint8), layout).view(x.dtype)
    nan = math.nan if x.is_floating_point() else 0x7F
    if layout == "transposed" and x.dim() > 1:
        swapped = x.transpose(-1, -2).clone(memory_format=torch.contiguous_format)
        return swapped.transpose(-1, -2)
    if layout == "sliced":
        padded = x.new_full([2 * size + 3 for size in x.shape], nan)
        view = padded[tuple(slice(1, 1 + 2 * size, 2) for size in x.shape)]
        return view.copy_(x)
    if layout == "offset":  # contiguous, misaligned by one element
        flat = x.new_full([x.numel() + 3], nan)
        return flat[1 : 1 + x.numel()].view(x.shape).copy_(x)
    return x.clone(memory_format=torch.contiguous_format)


@contextlib.contextmanager
def input_in_layout(
    case: Case, x: torch.Tensor, group: dist.ProcessGroup
) -> Iterator[torch.Tensor]:
    """Yield x in the memory layout of the case.

    With "symmetric", x is at the start of symmetric memory, with "symmetric_end" at its end, with
    "mixed" at its start on odd ranks only. These three are collective.
    """
    if case.layout not in ("symmetric", "symmetric_end", "mixed"):
        yield copy_to_layout(x, case.layout)
        return
    max_numel = x.numel()
    if "all_gather" in case.op:
        shard_shape = list(case.shape)
        shard_shape[case.dim] = max(case.shards(group.size()))
        max_numel = math.prod(shard_shape)
    elif case.k:
        max_numel = x[..., 0].numel() * max(case.k)
    # Peers read the memory during the call, so this function keeps it until the block ends.
    memory = tpkernels.empty(max_numel, dtype=x.dtype, group=group)
    memory.fill_(math.nan)
    offset = max_numel - x.numel() if case.layout == "symmetric_end" else 0
    x_view = memory[offset : offset + x.numel()].view(x.shape).copy_(x)
    yield copy_to_layout(x, "plain") if case.layout == "mixed" and group.rank() % 2 == 0 else x_view


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        torch.equal(a, b) if a.itemsize > 1 else torch.equal(*(t.view(torch.uint8) for t in (a, b)))
    )


def _weight_in_layout(w: Any, layout: str) -> torch.Tensor | CustomMatmul:
    if isinstance(w, Operand):
        return copy_to_layout(w.elements, layout).t()
    if layout == "packed" or (layout == "packed_on_even_ranks" and dist.get_rank() % 2 == 0):
        return tpkernels.pack(w)
    if layout == "caller's":
        return CustomMatmul(lambda x: x @ w, w.shape, w.dtype)
    return copy_to_layout(w, "transposed" if layout == "linear" else layout)


def call_options(case: Case) -> dict[str, Any]:
    """Return the options of a call that are not tensors."""
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
    gathered_x = reference.gathered_x(case)
    shard = case.shard(gathered_x.elements if case.scales else gathered_x, rank, world)
    options = call_options(case)
    with input_in_layout(case, shard, group) as x:
        if not case.n:
            results = [tpkernels.all_gather(x, group_like, **options)]
        else:
            pairs = reference.column_weights(case, rank)
            if case.biases:
                options["biases"] = [
                    None if b is None else copy_to_layout(b, case.layout) for _, b in pairs
                ]
            scales: list[Any] = []
            if case.scales:
                replicated = case.replicated or not gathered_x.scale.dim()
                x_scale = (
                    gathered_x.scale if replicated else case.shard(gathered_x.scale, rank, world)
                )
                scales = [
                    format_x_scale(case, x_scale),
                    [format_w_scale(case, w) for w, _ in pairs],
                ]
            results = getattr(tpkernels, case.op)(
                x,
                [_weight_in_layout(w, case.weight_layout) for w, _ in pairs],
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
    local_x, w = reference.partial_operands(case, rank, world)
    scales: list[torch.Tensor] = []
    if case.scales:
        scales = [format_x_scale(case, local_x.scale), format_w_scale(case, w)]
        local_x = local_x.elements
    options = call_options(case)
    bias, residual = reference.reduction_bias(case), reference.reduction_residual(case)
    if residual is not None and case.scattered:
        residual = case.shard(residual, rank, world)
    if w is not None:
        options["bias"] = None if bias is None else copy_to_layout(bias, case.layout)
    if w is not None or case.normalises:
        options["residual"] = None if residual is None else copy_to_layout(residual, case.layout)
    with input_in_layout(case, local_x, group) as x:
        operands = [x] if w is None else [x, _weight_in_layout(w, case.weight_layout)]
        if case.normalises:
            operands.append(copy_to_layout(reference.norm_weight(case), case.layout))
        result: Any = getattr(tpkernels, case.op)(*operands, *scales, group_like, **options)
        if case.op == "all_reduce_":
            assert result is x, "not the tensor that was passed"
            return [result.contiguous().clone()]
        assert _same_bytes(x, local_x), "the input was changed"
    return list(result) if case.normalises else [result]


def call(
    case: Case, group: dist.ProcessGroup, group_like: GroupLike | None = None
) -> list[torch.Tensor]:
    """Run one case and return its results. ``group_like`` is the group argument of the op."""
    function = _gather if "all_gather" in case.op else _reduce
    return function(case, group, group if group_like is None else group_like)


def find_difference(got: torch.Tensor, want: Expected) -> str | None:
    """Describe a wrong result, or return None."""
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
    """Run one case and describe its wrong results."""
    rank, world = group.rank(), group.size()
    results, expected = call(case, group, group_like), reference.expected(case, rank, world)
    if case.normalises:
        expected = [reference.expected_norm(case, results[1]), *expected]
    errors = [find_difference(got, want) for got, want in zip(results, expected, strict=True)]
    return [f"rank {rank} of {world}: {case}: {error}" for error in errors if error is not None]


def check_cases(
    cases: Sequence[Case], group: dist.ProcessGroup, group_like: GroupLike | None = None
) -> list[str]:
    """Run cases up to the first exception and describe the failures."""
    failures: list[str] = []
    for case in cases:
        try:
            failures += check(case, group, group_like)
        except Exception as error:
            failures.append(f"{case}: {traceback.format_exc()}")
            groups.get(group.group_name).mark_broken(error)  # ends the waits of the peers
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
    """Run the cases on ``world`` ranks and fail with the failures of all ranks.

    ``hosts``: see `on_hosts`. Empty: one host.
    """
    assert cases
    check_job(ranks(world), cases_job, list(cases), workspace_bytes, hosts, timeout=240)


def collect_messages(attempts: Iterable[Callable[[], Any]], kind: Any = Exception) -> list[str]:
    """Return the error of each attempt as "type: message", or "nothing" on success.

    Errors that are not of type ``kind`` propagate.
    """
    messages = []
    for attempt in attempts:
        try:
            attempt()
            messages.append("nothing")
        except kind as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def find_unexpected_messages(
    attempts: Mapping[str, Callable[[], Any]], kind: Any = Exception
) -> list[str]:
    """Return the messages that do not contain the expected text.

    ``attempts`` maps each expected text to an attempt. The message of a success is "nothing".
    """
    pairs = zip(attempts, collect_messages(attempts.values(), kind), strict=True)
    return [
        f"{message!r} lacks {expected!r}" for expected, message in pairs if expected not in message
    ]


def on_ranks(
    world: int | None = None, timeout: float = 120.0, fixture: str = "ranks", driver: bool = False
) -> Callable[[Any], Any]:
    """Turn a function into a test that runs it on every rank.

    The function returns failures as texts, or None. Its parameters are parameters of the test.

    Args:
        world: number of ranks. By default the test has a parameter of this name.
        driver: the ranks load the emulated CUDA driver.
    """

    def decorate(job: Callable[..., list[str] | None]) -> Callable[..., None]:
        def test(**values: Any) -> None:
            ranks, count = values.pop(fixture), world or values.pop("world")
            path = values.pop("cuda_driver", None)
            job_args = (job.__module__, job.__name__, path, values)
            check_job(ranks(count), _run_job, *job_args, timeout=timeout)

        fixtures = [
            fixture,
            *(["cuda_driver"] if driver else []),
            *(["world"] if world is None else []),
        ]
        names = [*fixtures, *inspect.signature(job).parameters]
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
    """Run a job on all ranks. Fail with the texts that it returns on any rank."""
    results = ranks.run(job, *arguments, timeout=timeout)
    report(failure for failures in results for failure in failures or ())


def report(failures: Iterator[str]) -> None:
    messages = list(failures)
    assert not messages, f"{len(messages)} failures\n" + "\n".join(messages[:10])


def report_cases(
    ranks: Ranks, failure: Callable[..., str | None], cases: Iterable[Any], **options: Any
) -> None:
    """Run ``failure(case, group)`` on all ranks and report the failures.

    All cases run in one group. ``options`` are options of `fresh_group`, and ``hosts``: the ranks
    share no memory.
    """
    results = ranks.run(_check_in_group, failure, list(cases), timeout=120, **options)
    report(message for rank in results for message in rank if message)


def _check_in_group(
    failure: Callable[..., str | None], cases: list[Any], hosts: bool = False, **options: Any
) -> list[str | None]:
    with separate_hosts() if hosts else contextlib.nullcontext(), fresh_group(**options) as group:
        return [failure(case, group) for case in cases]


# Calls of Python functions.


@contextmanager
def functions_called(package: str = "") -> Iterator[list[str]]:
    """Record the Python functions that are called within the block.

    ``package`` restricts the record to a module, or a package and its modules. A generator counts
    once per step.
    """
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
