"""All processes of a run as one of them sees it: the layout, who it is itself, the store they share, and their watch.

Physical rank 0 reads the command line, checks it, and keeps a store. Every other process is told its config through the store,
whoever started it: rank 0 itself, one process a host, torchrun or SLURM. So there is one road for all, Hydra runs once, and a
sweep is nothing special: each of its jobs starts and ends its own processes.

What they put into the store is signed (:mod:`dflash_lit.placement.signed_store`); docs/security.md says against whom.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist

from dflash_lit.errors import Interrupted, RankError, UserError
from dflash_lit.placement.children import Children, die_with_parent, ignore_stops, outlive_parent
from dflash_lit.placement.flow import Flow
from dflash_lit.placement.interfaces import check_interface, listening_address, on_interface
from dflash_lit.placement.layout import Layout, Role, Transport
from dflash_lit.placement.members import LOG, Entry, Members, add
from dflash_lit.placement.reach import meet
from dflash_lit.placement.secret import Key, find_secret, new_secret
from dflash_lit.placement.signed_store import SignedStore
from dflash_lit.placement.started import DrafterEnvironment, Started, agent_store, child_environment, rejoin_line
from dflash_lit.placement.watch import STOPPED, Watch, beats_of, client
from dflash_lit.stopping import stopping

__all__ = ["NO_LIMIT", "World", "follow", "lead"]

NO_LIMIT = timedelta(days=1000)
"""Of waits for other ranks: one may compile, validate or save. The watch ends what hangs."""

_RANK_0_FIRST_S = 1.5
"""For rank 0 to say what all drafters have met with at once."""

_START_S = 300.0
"""For a process to start, import and reach the store; hosts of a cluster begin at different times."""

_WAIT_SAID_S = 30.0
"""Another host waits so long for rank 0 before it says so."""

_MISSING_SAID_S = 20.0
"""The same of rank 0, for other hosts."""


class World:
    """One process's place in a run of several; made by :func:`lead` or :func:`follow`.

    A context manager: on leaving it by an exception all ranks end, with one message; otherwise this rank says goodbye.

    Attributes:
        layout: who is what.
        rank: physical.
        stores: shared by all ranks.
        watch: of this rank.
        flow: what this rank has moved so far; whoever moves something counts it here.
        children: the other processes of this host, if this one started them.
        life: how many processes of this rank were lost before this one.
        tolerate: how many target ranks may be missing at a time.
        host_names: of all hosts, once local rank 0 has met the others.
    """

    def __init__(
        self,
        layout: Layout,
        started: Started,
        store: dist.Store,
        *,
        run: Run,
        address: str,
        port: int,
        timeout_s: float,
        interface: str | None = None,
        children: Children | None = None,
        parent: int | None = None,
        tolerate: int = 0,
        life: int = 0,
        command: Sequence[str] = (),
    ) -> None:
        self.layout, self.started, self.timeout_s = layout, started, timeout_s
        self.tolerate, self.life, self._command = tolerate, life, command
        self.host_names: list[str] = []
        self._began, self._said_missing = time.monotonic(), False
        self.rank = layout.physical_rank(started.host, started.local_rank)
        self.address, self.port = address, port
        self.stores = Stores.of(run, store)
        self._run, self._interface = run, interface
        self.children = children
        self.flow = Flow()
        self.ended = False
        self._cleanups: list[Callable[[], object]] = []
        if self.rank == 0:
            beats_of(layout, self.store.under("watch"))
        self.watch = Watch(
            run.of(client(address, port, _START_S)).under("watch"),
            layout,
            self.rank,
            stale_s=timeout_s,
            start_s=_START_S,
            flow=lambda: self.flow,
            children=children.failed if children else lambda: None,
            parent=parent,
            keeper="torchrun" if agent_store() else layout.who(0),
            end=self._end_at_once,
            tolerate=tolerate,
            life=life,
            changed=self._members_changed,
        )

    @property
    def role(self) -> Role:
        return self.layout.role(self.rank)

    @property
    def drafter_rank(self) -> int:
        return self.layout.drafter_rank(self.rank)

    @property
    def host(self) -> int:
        return self.layout.host(self.rank)

    @property
    def environment(self) -> DrafterEnvironment:
        """For Lightning."""
        return DrafterEnvironment(self.layout, self.rank, self.address, self.port)

    def flows(self) -> dict[int, Flow]:
        """Newest known counters of each rank."""
        return {**self.watch.flows, self.rank: self.flow}

    # -- telling each other

    def tell(self, name: str, value: Any) -> None:
        """Put a value (JSON) where every rank finds it."""
        self.store.set(name, json.dumps(value))

    def told(self, name: str) -> Any:
        """Wait for a value as long as it takes; the watch ends a wait for a rank that has failed.

        Raises:
            RankError: if a rank has failed meanwhile.
        """
        self._wait(lambda: self.store.check([name]))
        return json.loads(self.store.get(name))

    def _wait(self, over: Callable[[], bool]) -> None:
        pause = 0.01
        while not over():
            self.watch.check()
            self._say_who_is_missing()
            time.sleep(pause)
            pause = min(1.5 * pause, 0.25)

    def _say_who_is_missing(self) -> None:
        """Once, as rank 0: which hosts nothing was heard of when they could have been."""
        if self.rank != 0 or self._said_missing or time.monotonic() - self._began < _MISSING_SAID_S:
            return
        self._said_missing = True
        firsts = {host: self.layout.physical_rank(host, 0) for host in range(self.layout.hosts)}
        if missing := [str(host) for host, rank in firsts.items() if not self.watch.heard(rank)]:
            hosts = f"host{'s' * (len(missing) > 1)} {', '.join(missing)}"
            print(
                f"waiting for {hosts}: nothing was heard of yet (NODE_RANK, MASTER_ADDR, MASTER_PORT)",
                file=sys.stderr,
                flush=True,
            )

    def is_done(self, rank: int) -> bool:
        """Whether a rank has nothing more to do."""
        return self.store.check([f"done/{rank}"])

    @property
    def store(self) -> SignedStore:
        """Shared by all ranks."""
        return self.stores.signed

    def more_stores(self) -> Stores:
        """The store by a connection of its own, for another thread: one that waits blocks all who use it."""
        return Stores.of(self._run, client(self.address, self.port, _START_S))

    def group(self, name: str, rank: int, size: int, stores: Stores | None = None) -> Any:
        """A ``ProcessGroupGloo`` of its own, unknown to torch.distributed's default one. Its stubs lack most methods."""
        return _Group((stores or self.stores).signed.under(name), rank, size)

    def key(self, *purpose: str) -> Key:
        """To sign what ranks tell each other past the store."""
        return self._run.key(*purpose)

    # -- target ranks that are lost and come back

    @property
    def members(self) -> Members:
        """The target ranks that serve, as far as this rank has heard."""
        return self.watch.members

    def announce(self, kind: Literal["ready", "joined"]) -> None:
        """Of this target rank, to all."""
        store = self.store.under("watch")
        entry, text = Entry(kind, self.rank, self.life), store.get(LOG)
        while entry not in (members := Members.read(self.layout, self.tolerate, text)).log:
            if members.is_over(self.rank, self.life):
                return  # the watch ends this process
            text = add(store, text, entry)

    def _members_changed(self, entry: Entry, members: Members) -> None:
        """In a thread of the watch: end what is given up, and say what has changed."""
        if entry.kind == "lost" and self.children is not None and not entry.life:
            self.children.drop(entry.rank)  # no more than kill: this thread has to go on beating
        if self.rank != 0 or (entry.kind == "joined" and not entry.life) or entry.kind == "ready":
            return
        left = f"{len(members.joined)} of {len(members.lives)} target ranks serve"
        if entry.kind == "joined":
            print(f"{self.layout.who(entry.rank)} is back: {left}", file=sys.stderr, flush=True)
            return
        line = rejoin_line(self.layout, entry.rank, self.address, self.port, self._command)
        host = (
            f"host {self.layout.host(entry.rank)} ({self.host_names[self.layout.host(entry.rank)]})"
            if self.host_names
            else "its host"
        )
        print(
            f"lost: {entry.why}; training goes on, {left} (placement.tolerate={self.tolerate}); to start it again on {host}: {line}",
            file=sys.stderr,
            flush=True,
        )

    def start_drafter_group(self, device: torch.device, transport: Transport | None = None) -> None:
        """Make the default process group: the drafters alone, so that all of Lightning's collectives are right.

        Args:
            device: of this rank.
            transport: of gradients; by default NCCL on a GPU, which needs one for each drafter.
        """
        nccl = (transport or ("nccl" if device.type == "cuda" else "gloo")) == "nccl"
        # The watch ends a run that hangs, and names who hangs. torch's own limits would end those who wait for a long validation on
        # rank 0, and NCCL's error handling would abort the partners of a rank that has failed before its name is known.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        self._of_drafters = self.store.under("drafters")  # kept: see _Group
        if self.layout.hosts > 1 and self.started.local_rank == 0:
            self.host_names = meet(self)
        dist.init_process_group(
            "nccl" if nccl else "gloo",
            timeout=NO_LIMIT,
            store=dist.PrefixStore("drafters", self.stores.plain) if nccl else self._of_drafters,
            rank=self.drafter_rank,
            world_size=self.layout.drafter_world,
            device_id=device if nccl else None,
        )

    def at_end(self, cleanup: Callable[[], object]) -> None:
        """Call this when the run ends, however it does, also if the process is ended by its watch."""
        self._cleanups.append(cleanup)

    # -- beginning and end

    def __enter__(self) -> World:
        interface = on_interface("127.0.0.1" if self.layout.hosts == 1 else self.address, self.port, self._interface)
        interface.__enter__()  # until the end of the run: groups are made at any time
        self.at_end(lambda: interface.__exit__(None, None, None))
        self.watch.start()
        if self.watch.parent is not None and self.started.local_rank == 1:
            outlive_parent()  # to say that it is gone
        if self.rank == 0:
            alone, stopping.too_late = stopping.too_late, self.watch.abort
            self.at_end(lambda: setattr(stopping, "too_late", alone))
        try:
            check_interface(self._interface)  # of this host, which may be another than rank 0's
        except UserError as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if error is None or (isinstance(error, Interrupted) and not error.alone):  # all ranks are here
                self.goodbye()
            elif isinstance(error, Interrupted) and self.ended:
                pass
            elif isinstance(error, Interrupted) and self.rank == 0:
                self.watch.abort(STOPPED)
            else:
                self._fail(error)
        finally:
            self._end()

    def _fail(self, error: BaseException) -> None:
        """Let all ranks end for what has happened to this one, or for what is behind that.

        Raises:
            RankError: instead of ``error``, unless that is meant for the user of this very process.
        """
        failure = self.watch.behind(error)
        if failure == STOPPED and self.rank != 0:
            raise Interrupted(0, None) from None  # rank 0 says so
        if failure is None and self.rank != 0 and isinstance(error, Exception):
            # What all drafters meet with at once, such as a checkpoint that is refused, is for rank 0 to say.
            deadline = time.monotonic() + _RANK_0_FIRST_S
            while (failure := self.watch.failure) is None and time.monotonic() < deadline:
                time.sleep(0.05)
        if failure is None:
            said = " ".join("; ".join([str(error), *getattr(error, "__notes__", ())]).split())[:600]
            if not isinstance(error, Exception):
                own = f"{self.layout.who(self.rank)} was interrupted"
            elif isinstance(error, UserError):
                own = f"{self.layout.who(self.rank)} failed: {said}"
            else:
                own = f"{self.layout.who(self.rank)} failed: {type(error).__name__}: {said}"
                traceback.print_exception(error)  # now: as soon as the others know, this process may be ended
            failure = self.watch.abort(own)
            if failure == own and (isinstance(error, UserError) or not isinstance(error, Exception)):
                return
        raise RankError(failure) from error

    def goodbye(self) -> None:
        """This rank is done. The one that keeps the store leaves last."""
        if self.ended:
            return
        self.tell(f"done/{self.rank}", True)
        if self.rank == 0:
            for rank in range(1, self.layout.world):
                self._wait(lambda rank=rank: rank in self.members.missing or self.is_done(rank))  # type: ignore[misc]
        if dist.is_initialized():
            # Before those that this process has started are waited for: NCCL ends a group on all of its ranks together.
            dist.destroy_process_group()
        if self.role is Role.DRAFTER:
            self.tell(f"out/{self.rank}", True)
        if self.rank == 0:
            # That can take a drafter of another host longer than this one, and its watch needs the store until then.
            out = [f"out/{rank}" for host in range(self.layout.hosts) for rank in self.layout.drafters_of_host(host)]
            self._wait(lambda: self.store.check(out))
        self.watch.leave()
        if self.children is not None and not self.children.wait(self.timeout_s):
            print("some processes of this run did not end by themselves and are killed", file=sys.stderr)
        self._end()

    def _end_at_once(self) -> None:
        """The watch's last act: nothing is left behind, whatever the main thread is doing."""
        if self.children is not None:
            self.children.kill()
        if self.rank == 0:
            self._clean()

    def _end(self) -> None:
        if self.ended:
            return
        self.ended = True
        failed = self.watch.failure is not None
        if failed and self.rank == 0 and (self.layout.hosts > 1 or not self.started.starts_others):
            time.sleep(1.0)  # before the store goes, those whom this process does not end read why
        if self.children is not None:
            self.children.kill()
        self._clean()
        if dist.is_initialized():
            # The next job of a sweep would find this job's group.
            if failed and torch.cuda.is_available() and dist.group.WORLD is not None:
                dist.group.WORLD.abort()  # else it would wait for those who are gone
            dist.destroy_process_group()
        self.watch.leave()  # last: should anything here hang, it ends this process

    def _clean(self) -> None:
        while self._cleanups:
            with contextlib.suppress(Exception):
                self._cleanups.pop()()


