"""Heartbeats of all ranks, so that a rank that dies, hangs or fails ends the run with its name instead of a hang.

Unless it is a target rank that the run can do without (``placement.tolerate``): then the log of members says that it is lost.

Every rank writes a beat to the store that rank 0 keeps, and reads those of the others. Clocks need not agree: a beat is a number
that changes. Whoever finds a failure puts it under one key; the first one counts, and everybody leaves.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from dflash_lit.errors import RankError
from dflash_lit.placement.flow import Flow
from dflash_lit.placement.layout import Layout
from dflash_lit.placement.members import LOG, Entry, Members, add
from dflash_lit.placement.secret import ForgedError
from dflash_lit.placement.signed_store import SignedStore
from dflash_lit.stopping import stopping

__all__ = ["STOPPED", "Watch"]

STOPPED = "rank 0 was told to stop"
"""Stands where a failure does: all ranks leave at once, and in silence with 0."""

_LEFT = "left"
_REACHED = "Somebody else has reached a port of this run"
_ABORT, _STOP = "abort", "stop"
_GONE = "is gone: it was killed or has crashed"
_SILENT = "it is stopped, or its host is gone"
_UNSEEN = "it was not started, does not reach MASTER_ADDR and MASTER_PORT, or has failed, as its own lines say"
_GRACE_S = 8.0
"""For rank 0's main thread to end by itself once it knows of a failure: W&B has to be closed."""
_LEADER_S = 3.0
"""For local rank 0 to end the others of its host."""


