"""A run that loses target ranks in several ways and gets one back: it comes to the same to the last bit, or ends with their names."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from dflash_lit.config import PlacementSection
from dflash_lit.errors import UserError
from dflash_lit.placement.layout import Layout
from dflash_lit.placement.members import LOG, Entry, Members, add
from dflash_lit.plan import _layout
from tests.placement.test_faults import ROOT, SOON, Live, live
from tests.placement.test_same_run import assert_same, column, metrics

STEPS = 30
SAME = [
    f"trainer.max_steps={STEPS}",
    "trainer.val_every=15",
    "trainer.log_every_n_steps=2",
    "data.train_prompts=12",
    "data.val_prompts=4",
    "data.row_tokens=128",
    "drafter.anchors=4",
    "drafter.layers=1",
    "callbacks.checkpoint=null",
    "callbacks.last_checkpoint=null",
    "evaluation.prompts=1",
    "evaluation.temperatures=[]",
    "+callbacks.recorder._target_=tests.placement.recorder.Recorder",
    "+callbacks.recorder.folder=${paths.output_dir}/seen",
]
HELD = [
    "+callbacks.held._target_=tests.placement.held.Held",
    "+callbacks.held.folder=${paths.output_dir}",
    "+callbacks.held.steps=[12,20]",
]
LINE = r"to start it again on its host: (.*)"


def again(run: Live, line: str) -> subprocess.Popen[str]:
    """Start a lost rank as a person would, by the line that the run printed, in the shell that the run was started in."""
    *variables, python, script = shlex.split(line.replace("tests/placement/faulty.py", "train.py"))
    assert python == "python"
    environment = os.environ | dict(variable.split("=", 1) for variable in variables) | dict([run.mark.split("=")])
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    command = ["python", script]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tolerate")


@pytest.fixture(scope="module")
def disturbed(shelf: Path) -> Iterator[Live]:
    """Rank 1 raises, and is started again by hand; then rank 2 is stopped; rank 1 goes on alone."""
    split = ("placement=split", "placement.targets=2", "placement.tolerate=1", "placement.timeout_s=4")
    with live(shelf, *split, *SAME, *HELD, script="tests/placement/faulty.py", FAULT="forward:1") as run:
        line = run.until(rf"lost: rank 1 \(target, host 0\) failed: ArithmeticError: .*{LINE}")[1]
        restarted = again(run, line)
        run.until(r"rank 1 \(target, host 0\) is back: 2 of 2 target ranks serve")
        (run.folder / "run" / "go12").touch()
        run.until("step 20/")
        os.kill(run.pid(2), signal.SIGSTOP)
        (run.folder / "run" / "go20").touch()
        run.until(r"lost: rank 2 \(target, host 0\) has not been heard of for 4 s")
        run.ended(240, 0)
        assert restarted.wait(10) == 0, restarted.stderr and restarted.stderr.read()
        yield run


@pytest.fixture(scope="module")
def undisturbed(shelf: Path) -> Iterator[Live]:
    with live(shelf, *SAME) as run:
        run.ended(240, 0)
        yield run


def test_losses_rows_anchors_and_weights_are_the_same_to_the_last_bit(disturbed: Live, undisturbed: Live) -> None:
    one, other = disturbed.folder / "run", undisturbed.folder / "run"
    assert_same(one, other, 1)
    assert len(column(metrics(one), "train/loss")) == STEPS // 2


def test_it_says_who_was_lost_and_why_and_how_many_are_left(disturbed: Live) -> None:
    lost = re.findall(
        r"lost: rank (\d) .*; training goes on, (\d) of 2 target ranks serve \(placement.tolerate=1\)", disturbed.said()
    )
    assert lost == [("1", "1"), ("2", "1")]
    assert disturbed.said().count("Traceback") == 1  # that of rank 1
    assert not disturbed.errors()
    header, *rows = [line.split(",") for line in (disturbed.folder / "run/csv/metrics.csv").read_text().splitlines()]
    served = [float(number) for row in rows if (number := row[header.index("pipeline/targets")])]
    assert set(served) == {1, 2}
    assert served[-1] == 1


def test_more_than_are_tolerated(shelf: Path) -> None:
    """The run ends as without it; a rank that was not lost cannot be started again."""
    three = ("placement=split", "placement.targets=3", "placement.tolerate=1", "placement.timeout_s=4")
    with live(shelf, *three) as run:
        run.until("step 3/")
        os.kill(run.pid(2), signal.SIGKILL)
        line = run.until(rf"lost: rank 2 .* was killed by SIGKILL; training goes on, 2 of 3 .*{LINE}")[1]
        wrong = again(run, line.replace("REJOIN=2", "REJOIN=3"))
        assert wrong.wait(60) == 2
        assert wrong.stderr is not None
        assert "rank 3 (target, host 0) was not lost" in wrong.stderr.read()
        os.kill(run.pid(3), signal.SIGKILL)
        run.ended(SOON, 1)
        assert run.errors() == [
            "error: rank 3 (target, host 0) was killed by SIGKILL; before that rank 2 (target, host 0) was killed by SIGKILL "
            "(placement.tolerate=1)"
        ]


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