@dataclass(frozen=True)
class Stores:
    """The run's store by one connection to it.

    Attributes:
        signed: for all but NCCL.
        plain: the same without signatures, for NCCL, which uses it from threads of its own.
    """

    signed: SignedStore
    plain: dist.Store

    @classmethod
    def of(cls, run: Run, store: dist.Store) -> Stores:
        return cls(run.of(store), dist.PrefixStore(run.prefix, store))


class _Group(dist.ProcessGroupGloo):
    """Keeps its store: torch's own does not keep what is Python's."""

    def __init__(self, store: SignedStore, rank: int, size: int) -> None:
        super().__init__(store, rank, size, NO_LIMIT)
        self.store = store


@dataclass(frozen=True)
class Run:
    """What tells one run from another: a secret that its processes alone know, and a number that is used once.

    Attributes:
        secret: known to all processes, maybe of several runs.
        nonce: drawn by rank 0. What was signed in another run is refused in this one.
        prefix: of all keys in the store.
    """

    secret: str
    nonce: str
    prefix: str

    @classmethod
    def begin(cls, secret: str, store: dist.Store) -> Run:
        """As rank 0."""
        run = cls(secret, secrets.token_hex(16), _prefix())
        cls._front(secret, store).set("nonce", run.nonce)
        return run

    @classmethod
    def join(cls, secret: str, store: dist.Store) -> Run:
        """As any other rank; waits for rank 0."""
        return cls(secret, cls._front(secret, store).get("nonce").decode(), _prefix())

    @staticmethod
    def _front(secret: str, store: dist.Store) -> SignedStore:
        return SignedStore(store, Key(secret, "front"), f"{_prefix()}/")

    def key(self, *purpose: str) -> Key:
        return Key(self.secret, "run", self.nonce, *purpose)

    def of(self, store: dist.Store) -> SignedStore:
        """The store as this run uses it."""
        return SignedStore(store, self.key("store"), f"{self.prefix}/")


