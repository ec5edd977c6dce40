"""Triton's cache, filled before the GPU is there.

Triton finds a kernel by a hash of its own files, the kernel's source and line number, the argument
types, the options, ptxas's version and a few environment variables. The path of the checkout is not
in it. But each entry lists its files by absolute path, and Triton ignores files that are not there.
So a cache that was copied to another path needs `relocate` before it is used. Read in Triton 3.6.0:
`runtime/cache.py`, `compiler/compiler.py`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

SCRATCH = Path(__file__).parents[2] / ".gpu"  #: what is made before the GPU is there
FOLDER = Path(os.environ.get("TRITON_CACHE_DIR") or SCRATCH / "triton")
_LISTS = "*/__grp__*.json"


def relocate(folder: Path = FOLDER) -> int:
    """Let the entries of the cache name the files in ``folder``; return how many have moved."""
    moved = 0
    for path in folder.glob(_LISTS):
        entry = json.loads(path.read_text())
        files = {name: str(path.parent / name) for name in entry["child_paths"]}
        if files != entry["child_paths"]:
            path.write_text(json.dumps({"child_paths": files}))
            moved += 1
    return moved


def kernels(folder: Path = FOLDER) -> int:
    """Return how many kernels the cache has."""
    return sum(1 for _ in folder.glob(_LISTS))
