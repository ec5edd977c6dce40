"""Measure how fast the ranks of this machine multiply, copy and communicate. All ranks run the
probes simultaneously, because they share memory channels, clocks and possibly cores.

`tpkernels bench` draws its rooflines from the rates: a call needs at least the time of its flops at
the rate of the matmul, and the time of its bytes at the rate of the copy. `tpkernels tune
--machine` saves them as a `Profile`.
"""

from __future__ import annotations

import torch

from tpkernels import ops
from tpkernels.bench.cases import memory_budget, world_group
from tpkernels.common.text import counted
from tpkernels.launch.session import rank_device, synchronizer
from tpkernels.launch.terminal import UsageError, check_known
from tpkernels.local.matmul import local_matmul
from tpkernels.planning import store
from tpkernels.planning.cost import MEASURED, Link, Profile, Rates, machine_named, machines
from tpkernels.planning.machine import Machine, last_level_cache_bytes, this_machine
from tpkernels.timing import Variant, measure, slowest

# A square matmul that is long compared with its overheads and short compared with a case: 2 GFLOP
# take about 40 ms on a core of AMD EPYC Zen 3 in fp32 (2026-11-21, `tpkernels bench`: 0.058
# TFLOP/s).
_SIZE = {"cpu": 1024, "cuda": 8192}
_REPEAT, _SECONDS = 5, 1.0
_COPY_BYTES = 4  # times the cache, if memory allows
_LEAST_BYTES = 1 << 20

_DTYPES = (torch.bfloat16, torch.float32, torch.float64)
_SMALL, _LARGE = 4 << 10, 16 << 20  # bytes of the tensor that is gathered
_LINK_REPEAT, _LINK_SECONDS = 20, 2.0


def measure_rates(dtype: torch.dtype, device: str) -> Rates:
    """Measure the rates that every rank reaches on "cpu" or "cuda". Collective."""
    place, synchronize = rank_device(device), synchronizer(device)
    size = _SIZE[device]
    x, w = (torch.randn(size, size).to(place, dtype) for _ in range(2))
    w, product = w.t(), torch.empty_like(x)
    most = min(_COPY_BYTES * last_level_cache_bytes(device), memory_budget(device) // 2)
    nbytes = max(_LEAST_BYTES, most)
    source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=place)
    target = torch.empty_like(source)
    variants = {
        "local_matmul": Variant(lambda: local_matmul(x, w, product)),
        "copy": Variant(lambda: target.copy_(source)),
    }
    samples = measure(variants, repeat=_REPEAT, budget=_SECONDS, synchronize=synchronize)
    # Separate, and only once: without instructions for the dtype it takes many times as long.
    alone = {"matmul": Variant(lambda: torch.matmul(x, w))}
    samples |= measure(alone, repeat=1, synchronize=synchronize)
    names = ("local_matmul", "matmul", "copy")
    local, by_torch, copy = slowest([min(samples[name].seconds) for name in names])
    flops = 2 * size**3
    return Rates(flops / min(local, by_torch), flops / by_torch, copy_bytes=2 * nbytes / copy)


def measure_machine(device: str, day: str) -> tuple[Machine, Profile]:
    """Return this machine, and the rates that every rank reaches while all ranks run. Collective.

    Args:
        day: of the measurement, for the profile's ``source``.
    """
    group = world_group().ready(device)
    world, place, variants = group.world, rank_device(device), {}
    by_dtype = [measure_rates(dtype, device) for dtype in _DTYPES]
    flops16, flops32, flops64 = (rates.flops for rates in by_dtype)
    for name, nbytes in (("small", _SMALL), ("large", _LARGE)):
        x = torch.zeros(nbytes // 4 // world, device=place)
        variants[name] = Variant(lambda x=x: ops.all_gather(x, group.name))  # type: ignore[misc]
    samples = measure(
        variants, repeat=_LINK_REPEAT, budget=_LINK_SECONDS, synchronize=synchronizer(device)
    )
    # The fastest repetition, as in `measure_rates`.
    small, large = (min(slowest(samples[name].seconds)) for name in variants)
    received = _LARGE * (world - 1) / world
    link = Link(call=small, step=0.0, bandwidth=received / max(large - small, 1e-9))
    machine = this_machine(device, world, group.hosts, group.shared_memory)
    on_gpus = machine.kind == "cuda"
    return machine, Profile(
        title=f"{machine.device}, {counted(world, 'rank')}"
        + ("" if on_gpus else f" x {counted(machine.threads, 'thread')}"),
        device=machine.kind,
        flops=(flops16, flops32, flops64),
        bandwidth=min(rates.copy_bytes for rates in by_dtype),
        memory=0,
        node=world,
        within=link,
        between=link,
        host=machine_named(store.preset_name_here(machine.kind)).host,
        overlaps=on_gpus,
        source=f"measured by tpkernels tune --machine, {day}",
    )


def machine_by_name(name: str | None, ranks: int, device: str) -> Profile:
    """Return the profile of a machine for `tpkernels explain`. ``UsageError`` if the name is
    unknown, or if this machine has not been measured.

    Args:
        name: a name in `machines.yaml`, or "this"; None: the profile that `tpkernels.mesh` uses.
        ranks: the number of ranks of the mesh, for "this".
    """
    if name is None:
        return store.machine_here(device, ranks)[1]
    if name != MEASURED:
        check_known("machine", [name], (MEASURED, *machines()))
        return machine_named(name)
    measured = store.load_profile(this_machine(device, ranks, 1, True, threads=1))
    if measured is None:
        raise UsageError(
            f"this machine has not been measured with {ranks} ranks x 1 thread; run tpkernels "
            f"tune --machine --tp {ranks}"
        )
    return measured


def rates_text(profile: Profile) -> str:
    """Describe rates for people."""
    tflops = ", ".join(f"{flops / 1e12:.3g}" for flops in profile.flops)
    link = profile.within
    return (
        f"{tflops} TFLOP/s (16, 32, 64 bits), memory {profile.bandwidth / 1e9:.3g} GB/s, link "
        f"{link.bandwidth / 1e9:.3g} GB/s and {1e6 * link.call:.3g} us per call"
    )
