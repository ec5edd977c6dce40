"""Which groups can share memory: those whose ranks all reach a Unix socket of rank 0.

It is tried, not read off names: machines cloned from one image may have one boot_id, and containers
on one machine may have it and share nothing else. Descriptors of memory travel over such a socket,
so who reaches it can be given them. All ranks come to the same answer.
"""

from __future__ import annotations

import os
import socket
from typing import Any

from tpkernels.symm.messages import user_of
from tpkernels.symm.rendezvous import Member, exchange, listening


def share_a_host(member: Member, say: dict[str, Any]) -> tuple[bool, list[dict[str, Any]]]:
    """Whether all ranks can share memory. Also returns what every rank says, as `exchange` does."""
    if member.rank == 0:
        with listening("reach", member.world) as (_, name):
            said = exchange(member, "init", {"socket": name, **say})
            found = exchange(member, "reach", {"reached": True})  # it listens until all have tried
    else:
        said = exchange(member, "init", say)
        found = exchange(member, "reach", {"reached": _reaches(said[0]["socket"])})
    return all(rank["reached"] for rank in found), said


def _reaches(name: str) -> bool:
    """Whether a process of the same user listens there. It need not accept: the kernel tells."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.setblocking(False)
        try:
            connection.connect(f"\0{name}")
        except OSError:
            return False
        return user_of(connection) == os.getuid()
