"""Several hosts that are not one machine: which interface leads to the others, whether they reach each other, and what is said if not."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dflash_lit.errors import UserError
from dflash_lit.placement import world as worlds
from dflash_lit.placement.flow import Flow
from dflash_lit.placement.layout import Layout
from dflash_lit.placement.reach import meet
from dflash_lit.placement.started import Started
from dflash_lit.placement.watch import Watch, beats_of
from dflash_lit.placement.world import Run, _door, _wait_for_rank_0, follow, lead
from dflash_lit.stopping import stopping
from tests.fork_server import forked_python
from tests.placement.test_security import SECRET, signed

ROOT = Path(__file__).parent.parent.parent

# A host whose first interface leads nowhere, and which has its own name at 127.0.1.1, as Debian installs it.
NETWORK = """
mount --bind "$1" /etc/hosts
ip link set lo up
ip link add docker0 type veth peer name x0 && ip addr add 172.17.0.1/16 dev docker0 && ip link set docker0 up && ip link set x0 up
ip link add eth1 type veth peer name x1 && ip link set eth1 up && ip link set x1 up
ip addr add 10.77.0.1/24 dev eth1 && ip addr add 10.77.0.9/24 dev eth1 && ip -6 addr add fd77::1/64 dev eth1 nodad
"""
ASKED = """
import json, os
from dflash_lit.errors import UserError
from dflash_lit.placement.interfaces import address_of, interface_of, listening_address, on_interface

def of(function, *arguments):
    try:
        return function(*arguments)
    except UserError as error:
        return f"error: {error}"

def gloo(address, chosen):
    with on_interface(address, 29400, chosen):
        return os.environ.get("GLOO_SOCKET_IFNAME")

