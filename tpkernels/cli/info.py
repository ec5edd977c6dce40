"""``tpkernels info``."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from typing import Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tpkernels import _C, cuda, kernels, nccl
from tpkernels.algorithms.backends import TABLES
from tpkernels.bench.specs import Spec, unsupported_kernels
from tpkernels.cli import options
from tpkernels.common import dtypes
from tpkernels.launch.terminal import DTYPES, byte_size, console, table
from tpkernels.local.packed import is_native
from tpkernels.planning import machine, qualification
from tpkernels.planning.algorithms import ALGORITHMS
from tpkernels.planning.choose import Capabilities, unsupported_algorithms
from tpkernels.planning.op_spec import OPS
from tpkernels.symm import colocation
from tpkernels.symm.limits import available_bytes

_MATMULS = {
    "native": "native: torch.matmul runs at full speed",
    "converted": "converted to float32 in panels: this processor has no instructions for the dtype",
}


def info(as_json: options.AsJson = False) -> None:
    """Show versions, devices, and the algorithms that each op can use on this machine."""
    collected = facts()
    if as_json:
        typer.echo(json.dumps(collected, indent=2))
    else:
        _show(collected, console())


def facts() -> dict[str, Any]:
    """Collect everything that `tpkernels info` shows."""
    modules = {"calls": _C.calls, "host": _C.host, "nccl": _C.nccl, "cuda": _C.cuda}
    public = [
        f"{prefix}.{name}"
        for prefix, module in modules.items()
        for name in dir(module)
        if not name.startswith("_")
    ]
    algorithms, across_hosts = (
        {
            device: {op: find_obstacles(device, op, shared_memory=shared) for op in OPS}
            for device in TABLES
        }
        for shared in (True, False)
    )
    return {
        "versions": {
            **machine.versions(),
            "python": platform.python_version(),
            "kernel": f"{platform.system()} {platform.release()}",
        },
        "extension": {"file": _C.__file__, "holds": public},
        "vector_unit": {
            "in_use": _C.host.vector_unit(),
            "available": _C.host.vector_units(),
            "failed": _C.host.failed_vector_units(),
            "amx_refused": _C.host.amx_refused(),  # "" if AMX is available
        },
        "local_matmul": {
            dtypes.name(dtype): "native" if is_native(dtype) else "converted"
            for dtype in DTYPES.values()
        },
        "devices": {
            "cpu": machine.processor(),
            "cores": os.cpu_count(),
            "usable_cores": sorted(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            "available_bytes": available_bytes(),
            "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        },
        "shared_memory": colocation.unsupported(),
        "cuda": {"kernels": cuda.image_status(), "driver": cuda.driver_status()},
        "nccl": nccl.facts(),
        "qualified": _qualified() if torch.cuda.is_available() else {},
        "algorithms": algorithms,
        "algorithms_across_hosts": across_hosts,
    }


def find_obstacles(device: str, op: str, *, shared_memory: bool) -> dict[str, str | None]:
    """Return, for each algorithm, the reason why it cannot run ``op`` on this machine, or None if
    it can."""
    if device == "cuda" and not torch.cuda.is_available():
        return dict.fromkeys(ALGORITHMS, kernels.NO_GPU)
    shape = (1024, 1024, 1024) if OPS[op].has_matmul else (1024,)
    problem = Spec(op, shape, torch.float32).problem(2, device)
    capabilities = Capabilities(
        shared_memory=shared_memory, unsupported=unsupported_kernels(device)
    )
    reasons = unsupported_algorithms(problem, capabilities)
    for name in ALGORITHMS:
        if reasons[name] is None and (op, name) not in TABLES[device]:
            reasons[name] = f"is not implemented for {device} tensors"
    return reasons


def _qualified() -> dict[str, dict[str, str]]:
    """Return the results of `tpkernels qualify` by world size, then variant."""
    report, ignored = qualification.load("cuda")
    if report is None:
        return {"ignored": {"": ignored}} if ignored else {}
    return {
        world: {variant: outcome.reason or outcome.status for variant, outcome in variants.items()}
        for world, variants in report.variants.items()
    }


def _qualified_text(qualified: dict[str, dict[str, str]]) -> str:
    if not qualified:
        return "none: run `tpkernels qualify`" if torch.cuda.is_available() else "no GPU"
    counts = []
    for world, variants in qualified.items():
        passed = sum(result == qualification.QUALIFIED for result in variants.values())
        counts.append(f"{passed} of {len(variants)} variants for {world} ranks")
    return qualified.get("ignored", {}).get("", "") or ", ".join(counts)


def _show(facts: dict[str, Any], out: Console) -> None:
    devices, units = facts["devices"], facts["vector_unit"]
    unshared_reason = facts["shared_memory"]
    cores = ", ".join(map(str, devices["usable_cores"]))
    memory, available = (byte_size(devices[f"{kind}_bytes"]) for kind in ("memory", "available"))
    versions, nccl_text = dict(facts["versions"]), facts["nccl"].get("unsupported")
    nccl_text = nccl_text or "{version}, {origin}: {path}".format(**facts["nccl"])
    lines = {
        **{name: versions.pop(name) for name in ("tpkernels", "torch")},
        "processor": devices["cpu"],
        "cores": f"{len(devices['usable_cores'])} of {devices['cores']} usable: {cores}",
        "memory": f"{memory}, {available} available",
        "GPUs": ", ".join(devices["gpus"]) or "none visible to torch",
        "vector unit": f"{units['in_use']} (available: {', '.join(units['available'])}"
        + (f"; failed the self-test: {', '.join(units['failed'])})" if units["failed"] else ")"),
        "AMX": units["amx_refused"] or "available to this process",
        **{f"{name} matmul": _MATMULS[kind] for name, kind in facts["local_matmul"].items()},
        "shared memory": f"none: this process {unshared_reason}"
        if unshared_reason
        else "available between ranks of one user, on one machine and in one network namespace",
        "CUDA driver": facts["cuda"]["driver"],
        "CUDA kernels": facts["cuda"]["kernels"],
        "NCCL": nccl_text,
        "qualified variants": _qualified_text(facts["qualified"]),
        **versions,
        "extension": facts["extension"]["file"],
        "extension contents": ", ".join(facts["extension"]["holds"]),
    }
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in lines.items():
        grid.add_row(f"[bold]{name}[/bold]", escape(str(value)))
    out.print(grid)
    for device, ops in facts["algorithms"].items():
        if all(reason == kernels.NO_GPU for reasons in ops.values() for reason in reasons.values()):
            out.print(f"on {device}: no algorithm is available; each {kernels.NO_GPU}")
            continue
        names = [
            name
            for name, algorithm in ALGORITHMS.items()
            if len(algorithm.unsupported_ops.get(device, ())) < len(ops)
        ]
        grid = table(f"{device} tensors", tuple(names))
        for op, reasons in ops.items():
            grid.add_row(op, *("yes" if reasons[name] is None else "no" for name in names))
        out.print(grid)
        out.print(_reasons(ops, names))
        across_hosts = facts["algorithms_across_hosts"][device].values()
        usable = [name for name in names if all(reasons[name] is None for reasons in across_hosts)]
        out.print(f"Available if the ranks of a group do not share memory: {', '.join(usable)}\n")


def _reasons(ops: dict[str, dict[str, str | None]], names: Sequence[str]) -> Table:
    """Return a table of unavailable algorithms with the reasons and the affected ops."""
    affected_ops: dict[tuple[str, str], list[str]] = {}
    for name in names:
        for op, reasons in ops.items():
            if (reason := reasons[name]) is not None:
                affected_ops.setdefault((name, reason), []).append(op)
    grid = table("algorithm", (), "not available because it")
    grid.add_column("for", overflow="fold")
    for (name, reason), affected in affected_ops.items():
        grid.add_row(name, escape(reason), ", ".join(affected))
    return grid
