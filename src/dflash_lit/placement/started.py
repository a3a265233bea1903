"""How this process was started, and where it stands: by hand, by this package, by torchrun or by SLURM; or again, in place of a
target rank that was lost."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment

from dflash_lit.errors import UserError
from dflash_lit.placement.layout import Layout, Role
from dflash_lit.placement.own_gpu import variables
from dflash_lit.placement.secret import VARIABLE as SECRET

__all__ = ["DrafterEnvironment", "Started", "child_environment", "how_started", "rejoin_line"]

_LOCAL_RANK, _HOST = "DFLASH_LIT_LOCAL_RANK", "DFLASH_LIT_HOST"
_REJOIN = "DFLASH_LIT_REJOIN"


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
    """

    by: Literal["hand", "us", "torchrun", "slurm", "rejoin"]
    host: int = 0
    local_rank: int = 0
    address: str = "127.0.0.1"
    port: int = 0
    processes: int | None = None
    per_host: int | None = None

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
    if SLURMEnvironment.detect() and number("SLURM_NTASKS", 1) > 1:
        try:
            slurm = SLURMEnvironment(auto_requeue=False)
            place = (slurm.node_rank(), slurm.local_rank(), slurm.main_address, slurm.main_port)
        except KeyError as error:
            raise UserError(f"{error.args[0]} is not in the environment, as for SLURM's tasks it is: start with srun") from None
        except (RuntimeError, ValueError) as error:  # without --ntasks-per-node, or with words where numbers belong
            raise UserError(f"SLURM: {error}") from error
        host, local, address, port = place
        processes, per_host = number("SLURM_NTASKS", 1), number("SLURM_NTASKS_PER_NODE", 1)
        # All on one node meet at its loopback, whatever its name leads to.
        return Started("slurm", host, local, address if processes > per_host else "127.0.0.1", port, processes, per_host)
    return Started("hand", number("NODE_RANK", 0), 0, address, port)


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
