"""The Triton cache, filled on a machine without a GPU.

The key of a kernel is a hash of the Triton files, the kernel source and line number, the argument
types, the options, the ptxas version and a few environment variables. The path of the checkout does
not enter the hash. But each entry lists its files by absolute path, and Triton ignores missing
files. `relocate` therefore rewrites the paths after a cache was copied to a different folder. This
describes Triton 3.6.0: `runtime/cache.py`, `compiler/compiler.py`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

SCRATCH = Path(__file__).parents[2] / ".gpu"  #: files prepared without a GPU
FOLDER = Path(os.environ.get("TRITON_CACHE_DIR") or SCRATCH / "triton")
_LISTS = "*/__grp__*.json"


def relocate(folder: Path = FOLDER) -> int:
    """Rewrite cache entries to the paths in ``folder``. Returns the number of changed entries."""
    relocated = 0
    for path in folder.glob(_LISTS):
        entry = json.loads(path.read_text())
        files = {name: str(path.parent / name) for name in entry["child_paths"]}
        if files != entry["child_paths"]:
            path.write_text(json.dumps({"child_paths": files}))
            relocated += 1
    return relocated


def kernels(folder: Path = FOLDER) -> int:
    """Return the number of kernels in the cache."""
    return sum(1 for _ in folder.glob(_LISTS))
