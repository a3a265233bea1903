"""A run that loses target ranks in several ways and gets one back: it comes to the same to the last bit, or ends with their names."""

from __future__ import annotations

import csv
import json
import re
import signal
import socket
import stat
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.soak import Kill, Sample, judge, prepare, settings, soak
from dflash_lit.config import PlacementSection
from dflash_lit.errors import UserError
from dflash_lit.placement.flow import Flow
from dflash_lit.placement.layout import Layout
from dflash_lit.placement.members import LOG, Entry, Members, add
from dflash_lit.placement.secret import ForgedError
from dflash_lit.placement.started import Started, how_started, rejoin_line
from dflash_lit.placement.watch import Watch, beats_of
from dflash_lit.placement.world import Run, _life, follow
from dflash_lit.plan import _layout
from tests.placement.test_same_run import assert_same, column, metrics
from tests.placement.test_security import SECRET, signed
from tests.test_train import run

STEPS = 300
RECORDED = [
    f"trainer.val_every={STEPS // 2}",
    "+callbacks.recorder._target_=tests.placement.recorder.Recorder",
    "+callbacks.recorder.folder=${paths.output_dir}/seen",
]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tolerate")
    prepare(folder, rows=60, tokens=100)
    return folder


@pytest.fixture(scope="module")
def disturbed(shelf: Path) -> dict[str, Any]:
    """Rank 1 raises, and is started again by hand; then rank 2 is stopped; rank 1 goes on alone."""
    return soak(
        shelf,
        *RECORDED,
        steps=STEPS,
        targets=2,
        every=0.2,
        mib=16.0,  # caches are filled meanwhile
        kills=[Kill(round(0.8 * STEPS), 2, signal.SIGSTOP)],
        restarts=1,
        planted=1,
        timeout_s=4.0,
        script="tests/placement/faulty.py",
        FAULT="forward:1",
    )


@pytest.fixture(scope="module")
def undisturbed(shelf: Path, disturbed: dict[str, Any]) -> Path:
    folder = shelf / "undisturbed"
    done = run("train.py", *settings(shelf, STEPS), *RECORDED, f"hydra.run.dir={folder}", folder=shelf)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_losses_rows_anchors_and_weights_are_the_same_to_the_last_bit(
    shelf: Path, disturbed: dict[str, Any], undisturbed: Path
) -> None:
    assert_same(shelf / "run", undisturbed, 1)
    assert len(column(metrics(undisturbed), "train/loss")) == STEPS


def test_it_says_who_was_lost_and_why_and_how_many_are_left(shelf: Path, disturbed: dict[str, Any]) -> None:
    said = (shelf / "said.txt").read_text()
    lost = re.findall(r"lost: (.*); training goes on, 1 of 2 target ranks serve \(placement.tolerate=1\)", said)
    assert lost == [
        "rank 1 (target, host 0) failed: ArithmeticError: planted: 1 + 1 = 3",
        "rank 2 (target, host 0) has not been heard of for 4 s: it is stopped, or its host is gone",
    ]
    assert said.count("Traceback") == 1  # that of rank 1
    assert "error:" not in said
    served = [
        float(row["pipeline/targets"])
        for row in csv.DictReader((shelf / "run/csv/metrics.csv").open())
        if row.get("pipeline/targets")
    ]
    assert served[0] == 2
    assert 1 in served
    assert served[-1] == 1


def test_nothing_grows_while_targets_come_and_go(disturbed: dict[str, Any]) -> None:
    verdict = disturbed["verdict"]
    assert not verdict["grew"]
    assert {"rank 0", "rank 2"} <= verdict["processes"].keys()
    assert [event["kind"] for event in disturbed["events"]] == ["restarted", "back", "SIGSTOP"]


def test_the_secret_by_which_a_rank_comes_back_is_not_printed(shelf: Path, disturbed: dict[str, Any]) -> None:
    path = shelf / "config/dflash_lit/secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(path.read_text().strip()) == 64
    assert path.read_text().strip() not in (shelf / "said.txt").read_text()


# -- what cannot be done without


