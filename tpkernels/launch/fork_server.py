"""Imported by the fork server of `tpkernels.launch` only: has it clean up after a killed parent.

The server listens on a socket in a temporary folder, which the parent removes when it exits. When
the parent is killed, nobody would; but the server lives on until it and all ranks are gone.
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
