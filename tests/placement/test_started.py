"""Who started a process, and where it stands: read from the environment as launchers set it."""

from __future__ import annotations

import os
import re

import pytest

from dflash_lit.errors import UserError
from dflash_lit.placement.layout import Layout
from dflash_lit.placement.started import DrafterEnvironment, Started, child_environment, how_started

LAUNCHERS = ("SLURM", "TORCHELASTIC", "MASTER_", "DFLASH_LIT_")
OTHERS = {"RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29400",
    "RANK": "6",
    "LOCAL_RANK": "2",
    "GROUP_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
}
SLURM = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_JOB_NAME": "drafter",
    "SLURM_NODELIST": "node[07-08]",
    "SLURM_NTASKS": "8",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Of a process that nobody but a shell has started."""
    # Lightning writes MASTER_ADDR and MASTER_PORT into the environment, too: put back whatever happens to them.
    for name in {*os.environ, "MASTER_ADDR", "MASTER_PORT"}:
        if name.startswith(LAUNCHERS) or name in OTHERS:
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
    return monkeypatch


def set_all(environment: pytest.MonkeyPatch, values: dict[str, str]) -> None:
    for name, value in values.items():
        environment.setenv(name, value)


def test_by_hand(environment: pytest.MonkeyPatch) -> None:
    started = how_started()
    assert started == Started("hand")
    assert started.leads
    assert started.starts_others
    assert not started.others_wait


def test_by_hand_on_the_second_of_two_hosts(environment: pytest.MonkeyPatch) -> None:
    set_all(environment, {"NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400"})
    started = how_started()
    assert started == Started("hand", host=1, address="10.0.0.1", port=29400)
    assert not started.leads
    assert started.starts_others  # those of its host


def test_by_us(environment: pytest.MonkeyPatch) -> None:
    """Whatever else is set: torchrun or SLURM may have started the process that started this one."""
    set_all(environment, {**SLURM, "SLURM_NTASKS": "2"})
    for name, value in child_environment(Started("hand", host=1), 3, "10.0.0.1", 29400, "s" * 32).items():
        environment.setenv(name, value)
    started = how_started()
    assert started == Started("us", host=1, local_rank=3, address="10.0.0.1", port=29400)
    assert not started.leads
    assert not started.starts_others
    # What Lightning reads before there is a Trainer.
    assert (os.environ["LOCAL_RANK"], os.environ["NODE_RANK"]) == ("3", "1")


def test_by_torchrun(environment: pytest.MonkeyPatch) -> None:
    set_all(environment, TORCHRUN)
    started = how_started()
    assert started == Started("torchrun", 1, 2, "10.0.0.1", 29400, processes=8, per_host=4)
    assert not started.leads
    assert not started.starts_others
    assert started.others_wait
    set_all(environment, {"GROUP_RANK": "0", "LOCAL_RANK": "0"})
    assert how_started().leads


def test_by_slurm(environment: pytest.MonkeyPatch) -> None:
    set_all(environment, SLURM)
    started = how_started()
    # The address of the first node; Lightning's rule for the port: 15000 + the job's last four digits.
    assert started == Started("slurm", 1, 2, "node07", 19567, processes=8, per_host=4)
    assert started.others_wait
    set_all(environment, {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "4711"})
    assert (how_started().address, how_started().port) == ("10.0.0.9", 4711)
    set_all(environment, {"SLURM_NTASKS": "4", "SLURM_NODEID": "0"})  # all on one node: nobody else has to reach it
    assert how_started().address == "127.0.0.1"


@pytest.mark.parametrize(
    "values",
    [
        {"SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "1"},  # one task, which starts the others itself
        {"SLURM_JOB_NAME": "interactive"},  # a shell in an allocation
        {"SLURM_JOB_NAME": "bash"},
    ],
)
def test_a_single_process_in_a_slurm_job_is_by_hand(environment: pytest.MonkeyPatch, values: dict[str, str]) -> None:
    set_all(environment, {**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", **values})
    assert how_started().by == "hand"


@pytest.mark.parametrize(
    ("values", "missing", "says"),
    [
        ({"MASTER_PORT": "http"}, "", "MASTER_PORT='http' in the environment: must be a whole number"),
        (
            {"MASTER_PORT": "99999999999999999999"},
            "",
            "MASTER_PORT=99999999999999999999 in the environment: must lie in 0..65535",
        ),
        ({"NODE_RANK": "one"}, "", "NODE_RANK='one' in the environment: must be a whole number"),
        ({**TORCHRUN, "LOCAL_RANK": "x"}, "", "LOCAL_RANK='x'"),
        ({**SLURM, "SLURM_LOCALID": "banana"}, "", "SLURM: invalid literal for int() with base 10: 'banana'"),
        (SLURM, "SLURM_NODEID", "SLURM_NODEID is not in the environment, as for SLURM's tasks it is: start with srun"),
        (SLURM, "SLURM_NTASKS_PER_NODE", "SLURM: You set `--ntasks=8` in your SLURM bash script"),
    ],
)
def test_what_is_wrong_names_the_variable(
    environment: pytest.MonkeyPatch, values: dict[str, str], missing: str, says: str
) -> None:
    set_all(environment, {name: value for name, value in values.items() if name != missing})
    with pytest.raises(UserError, match=re.escape(says)):
        how_started()


# -- the processes and the layout


def test_processes_that_are_those_of_the_layout() -> None:
    Started("torchrun", processes=8, per_host=4).check(Layout(3, 1, 2))
    Started("slurm", processes=2, per_host=2).check(Layout(0, 2))
    Started("hand").check(Layout(5, 3, 7))  # which will start them


@pytest.mark.parametrize(
    ("started", "layout", "says"),
    [
        (
            Started("torchrun", processes=3, per_host=3),
            Layout(1, 1),
            "torchrun has started 3 processes, 3 a host, but placement.drafters=1 + placement.targets=1 are 2: start 2 a host",
        ),
        (
            Started("slurm", processes=4, per_host=4),
            Layout(0, 1),
            "slurm has started 4 processes, 4 a host, but placement.drafters=1 are 1: start 1 a host",
        ),
        (  # as many as needed, but not where they are needed
            Started("slurm", processes=8, per_host=8),
            Layout(3, 1, 2),
            "slurm has started 8 processes, 8 a host, but placement.drafters=1 + placement.targets=3 on each of "
            "placement.hosts=2 are 8: start 4 a host",
        ),
    ],
)
def test_other_processes_than_the_layout_has(started: Started, layout: Layout, says: str) -> None:
    with pytest.raises(UserError) as caught:
        started.check(layout)
    assert str(caught.value) == says


def test_everyone_has_a_place_without_a_layout() -> None:
    layout = Started("torchrun", processes=8, per_host=4).everyone()
    assert (layout.world, layout.hosts, layout.ranks_per_host) == (8, 2, 4)


# -- what Lightning is shown


def test_lightning_sees_the_drafters_alone() -> None:
    layout = Layout(targets=2, drafters=2, hosts=2)
    environment = DrafterEnvironment(layout, 5, "10.0.0.1", 29400)  # the second drafter of the second host
    assert environment.creates_processes_externally
    assert (environment.world_size(), environment.global_rank()) == (4, 3)
    assert (environment.local_rank(), environment.node_rank()) == (1, 1)
    assert (environment.main_address, environment.main_port) == ("10.0.0.1", 29400)
    assert not DrafterEnvironment.detect()
    environment.set_world_size(4)
    environment.set_global_rank(3)
    for wrong in (lambda: environment.set_world_size(8), lambda: environment.set_global_rank(5)):
        with pytest.raises(AssertionError):
            wrong()


def test_a_target_has_no_place_there() -> None:
    with pytest.raises(AssertionError):
        DrafterEnvironment(Layout(1, 1), 1, "127.0.0.1", 1)


def test_a_child_inherits_the_rest(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    made = child_environment(Started("hand"), 1, "127.0.0.1", 4711, "s" * 32)
    assert made["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert made["PATH"] == os.environ["PATH"]
    assert made["DFLASH_LIT_SECRET"] == "s" * 32
    assert all(isinstance(value, str) for value in made.values())
