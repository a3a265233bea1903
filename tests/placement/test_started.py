"""Who started a process, and where it stands: read from the environment as launchers set it."""

from __future__ import annotations

import os
import re

import pytest

from dflash_lit.errors import UserError
from dflash_lit.placement.layout import Layout
from dflash_lit.placement.started import DrafterEnvironment, Started, child_environment, how_started

LAUNCHERS = ("SLURM", "TORCHELASTIC", "MASTER_", "DFLASH_LIT_")
OTHERS = {"ENVIRONMENT", "RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}

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
# As SLURM 22.05 sets them. `srun --nodes 2 --ntasks-per-node 4`, the third task of the second node:
SLURM = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_JOB_NAME": "python",
    "SLURM_NODELIST": "node[07-08]",
    "SLURM_JOB_NODELIST": "node[07-08]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "8",
    "SLURM_NPROCS": "8",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.200",  # of where srun runs
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
}
FIRST = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
# The shell of `#SBATCH --nodes=2 --ntasks-per-node=4`, and that of `salloc`: no step, but the number of all tasks.
OF_STEPS = ("SLURM_STEP", "SLURM_LAUNCH")
BATCH = {name: value for name, value in SLURM.items() if not name.startswith(OF_STEPS)} | FIRST
BATCH |= {"SLURM_JOB_NAME": "run.sh", "ENVIRONMENT": "BATCH"}
SALLOC = {name: value for name, value in BATCH.items() if name not in {*FIRST, "ENVIRONMENT"}} | {
    "SLURM_JOB_NAME": "interactive"
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
    set_all(environment, SLURM)
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
    assert "MASTER_PORT" not in os.environ  # nothing is set, as Lightning does: what this process starts is told otherwise
    environment.setenv("SLURM_STEP_ID", "2")
    assert how_started().port == 21567  # steps of one job may run at the same time
    set_all(environment, {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "4711"})
    assert (how_started().address, how_started().port) == ("10.0.0.9", 4711)


@pytest.mark.parametrize(
    ("values", "processes", "per_host", "address"),
    [
        # `srun --nodes 1 --ntasks 4` in such a job; SLURM_NTASKS_PER_NODE and SLURM_NODELIST stay those of the job.
        (
            {
                "SLURM_NTASKS": "2",
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_STEP_TASKS_PER_NODE": "2",
                "SLURM_STEP_NODELIST": "node08",
            },
            2,
            2,
            "127.0.0.1",  # all on one node: nobody else has to reach it
        ),
        # `srun --nodes 2 --ntasks 2`
        ({"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, 2, 1, "node07"),
        # On nodes 2 and 3 of a job of three.
        ({"SLURM_NODELIST": "node[07-09]", "SLURM_STEP_NODELIST": "node[08-09]"}, 8, 4, "node08"),
        # In a shell of salloc.
        ({"SLURM_JOB_NAME": "interactive"}, 8, 4, "node07"),
        # `srun bash run.sh`
        ({"SLURM_JOB_NAME": "bash"}, 8, 4, "node07"),
    ],
    ids=["one node of two", "one task a node", "a part of the nodes", "salloc", "bash script"],
)
def test_by_slurm_it_is_the_step_that_counts(
    environment: pytest.MonkeyPatch, values: dict[str, str], processes: int, per_host: int, address: str
) -> None:
    set_all(environment, {**SLURM, **FIRST, **values})
    started = how_started()
    assert (started.by, started.processes, started.per_host, started.address) == ("slurm", processes, per_host, address)


def test_ntasks_alone(environment: pytest.MonkeyPatch) -> None:
    """``srun --ntasks 2`` sets no SLURM_NTASKS_PER_NODE; ``srun --nodes 2 --ntasks 4`` starts 3 tasks on one node and 1 on the other."""
    set_all(environment, {**SLURM, **FIRST, "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "node07"})
    environment.delenv("SLURM_NTASKS_PER_NODE")
    assert how_started() == Started("slurm", 0, 0, "127.0.0.1", 19567, processes=2, per_host=2)
    environment.setenv("SLURM_STEP_TASKS_PER_NODE", "3,1")
    environment.setenv("SLURM_STEP_NODELIST", "node[07-08]")
    with pytest.raises(
        UserError, match=r"slurm has started 4 processes, 3, 1 on the hosts: .* give srun --nodes and --ntasks-per-node instead"
    ):
        how_started().check_alike()
    environment.setenv("SLURM_STEP_TASKS_PER_NODE", "2(x2)")
    how_started().check_alike()


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node[1-2]", "node1"),
        ("node[07,09-11],gpu1", "node07"),
        ("gpu-a,node[1-2]", "gpu-a"),
        ("rack[1-2]n[3,5]", "rack1n3"),
        ("n[1-2]-ib", "n1-ib"),
    ],
)
def test_the_first_of_the_nodes(environment: pytest.MonkeyPatch, nodes: str, first: str) -> None:
    set_all(environment, {**SLURM, "SLURM_STEP_NODELIST": nodes})
    assert how_started().address == first


@pytest.mark.parametrize(
    "values",
    [
        {**SLURM, **FIRST, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"},  # it starts the others itself
        BATCH,  # without srun: nobody has started another
        SALLOC,
        # The shell itself of salloc, where it is a step (LaunchParameters=use_interactive_step).
        {**SALLOC, **FIRST, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"},
    ],
    ids=["one task", "batch script", "salloc", "salloc's step"],
)
def test_a_single_process_in_a_slurm_job_is_by_hand(environment: pytest.MonkeyPatch, values: dict[str, str]) -> None:
    set_all(environment, values)
    assert how_started() == Started("hand")


@pytest.mark.parametrize(("at_terminal", "by"), [(True, "hand"), (False, "slurm")])
def test_the_shell_of_srun_pty(environment: pytest.MonkeyPatch, at_terminal: bool, by: str) -> None:
    """``srun --ntasks-per-node 4 --pty bash``: the shell has the variables of a task, and what it starts by hand inherits them."""
    set_all(environment, {**SLURM, **FIRST, "SLURM_JOB_NAME": "bash", "SLURM_PTY_PORT": "41405"})
    here, there = os.openpty()
    pipe = os.pipe()
    before = os.dup(0)
    try:
        os.dup2(there if at_terminal else pipe[0], 0)
        assert how_started().by == by
        environment.setenv("SLURM_JOB_NAME", "python")  # srun --pty python train.py
        assert how_started().by == "slurm"
    finally:
        os.dup2(before, 0)
        for descriptor in (before, here, there, *pipe):
            os.close(descriptor)


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
        ({**SLURM, "SLURM_LOCALID": "banana"}, "", "SLURM_LOCALID='banana' in the environment: must be a whole number"),
        ({**SLURM, "SLURM_LOCALID": "4"}, "", "SLURM_NODEID=1 SLURM_LOCALID=4 in the environment: there is no such task in"),
        (
            {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "two"},
            "",
            "SLURM_STEP_TASKS_PER_NODE='two' in the environment: must be of SLURM's",
        ),
        (
            {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1(x9999999)"},
            "",
            "SLURM_STEP_TASKS_PER_NODE='1(x9999999)' in the environment",
        ),
        (SLURM, "SLURM_NODEID", "SLURM_NODEID is not in the environment, as for SLURM's tasks it is: start with srun"),
        (SLURM, "SLURM_STEP_NODELIST", "SLURM_STEP_NODELIST is not in the environment"),
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