print(json.dumps({
    "address": [address_of("docker0"), address_of("eth1"), address_of("lo")],
    "interface": [interface_of(a) for a in ("172.17.0.1", "10.77.0.1", "10.77.0.9", "fd77::1", "::1", "10.77.0.2")],
    "listens": [of(listening_address, a, 29400, c) for a, c in (
        ("10.77.0.1", None), ("10.77.0.9", None), ("fd77::1", None), ("10.77.0.1", "docker0"), ("host0", "eth1"), ("10.77.0.1", "all"),
    )],
    "refused": [of(listening_address, "host0", 29400, c) for c in (None, "all")],
    "gloo": [gloo(a, c) for a, c in (
        ("10.77.0.1", None), ("10.77.0.2", None), ("fd77::2", None), ("10.77.0.2", "all"), ("10.77.0.2", "docker0"), ("127.0.0.1", None),
    )],
    "named": gloo("host0", "all"),
}))
"""


def in_a_network(folder: Path, more: str = "") -> dict[str, Any]:
    """What ``ASKED`` prints in a network namespace of its own."""
    for program in ("unshare", "ip", "mount"):
        if shutil.which(program) is None:
            pytest.skip(f"no network of its own: {program} is not installed")
    (folder / "hosts").write_text("127.0.0.1 localhost\n127.0.1.1 host0\n")
    alone = ["unshare", "--user", "--map-root-user", "--net", "--mount", "sh", "-ec"]
    probe = subprocess.run([*alone, NETWORK, "sh", str(folder / "hosts")], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"no network of its own: {(probe.stderr.strip().splitlines() or ['not permitted'])[-1]}")
    asked = [*alone, f'{NETWORK}{more}\nexec "$2" -c "$3"', "sh", str(folder / "hosts"), sys.executable, ASKED]
    variables = {name: value for name, value in os.environ.items() if not name.endswith("SOCKET_IFNAME")}
    done = subprocess.run(asked, capture_output=True, text=True, env=variables | {"PYTHONPATH": str(ROOT / "src")})
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def test_the_interface_that_leads_to_the_others(tmp_path: Path) -> None:
    said = in_a_network(tmp_path)
    assert said["address"] == ["172.17.0.1", "10.77.0.1", "127.0.0.1"]
    assert said["interface"] == ["docker0", "eth1", "eth1", "eth1", "lo", None]
    # placement.interface is for gloo and NCCL: the store is where the others were told it is.
    assert said["listens"] == ["10.77.0.1", "10.77.0.9", "fd77::1", "10.77.0.1", "10.77.0.1", ""]
    assert said["refused"][0].startswith(
        "error: MASTER_ADDR=host0: on host 0 that is 127.0.1.1, which other hosts do not reach"
    )
    assert "which of docker0, eth1 leads to the other hosts" in said["refused"][1]
    assert said["gloo"] == ["eth1", "eth1", "eth1", "eth1", "docker0", "lo"]
    assert said["named"] is None


def test_a_name_at_the_loopback_and_one_interface(tmp_path: Path) -> None:
    said = in_a_network(tmp_path, "ip link del docker0")
    assert said["refused"][1] == ""
    assert said["named"] == "eth1"


def test_an_interface_with_ipv6_alone(tmp_path: Path) -> None:
    said = in_a_network(tmp_path, "ip -4 addr flush dev eth1")
    assert said["address"] == ["172.17.0.1", "fd77::1", "127.0.0.1"]
    assert said["listens"][2:5:2] == ["fd77::1", "fd77::1"]
    assert said["gloo"][2] == "eth1"


def test_a_store_on_all_interfaces_is_there_by_ipv6_too() -> None:
    with _door("", 0) as door:
        socket.create_connection(("127.0.0.1", door.getsockname()[1]), 5).close()
        if door.family == socket.AF_INET6:
            socket.create_connection(("::1", door.getsockname()[1]), 5).close()


# -- whether they reach each other


class Hosts:
    """What ``meet`` needs of a world; what the other host tells is what the test says."""

    def __init__(self, **told: Any) -> None:
        self.layout, self.rank, self.host = Layout(0, 1, 2), 0, 0
        self.values = told

    def tell(self, name: str, value: Any) -> None:
        self.values[name] = json.loads(json.dumps(value))

    def told(self, name: str) -> Any:
        if name == "knocked/1":  # which it could not have done later
            _, interface, address, port = self.values["door/0"]
            assert interface == "lo"
            socket.create_connection((address, port), 5).close()
            return True
        return self.values[name]


def test_a_host_that_is_not_reached_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Gloo would try for minutes if packets were dropped, and end with an address and no advice."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        hosts: Any = Hosts(**{"door/1": ["node7", "eth1", "127.0.0.1", port]})
        assert meet(hosts) == [socket.gethostname(), "node7"]
    assert hosts.values["knocked/0"]
    assert capsys.readouterr().err == f"hosts: 0 is {socket.gethostname()} (lo, 127.0.0.1), 1 is node7 (eth1, 127.0.0.1)\n"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(tuple(hosts.values["door/0"][2:]), 5)
    says = rf"does not reach host 1 \(node7, eth1, 127.0.0.1\) at port {port}: .*placement.interface"
    with pytest.raises(UserError, match=says):
        meet(hosts)


# -- hosts that do not come


def test_rank_0_says_for_whom_it_waits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(worlds, "_MISSING_SAID_S", 0.1)
    for name, value in {"DFLASH_LIT_SECRET": SECRET, "MASTER_ADDR": "127.0.0.1", "NODE_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    world = lead(Layout(0, 1, 3), Started("hand", 0, 0, "127.0.0.1", port), "", command=[], timeout_s=5)
    told = threading.Timer(0.5, lambda: world.more_stores().signed.set("there", "1"))
    told.start()
    assert world.told("there") == 1
    told.join()
    assert capsys.readouterr().err == "waiting for hosts 1, 2: nothing was heard of yet (NODE_RANK, MASTER_ADDR, MASTER_PORT)\n"


def test_a_host_that_never_started_is_not_called_stopped() -> None:
    store, layout = signed(dist.HashStore()), Layout(1, 1, 2)
    beats_of(layout, store)
    quiet: dict[str, Any] = {"flow": Flow, "children": lambda: None, "parent": None, "keeper": "rank 0", "end": lambda: None}
    watch = Watch(store, layout, 0, stale_s=5, start_s=300, **quiet)
    beat = json.dumps([0, 1, Flow().to_json()]).encode()
    assert not watch.heard(2)
    watch._seen[1] = (beat, 301.0)
    found = watch._silent([b"", beat, b"", b""], 301.0, 0.0)
    assert found is not None
    assert found.why == (
        "rank 2 (drafter, host 1) and all others of host 1 have not been heard of within 300 s: it was not started, does not reach "
        "MASTER_ADDR and MASTER_PORT, or has failed, as its own lines say"
    )


def test_rank_0_that_does_not_come(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(worlds, "_START_S", 0.5)
    monkeypatch.setattr(worlds, "_WAIT_SAID_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
        _wait_for_rank_0(Started("hand", 1, 0, "127.0.0.1", port), port)
    began = time.monotonic()
    with pytest.raises(
        UserError, match=r"could not be reached from host 1 within 0 s \(Connection refused\); start it on host 0"
    ):
        _wait_for_rank_0(Started("hand", 1, 0, "127.0.0.1", port), port)
    assert time.monotonic() - began < 10
    assert capsys.readouterr().err == f"waiting for rank 0 at MASTER_ADDR=127.0.0.1 MASTER_PORT={port}: Connection refused\n"


def test_a_host_without_the_interface_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    door = socket.create_server(("127.0.0.1", 0))
    port = door.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20), master_listen_fd=door.detach()
    )
    ours = Run.begin(SECRET, store).of(store)
    beats_of(Layout(0, 1, 2), ours.under("watch"))
    ours.set("config", json.dumps({"text": "", "layout": [0, 1, 2], "timeout_s": 5, "interface": "eth99", "tolerate": 0}))
    monkeypatch.setenv("DFLASH_LIT_SECRET", SECRET)
    monkeypatch.setattr(worlds, "ignore_stops", lambda: None)  # of this process
    monkeypatch.setattr(stopping, "follows", False)
    world, _ = follow(Started("hand", 1, 0, "127.0.0.1", port), ["python", "train.py"])
    with pytest.raises(UserError, match=r"placement\.interface='eth99': this host has lo"), world:
        raise AssertionError
    told = ours.under("watch").get("abort").decode()
    assert told.startswith("rank 1 (drafter, host 1) failed: placement.interface='eth99': this host has lo")


def test_a_host_says_why_it_ends_before_its_processes_do() -> None:
    """Once they end, connections break, and the main thread may end the process first: in silence, as rank 0 is to speak."""
    script = """
import os
import torch.distributed as dist
from dflash_lit.placement.flow import Flow
from dflash_lit.placement.layout import Layout
from dflash_lit.placement.watch import Watch
from tests.placement.test_security import signed
quiet = {"flow": Flow, "children": lambda: None, "parent": None, "keeper": "rank 0 (drafter, host 0)"}
watch = Watch(signed(dist.HashStore()), Layout(1, 1, 2), 2, stale_s=5, start_s=5, end=lambda: os._exit(1), **quiet)
watch._fail("rank 0 (drafter, host 0) is gone", lost=True)
"""
    done = subprocess.run([forked_python(), "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "error: rank 0 (drafter, host 0) is gone\n")
