"""``tpkernels explain``."""

from __future__ import annotations

from typing import Annotated

import torch
from rich.markup import escape
from typer import Option

from tpkernels.bench.specs import Spec, check_split, spec_of, unsupported_kernels
from tpkernels.cli import options
from tpkernels.launch.session import check_device
from tpkernels.launch.terminal import (
    UsageError,
    at_least,
    check_known,
    check_workers,
    console,
    dtype_named,
    milliseconds,
    table,
)
from tpkernels.op_spec import OPS
from tpkernels.planning import store, trust
from tpkernels.planning.choose import (
    Means,
    candidates,
    choose,
    unsupported_algorithms,
    why_unqualified,
)
from tpkernels.planning.cost import all_reduce_way
from tpkernels.planning.machine import cpu_flags, this_machine
from tpkernels.planning.table import Measurement, Table
from tpkernels.planning.trust import SUMS, Trust
from tpkernels.shards import shard_sizes
from tpkernels.symm.node import why_not_hierarchical
from tpkernels.text import counted
from tpkernels.tuning.contest import ELIGIBLE, is_eligible


def explain(
    op: Annotated[str, Option(help="The op.")],
    m: Annotated[int | None, Option(help="Rows, over all ranks.")] = None,
    n: Annotated[int | None, Option(help="Columns of the result, over all ranks.")] = None,
    k: Annotated[int | None, Option(help="Contraction extent, over all ranks.")] = None,
    nbytes: Annotated[
        str | None,
        Option("--bytes", help="Size of a collective's tensor, instead of --m, --n, --k."),
    ] = None,
    world: Annotated[int, Option("--tp", "--nproc", help="Number of ranks.")] = 2,
    dtype: options.Dtype = "bf16",
    device: Annotated[str, Option(help="cpu | cuda")] = "cpu",
    hosts: Annotated[
        int, Option(help="Number of hosts; ranks on several hosts share no memory.")
    ] = 1,
    threads: options.Threads = 1,
) -> None:
    """Show which algorithm auto chooses for a problem and why, with the times that `tpkernels tune`
    measured here. Starts no ranks."""
    check_workers(tp=world, threads=threads)
    at_least(1, hosts=hosts)
    check_device(device)
    spec = _spec_of_extents(op, (m, n, k), nbytes, dtype_named(dtype))
    check_split(spec, world)
    shared_memory, problem = hosts == 1, spec.problem(world, device)
    means = Means(
        shared_memory,
        cpu_flags=cpu_flags(),
        unsupported=unsupported_kernels(device),
        why_no_node=why_not_hierarchical(shard_sizes(world, hosts)),
        trust=trust.of_this_machine(world) if device == "cuda" else Trust(),
    )
    machine, known = None, Table()
    if device == "cpu" or torch.cuda.is_available():
        machine = this_machine(device, world, hosts, shared_memory, threads=threads)
        known = store.load_or_warn(machine)
    chosen = choose(problem, means, tuned=known)
    cases = [] if problem.tuning_key is None else known.at(*problem.tuning_key)
    grid = table("algorithm", ("ms",), "why not")
    for name, unsupported in unsupported_algorithms(problem, means).items():
        reason = unsupported or why_unqualified(problem, name, means)
        label = f"[bold green]{name}[/]" if name == chosen.algorithm else name
        times = _times(name, cases) if reason is None else ""
        grid.add_row(label, times, escape(reason or ""))
    notes = []
    if device == "cuda" and op in ("all_reduce", "matmul_all_reduce"):
        way = all_reduce_way(problem.nbytes, world, frozenset(SUMS))
        notes.append(f"direct sums by {way}, for these bytes and ranks by the model of hops")
    notes.append(f"auto chooses [bold]{chosen.algorithm}[/]: {escape(chosen.reason)}")
    if is_eligible(problem, shared_memory, known):
        tries = ", ".join(name for name in candidates(problem, means) if name in ELIGIBLE)
        notes.append(
            f"In the first calls it tries {tries}, and keeps the fastest "
            "(tpkernels.init(autotune=False): it does not)"
        )
    if machine is not None:
        count = len(known.measurements)
        where = f"{counted(world, 'rank')} x {counted(threads, 'thread')}"
        if count:
            path = escape(str(store.path_for(machine)))
            notes.append(f"Measured here with {where}: {count} cases, {path}")
        else:
            notes.append(f"Nothing was measured here with {where}: see tpkernels tune")
    for part in (f"{op} {spec}, {counted(world, 'rank')}, {device}", grid, *notes):
        console().print(part)


def _spec_of_extents(
    op: str, extents: tuple[int | None, ...], sizes: str | None, dtype: torch.dtype
) -> Spec:
    """Return the spec given by either --m, --n, --k (``extents``) or --bytes, whichever ``op``
    needs."""
    check_known("op", [op], OPS)
    needed, unused = "--m, --n and --k", "--bytes"
    complete, excluded = None not in extents, sizes is not None
    if not OPS[op].has_matmul:
        needed, unused = unused, needed
        complete, excluded = excluded, any(extent is not None for extent in extents)
    if excluded or not complete:
        raise UsageError(f"{op} takes {needed}, not {unused}")
    return spec_of(op, ",".join(map(str, extents)), sizes or "", dtype)


def _times(name: str, cases: list[Measurement]) -> str:
    """Return the time for each measured extent that is not part of the problem."""
    times = [
        milliseconds(case.ms[name]) + (f" ({case.other})" if len(cases) > 1 else "")
        for case in cases
        if name in case.ms
    ]
    return ", ".join(times) or "not measured"
