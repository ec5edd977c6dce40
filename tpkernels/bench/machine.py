"""The rates of this machine, for the cost model of products on meshes (`mesh.cost`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist

from tpkernels import groups, ops
from tpkernels.bench.roofline import Rates, measure_rates, slowest_rates
from tpkernels.launch.session import rank_device, synchronizer
from tpkernels.planning import machines
from tpkernels.planning.machine import Machine, this_machine
from tpkernels.planning.machines import Link, Profile
from tpkernels.terminal import UsageError, check_known, writing
from tpkernels.timing import Variant, measure

_DTYPES = (torch.bfloat16, torch.float32, torch.float64)
_SMALL, _LARGE = 4 << 10, 16 << 20  # bytes of the tensor that is gathered
_REPEAT, _SECONDS = 20, 2.0


@dataclass(frozen=True)
class MachineReport:
    """One rank's report: its rates, by the order of `_DTYPES`, and the seconds of an all-gather of
    `_SMALL` and of `_LARGE` bytes."""

    machine: Machine
    rates: tuple[Rates, ...]
    small: tuple[float, ...]
    large: tuple[float, ...]


def measure_machine(device: str) -> MachineReport:
    """Measures this rank's share of the machine while the others measure theirs. Collective."""
    assert dist.group.WORLD is not None  # it runs on ranks
    group = groups.get(dist.group.WORLD.group_name).ready(device)
    rates = tuple(measure_rates(dtype, device) for dtype in _DTYPES)
    place, variants = rank_device(device), {}
    for name, nbytes in (("small", _SMALL), ("large", _LARGE)):
        x = torch.zeros(nbytes // 4 // group.world, device=place)
        variants[name] = Variant(lambda x=x: ops.all_gather(x, group.name))  # type: ignore[misc]
    samples = measure(variants, repeat=_REPEAT, budget=_SECONDS, synchronize=synchronizer(device))
    machine = this_machine(device, group.world, group.hosts, group.shared_memory)
    return MachineReport(machine, rates, samples["small"].seconds, samples["large"].seconds)


def profile_of(reports: Sequence[MachineReport], day: str) -> Profile:
    """The rates that all ranks reach at once."""
    machine, world = reports[0].machine, len(reports)
    by_dtype = [slowest_rates(rates) for rates in zip(*(r.rates for r in reports), strict=True)]
    flops16, flops32, flops64 = (rates.flops for rates in by_dtype)
    small, large = (
        min(max(each) for each in zip(*seconds, strict=True))  # the best, as `measure_rates` takes
        for seconds in ([r.small for r in reports], [r.large for r in reports])
    )
    received = _LARGE * (world - 1) / world
    link = Link(call=small, step=0.0, bandwidth=received / max(large - small, 1e-9))
    return Profile(
        title=f"{machine.device}, {world} ranks x {machine.threads} threads",
        device=machine.kind,
        flops=(flops16, flops32, flops64),
        bandwidth=min(rates.copy_bytes for rates in by_dtype),
        memory=0,
        node=world,
        within=link,
        between=link,
        host=machines.machine_named(machines.name_of_own(machine.kind)).host,
        overlaps=machine.kind == "cuda",
        source=f"measured by tpkernels tune --machine, {day}",
        multiprocessors=_multiprocessors(machine.kind),
    )


def _multiprocessors(device: str) -> int:
    if device == "cpu":
        return 0
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)


def keep(reports: Sequence[MachineReport]) -> tuple[Path, Profile]:
    """Writes the rates to the cache folder; returns the file and the profile. ``UsageError`` if it
    cannot be written."""
    machine, profile = reports[0].machine, profile_of(reports, date.today().isoformat())
    with writing(machines.path_for(machine)):
        return machines.keep(machine, profile), profile


def engines_of(cpu: str | None, gpu: str | None, ranks: int) -> tuple[Profile, Profile | None]:
    """The rates of a CPU and a GPU by name, or of this machine's; None: it has no GPU.
    ``UsageError`` as `machine_by_name`, or for a name of the other kind."""
    profiles: list[Profile | None] = []
    for option, name, device in (("--cpu", cpu, "cpu"), ("--gpu", gpu, "cuda")):
        if name is None and device == "cuda" and not torch.cuda.is_available():
            profiles.append(None)
            continue
        profile = machine_by_name(name, ranks, device)
        if profile.device != device:
            raise UsageError(f"{option} is '{name}', {profile.title}, which is of the other kind")
        profiles.append(profile)
    on_cpu, on_gpu = profiles
    assert on_cpu is not None  # every machine has one
    return on_cpu, on_gpu


def machine_by_name(name: str | None, ranks: int, device: str) -> Profile:
    """A machine for `tpkernels plan`. ``UsageError`` if there is none of that name, or this one has
    not been measured.

    Args:
        name: of `machines.yaml`, or "this"; None: as a product on a mesh takes it.
        ranks: of the mesh, for "this".
    """
    if name is None:
        return machines.own_machine(device, ranks)[1]
    if name != machines.MEASURED:
        check_known("machine", [name], (machines.MEASURED, *machines.machines()))
        return machines.machine_named(name)
    measured = machines.load(this_machine(device, ranks, 1, True, threads=1))
    if measured is None:
        raise UsageError(
            f"this machine has not been measured with {ranks} ranks of 1 thread; run tpkernels "
            f"tune --machine --tp {ranks}"
        )
    return measured


def rates_text(profile: Profile) -> str:
    """For people."""
    tflops = ", ".join(f"{flops / 1e12:.3g}" for flops in profile.flops)
    link = profile.within
    return (
        f"{tflops} TFLOP/s (16, 32, 64 bits), memory {profile.bandwidth / 1e9:.3g} GB/s, link "
        f"{link.bandwidth / 1e9:.3g} GB/s and {1e6 * link.call:.3g} us a call"
    )
