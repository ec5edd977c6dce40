"""The sizes of groups as a part of the key of torch's compile caches.

A call of an op in a graph has the name of its group, not how many ranks that has, and the shape of
its result may depend on it. Torch's own collectives take the size as an argument for that reason.
So a graph that was compiled for one rank would be found in the cache by a job of two.
"""

from __future__ import annotations

import re

import torch

from tpkernels import groups

_OURS = re.compile(r" ?tpkernels\{[^}]*\}")


def add_group_sizes() -> None:
    """Has the caches tell graphs apart by the sizes of the groups that the ops have used. Called
    while a graph is traced, before its key is made. It leaves what the user has set as it is."""
    sizes = ", ".join(f"{name}: {world}" for name, world in groups.sizes())
    config = torch.compiler.config
    theirs = _OURS.sub("", config.cache_key_tag)
    tag = f"{theirs} tpkernels{{{sizes}}}".strip()
    if config.cache_key_tag != tag:
        config.cache_key_tag = tag
