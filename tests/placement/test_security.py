"""Strangers at the ports of a run: where it listens, whom it believes, and what becomes of what they send."""

from __future__ import annotations

import gc
import os
import pickle
import re
import socket
import stat
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dflash_lit.errors import UserError
from dflash_lit.placement import secret
from dflash_lit.placement.channel import Channel, ServingChannel
from dflash_lit.placement.flow import Flow
from dflash_lit.placement.interfaces import address_of, interface_of, listening_address, on_interface
from dflash_lit.placement.layout import Layout
from dflash_lit.placement.link import Answer, Call, DrafterLink, Rows
from dflash_lit.placement.members import LOG, Entry, Members, add
from dflash_lit.placement.messages import Messages
from dflash_lit.placement.secret import ForgedError, Key, find_secret
from dflash_lit.placement.signed_pickle import seal, unseal
from dflash_lit.placement.signed_store import LARGEST, SignedStore
from dflash_lit.placement.watch import Watch, beats_of
from tests.placement.test_faults import SOON, SPLIT, Live, live

SECRET = "0123456789abcdef" * 2


# -- the store


def signed(raw: dist.Store, word: str = SECRET, nonce: str = "1") -> SignedStore:
    return SignedStore(raw, Key(word, "run", nonce), "run/")


def test_ranks_understand_each_other() -> None:
    raw = dist.HashStore()
    one, other = signed(raw), signed(raw)
    one.set("a", "text")
    one.under("deep").set("b", bytes(range(256)))
    assert other.get("a") == b"text"
    assert other.multi_get(["a", "deep/b"]) == [b"text", bytes(range(256))]
    assert other.under("deep").get("b") == bytes(range(256))
    assert other.check(["a"])
    assert not other.check(["c"])
    one.set("first", "")
    assert other.compare_set("first", "", "mine") == b"mine"
    assert one.compare_set("first", "", "too late") == b"mine"


def forged(raw: dist.Store) -> Iterator[str]:
    """What a stranger can put there, by the name of its key."""
    mine = signed(raw)
    mine.set("honest", "value")
    sealed = raw.get("run/honest")
    for name, value in {
        "unsigned": b"value",
        "empty": b"",
        "pickle": pickle.dumps(os.getcwd),
        "moved": sealed,  # signed by a rank, for another key
        "changed": sealed[:-1] + b"x",
        "large": sealed + bytes(LARGEST + 100),
    }.items():
        raw.set(f"run/{name}", value)
        yield name
    signed(raw, word="f" * 32).set("secret", "value")
    yield "secret"
    signed(raw, nonce="0").set("earlier", "value")  # by a rank, in another run
    yield "earlier"


def test_a_strangers_values_are_refused() -> None:
    raw = dist.HashStore()
    refused = []
    for name in forged(raw):
        with pytest.raises(ForgedError, match=f"the value 'run/{name}' in the run's store was refused"):
            signed(raw).get(name)
        with pytest.raises(ForgedError):
            signed(raw).compare_set(name, "", "mine")
        refused.append(name)
    assert len(refused) == 8


def test_what_is_too_large_is_not_put_there() -> None:
    with pytest.raises(ValueError, match="a value of 4194305 bytes is more than the 4194304"):
        signed(dist.HashStore()).set("a", bytes(LARGEST + 1))


def test_an_old_beat_that_comes_again_is_no_sign_of_life() -> None:
    store = signed(dist.HashStore())
    layout = Layout(1, 1)
    beats_of(layout, store)
    watch = Watch(
        store,
        layout,
        0,
        stale_s=5,
        start_s=5,
        flow=Flow,
        children=lambda: None,
        parent=None,
        keeper="rank 0",
        end=lambda: None,
    )
    flow = Flow().to_json()
    beats = [str([0, number, flow]).replace("'", '"').encode() for number in (1, 2)]
    assert watch._silent([b"", beats[0]], 1.0, 0.0) is None
    assert watch._silent([b"", beats[1]], 2.0, 0.0) is None
    assert watch._silent([b"", beats[0]], 6.0, 0.0) is None
    assert "rank 1 (target, host 0) has not been heard of for 5 s" in str(watch._silent([b"", beats[1]], 7.5, 0.0))


