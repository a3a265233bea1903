"""Heartbeats of all ranks, so that a rank that dies, hangs or fails ends the run with its name instead of a hang.

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

from dflash_lit.errors import RankError, UserError
from dflash_lit.placement.flow import Flow
from dflash_lit.placement.layout import Layout

__all__ = ["Watch"]

_LEFT = "left"
_GRACE_S = 8.0


class Watch(threading.Thread):
    """The thread of one rank that beats and listens.

    Args:
        store: a client of its own: a client blocks while it waits.
        layout, rank: physical.
        stale_s: a rank not heard of for so long is taken for dead or hung.
        start_s: the same for its first beat.
        flow: what this rank has moved so far; travels with the beats.
        children: says what became of a process that this one has started, None as long as all is well.
        parent: pid of the process that started this one, if it is a rank of the run.
        end: called once when the run is to end at once: stops the processes that this one has started.
        period_s: between beats.

    Attributes:
        failure: why the run has to end, None as long as it goes well.
        flows: newest known of each rank.
    """

    def __init__(
        self,
        store: dist.Store,
        layout: Layout,
        rank: int,
        *,
        stale_s: float,
        start_s: float,
        flow: Callable[[], Flow],
        children: Callable[[], tuple[int, str] | None],
        parent: int | None,
        end: Callable[[], None],
        period_s: float = 0.25,
    ) -> None:
        super().__init__(name="dflash_lit-watch", daemon=True)
        self.store, self.layout, self.rank = store, layout, rank
        self.stale_s, self.start_s, self.period_s = stale_s, max(start_s, stale_s), period_s
        self._flow, self._children, self._end, self.parent = flow, children, end, parent
        self.failure: str | None = None
        self.flows: dict[int, Flow] = {}
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._beats = 0
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._left: set[int] = set()

    # -- what the main thread calls

    def check(self) -> None:
        """Raise what has gone wrong elsewhere.

        Raises:
            RankError: naming rank, role, host and cause.
        """
        if self.failure is not None:
            raise RankError(self.failure)

    def explain(self, error: BaseException, wait_s: float = 4.0) -> str:
        """Why ``error`` happened here, for all ranks: the failure of another rank behind it, else itself.

        A rank that dies makes its partners fail a moment later; so where the connection broke, wait for the cause.
        """
        if isinstance(error, RankError) or _of_a_connection(error):
            deadline = time.monotonic() + wait_s
            while self.failure is None and time.monotonic() < deadline:
                time.sleep(0.05)
        if self.failure is None:
            said = " ".join(str(error).split())[:600]
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            self.abort(f"{self.layout.who(self.rank)} failed: {kind}{said}")
        assert self.failure is not None
        return self.failure

    def abort(self, why: str) -> None:
        """End the run on all ranks, for this reason if there is no earlier one."""
        with self._lock, contextlib.suppress(Exception):  # without a store the others find out by themselves
            why = self.store.compare_set("abort", "", why).decode() or why
        self.failure = self.failure or why

    def leave(self) -> None:
        """This rank has nothing more to do; the others need not listen for it."""
        if not self._over.is_set():
            self._over.set()
            self.join(timeout=5)
            with contextlib.suppress(Exception):
                self.store.set(f"beat/{self.rank}", _LEFT)

    # -- the thread

    def run(self) -> None:
        began = time.monotonic()
        keys = [f"beat/{rank}" for rank in range(self.layout.world)]
        last = time.monotonic()
        while not self._over.wait(self.period_s):
            now = time.monotonic()
            if now - last > 2 + 4 * self.period_s:
                # This process itself was stopped or starved: what it missed meanwhile says nothing of the others.
                self._seen = {rank: (value, now) for rank, (value, _) in self._seen.items()}
            last = now
            try:
                with self._lock:
                    self._beats += 1
                    self.store.set(f"beat/{self.rank}", json.dumps([self._beats, self._flow().to_json()]))
                    beats = self.store.multi_get(keys)
                    told = self.store.get("abort")
            except Exception:
                if not self._over.is_set():
                    self._lost(f"{self.layout.who(0)} is gone or stopped: the store that it keeps does not answer")
                return
            found = self._children()
            if found is not None:
                self.abort(f"{self.layout.who(found[0])} {found[1]}")
            elif told:
                self.failure = self.failure or told.decode()
            else:
                self._look(beats, began)
            if self.failure is not None:
                self._fail(self.failure)
                return

    def _look(self, beats: list[bytes], began: float) -> None:
        now = time.monotonic()
        for rank, value in enumerate(beats):
            if rank == self.rank or value == _LEFT.encode():
                continue
            if value and value != self._seen.get(rank, (b"", 0.0))[0]:
                self._seen[rank] = (value, now)
                self.flows[rank] = Flow.from_json(json.loads(value)[1])
                continue
            heard, limit = (self._seen[rank][1], self.stale_s) if rank in self._seen else (began, self.start_s)
            if now - heard > limit:
                silent = [other for other in self.layout.ranks_of_host(self.layout.host(rank)) if other != self.rank]
                of_host = len(silent) > 1 and all(
                    beats[other] != _LEFT.encode() and now - self._seen.get(other, (b"", began))[1] > 0.8 * limit
                    for other in silent
                )
                where = f" and all others of host {self.layout.host(rank)}" if of_host else ""
                self.abort(
                    f"{self.layout.who(rank)}{where} has not been heard of for {limit:.0f} s: it is stopped, or its host is gone"
                )
                return

    def _lost(self, why: str) -> None:
        """Without a store, a host's ranks end by themselves; they take a parent along that is stopped and cannot."""
        if self.rank == 0 or not self.parent:
            self._fail(why)
            return
        if self.layout.local_rank(self.rank) == 1:  # one speaks, before the parent's end is its own
            print(f"error: {why}", file=sys.stderr, flush=True)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.parent, signal.SIGKILL)
        time.sleep(1)
        os._exit(1)

    def _fail(self, why: str) -> None:
        """Leave. Rank 0 speaks for all, and its main thread gets time to clean up behind itself."""
        self.failure = self.failure or why
        self._end()  # connections to them break, which wakes a main thread that waits for them
        if self.rank != 0:
            if self.layout.local_rank(self.rank) == 0:  # on another host, where rank 0's words may not be seen
                print(f"error: {why}", file=sys.stderr, flush=True)
            # The one that failed says more, if it is let.
            if not self._over.wait(1.0 if why.startswith(self.layout.who(self.rank)) else 0.0):
                os._exit(1)
            return
        if not self._over.wait(_GRACE_S):
            print(f"error: {why}", file=sys.stderr, flush=True)
            os._exit(1)


def _of_a_connection(error: BaseException) -> bool:
    """Whether it says that a partner of this process is gone, or that a wait for one was too long."""
    if isinstance(error, dist.DistError | ConnectionError):
        return True
    said = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        word in said for word in ("gloo", "nccl", "connection", "socket", "timed out", "peer")
    )


def beats_of(layout: Layout, store: dist.Store) -> None:
    """Make all the keys that a watch reads, before any other rank looks."""
    store.set("abort", "")
    for rank in range(layout.world):
        store.set(f"beat/{rank}", "")


def client(address: str, port: int, timeout_s: float) -> dist.Store:
    """Another connection to the store that rank 0, or torchrun's agent, keeps."""
    return dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
