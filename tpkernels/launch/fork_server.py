"""Imported only by the fork server of `tpkernels.launch`: cleans up after a killed parent.

The server listens on a socket in a temporary folder, which the parent removes on exit. A killed
parent cannot, but the server outlives it until all ranks are gone, and removes the folder then.
"""

from __future__ import annotations

import atexit
import os
import shutil
from multiprocessing import forkserver
from pathlib import Path

_SERVER, _PARENT = os.getpid(), os.getppid()


@atexit.register
def _remove_socket_folder() -> None:
    address = getattr(getattr(forkserver, "_forkserver", None), "_forkserver_address", None)
    orphan = os.getpid() == _SERVER and os.getppid() != _PARENT
    if orphan and isinstance(address, str) and not address.startswith("\0"):
        folder = Path(address).parent
        if folder.name.startswith("pymp-"):  # multiprocessing's own
            shutil.rmtree(folder, ignore_errors=True)