def test_one_more_than_is_tolerated_ends_the_run() -> None:
    layout, store = Layout(3, 1), signed(dist.HashStore())
    beats_of(layout, store)
    quiet: dict[str, Any] = {"flow": Flow, "children": lambda: None, "parent": None, "keeper": "rank 0", "end": lambda: None}
    changes: list[Entry] = []
    watch = Watch(store, layout, 0, stale_s=5, start_s=5, tolerate=1, changed=lambda entry, _: changes.append(entry), **quiet)
    for rank in (1, 2, 3):
        watch._read(add(store, store.get(LOG), Entry("joined", rank)))
    assert not watch._tell(Entry("lost", 2, 0, "rank 2 is gone"))
    assert not watch._tell(Entry("lost", 2, 0, "rank 2 is gone, as another has found"))
    assert [entry.why for entry in changes if entry.kind == "lost"] == ["rank 2 is gone"]
    assert store.get("abort") == b""
    ended = watch._tell(Entry("lost", 3, 0, "rank 3 is gone"))
    assert ended == store.get("abort") == b"rank 3 is gone; before that rank 2 is gone (placement.tolerate=1)"
    assert watch._tell(Entry("lost", 0, 0, "rank 0 is gone")) == ended  # the first counts
    assert watch.failure is None  # rank 0 was not given up; it reads the end at its next beat
    of_two = Watch(store, layout, 2, stale_s=5, start_s=5, tolerate=1, **quiet)
    of_two._read(store.get(LOG))
    assert of_two.failure == "the run goes on without this process: rank 2 is gone"


@pytest.mark.parametrize(
    ("local_rank", "error"),
    [(0, "is no target rank"), (4, "is no target rank"), (3, r"rank 3 \(target, host 0\) was not lost")],
)
def test_a_rank_that_cannot_come_back(local_rank: int, error: str) -> None:
    layout, store = Layout(3, 1), signed(dist.HashStore())
    beats_of(layout, store.under("watch"))
    with pytest.raises(UserError, match=f"DFLASH_LIT_REJOIN={local_rank}: {error}"):
        _life(layout, Started("rejoin", 0, local_rank), store)


