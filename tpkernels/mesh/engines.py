"""Which engine of a machine with both computes a product: its CPU or its GPUs. Pure.

Model: the operands are on the host, where the result is wanted too, and the weight is on both. So a
GPU's time is that of the product on a mesh of GPUs (cost.py), and of copies of this rank's x and
result over the link to the host, which nothing hides.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from tpkernels.mesh.cost import Estimate, ranked
from tpkernels.mesh.layout import local_shape
from tpkernels.mesh.planner import MatmulPlan, MatmulProblem
from tpkernels.planning.machines import Profile

ENGINES = ("cpu", "gpu")


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An engine at its best.

    Attributes:
        cost: of ``plan``, without the copies.
        copies: seconds of the copies between the host and the device.
    """

    profile: Profile
    plan: MatmulPlan
    cost: Estimate
    copies: float

    @property
    def name(self) -> str:
        """Return the name, of `ENGINES`."""
        return "gpu" if self.profile.device == "cuda" else "cpu"

    @property
    def seconds(self) -> float:
        """Return the seconds from operands on the host to the result there."""
        return self.cost.seconds + self.copies

    def __str__(self) -> str:
        copies = f", {1e3 * self.copies:.3g} of them copies" if self.copies else ""
        return f"{self.profile.title} {1e3 * self.seconds:.3g} ms{copies}"


def engine_on(problem: MatmulProblem, profile: Profile) -> Engine:
    """Return the engine with these rates."""
    plan, cost = ranked(problem, profile)[0]
    copies = 0.0
    if profile.host is not None:
        mesh = problem.mesh_shape
        for operand, placements in (("x", problem.x), ("out", plan.out)):
            shard = local_shape(problem.shape(operand), placements, mesh, (0,) * len(mesh))
            nbytes = prod(shard) * problem.itemsize
            copies += profile.host.call + nbytes / profile.host.bandwidth
    return Engine(profile=profile, plan=plan, cost=cost, copies=copies)


def faster(cpu: Engine, gpu: Engine) -> tuple[Engine, str]:
    """Return the engine to take, and why."""
    if not gpu.cost.fits(gpu.profile):
        return cpu, f"it needs more than the GPU's {gpu.profile.memory / 1e9:.4g} GB"
    if gpu.seconds < cpu.seconds:
        return gpu, f"{gpu}; {cpu}"
    if gpu.copies >= cpu.seconds:
        return cpu, f"the copies to and from the GPU alone take longer: {cpu}; {gpu}"
    return cpu, f"{cpu}; {gpu}"
