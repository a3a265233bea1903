"""How this process was started, and where it stands: by hand, by this package, by torchrun or by SLURM; or again, in place of a
target rank that was lost."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import TorchElasticEnvironment

from dflash_lit.errors import UserError
from dflash_lit.placement.layout import Layout, Role
from dflash_lit.placement.own_gpu import variables
from dflash_lit.placement.secret import VARIABLE as SECRET

__all__ = ["DrafterEnvironment", "Started", "child_environment", "how_started", "rejoin_line"]

_LOCAL_RANK, _HOST = "DFLASH_LIT_LOCAL_RANK", "DFLASH_LIT_HOST"
_REJOIN = "DFLASH_LIT_REJOIN"
_MOST_TASKS = 2**20
"""Of a node, and nodes; more is no number of SLURM's."""


@dataclass(frozen=True)
class Started:
    """Where a process stands before it knows the layout.

    Attributes:
        by: who started it. "hand" is a plain ``python train.py``, one process a host, which starts the others of its host;
            "rejoin" is one target rank by hand, in place of one that was lost.
        host: number of its host, from 0.
        local_rank: on its host.
        address, port: of the store that physical rank 0 keeps (torchrun: its agent); port 0 if any free one will do.
        processes: of the whole run, as far as whoever started it knows.
        per_host: how many of them are on each host.
        uneven: numbers of processes of the hosts, where these are not all the same; then there can be no run.
    """

    by: Literal["hand", "us", "torchrun", "slurm", "rejoin"]
    host: int = 0
    local_rank: int = 0
    address: str = "127.0.0.1"
    port: int = 0
    processes: int | None = None
    per_host: int | None = None
    uneven: tuple[int, ...] = ()

    @property
    def leads(self) -> bool:
        """Whether this is physical rank 0, which reads the command line; all others are told."""
        return self.host == 0 and self.local_rank == 0

    @property
    def starts_others(self) -> bool:
        """Whether it has to start the other processes of its host."""
        return self.by == "hand"

    @property
    def others_wait(self) -> bool:
        """Whether there are others that somebody else has started: they have to be told, also that there is no run."""
        return (self.processes or 1) > 1

    def check_alike(self) -> None:
        """Whether each host has as many processes as any other.

        Raises:
            UserError: if not.
        """
        if self.uneven:
            raise UserError(
                f"{self.by} has started {self.processes} processes, {', '.join(map(str, self.uneven))} on the hosts: all hosts of a run "
                "have as many; give srun --nodes and --ntasks-per-node instead of --ntasks"
            )

    def check(self, layout: Layout) -> None:
        """Whether the processes that exist are those of the layout.

        Raises:
            UserError: showing both.
        """
        if self.processes is None or (self.processes, self.per_host) == (layout.world, layout.ranks_per_host):
            return
        targets = f" + placement.targets={layout.targets}" if layout.targets else ""
        hosts = f" on each of placement.hosts={layout.hosts}" if layout.hosts > 1 else ""
        raise UserError(
            f"{self.by} has started {self.processes} processes, {self.per_host} a host, but placement.drafters={layout.drafters}"
            f"{targets}{hosts} are {layout.world}: start {layout.ranks_per_host} a host"
        )

    def everyone(self) -> Layout:
        """Those that exist, as a layout: for a run whose own layout is not known."""
        assert self.processes is not None
        assert self.per_host is not None
        return Layout(0, self.per_host, -(-self.processes // self.per_host))


def agent_store() -> bool:
    """Whether torchrun keeps a store for its workers."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def how_started() -> Started:
    """Read it from the environment.

    Several hosts by hand: ``NODE_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``, as for Lightning.

    Raises:
        UserError: for a variable that is no number, or missing.
    """
    env = os.environ

    def number(name: str, otherwise: int) -> int:
        try:
            return int(env.get(name, otherwise))
        except ValueError:
            raise UserError(f"{name}={env[name]!r} in the environment: must be a whole number") from None

    address, port = env.get("MASTER_ADDR", "127.0.0.1"), number("MASTER_PORT", 0)
    if not 0 <= port < 2**16:
        raise UserError(f"MASTER_PORT={port} in the environment: must lie in 0..65535")
    if _REJOIN in env:
        if (local := number(_REJOIN, 0)) < 1 or not port:
            raise UserError(
                f"{_REJOIN}={local}: start a lost target rank again with the line that the run printed when it was lost: the rank's "
                "number on its host, MASTER_ADDR and MASTER_PORT"
            )
        return Started("rejoin", number("NODE_RANK", 0), local, address, port)
    if _LOCAL_RANK in env:
        return Started("us", number(_HOST, 0), number(_LOCAL_RANK, 0), address, port)
    if TorchElasticEnvironment.detect():
        processes = number("WORLD_SIZE", 1)
        per_host = number("LOCAL_WORLD_SIZE", processes)
        return Started("torchrun", number("GROUP_RANK", 0), number("LOCAL_RANK", 0), address, port, processes, per_host)
    if (tasks := _slurm_tasks()) and not _is_shell():
        return _by_slurm(tasks, number)
    return Started("hand", number("NODE_RANK", 0), 0, address, port)


def _slurm_tasks() -> list[int]:
    """How many tasks of this job step are on each of its nodes; empty where srun has not started several.

    The job's own numbers (``SLURM_NTASKS``, ``SLURM_NTASKS_PER_NODE``, ``SLURM_NODELIST``) are those of a batch script's single shell, too,
    and stay as they are in a step with fewer.

    Raises:
        UserError: if SLURM's variable is none of that form.
    """
    text = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    tasks: list[int] = []
    for part in text.split(",") if text else ():
        match = re.fullmatch(r"([0-9]{1,7})(?:\(x([0-9]{1,7})\))?", part)
        count, times = (int(match[1]), int(match[2] or 1)) if match else (0, 0)
        if not (0 < count <= _MOST_TASKS and 0 < times <= _MOST_TASKS - len(tasks)):
            raise UserError(f"SLURM_STEP_TASKS_PER_NODE={text!r} in the environment: must be of SLURM's form, such as 2(x3),1")
        tasks += [count] * times
    return tasks if sum(tasks) > 1 else []


def _is_shell() -> bool:
    """Whether this is started by hand in the shell of ``srun --pty bash``, which has the variables of a task.

    What ``srun`` starts in an allocation of salloc, or as ``bash script.sh``, has those names, too, but no terminal.
    """
    return os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive") and os.isatty(0)


def _by_slurm(tasks: list[int], number: Callable[[str, int], int]) -> Started:
    """As one of several tasks of a job step."""
    env = os.environ
    for name in ("SLURM_NODEID", "SLURM_LOCALID", "SLURM_STEP_NODELIST"):
        if not env.get(name):
            raise UserError(f"{name} is not in the environment, as for SLURM's tasks it is: start with srun")
    host, local = number("SLURM_NODEID", 0), number("SLURM_LOCALID", 0)
    if not (0 <= host < len(tasks) and 0 <= local < tasks[host]):
        raise UserError(
            f"SLURM_NODEID={host} SLURM_LOCALID={local} in the environment: there is no such task in SLURM_STEP_TASKS_PER_NODE="
            f"{env['SLURM_STEP_TASKS_PER_NODE']}"
        )
    # As Lightning has it, 15000 + the job's last four digits, and another port for each step: several of a job may run at a time.
    port = number("MASTER_PORT", 15000 + (number("SLURM_JOB_ID", 0) + 1000 * number("SLURM_STEP_ID", 0)) % 10000)
    # All on one node meet at its loopback, whatever its name leads to.
    address = env.get("MASTER_ADDR") or _first_node(env["SLURM_STEP_NODELIST"]) if len(tasks) > 1 else "127.0.0.1"
    uneven = tuple(tasks) if len(set(tasks)) > 1 else ()
    return Started("slurm", host, local, address, port, sum(tasks), tasks[0], uneven)


def _first_node(nodes: str) -> str:
    """Of a list as SLURM writes it: ``node[07-08,11],gpu1``, ``rack[1-2]n[3,5]``."""
    first = re.split(r",(?![^\[]*\])", nodes, maxsplit=1)[0]
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", first)


def child_environment(started: Started, local_rank: int, address: str, port: int, secret: str) -> dict[str, str]:
    """Environment of a process that we start on this host; other users cannot read it."""
    # Lightning looks at these before there is a Trainer, to tell whether it may print.
    ours = {"LOCAL_RANK": str(local_rank), "NODE_RANK": str(started.host)}
    return {
        **os.environ,
        **variables(local_rank),
        **ours,
        _LOCAL_RANK: str(local_rank),
        _HOST: str(started.host),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        SECRET: secret,
    }


def rejoin_line(layout: Layout, rank: int, address: str, port: int, command: Sequence[str]) -> str:
    """What to type on the host of a lost target rank to start it again.

    Args:
        rank: physical.
        command: as the other processes of the run are started.
    """
    host = f"NODE_RANK={layout.host(rank)} " if layout.hosts > 1 else ""
    script = [
        os.path.relpath(part) if os.path.isabs(part) and Path(part).is_relative_to(Path.cwd()) else part for part in command[1:]
    ]
    return f"{host}MASTER_ADDR={address} MASTER_PORT={port} {_REJOIN}={layout.local_rank(rank)} " + shlex.join(
        ["python", *script]
    )


class DrafterEnvironment(ClusterEnvironment):
    """What Lightning is shown: a world of drafters only, whose processes exist already.

    Args:
        layout: of the run.
        rank: physical, of a drafter.
        address, port: of the store; Lightning puts them into the environment.
    """

    def __init__(self, layout: Layout, rank: int, address: str, port: int) -> None:
        assert layout.role(rank) is Role.DRAFTER
        super().__init__()
        self.layout, self.rank, self._address, self._port = layout, rank, address, port

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return self._address

    @property
    def main_port(self) -> int:
        return self._port

    @staticmethod
    def detect() -> bool:
        return False  # it is only ever given

    def world_size(self) -> int:
        return self.layout.drafter_world

    def set_world_size(self, size: int) -> None:
        assert size == self.layout.drafter_world

    def global_rank(self) -> int:
        return self.layout.drafter_rank(self.rank)

    def set_global_rank(self, rank: int) -> None:
        assert rank == self.global_rank()

    def local_rank(self) -> int:
        return self.layout.local_rank(self.rank)

    def node_rank(self) -> int:
        return self.layout.host(self.rank)