def _prefix() -> str:
    return f"dflash_lit/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"


def lead(
    layout: Layout,
    started: Started,
    config: str,
    *,
    command: list[str],
    timeout_s: float,
    interface: str | None = None,
    tolerate: int = 0,
) -> World:
    """Begin a run as physical rank 0.

    Args:
        config: what the other ranks are told.
        command: starts another process of the run.
        timeout_s: a rank not heard of for so long ends the run.
        interface: ``placement.interface``.
        tolerate: target ranks that may be missing at a time.

    Raises:
        UserError: if there are to be several hosts, and the environment does not say where they meet.
    """
    _check(layout, started)
    address = started.address
    # Where nobody else starts processes of the run nobody else has to know its secret. A lost target rank is started again by hand.
    secret = new_secret() if started.starts_others and layout.hosts == 1 and not tolerate else find_secret()
    if agent_store():
        port = started.port
        store: dist.Store = client(address, port, _START_S)
    else:
        if layout.hosts == 1:
            address = own = "127.0.0.1"  # nobody else is to join
        else:
            own = listening_address(address, started.port, interface)
            address = own or address
        door = _door(own, started.port if started.starts_others and layout.hosts == 1 else started.port or 29500)
        port = door.getsockname()[1]
        store = dist.TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=_START_S),
            master_listen_fd=door.detach(),
        )
    run = Run.begin(secret, store)
    children = None
    if started.starts_others:
        children = Children(0)
    world = World(
        layout,
        started,
        store,
        run=run,
        address=address,
        port=port,
        timeout_s=timeout_s,
        interface=interface,
        children=children,
        tolerate=tolerate,
        command=command,
    )
    world.tell(
        "config",
        {
            "text": config,
            "layout": [layout.targets, layout.drafters, layout.hosts],
            "timeout_s": timeout_s,
            "interface": interface,
            "tolerate": tolerate,
        },
    )
    if children is not None:
        locals_ = range(1, layout.ranks_per_host)
        children.start(command, {local: child_environment(started, local, address, port, secret) for local in locals_})
    return world