class Watch:
    """Two threads of one rank: one beats and listens, the other sees to it that the process ends.

    Two, since whoever talks to the store of a stopped process waits for ever: torch's client has timeouts, but then waits for the
    answer to its cancellation.

    Args:
        store: by a client of its own: a client blocks while it waits.
        layout, rank: physical.
        stale_s: a rank not heard of for so long is taken for dead or hung.
        start_s: the same for its first beat.
        flow: what this rank has moved so far; travels with the beats.
        children: says what became of a process that this one has started, None as long as all is well.
        parent: pid of the process that started this one, if it is a rank of the run: local rank 0 of this host.
        keeper: of the store, as messages name it.
        end: called once when the run is to end at once: stops the processes that this one has started.
        tolerate: how many target ranks may be missing at a time.
        life: of this process, if others of its rank were lost before it.
        changed: called, in a thread of the watch, with each entry that the log of members gets, and with the members as of then.
        period_s: between beats.

    Attributes:
        failure: why the run, or this process, has to end; None as long as it goes well.
        flows: newest known of each rank; all that a rank has moved, also before it was lost and came back.
        members: the target ranks that serve, as of the last beat.
    """

    def __init__(
        self,
        store: SignedStore,
        layout: Layout,
        rank: int,
        *,
        stale_s: float,
        start_s: float,
        flow: Callable[[], Flow],
        children: Callable[[], tuple[int, str] | None],
        parent: int | None,
        keeper: str,
        end: Callable[[], None],
        tolerate: int = 0,
        life: int = 0,
        changed: Callable[[Entry, Members], None] = lambda entry, members: None,
        period_s: float = 0.25,
    ) -> None:
        self.store, self.layout, self.rank = store, layout, rank
        self.stale_s, self.start_s, self.period_s = stale_s, max(start_s, stale_s), period_s
        self._flow, self._children, self._end = flow, children, end
        self.parent, self._keeper = parent, keeper
        self._host, self._local = layout.host(rank), layout.local_rank(rank)
        self.life, self._tolerate, self._changed = life, tolerate, changed
        self.failure: str | None = None
        self.flows: dict[int, Flow] = {}
        self.members = Members(layout, tolerate)
        self._text = b"[]"  # of their log
        self._before: dict[int, Flow] = {}  # what ranks had moved when they were lost
        self._over = threading.Event()
        self._found: Entry | None = None  # a loss, not yet told
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._newest: dict[int, tuple[int, int]] = {}  # life and number of the newest beat
        self._broken = False
        self._answered = time.monotonic()
        self._talker = threading.Thread(target=self._talk, name="dflash_lit-beats", daemon=True)
        self._guard = threading.Thread(target=self._see_to_it, name="dflash_lit-watch", daemon=True)

    # -- what the main thread calls

    def start(self) -> None:
        self._answered = time.monotonic()
        self._talker.start()
        self._guard.start()

    def check(self) -> None:
        """Raise what has gone wrong elsewhere.

        Raises:
            RankError: naming rank, role, host and cause.
        """
        if self.failure is not None:
            raise RankError(self.failure)

    def heard(self, rank: int) -> bool:
        """Whether a rank has been heard of at all."""
        return rank == self.rank or rank in self._seen

    def behind(self, error: BaseException) -> str | None:
        """The failure of another rank behind ``error``, which this one met with; None if there is none.

        A rank that dies breaks its partners' connections at once, but may be missed only when its beats are. So where a
        connection broke, wait for the cause as long as that takes.
        """
        if isinstance(error, RankError) or _of_a_connection(error):
            deadline = time.monotonic() + self.stale_s + 2
            while self.failure is None and time.monotonic() < deadline:
                time.sleep(0.05)
        return self.failure

    def abort(self, why: str) -> str:
        """End the run on all ranks, for this reason or for an earlier one, which is returned; or this rank, if it can be spared."""
        deadline = time.monotonic() + self.stale_s
        while self.failure is None and not self._broken and time.monotonic() < deadline:
            self._found = self._found or self._loss(self.rank, why)  # after one, maybe, that the run goes on without
            time.sleep(0.02)
        self.failure = self.failure or why  # without a store the others find out by themselves
        return self.failure

    def leave(self) -> None:
        """This rank has nothing more to do; the others need not listen for it."""
        self._over.set()
        if self._talker.is_alive():
            self._talker.join(timeout=5)

    def _loss(self, rank: int, why: str) -> Entry:
        return Entry("lost", rank, self.life if rank == self.rank else self.members.lives.get(rank, 0), why)

    # -- the thread that talks

    def _talk(self) -> None:
        keys = [*(f"beat/{rank}" for rank in range(self.layout.world)), _ABORT, LOG, _STOP]
        began = last = time.monotonic()
        number = 0
        try:
            while self.failure is None and not self._over.wait(self.period_s):
                now = time.monotonic()
                if now - last > self.stale_s / 2:
                    # This process or the store's was stopped or starved: what it missed meanwhile says nothing of the others.
                    self._seen = {rank: (value, now) for rank, (value, _) in self._seen.items()}
                last = now
                number += 1
                self.store.set(f"beat/{self.rank}", json.dumps([self.life, number, self._flow().to_json()]))
                *beats, told, text, stop = self.store.multi_get(keys)
                if stop:
                    stopping.tell(int(stop))
                elif stopping.signal:  # so that no rank begins what takes long
                    self.store.set(_STOP, str(stopping.signal))
                self._read(text)
                silent = self._silent(beats, now, began)
                if found := self._found or silent:
                    told = self._tell(found) or told
                self._answered = time.monotonic()
                self.failure = told.decode() or self.failure
            if self._over.is_set():
                self.store.set(f"beat/{self.rank}", _LEFT)
        except ForgedError as error:
            self.failure = self.failure or str(error)  # the others read the same
        except Exception:
            self._broken = not self._over.is_set()

    def _tell(self, found: Entry) -> bytes:
        """Let all ranks know of a loss: as one more that the run goes on without, else as the end of the run, which is returned."""
        while not self.members.is_over(found.rank, found.life):
            if not self.members.may_lose(found.rank):
                before = list(self.members.missing.values())
                more = f"; before that {before[0]} (placement.tolerate={self._tolerate})" if before else ""
                if found.why == STOPPED:
                    more = ""
                return self.store.compare_set(_ABORT, "", found.why + more)
            self._read(add(self.store, self._text, found))
        if self._found is not None and self.members.is_over(self._found.rank, self._found.life):
            self._found = None
        return b""

    def _read(self, text: bytes) -> None:
        """Note what is new in the log of members.

        Raises:
            ForgedError: if what was known of it is not there any more: an old one was put there again.
        """
        if text == self._text:
            return
        known, self._text = len(self.members.log), text
        members = Members.read(self.layout, self._tolerate, text)
        if members.log[:known] != self.members.log:
            raise ForgedError("the log of target ranks in the run's store was refused: entries of it are missing. " + _REACHED)
        self.members = members
        for entry in members.log[known:]:
            if entry.kind == "ready":  # it is expected to beat from now on
                self._seen[entry.rank] = (b"", time.monotonic())
            elif entry.kind == "lost" and entry.rank in self.flows:
                self._before[entry.rank] = self.flows[entry.rank]
            self._changed(entry, members)
        if members.is_over(self.rank, self.life):
            self.failure = f"the run goes on without this process: {members.missing.get(self.rank, 'it was given up')}"

    def _silent(self, beats: list[bytes], now: float, began: float) -> Entry | None:
        """Who has not been heard of for too long, as a loss."""
        for rank, value in enumerate(beats):
            if value and self.members.listens(rank) and value != self._seen.get(rank, (b"", 0.0))[0]:
                if value != _LEFT.encode():
                    life, number, flow = json.loads(value)
                    # An old one, put there again by somebody else; or by a process that was given up and has woken up.
                    if (life, number) <= self._newest.get(rank, (0, 0)) or life < self.members.lives.get(rank, 0):
                        continue
                    self._newest[rank] = life, number
                    self.flows[rank] = self._before.get(rank, Flow()) + Flow.from_json(flow)
                self._seen[rank] = (value, now)

        def silent(rank: int, share: float = 1.0) -> bool:
            if not self.members.listens(rank):
                return True
            heard, limit = (self._seen[rank][1], self.stale_s) if rank in self._seen else (began, self.start_s)
            return beats[rank] != _LEFT.encode() and now - heard > share * limit

        for rank in range(self.layout.world):
            if rank != self.rank and self.members.listens(rank) and silent(rank):
                limit = self.stale_s if rank in self._seen else self.start_s
                host = self.layout.host(rank)
                first, *others = self.layout.ranks_of_host(host)
                of_host = others and host != self._host and all(silent(other, 0.8) for other in (first, *others))
                all_others = f" and all others of host {host} have" if of_host else " has"
                who = first if of_host else rank
                since, cause = ("for", _SILENT) if rank in self._seen else ("within", _UNSEEN)
                return self._loss(who, f"{self.layout.who(who)}{all_others} not been heard of {since} {limit:.0f} s: {cause}")
        return None

    # -- the thread that sees to it that the process ends

    def _see_to_it(self) -> None:
        last = time.monotonic()
        while not self._over.wait(self.period_s):
            now = time.monotonic()
            if now - last > self.stale_s / 2:  # this process itself was stopped
                self._answered = now
            last = now
            if self.failure is None:
                if self._broken or now - self._answered > self.stale_s:
                    how = _GONE if self._broken else f"has not answered for {self.stale_s:.0f} s: {_SILENT}"
                    over = "the run is over, or " if self.life and self._broken else ""
                    self.failure = f"{over}{self._keeper} {how}"
                    self._fail(self.failure, lost=True)
                    return
                if (child := self._children()) is not None:
                    self._found = self._found or Entry("lost", child[0], 0, f"{self.layout.who(child[0])} {child[1]}")
                elif self._orphan():
                    first = self.layout.physical_rank(self._host, 0)
                    self._found = self._found or self._loss(first, f"{self.layout.who(first)} {_GONE}")
            if self.failure is not None:
                self._fail(self.failure)
                return

    def _orphan(self) -> bool:
        return self.parent is not None and os.getppid() != self.parent

    def _fail(self, why: str, *, lost: bool = False) -> None:
        """Leave. Local rank 0 speaks for its host; that of host 0 gets time to clean up behind itself.

        Args:
            lost: without a store, so of rank 0 nothing is to be expected.
        """
        if why != STOPPED and (self.life or self.members.is_over(self.rank, self.life)):  # the others are none of its business
            if self.life:
                print(f"error: {why}", file=sys.stderr, flush=True)
            os._exit(1)
        speaks = why != STOPPED and self._local == 0 and self.rank != 0
        if speaks:  # before the others end: that wakes the main thread, which may end this process, in silence
            print(f"error: {why}", file=sys.stderr, flush=True)
        self._end()  # connections to the ended break, which wakes a main thread that waits for them
        if why == STOPPED:
            if self.rank != 0:
                os._exit(0)
            return  # the time it has is not this one's to say
        if self.rank == 0 and self._over.wait(_GRACE_S):
            return  # the main thread has left, and speaks
        if not speaks and (self._local == 0 or (self._local == 1 and self._is_left_alone(lost))):
            print(f"error: {why}", file=sys.stderr, flush=True)
        os._exit(1)

    def _is_left_alone(self, lost: bool) -> bool:
        """Whether local rank 0 can neither speak nor end this process: it has died, is stopped or hangs. Ends it, then."""
        if self.parent is None:  # somebody else has started this process, and ends it
            return lost and self._host == 0
        deadline = time.monotonic() + _LEADER_S
        while not self._orphan() and time.monotonic() < deadline:
            time.sleep(0.05)  # one that is well ends this process meanwhile
        if not self._orphan():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.parent, signal.SIGKILL)
        return True


def _of_a_connection(error: BaseException) -> bool:
    """Whether it says that a partner of this process is gone, or that a wait for one was too long."""
    if isinstance(error, dist.DistError | ConnectionError):
        return True
    said = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        word in said for word in ("gloo", "nccl", "connection", "socket", "timed out", "peer")
    )


def beats_of(layout: Layout, store: SignedStore) -> None:
    """Make all the keys that a watch reads, before any other rank looks."""
    store.set(_ABORT, "")
    store.set(LOG, "[]")
    store.set(_STOP, "")
    for rank in range(layout.world):
        store.set(f"beat/{rank}", "")


def client(address: str, port: int, timeout_s: float) -> dist.Store:
    """Another connection to the store that rank 0, or torchrun's agent, keeps."""
    return dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
