"""Hosts of their own on one machine, and what becomes of a run when one of them is cut off, comes back, or dies.

    sudo python benchmarks/hosts.py --faults cut carrier back killed

Linux, as root: each host is a network namespace with a name, a home and a loopback of its own, and two interfaces: ``docker0``, which leads
nowhere, and ``eth1``, by which the hosts meet at a bridge in one more namespace. The machine's own network is left alone. A small run is
started by hand on all hosts, and after a few steps host 1 is hit: its cable is cut behind the switch (``cut``: what it sends is lost) or
at its end (``carrier``), cut and mended after ``--pause`` seconds (``back``), or its processes get SIGKILL (``killed``), or those of host
0 (``killed-0``). A line of JSON for each: ``seconds`` from then until each host's last process was gone. Exit code 1 if a process was
left after ``--limit`` seconds, nothing said why, or a run that should have gone on did not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.waiting import until  # noqa: E402

FAULTS = ("cut", "carrier", "back", "killed", "killed-0")
SMALL = (
    *("debug=fast", "trainer.accelerator=cpu", "trainer.threads=1", "logger=csv", "data.rows_per_batch=1"),
    *("callbacks.acceptance=null", "trainer.max_steps=100000", "trainer.val_every=100000", "trainer.log_every_n_steps=1"),
    "+callbacks.progress.lines=100000",
)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


class Network:
    """Hosts 10.77.0.1, 10.77.0.2, ... at one switch."""

    def __init__(self, hosts: int) -> None:
        self.mark = f"dflash-lit-{os.getpid()}"
        self.switch = f"{self.mark}-switch"
        self.spaces = [f"{self.mark}-{host}" for host in range(hosts)]

    def __enter__(self) -> Network:
        ip("netns", "add", self.switch)
        ip("-n", self.switch, "link", "add", "br0", "type", "bridge")
        ip("-n", self.switch, "link", "set", "br0", "up")
        for host, space in enumerate(self.spaces):
            ip("netns", "add", space)
            ip("-n", space, "link", "set", "lo", "up")
            for name, end, address in (
                ("docker0", f"x{host}", "172.17.0.1/16"),
                ("eth1", f"p{host}", f"10.77.0.{host + 1}/24"),
            ):
                ip("-n", self.switch, "link", "add", end, "type", "veth", "peer", "name", name, "netns", space)
                ip("-n", space, "addr", "add", address, "dev", name)
                ip("-n", space, "link", "set", name, "up")
                ip("-n", self.switch, "link", "set", end, "up")
            self.port(host, "master", "br0")
        return self

    def __exit__(self, *_: object) -> None:
        for space in (*self.spaces, self.switch):
            subprocess.run(["ip", "netns", "del", space], stderr=subprocess.DEVNULL)

    def port(self, host: int, *words: str) -> None:
        """Change a host's port of the switch."""
        ip("-n", self.switch, "link", "set", f"p{host}", *words)

    def start(self, host: int, folder: Path, *overrides: str) -> subprocess.Popen[bytes]:
        """``train.py`` on a host; its lines go to ``folder/HOST.err``."""
        home = folder / f"home{host}"
        home.mkdir(exist_ok=True)
        variables = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")} | {
            "HOME": str(home),
            "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
            "DFLASH_LIT_SECRET": f"{self.mark:x>32}",
            "DFLASH_LIT_TEST": f"{self.mark}-{host}.",
            "MASTER_ADDR": "10.77.0.1",
            "MASTER_PORT": "29400",
            "NODE_RANK": str(host),
        }
        inside = ["unshare", "--uts", "sh", "-c", f'hostname host{host} && exec "$@"', "sh"]
        with (folder / f"{host}.err").open("w") as said:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.spaces[host], *inside, sys.executable, "train.py", *overrides],
                cwd=ROOT,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=said,
            )

    def processes(self, host: int) -> list[int]:
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"DFLASH_LIT_TEST={self.mark}-{host}.".encode() in (place / "environ").read_bytes():
                    found.append(int(place.name))
        return found

    def kill(self, host: int) -> None:
        for pid in self.processes(host):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def running(network: Network, folder: Path, *overrides: str) -> Iterator[Callable[[], int]]:
    """Inside, a run that has come to its fifth step; yields what tells its step."""
    hosts = len(network.spaces)
    first = (*SMALL, f"placement.hosts={hosts}", f"hydra.run.dir={folder / 'run'}", *overrides)
    started = [network.start(host, folder, *(first if host == 0 else ())) for host in range(hosts)]

    def step() -> int:
        return max(map(int, re.findall(r"(?m)^step (\d+)/", (folder / "0.err").read_text())), default=0)

    try:
        if not until(lambda: step() >= 5 or started[0].poll() is not None, 300) or started[0].poll() is not None:
            raise SystemExit(f"no fifth step:\n{(folder / '0.err').read_text()[-3000:]}")
        yield step
    finally:
        for host in range(hosts):
            network.kill(host)
        for process in started:
            process.wait()


def fault(network: Network, folder: Path, kind: str, *overrides: str, pause_s: float, limit_s: float) -> dict[str, Any]:
    """One run, and what has become of it."""
    with running(network, folder, *overrides) as step:
        began, ends = time.monotonic(), {}
        off, on = (("nomaster",), ("master", "br0")) if kind != "carrier" else (("down",), ("up",))
        if kind.startswith("killed"):
            network.kill(0 if kind == "killed-0" else 1)
        else:
            network.port(1, *off)
        if kind == "back":
            time.sleep(pause_s)
            before = step()
            network.port(1, *on)
            mended = time.monotonic()
            good = until(lambda: step() > before + 1, limit_s)
            return {"fault": kind, "pause": pause_s, "goes_on_after": round(time.monotonic() - mended, 1), "good": good}

        def gone() -> bool:
            for host in range(len(network.spaces)):
                if host not in ends and not network.processes(host):
                    ends[host] = round(time.monotonic() - began, 1)
            return len(ends) == len(network.spaces)

        over = until(gone, limit_s)
        if not kind.startswith("killed"):
            network.port(1, *on)
    said = {host: re.findall(r"(?m)^error: .*$", (folder / f"{host}.err").read_text()) for host in range(len(network.spaces))}
    return {"fault": kind, "seconds": ends, "said": said, "good": over and any(said.values())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--pause", type=float, default=6.0, help="seconds until a cut cable is mended (back)")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds")
    parser.add_argument("overrides", nargs="*", help="of train.py, such as placement=split; after --")
    options = parser.parse_args()
    if sys.platform != "linux" or os.geteuid() != 0:
        print("error: network namespaces are Linux's, and made by root: start this with sudo", file=sys.stderr)
        return 2
    good = True
    with Network(options.hosts) as network:
        for kind in options.faults:
            with tempfile.TemporaryDirectory() as folder:
                found = fault(network, Path(folder), kind, *options.overrides, pause_s=options.pause, limit_s=options.limit)
            print(json.dumps(found), flush=True)
            good &= found["good"]
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