def test_a_log_of_target_ranks_that_was_put_back_is_refused() -> None:
    """Signed, but old: it would have a rank serve that was lost."""
    store, layout = signed(dist.HashStore()), Layout(2, 1)
    store.set(LOG, "[]")
    quiet: dict[str, Any] = {"flow": Flow, "children": lambda: None, "parent": None, "keeper": "rank 0", "end": lambda: None}
    watch = Watch(store, layout, 0, stale_s=5, start_s=5, tolerate=1, **quiet)
    old = add(store, b"[]", Entry("joined", 1))
    watch._read(old)
    watch._read(add(store, old, Entry("lost", 1, 0, "rank 1 is gone")))
    with pytest.raises(ForgedError, match="the log of target ranks in the run's store was refused: entries of it are missing"):
        watch._read(old)
    assert set(watch.members.missing) == {1}


# -- the channel


class Trap:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.fixture
def ends(request: pytest.FixtureRequest) -> tuple[DrafterLink, ServingChannel]:
    return connected(**getattr(request, "param", {}))


def connected(**settings: Any) -> tuple[DrafterLink, ServingChannel]:
    """A drafter's end and a target's, of a run without anything else; the drafter knows another secret if asked to."""
    raw, layout = dist.HashStore(), Layout(1, 1)

    def world(rank: int) -> Any:
        return SimpleNamespace(
            layout=layout,
            rank=rank,
            host=0,
            life=0,
            members=Members(layout, 0),
            watch=SimpleNamespace(check=lambda: None),
            key=lambda *purpose: Key(settings.get("secret", SECRET) if rank == 0 else SECRET, *purpose),
            group=lambda name, rank, size, stores: dist.ProcessGroupGloo(
                dist.PrefixStore(name, raw), rank, size, timedelta(seconds=30)
            ),
        )

    cpu = torch.device("cpu")
    with ThreadPoolExecutor(2) as threads:
        drafter = threads.submit(Channel, world(0), cpu, "gloo")
        target = threads.submit(ServingChannel, world(1), cpu, "gloo", limit_gib=settings.get("limit_gib", 4.0))
    return drafter.result().links[1], target.result()


def test_requests_and_answers(ends: tuple[DrafterLink, ServingChannel]) -> None:
    drafter, target = ends
    rows = torch.arange(24, dtype=torch.int32).reshape(3, 2, 4)
    drafter._request(1, rows, 2, 4)
    answer = drafter.call(max, 3)
    request = target.next_request()
    assert isinstance(request, Rows)
    assert torch.equal(request.rows, rows)
    assert target.next_request() == Call(0, max, (3,))
    target.send_answer(0, True, "yes")
    assert answer.take() == "yes"
    drafter._request(3, None)
    assert target.next_request() is None  # all have said goodbye


def test_a_link_that_nobody_closes_leaves_no_thread() -> None:
    """As where a job of a sweep has failed."""
    drafter, target = connected()
    answer = drafter.call(max, 3)
    target.next_request()
    target.send_answer(0, True, "yes")
    assert answer.take() == "yes"
    waiting = [thread for thread in (drafter._features, drafter._others) if thread is not None]
    assert [thread.is_alive() for thread in waiting] == [True, True]
    del drafter, answer
    gc.collect()
    for thread in waiting:
        thread.join(10)
    assert not any(thread.is_alive() for thread in waiting)


@pytest.mark.parametrize("ends", [{"secret": "f" * 32}], indirect=True)
def test_a_strangers_call_is_neither_made_nor_unpickled(ends: tuple[DrafterLink, ServingChannel], tmp_path: Path) -> None:
    drafter, target = ends
    drafter.call(Trap(tmp_path / "ran"))
    with pytest.raises(ForgedError, match="a message to local rank 1 was refused: local rank 0, from which it claims to be"):
        target.next_request()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("ends", [{"secret": "f" * 32}], indirect=True)
