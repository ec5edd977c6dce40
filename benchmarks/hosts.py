"""Run a tpkernels command under torchrun on several network namespaces, each acting as a host.

    python -m benchmarks.hosts --hosts 2 --nproc 1 --mbit 1000 -- bench --algorithm unfused,ring

Each namespace has an address on a common switch. Namespaces do not share memory, because ranks
reach only Unix sockets of their namespace. Needs Linux, root (CAP_NET_ADMIN and CAP_SYS_ADMIN) and
iproute2. No traffic leaves the machine. The rate of the links can be limited (tc, token bucket).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from types import TracebackType

_PORT = 29631  # free, because the namespaces are new
_SETUP_S = 10.0
_RUN_S = 3600.0


def _ip(*arguments: str) -> str:
    command = ["ip", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=_SETUP_S, check=False)
    if result.returncode:
        raise OSError(f"{' '.join(command)}: {result.stderr.strip() or result.returncode}")
    return result.stdout


class Hosts:
    """Context manager that creates ``count`` hosts and kills their processes at exit.

    Args:
        count: number of hosts.
        mbit: link rate of a host in Mbit/s; None: unlimited.

    Raises:
        OSError: a namespace cannot be created. The message contains the reason.
    """

    def __init__(self, count: int, mbit: int | None = None) -> None:
        self._mbit = mbit
        self._switch = f"tpk{os.getpid()}s"
        self._names = [f"tpk{os.getpid()}h{i}" for i in range(count)]
        self._created: list[str] = []

    def __enter__(self) -> Hosts:
        try:
            for name in [self._switch, *self._names]:
                _ip("netns", "add", name)
                self._created.append(name)
                _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
            _ip("-n", self._switch, "link", "set", "switch", "up")
            for i, name in enumerate(self._names):
                self._attach(i, name)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def _attach(self, i: int, name: str) -> None:
        port = f"port{i}"
        peer = ["peer", "name", "eth", "netns", name]
        _ip("-n", self._switch, "link", "add", port, "type", "veth", *peer)
        _ip("-n", self._switch, "link", "set", port, "master", "switch", "up")
        _ip("-n", name, "address", "add", f"{self.address(i)}/24", "dev", "eth")
        _ip("-n", name, "link", "set", "eth", "up")
        if self._mbit is not None:
            shaper = ["tbf", "rate", f"{self._mbit}mbit", "burst", "256kb", "latency", "100ms"]
            _ip("netns", "exec", name, "tc", "qdisc", "add", "dev", "eth", "root", *shaper)

    def _remove(self) -> None:
        """Delete the namespaces and their links."""
        while self._created:
            name = self._created.pop()
            for pid in _ip("netns", "pids", name).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            _ip("netns", "del", name)

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def cut(self, host: int) -> None:
        """Take down the link between a host and the switch."""
        _ip("-n", self._switch, "link", "set", f"port{host}", "down")

    def torchrun(self, host: int, nproc: int, *module: str) -> subprocess.Popen[str]:
        """Start ``nproc`` ranks of ``python -m module...`` on one host of the job."""
        torchrun = [
            *(sys.executable, "-m", "torch.distributed.run", "--max-restarts", "0"),
            *("--nnodes", str(len(self._names)), "--nproc-per-node", str(nproc)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.address(0)}:{_PORT}"),
            *("--rdzv-id", "hosts", "--rdzv-conf", f"is_host={int(host == 0)}"),
            *("--local-addr", self.address(host), "-m", "--"),
        ]
        environ = {**os.environ, "GLOO_SOCKET_IFNAME": "eth", "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            ["ip", "netns", "exec", self._names[host], *torchrun, *module],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def main() -> int:
    """Return the exit code of the first failed host, or 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2, help="number of hosts (%(default)s)")
    parser.add_argument("--nproc", type=int, default=1, help="ranks per host (%(default)s)")
    parser.add_argument(
        "--mbit", type=int, help="rate of the link of each host in Mbit/s (default: unlimited)"
    )
    parser.add_argument("command", nargs="+", help="tpkernels command and its options")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # then `Hosts` cleans up
    with Hosts(args.hosts, args.mbit) as hosts:
        processes = [
            hosts.torchrun(host, args.nproc, "tpkernels", *args.command)
            for host in range(args.hosts)
        ]
        outputs = [process.communicate(timeout=_RUN_S) for process in processes]
    failed = [i for i, process in enumerate(processes) if process.returncode]
    for i in failed:
        print(f"host {i}:\n{outputs[i][1]}", file=sys.stderr)
    print(*(output for output, _ in outputs), sep="")
    return processes[failed[0]].returncode if failed else 0


if __name__ == "__main__":
    sys.exit(main())
