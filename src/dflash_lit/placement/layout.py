"""Who is what when target and drafter have processes of their own: ranks, roles, hosts, devices. Arithmetic only.

The physical world is, host after host, M drafter ranks and then N target ranks. Lightning sees the drafters alone, numbered
through over the hosts. Physical rank 0 is a drafter because Lightning and its loggers read the number before any Trainer exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from dflash_lit.errors import UserError

__all__ = ["Device", "Layout", "Role", "Transport", "accumulation", "device_name", "devices", "table", "transport"]

Device = int | None
"""Index among the visible GPUs of the host; None is its CPU."""

Transport = Literal["nccl", "gloo"]
"""What carries tensors between ranks."""

_LONGEST_TABLE = 32  # ranks; of more, the first host stands for all


class Role(StrEnum):
    """What a process does."""

    DRAFTER = "drafter"
    TARGET = "target"


@dataclass(frozen=True)
class Layout:
    """The processes of a run.

    Attributes:
        targets: target ranks a host (N); 0 where each drafter has a target in its own process.
        drafters: drafter ranks a host (M).
        hosts: all of one kind.

    Raises:
        UserError: if there are less than 1, of targets less than 0.
    """

    targets: int
    drafters: int
    hosts: int = 1

    def __post_init__(self) -> None:
        for key, count, least in (
            ("placement.targets", self.targets, 0),
            ("placement.drafters", self.drafters, 1),
            ("placement.hosts", self.hosts, 1),
        ):
            if count < least:
                raise UserError(f"{key}={count}: must be at least {least}")

    @property
    def ranks_per_host(self) -> int:
        return self.drafters + self.targets

    @property
    def world(self) -> int:
        """Processes of the whole run."""
        return self.hosts * self.ranks_per_host

    @property
    def drafter_world(self) -> int:
        """Processes that Lightning sees."""
        return self.hosts * self.drafters

    @property
    def prefetch(self) -> int:
        """Requests for a drafter to keep in flight so that none of its targets waits for one: docs/performance.md."""
        return -(-self.targets // self.drafters) + 1

    def physical_rank(self, host: int, local: int) -> int:
        if not (0 <= host < self.hosts and 0 <= local < self.ranks_per_host):
            raise ValueError(f"no local rank {local} on host {host} in {self}")
        return host * self.ranks_per_host + local

    def host(self, physical: int) -> int:
        return self._place(physical)[0]

    def local_rank(self, physical: int) -> int:
        return self._place(physical)[1]

    def role(self, physical: int) -> Role:
        return Role.DRAFTER if self.local_rank(physical) < self.drafters else Role.TARGET

    def drafter_rank(self, physical: int) -> int:
        """Rank in the Trainer's world, 0 to ``drafter_world - 1``."""
        host, local = self._place(physical)
        if local >= self.drafters:
            raise ValueError(f"{self.who(physical)} is no drafter")
        return host * self.drafters + local

    def physical_drafter(self, drafter_rank: int) -> int:
        """The inverse of :meth:`drafter_rank`."""
        host, local = divmod(drafter_rank, self.drafters)
        return self.physical_rank(host, local)

    def ranks_of_host(self, host: int) -> range:
        """Physical ranks."""
        first = self.physical_rank(host, 0)
        return range(first, first + self.ranks_per_host)

    def drafters_of_host(self, host: int) -> range:
        """Physical ranks."""
        first = self.physical_rank(host, 0)
        return range(first, first + self.drafters)

    def targets_of_host(self, host: int) -> range:
        """Physical ranks."""
        first = self.physical_rank(host, self.drafters)
        return range(first, first + self.targets)

    def pairs_of_host(self, host: int) -> list[tuple[int, int]]:
        """All (drafter, target) of a host, in the order to connect them.

        Connecting blocks both sides. If everybody keeps to one order, nobody waits in a circle.
        """
        return [(drafter, target) for drafter in self.drafters_of_host(host) for target in self.targets_of_host(host)]

    def target_of(self, physical: int, request: int, serving: Sequence[int] | None = None) -> int:
        """Physical rank of the target that serves a drafter's request number ``request`` (from 0).

        Features stay inside the host. While its drafters are in step, the loads of its targets differ by 1 at most.

        Args:
            serving: the targets of the host that are there; all.
        """
        host, local = divmod(self.drafter_rank(physical), self.drafters)
        turn = request * self.drafters + local
        targets = serving or self.targets_of_host(host)
        return targets[turn % len(targets)]

    def global_rows(self, rows_per_batch: int, accumulate: int = 1) -> int:
        """Rows that an optimizer step learns from."""
        return rows_per_batch * self.drafter_world * accumulate

    def who(self, physical: int) -> str:
        """Names a rank in messages: "rank 4 (target, host 0)"."""
        return f"rank {physical} ({self.role(physical)}, host {self.host(physical)})"

    def _place(self, physical: int) -> tuple[int, int]:
        """Host and local rank."""
        if not 0 <= physical < self.world:
            raise ValueError(f"no rank {physical} among the {self.world} of {self}")
        return divmod(physical, self.ranks_per_host)