def _door(address: str, port: int) -> socket.socket:
    """A socket that listens there and nowhere else."""
    try:
        both = not address and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both or ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, dualstack_ipv6=both)
    except OSError as error:
        raise UserError(
            f"MASTER_PORT={port}: this process cannot listen on {address or 'all interfaces'} ({error.strerror}); give a free port"
        ) from error


def follow(started: Started, command: list[str]) -> tuple[World, str]:
    """Join a run as any other rank; waits until rank 0 is there.

    Returns:
        its world and the config that rank 0 tells.

    Raises:
        UserError: if rank 0 cannot be reached, or has another secret.
    """
    parent = die_with_parent() if started.by == "us" else None
    port = started.port or 29500
    if started.by == "rejoin":  # whose Ctrl-C is meant for it alone
        _look_for(started.address, port)
        secret = find_secret()
    else:
        if started.by != "hand":
            ignore_stops()
        stopping.follows = True
        secret = find_secret()
        _wait_for_rank_0(started, port)
        ignore_stops()  # a person may end the wait for a run that does not come
    try:
        store = client(started.address, port, _START_S)
        run = Run.join(secret, store)
        facts = json.loads(run.of(store).get("config"))
    except dist.DistError as error:
        raise UserError(_not_reached(started, port, "it does not answer")) from error
    layout = Layout(*facts["layout"])
    if not started.host < layout.hosts:
        raise UserError(f"NODE_RANK={started.host}: the run has placement.hosts={layout.hosts}; number them from 0")
    children = Children(layout.physical_rank(started.host, 0)) if started.starts_others else None
    world = World(
        layout,
        started,
        store,
        run=run,
        address=started.address,
        port=port,
        timeout_s=facts["timeout_s"],
        interface=facts["interface"],
        children=children,
        parent=parent,
        tolerate=facts["tolerate"],
        life=_life(layout, started, run.of(store)) if started.by == "rejoin" else 0,
        command=command,
    )
    if children is not None:
        locals_ = range(1, layout.ranks_per_host)
        children.start(command, {local: child_environment(started, local, started.address, port, secret) for local in locals_})
    return world, facts["text"]


