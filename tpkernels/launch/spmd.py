"""``tpkernels.spmd``: one function on several ranks of this machine, from a script or a notebook.

Problem: a different process cannot import a notebook function, a lambda or a closure.

Algorithm: cloudpickle sends such functions by value, and functions of modules by name. The ranks
therefore do not import the main script of the caller. If they did, a script without a guard
(``if __name__ == "__main__"``) would start ranks again in each rank.

The pickled arguments and results stay within the processes of one user on one machine.
"""

from __future__ import annotations

import importlib
import io
import operator
import types
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from tpkernels.launch.ranks import Ranks

_NAMES = ("x", "y", "z")  # default names of the mesh dims


def spmd(
    fn: Callable[..., Any],
    nprocs: int,
    mesh_shape: Sequence[int] | None = None,
    *args: Any,
    mesh_dim_names: Sequence[str] | None = None,
    device: str = "cpu",
    threads: int = 1,
    timeout: float = 300.0,
    **kwargs: Any,
) -> list[Any]:
    """Call ``fn(mesh, *args, **kwargs)`` on new ranks and return the results by rank.

    The default process group is initialised on the ranks. The ranks end with the call.

    Args:
        fn: any function, including lambdas, closures and functions defined in a notebook. ``fn``
            and its arguments are copied to the ranks, so later changes of variables are not shared
            in either direction. The output of the ranks appears on the standard output of this
            process. In a notebook that is the terminal of the server.
        nprocs: number of ranks.
        mesh_shape: sizes of the mesh dims; the number of mesh elements is ``nprocs``. By default
            one dim.
        *args: further arguments of ``fn``.
        mesh_dim_names: by default "x", "y" and "z".
        device: device type of the mesh, "cpu" or "cuda". With "cuda" the process group uses NCCL,
            and rank r uses GPU r modulo the number of GPUs.
        threads: intra-op threads of each rank.
        timeout: seconds for the call.
        **kwargs: keyword arguments of ``fn``.

    Returns:
        The results of ``fn``, in rank order.

    Raises:
        ValueError: ``mesh_shape`` does not fit ``nprocs``, the names do not fit the shape, or torch
            sees no such device.
        TypeError: ``fn`` is not callable, ``mesh_shape`` is not a sequence of sizes, or ``fn`` or
            an argument cannot be copied, such as an open file or a process group.
        RankError: ``fn`` raised on a rank, a rank died, or the call timed out. The message contains
            the tracebacks.
    """
    import cloudpickle

    if nprocs < 1:
        raise ValueError(f"nprocs is {nprocs!r}; pass the number of ranks, at least 1")
    if not callable(fn):
        raise TypeError(f"fn is {fn!r:.100}; pass the function itself, without calling it")
    try:
        shape = (nprocs,) if mesh_shape is None else tuple(map(operator.index, mesh_shape))
    except TypeError:
        raise TypeError(
            f"mesh_shape is {mesh_shape!r:.100}; pass the sizes of the mesh dims, such as "
            f"({nprocs},), or None; the arguments of fn come after it"
        ) from None
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}; expected 'cpu' or 'cuda'")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but torch sees no GPU")
    if min(shape, default=0) < 1:
        raise ValueError(f"mesh_shape is {shape}; pass at least one size, each at least 1")
    if prod(shape) != nprocs:
        raise ValueError(f"mesh_shape {shape} has {prod(shape)} ranks, but nprocs is {nprocs}")
    names = _NAMES[: len(shape)] if mesh_dim_names is None else tuple(mesh_dim_names)
    if len(names) != len(shape) or len(set(names)) != len(names):
        raise ValueError(
            f"mesh_dim_names is {names}, but mesh_shape {shape} has {len(shape)} dims; pass "
            "mesh_dim_names with a different name for each dim"
        )

    class Pickler(cloudpickle.Pickler):
        """Also pickles module subclasses by name, such as the config modules of torch. cloudpickle
        adds submodules of a package that the code of a function accesses as attributes."""

        def reducer_override(self, obj: object) -> object:
            if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType:
                return importlib.import_module, (obj.__name__,)
            return super().reducer_override(obj)

    file = io.BytesIO()
    try:
        Pickler(file).dump((fn, args, kwargs))
    except Exception as error:  # pickling may raise any class
        raise TypeError(
            f"{fn!r} and its arguments cannot be copied to the ranks: {error}; create such "
            "objects inside the function"
        ) from error
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    with Ranks(nprocs, backend=backend, threads=threads, import_main=False) as ranks:
        results = ranks.run(
            function_of_spmd, file.getvalue(), device, shape, names, timeout=timeout
        )
    return [cloudpickle.loads(result) for result in results]


def function_of_spmd(
    job: bytes, device: str, shape: tuple[int, ...], names: tuple[str, ...]
) -> bytes:
    """Run a pickled function on this rank. Error messages show the name of this function."""
    import cloudpickle

    fn, args, kwargs = cloudpickle.loads(job)
    mesh = init_device_mesh(device, shape, mesh_dim_names=names)
    return cloudpickle.dumps(fn(mesh, *args, **kwargs))
