"""The file of a run: written after every case, so that what ends the run loses one case at most."""

from __future__ import annotations

import json
import os
import shlex
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tpkernels.bench import environment, validation
from tpkernels.bench.inputs import last_level_cache_bytes
from tpkernels.bench.options import UsageError, read_input, writing
from tpkernels.bench.results import Report, Roofline, key
from tpkernels.bench.roofline import Rates
from tpkernels.bench.session import under_torchrun
from tpkernels.bench.sweep import Sweep
from tpkernels.text import all_printable, short, shown

_MOST_BYTES = 256 << 20  # a case takes some 10 KiB


def new_report(sweep: Sweep) -> Report:
    """Without results yet."""
    return {
        "format": validation.FORMAT,
        "complete": False,
        "sweep": sweep.facts(),
        "cases": [key(item) for item in sweep.items],
        "environment": all_printable(_environment(sweep.device)),
        "runs": [_run()],
        "rooflines": [],
        "results": [],
    }


def resumed(path: Path, fresh: Report) -> Report:
    """What ``path`` holds, to be gone on with; ``fresh`` where there is no such file.

    Raises:
        UsageError: it holds no report, or that of another sweep or machine.
    """
    if not path.exists():
        return fresh
    found = load(path)
    for part in ("environment", "sweep"):
        old, new = found[part], fresh[part]
        for name in sorted(old.keys() | new.keys()):
            if old.get(name) != new.get(name):
                raise UsageError(
                    f"cannot resume '{path}': its {name} is {shown(old.get(name))}, here it is "
                    f"{shown(new.get(name))}; choose another --out, or leave --resume out"
                )
    other = sorted(set(found["cases"]) ^ set(fresh["cases"]))
    if other:
        raise UsageError(
            f"cannot resume '{path}': it has other cases, {len(other)} of them, as "
            f"{short(other[0], 100)}; "
            "choose another --out, or leave --resume out"
        )
    found["runs"] = [*found["runs"], *fresh["runs"]]
    return found


def load(path: Path) -> Report:
    """The report in a file. ``UsageError`` where there is none that can be used."""
    content = read_input(path, most=_MOST_BYTES)
    try:
        return validation.parse(content)
    except ValueError as error:
        raise UsageError(f"'{path}' {error}; measure again") from error


def save(report: Report, path: Path) -> None:
    """All or nothing: whoever reads ``path`` finds a whole file. ``UsageError`` where it cannot be
    written."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with writing(path):
        try:
            part.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def roofline(tp: int, dtype: str, rates: Rates) -> Roofline:
    return {
        "tp": tp,
        "dtype": dtype,
        "tflops": rates.flops / 1e12,
        "torch_tflops": rates.torch_flops / 1e12,
        "copy_gb_per_s": rates.copy_bytes / 1e9,
        "copy_over_cache": rates.copy_over_cache,
    }


def _environment(device: str) -> dict[str, Any]:
    """What does not change from one run to the next on a machine."""
    devices = environment.devices()
    del devices["available_bytes"]
    return {
        **environment.versions(),
        **devices,
        "vector_unit": environment.vector_units()["in_use"],
        "last_level_cache_bytes": last_level_cache_bytes(device),
        "launcher": "torchrun" if under_torchrun() else "spawned",
    }


def _run() -> dict[str, Any]:
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["tpkernels", *sys.argv[1:]]),
        "load": list(os.getloadavg()),
    }