def test_a_run_that_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    for name, value in {"DFLASH_LIT_REJOIN": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    started = how_started()
    assert (started.by, started.local_rank, started.leads, started.starts_others) == ("rejoin", 2, False, False)
    with pytest.raises(UserError, match=f"MASTER_PORT={port}: no run listens there"):
        follow(started, ["python", "train.py"])
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(UserError, match="start a lost target rank again with the line that the run printed"):
        how_started()


def test_a_process_with_another_secret_cannot_take_a_lost_ranks_place(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, door = Layout(2, 1), socket.create_server(("127.0.0.1", 0))
    port = door.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20), master_listen_fd=door.detach()
    )
    ours = Run.begin(SECRET, store).of(store)
    beats_of(layout, ours.under("watch"))
    log = add(ours.under("watch"), b"[]", Entry("joined", 2))
    log = add(ours.under("watch"), log, Entry("lost", 2, 0, "rank 2 is gone"))
    ours.set("config", json.dumps({"text": "", "layout": [2, 1, 1], "timeout_s": 5, "interface": None, "tolerate": 1}))
    for name, value in {"DFLASH_LIT_REJOIN": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    command = ["python", "train.py"]
    monkeypatch.setenv("DFLASH_LIT_SECRET", "f" * 32)
    keys = store.num_keys()
    with pytest.raises(ForgedError, match=r"refused: it is not signed with the run's secret.*DFLASH_LIT_SECRET"):
        follow(how_started(), command)
    assert store.num_keys() == keys
    assert ours.under("watch").get(LOG) == log
    monkeypatch.setenv("DFLASH_LIT_SECRET", SECRET)
    world, _ = follow(how_started(), command)
    assert (world.rank, world.life, world.tolerate) == (2, 1, 1)


def test_the_line_that_brings_a_rank_back() -> None:
    command = ["/somewhere/python", str(Path.cwd() / "train.py")]
    assert rejoin_line(Layout(2, 1), 2, "127.0.0.1", 4711, command) == (
        "MASTER_ADDR=127.0.0.1 MASTER_PORT=4711 DFLASH_LIT_REJOIN=2 python train.py"
    )
    assert rejoin_line(Layout(2, 1, 2), 4, "10.0.0.1", 4711, command).startswith("NODE_RANK=1 MASTER_ADDR=10.0.0.1 ")


# -- what counts as growth


def _samples(**slopes: float) -> list[Sample]:
    """Of one process, every 100 of 20,000 steps."""
    start = {"rss_mib": 800.0, "own_mib": 500.0, "handles": 20, "threads": 10, "shm": 1}
    return [
        Sample("rank 0", step / 10, step, **{name: value + slopes.get(name, 0) * step for name, value in start.items()})  # type: ignore[arg-type]
        for step in range(100, 20_001, 100)
    ]


@pytest.mark.parametrize(
    ("slopes", "grew"),
    [
        ({}, []),
        ({"own_mib": 0.0003, "rss_mib": 0.1, "handles": -0.001}, []),
        ({"own_mib": 0.0005}, ["own_mib"]),
        ({"handles": 0.0005}, ["handles"]),
        ({"threads": 0.0005, "shm": 0.0001}, ["threads", "shm"]),
    ],
)
def test_what_grew(slopes: dict[str, float], grew: list[str]) -> None:
    flat = [(step, 2.0) for step in range(50, 20_000, 50)]
    found = judge(_samples(**slopes), flat, {}, steps=20_000, mib=4.0, prefetch=3)["grew"]
    assert [line.split()[2] for line in found] == grew


@pytest.mark.parametrize("rise", [1.2, -1.2])
def test_a_queue_that_changes(rise: float) -> None:
    depths = [(step, 2 + rise * step / 20_000) for step in range(50, 20_000, 50)]
    assert "queue depth" in judge(_samples(), depths, {}, steps=20_000, mib=4.0, prefetch=3)["grew"][0]


# -- the log


def test_log_of_members() -> None:
    """Two hosts, three drafters and two targets each: targets are ranks 3, 4 and 8, 9."""
    layout, store = Layout(2, 3, 2), dist.HashStore()
    store.set(LOG, "[]")
    text = b"[]"

    def members(tolerate: int = 2) -> Members:
        return Members.read(layout, tolerate, store.get(LOG))

    assert not any(map(members().may_lose, range(layout.world)))  # nobody serves yet
    for rank in (3, 4, 8, 9):
        text = add(store, text, Entry("joined", rank))
    assert [rank for rank in range(layout.world) if members().may_lose(rank)] == [3, 4, 8, 9]
    assert not any(map(members(0).may_lose, range(layout.world)))
    assert add(store, b"[]", Entry("lost", 4, 0, "of another opinion")) == text  # who has not read it all cannot add to it
    text = add(store, text, Entry("lost", 3, 0, "gone"))
    assert members().missing == {3: "gone"}
    assert [rank for rank in (4, 8, 9) if members().may_lose(rank)] == [8, 9]  # host 0 needs its last one
    assert not members(1).may_lose(8)
    assert members().is_over(3, 0)
    assert not members().listens(3)
    text = add(store, text, Entry("ready", 3, 1))
    assert members().listens(3)
    assert members().missing
    assert members().may_lose(3)  # again, before it serves: it is missed already
    text = add(store, text, Entry("joined", 3, 0))  # the one that was given up wakes up
    assert members().joined == {4, 8, 9}
    text = add(store, text, Entry("joined", 3, 1))
    assert members().joined == {3, 4, 8, 9}
    assert not members().missing
    assert not members().is_over(3, 1)
    assert members(1).may_lose(4)


@pytest.mark.parametrize(("targets", "hosts", "tolerate"), [(2, 1, 2), (1, 2, 1), (3, 1, -1)])
def test_more_cannot_be_spared(targets: int, hosts: int, tolerate: int) -> None:
    with pytest.raises(UserError, match=f"placement.tolerate={tolerate}: each host needs a target, so at most"):
        _layout(PlacementSection("split", 1, targets, hosts, tolerate=tolerate))


def test_as_many_as_can_be_spared() -> None:
    assert _layout(PlacementSection("split", 1, 3, 2, tolerate=4)) == Layout(3, 1, 2)