def test_a_strangers_answer_is_not_unpickled(ends: tuple[DrafterLink, ServingChannel], tmp_path: Path) -> None:
    drafter, target = ends
    target.send_answer(0, True, Trap(tmp_path / "ran"))
    answer = Answer(drafter)
    drafter._unanswered.append(answer)
    with pytest.raises(ForgedError, match="a message to local rank 0 was refused: local rank 1, from which it claims to be"):
        answer.take()
    assert not (tmp_path / "ran").exists()


def test_a_message_that_comes_again_is_refused(ends: tuple[DrafterLink, ServingChannel]) -> None:
    drafter, target = ends
    drafter.call(max, 3)
    target.next_request()
    drafter._messages._sent.clear()  # the same bytes once more
    drafter.call(max, 3)
    with pytest.raises(ForgedError):
        target.next_request()


def test_a_message_to_the_process_that_was_lost_is_refused_by_the_next_one() -> None:
    before, since = (Key(SECRET, "link", f"host/0/0-1/{life}") for life in (0, 1))
    message = Messages(before, 0, 1, 4.0).header(1, 2, None)
    assert Messages(before, 1, 0, 4.0).read(1, message).kind == 2
    with pytest.raises(ForgedError):
        Messages(since, 1, 0, 4.0).read(1, message)


def test_a_body_that_is_not_the_headers_is_refused(ends: tuple[DrafterLink, ServingChannel], tmp_path: Path) -> None:
    drafter, target = ends
    body = pickle.dumps((max, (3,)))
    trap = pickle.dumps(Trap(tmp_path / "ran"))
    length = max(len(body), len(trap))
    real, false = (torch.frombuffer(bytearray(data.ljust(length, b".")), dtype=torch.uint8) for data in (body, trap))
    send = drafter._control.send
    drafter._control = SimpleNamespace(send=lambda tensors, rank, tag: send([false] if tag == 2 else tensors, rank, tag))
    drafter._request(2, real)
    with pytest.raises(ForgedError):
        target.next_request()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("ends", [{"limit_gib": 0.001}], indirect=True)
def test_a_message_that_is_too_large(ends: tuple[DrafterLink, ServingChannel]) -> None:
    """The target's limit is the smaller one here, so that what the drafter sends meets it on the way in."""
    drafter, target = ends
    answer = drafter.call(len, bytes(100))
    target.next_request()
    target.send_answer(0, True, bytes(2**21))
    with pytest.raises(
        ValueError, match=r"a message of 0\.00195 GiB .* the limit is placement\.message_limit_gib=0\.001; raise it"
    ):
        answer.take()
    drafter.call(len, bytes(2**21))
    with pytest.raises(ValueError, match=r"placement\.message_limit_gib=0\.001"):
        target.next_request()


def test_a_strangers_broadcast_is_not_unpickled(tmp_path: Path) -> None:
    ours, theirs = Key(SECRET, "broadcast"), Key("f" * 32, "broadcast")
    assert unseal(ours, "from 0, 1", seal(ours, "from 0, 1", {"a": (1, None)}), "drafter 0") == {"a": (1, None)}
    trap = Trap(tmp_path / "ran")
    for sealed in (
        seal(theirs, "from 0, 2", trap),
        seal(ours, "from 0, 1", trap),
        pickle.dumps(trap),
        b"",
    ):  # the second comes again
        with pytest.raises(ForgedError, match="what drafter 0 tells the others was refused"):
            unseal(ours, "from 0, 2", sealed, "drafter 0")
    assert not (tmp_path / "ran").exists()


# -- the secret