def accumulation(layout: Layout, rows_per_batch: int, global_rows: int) -> int:
    """The ``trainer.accumulate_grad_batches`` with which an optimizer step learns from ``global_rows`` rows.

    Raises:
        UserError: if there is none; it names the nearest that there are.
    """
    once = layout.global_rows(rows_per_batch)
    if global_rows >= 1 and global_rows % once == 0:
        return global_rows // once
    below = max(global_rows, 0) // once
    choices = [times for times in (below, below + 1) if times]
    nearest = " and ".join(f"{times * once} (trainer.accumulate_grad_batches={times})" for times in choices)
    raise UserError(
        f"a global batch of {global_rows} rows cannot be had from data.rows_per_batch={rows_per_batch} on "
        f"{layout.drafter_world} drafters; the nearest {'are' if below else 'is'} {nearest}"
    )


def devices(layout: Layout, visible: int | None, *, share: bool = False) -> tuple[Device, ...]:
    """The device of each local rank; the same on all hosts.

    Args:
        visible: GPUs that the processes of a host can see; None runs all of them on the CPU.
        share: let ranks share GPUs, in turn, where there are too few.

    Raises:
        UserError: if there are too few GPUs and they are not to be shared.
    """
    needed = layout.ranks_per_host
    if visible is None:
        return (None,) * needed
    if visible < 1 or (visible < needed and not share):
        advice = "" if visible < 1 else ", or let ranks share GPUs with placement.share=true (slower)"
        targets = f"placement.targets={layout.targets} + " if layout.targets else ""
        raise UserError(
            f"{targets}placement.drafters={layout.drafters} need {needed} GPUs a host, "
            f"{visible} {'is' if visible == 1 else 'are'} visible: lower one, or make more visible (CUDA_VISIBLE_DEVICES){advice}"
        )
    return tuple(local % visible for local in range(needed))


def transport(ranks_devices: Sequence[Device]) -> Transport:
    """What can carry tensors between ranks of one host on these devices; two of them, or all.

    NCCL wants each of its ranks on a GPU of its own.
    """
    apart = len(set(ranks_devices)) == len(ranks_devices)
    return "nccl" if apart and None not in ranks_devices else "gloo"


def device_name(device: Device) -> str:
    """As torch writes it."""
    return "cpu" if device is None else f"cuda:{device}"


def table(layout: Layout, of_local: Sequence[Device]) -> str:
    """The processes as text, a line each; of many hosts, which are alike, only the first.

    Args:
        of_local: the device of each local rank.
    """
    lines = ["rank  host  local  role     trainer rank  device"]
    shown = layout.world if layout.world <= _LONGEST_TABLE else layout.ranks_per_host
    for rank in range(shown):
        local, role = layout.local_rank(rank), layout.role(rank)
        trainer = layout.drafter_rank(rank) if role is Role.DRAFTER else "-"
        lines.append(
            f"{rank:<4}  {layout.host(rank):<4}  {local:<5}  {role:<7}  {trainer!s:<12}  {device_name(of_local[local])}"
        )
    if shown < layout.world:
        lines.append(
            f"... and alike on hosts 1 to {layout.hosts - 1}: {layout.world} processes, {layout.drafter_world} drafters"
        )
    return "\n".join(lines)