def _wait_for_rank_0(started: Started, port: int) -> None:
    """Until it listens. Torch's client would wait for a name that leads nowhere, too, longer than it is told, and with pages of C++ at the end.

    Raises:
        UserError: if it does not within the time to start, with what the last try came to.
        SystemExit: instead, under SLURM, if this host's first process says so.
    """
    if agent_store():
        return
    began, pause = time.monotonic(), 0.1
    said = started.local_rank != 0
    while True:
        try:
            socket.create_connection((started.address, port), 10).close()
            return
        except (OSError, UnicodeError) as error:  # the latter of what can be no name
            bad_name = isinstance(error, socket.gaierror) and error.errno != socket.EAI_AGAIN
            # SLURM's nodes have had their names before; elsewhere host 0 may get its name when it starts.
            nowhere = isinstance(error, UnicodeError) or (bad_name and started.by == "slurm")
            reason, waited = getattr(error, "strerror", None) or str(error), time.monotonic() - began
        if nowhere or waited > _START_S:
            if started.by == "slurm" and started.local_rank:
                raise SystemExit(2)
            if nowhere:
                raise UserError(
                    f"MASTER_ADDR={started.address}: {reason} on host {started.host}; set MASTER_ADDR to an address of host 0"
                )
            raise UserError(_not_reached(started, port, reason))
        if (bad_name or waited > _WAIT_SAID_S) and not said:
            said = True
            print(
                f"waiting for rank 0 at MASTER_ADDR={started.address} MASTER_PORT={port}: {reason}", file=sys.stderr, flush=True
            )
        time.sleep(pause)
        pause = min(1.5 * pause, 1.0)