@pytest.fixture
def nothing_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    monkeypatch.delenv(secret.VARIABLE, raising=False)
    monkeypatch.delenv(secret.FILE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return monkeypatch


def test_the_secret_of_a_user(nothing_given: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Made once, whoever comes first, and for nobody else to read."""
    with ThreadPoolExecutor(8) as threads:
        found = set(threads.map(lambda _: find_secret(), range(16)))
    (path,) = (tmp_path / "config" / "dflash_lit").iterdir()
    assert found == {path.read_text().strip()}
    assert len(path.read_text().strip()) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_secret_that_was_given(nothing_given: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(f"{SECRET}\n")
    path.chmod(0o600)
    nothing_given.setenv(secret.FILE_VARIABLE, str(path))
    assert find_secret() == SECRET
    nothing_given.setenv(secret.VARIABLE, "another one, of words")
    assert find_secret() == "another one, of words"
    assert secret.VARIABLE not in os.environ  # W&B and whatever else is started has no need of it


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        (SECRET, 0o640, "others can read or write it, or own it; it holds the secret of runs: chmod 600"),
        ("short", 0o600, "a secret of 5 characters is too short; give 16 or more"),
        (None, 0o600, "cannot be read (No such file or directory)"),
    ],
)
def test_a_secret_that_is_none(
    nothing_given: pytest.MonkeyPatch, tmp_path: Path, text: str | None, mode: int, says: str
) -> None:
    path = tmp_path / "secret"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    nothing_given.setenv(secret.FILE_VARIABLE, str(path))
    with pytest.raises(UserError, match=re.escape(says)):
        find_secret()


def test_a_pipe_in_a_secrets_place_is_not_waited_for(nothing_given: pytest.MonkeyPatch, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "secret", 0o600)
    nothing_given.setenv(secret.FILE_VARIABLE, str(tmp_path / "secret"))
    with pytest.raises(UserError, match="a secret of 0 characters is too short"):
        find_secret()


# -- interfaces


def test_where_several_hosts_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    assert listening_address("127.0.0.1", 29500, None) == "127.0.0.1"
    assert listening_address("10.0.0.1", 29500, "all") == ""
    assert listening_address("10.0.0.1", 29500, "lo") == address_of("lo") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(UserError, match=r"MASTER_ADDR=198\.51\.100\.7: (is no address of host 0|Network is unreachable)"):
        listening_address("198.51.100.7", 29500, None)


def test_gloo_and_nccl_use_it_unless_the_user_has_said_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    with on_interface("127.0.0.1", 29500, None):
        assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("lo", "ib0")
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0"


# -- a whole run


def listening(run: Live) -> dict[str, set[int]]:
    """Ports at which processes of a run listen, by address, in hexadecimal digits as Linux writes them."""
    sockets = set()
    for pid in run.processes():
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                sockets |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(descriptor)))
            except OSError:
                continue
    found: dict[str, set[int]] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                address, port = fields[1].split(":")
                found.setdefault(address, set()).add(int(port, 16))
    return found


def test_a_run_and_a_stranger(tmp_path: Path) -> None:
    """One host: loopback alone. Noise at its ports does no harm; a value in its store ends it with a line, unread."""
    with live(tmp_path, *SPLIT) as run:
        run.until("step 3/")
        ports = listening(run)
        assert set(ports) == {"0100007F"}  # 127.0.0.1
        assert len(ports["0100007F"]) >= 3  # the store's, and of each process gloo's
        (port,) = {int(v["MASTER_PORT"]) for v in run.processes().values() if "DFLASH_LIT_LOCAL_RANK" in v}
        assert port in ports["0100007F"]
        for one in ports["0100007F"]:
            with socket.create_connection(("127.0.0.1", one)) as stranger:
                stranger.sendall(os.urandom(1 << 16))
        before = run.said().count("step ")
        while run.said().count("step ") < before + 3:
            assert run.hosts[0].poll() is None, run.said()[-3000:]
            time.sleep(0.05)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=20))
        store.set("dflash_lit/0/data", pickle.dumps(Trap(tmp_path / "ran")))  # which nobody reads any more
        store.set("dflash_lit/0/watch/abort", pickle.dumps(Trap(tmp_path / "ran")))
        run.ended(SOON, 1)
        (error,) = run.errors()
        assert error.startswith("error: the value 'dflash_lit/0/watch/abort' in the run's store was refused: it is not signed")
        assert not (tmp_path / "ran").exists()
        assert "Traceback" not in run.said()
