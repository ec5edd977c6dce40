"""Measure the matmul, copy and communication rates of the ranks of this machine. All ranks run the
probes simultaneously, because they share memory channels, clocks and possibly cores.

`tpkernels bench` draws rooflines from the rates. A call needs at least the time of its flops at the
matmul rate, and at least the time of its bytes at the copy rate. `tpkernels tune --machine` saves
the rates as a `Profile`.
"""

from __future__ import annotations

import torch

from tpkernels import ops
from tpkernels.bench.cases import memory_budget, world_group
from tpkernels.common.text import pluralize
from tpkernels.launch.session import rank_device, synchronizer
from tpkernels.launch.terminal import UsageError, check_known
from tpkernels.local.matmul import local_matmul
from tpkernels.planning import store
from tpkernels.planning.cost import MEASURED, Link, Profile, Rates, get_preset, machines
from tpkernels.planning.machine import Machine, last_level_cache_bytes, this_machine
from tpkernels.timing import Variant, measure, slowest

# Size of a square matmul that is long compared with its overhead and short compared with a case.
# 2 GFLOP run in about 40 ms on a core of AMD EPYC Zen 3 in fp32 (2026-11-21, `tpkernels bench`:
# 0.058 TFLOP/s).
_SIZE = {"cpu": 1024, "cuda": 8192}
_REPEAT, _SECONDS = 5, 1.0
_COPY_FACTOR = 4  # copied bytes / bytes of the last-level cache, if memory permits
_MIN_BYTES = 1 << 20

_DTYPES = (torch.bfloat16, torch.float32, torch.float64)
_SMALL, _LARGE = 4 << 10, 16 << 20  # bytes of the gathered tensor
_LINK_REPEAT, _LINK_SECONDS = 20, 2.0


def measure_rates(dtype: torch.dtype, device: str) -> Rates:
    """Measure the rates that every rank reaches on "cpu" or "cuda". Collective."""
    torch_device, synchronize = rank_device(device), synchronizer(device)
    size = _SIZE[device]
    x, w = (torch.randn(size, size).to(torch_device, dtype) for _ in range(2))
    w, out = w.t(), torch.empty_like(x)
    limit = min(_COPY_FACTOR * last_level_cache_bytes(device), memory_budget(device) // 2)
    nbytes = max(_MIN_BYTES, limit)
    source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=torch_device)
    target = torch.empty_like(source)
    variants = {
        "local_matmul": Variant(lambda: local_matmul(x, w, out)),
        "copy": Variant(lambda: target.copy_(source)),
    }
    samples = measure(variants, repeat=_REPEAT, budget=_SECONDS, synchronize=synchronize)
    # Timed separately and only once: without native instructions for the dtype, torch.matmul is
    # many times slower.
    torch_variant = {"matmul": Variant(lambda: torch.matmul(x, w))}
    samples |= measure(torch_variant, repeat=1, synchronize=synchronize)
    names = ("local_matmul", "matmul", "copy")
    local, by_torch, copy = slowest([min(samples[name].seconds) for name in names])
    flops = 2 * size**3
    return Rates(flops / min(local, by_torch), flops / by_torch, copy_bytes=2 * nbytes / copy)


def measure_machine(device: str, day: str) -> tuple[Machine, Profile]:
    """Return this machine, and the rates that every rank reaches while all ranks run. Collective.

    Args:
        day: date of the measurement, for ``source`` of the profile.
    """
    group = world_group().ready(device)
    world, torch_device, variants = group.world, rank_device(device), {}
    by_dtype = [measure_rates(dtype, device) for dtype in _DTYPES]
    flops16, flops32, flops64 = (rates.flops for rates in by_dtype)
    for name, nbytes in (("small", _SMALL), ("large", _LARGE)):
        x = torch.zeros(nbytes // 4 // world, device=torch_device)
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
        title=f"{machine.device}, {pluralize(world, 'rank')}"
        + ("" if on_gpus else f" x {pluralize(machine.threads, 'thread')}"),
        device=machine.kind,
        flops=(flops16, flops32, flops64),
        bandwidth=min(rates.copy_bytes for rates in by_dtype),
        memory=0,
        node=world,
        within=link,
        between=link,
        host=get_preset(store.get_local_preset_name(machine.kind)).host,
        overlaps=on_gpus,
        source=f"measured by tpkernels tune --machine, {day}",
    )


def profile_by_name(name: str | None, ranks: int, device: str) -> Profile:
    """Return the profile of a machine for `tpkernels explain`. ``UsageError`` if the name is
    unknown, or if this machine has not been measured.

    Args:
        name: a name in `machines.yaml`, or "this". None means the profile that `tpkernels.mesh`
            uses.
        ranks: the number of ranks of the mesh, for "this".
    """
    if name is None:
        return store.load_local_profile(device, ranks)[1]
    if name != MEASURED:
        check_known("machine", [name], (MEASURED, *machines()))
        return get_preset(name)
    measured = store.load_profile(this_machine(device, ranks, 1, True, threads=1))
    if measured is None:
        raise UsageError(
            f"this machine has not been measured with {ranks} ranks x 1 thread; run tpkernels "
            f"tune --machine --tp {ranks}"
        )
    return measured


def rates_text(profile: Profile) -> str:
    """Format the rates of a profile for the terminal."""
    tflops = ", ".join(f"{flops / 1e12:.3g}" for flops in profile.flops)
    link = profile.within
    return (
        f"{tflops} TFLOP/s (16, 32, 64 bits), memory {profile.bandwidth / 1e9:.3g} GB/s, link "
        f"{link.bandwidth / 1e9:.3g} GB/s and {1e6 * link.call:.3g} us per call"
    )