def _not_reached(started: Started, port: int, reason: str) -> str:
    return (
        f"MASTER_ADDR={started.address} MASTER_PORT={port}: rank 0 of the run could not be reached from host {started.host} "
        f"within {_START_S:.0f} s ({reason}); start it on host 0, and let the port through"
    )


def _look_for(address: str, port: int) -> None:
    """Whether there is a run, before torch's client waits for one.

    Raises:
        UserError: if not.
    """
    try:
        socket.create_connection((address, port), 10).close()
    except OSError as error:
        raise UserError(
            f"MASTER_ADDR={address} MASTER_PORT={port}: no run listens there: it is over, or the line is another's"
        ) from error


def _life(layout: Layout, started: Started, store: SignedStore) -> int:
    """How many processes of a rank were lost before this one, which is to take their place.

    Raises:
        UserError: if it is no target, or not missing.
    """
    members = Members.read(layout, 0, store.under("watch").get(LOG))
    if not started.local_rank < layout.ranks_per_host or (
        rank := layout.physical_rank(started.host, started.local_rank)
    ) not in (members.lives):
        raise UserError(f"DFLASH_LIT_REJOIN={started.local_rank}: is no target rank of a host; {layout}")
    if rank not in members.missing or rank in members.ready:
        raise UserError(
            f"DFLASH_LIT_REJOIN={started.local_rank}: {layout.who(rank)} was not lost, so there is nothing to start again"
        )
    return members.lives[rank]


def _check(layout: Layout, started: Started) -> None:
    if started.by == "hand" and layout.hosts > 1 and not (started.port and {"MASTER_ADDR", "NODE_RANK"} <= set(os.environ)):
        raise UserError(
            f"placement.hosts={layout.hosts}: set MASTER_ADDR and MASTER_PORT on every host to an address and free port of host 0, "
            "and NODE_RANK to 0, 1, ..., or start the run by torchrun or SLURM"
        )
