"""How a run is told to stop and how soon it has: signals, a wall-clock limit, and what SLURM wants to hear.

SIGTERM, SIGUSR1 and the end of ``trainer.max_time`` (SIGALRM) are one thing: save, end with 0, and say what goes on. Training looks at
:attr:`Stopping.signal` after each step, validation after each batch; everything else is left at once, by an exception. After
``trainer.save_within_s`` the process ends, whatever it is doing.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any

from dflash_lit.errors import Interrupted, UserError
from dflash_lit.placement.children import ignore_stops

__all__ = ["PREEMPTS", "Stopping", "duration", "stopping"]

PREEMPTS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM)
"""End a run with 0. SIGALRM is that of ``trainer.max_time``."""

ENDING_S = 10.0
"""For the other processes to hear that the time to save is over."""

AGAIN_S = 0.01
"""After a signal whose exception Python has let go nowhere, until it comes again."""


class Stopping:
    """What this process has been told. There is one, as signals are a process's own.

    Attributes:
        signal: number of the first signal that told it to stop, 0 if none has; of another rank's, if that was told.
        checkpoint: what goes on from where this run is, as far as is known; for who stops at once.
        limit_s: ``trainer.save_within_s``.
        follows: this process leaves signals to rank 0.
        too_late: ends the process, and all others of the run, when the limit is over; is given the reason.
    """

    def __init__(self) -> None:
        self.signal = 0
        self.checkpoint: str | None = None
        self.limit_s = 60.0
        self.too_late: Callable[[str], object] = lambda why: None
        self._held = self._leads = False
        self.follows = False
        self._mine: list[signal.Signals] = []
        self._began = time.monotonic()
        self._before: dict[int, Any] = {}
        self._pipe: tuple[int, int] | None = None
        self._told_lost: Callable[[sys.UnraisableHookArgs], object] = sys.__unraisablehook__
        self._retry: threading.Timer | None = None

    # -- rank 0, from its beginning to its end

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, this process stops at once by :class:`Interrupted` when it is told to; held back while :meth:`hold` lasts.

        Signals that somebody else handles already are left to them. Inside of itself, and outside of the main thread, where signals
        do not come, this does nothing.
        """
        if self._pipe is not None or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._leads, self.signal, over = True, 0, threading.Event()
        self._mine = mine = [signum for signum in PREEMPTS if signal.getsignal(signum) is signal.SIG_DFL]
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        # Python handles a signal when its main thread is back from what it computes; the limit is counted from the signal itself.
        waker = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        clock = threading.Thread(target=self._clock, args=(self._pipe[0], over), name="dflash_lit-stop", daemon=True)
        clock.start()
        for signum in mine:
            signal.signal(signum, self._told)
        others, sys.unraisablehook = sys.unraisablehook, self._lost
        self._told_lost = others
        try:
            yield
        finally:
            sys.unraisablehook = others
            if self._retry is not None:
                self._retry.cancel()
                self._retry = None
            signal.setitimer(signal.ITIMER_REAL, 0)
            for signum in mine:
                # Who was told to stop is told again while it ends, by SLURM for one.
                signal.signal(signum, signal.SIG_IGN if self.signal else signal.SIG_DFL)
            signal.set_wakeup_fd(waker)
            over.set()
            os.write(self._pipe[1], b"\0")
            clock.join()
            for end in self._pipe:
                os.close(end)
            self._leads, self._pipe = False, None

    def _lost(self, found: sys.UnraisableHookArgs) -> None:
        """Python lets no exception out of a ``__del__`` or a weak reference's callback. If it was ours: once more, when that is over."""
        error = found.exc_value
        if not isinstance(error, Interrupted | KeyboardInterrupt):
            self._told_lost(found)
            return
        signum = error.signal if isinstance(error, Interrupted) else signal.SIGINT

        def again() -> None:
            if isinstance(error, Interrupted):
                self.signal = 0
            os.kill(os.getpid(), signum)

        self._retry = threading.Timer(AGAIN_S, again)
        self._retry.daemon = True
        self._retry.start()

    def begin(self, *, limit_s: float, max_time: str | None, checkpoint: str | None, per_job: bool) -> None:
        """A run begins, whose config is known now.

        Args:
            max_time: ``trainer.max_time``, counted from the beginning of this process.
            checkpoint: what the run goes on from.
            per_job: count it from now: the process does several, one after the other.
        """
        self.limit_s, self.checkpoint = limit_s, checkpoint
        if per_job:
            self.signal = 0
        if max_time is not None and self._pipe is not None:
            began = time.monotonic() if per_job else self._began
            left = began + duration(max_time).total_seconds() - time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, max(left, 0.001))

    def end(self) -> None:
        """The run is over, and with it its ``max_time``."""
        if self._pipe is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _clock(self, pipe: int, over: threading.Event) -> None:
        told = b"\0"
        while not over.is_set() and told[0] not in PREEMPTS:
            told = os.read(pipe, 1)
        if over.wait(self.limit_s if told[0] in PREEMPTS else None):
            return
        why = (
            f"not stopped within {self.limit_s:g} s of {self.name(told[0])} (trainer.save_within_s), and not saved; "
            "ckpt_path=RUN/checkpoints/last.ckpt goes on from the last checkpoint"
        )
        self.too_late(why)
        if not over.wait(ENDING_S if self.too_late is not _nothing else 0.0):
            print(f"error: {why}", file=sys.stderr, flush=True)
            os._exit(1)

    # -- training

    def hold(self) -> None:
        """From now on a signal is only noted. Also on ranks that ignore them otherwise, and instead of whoever handles them."""
        with contextlib.suppress(ValueError):  # not in the main thread, where signals do not come
            for signum in (signal.SIGINT, *PREEMPTS):
                handler = signal.getsignal(signum)
                if signum not in self._before and handler is not None:  # None: not Python's
                    self._before[signum] = handler
                signal.signal(signum, self._told)
        self._held = True

    def again(self) -> None:
        """Lightning has put a handler of its own in place of ours, which starts a collective inside of it: undo that."""
        with contextlib.suppress(ValueError):
            if self._pipe is not None:
                for signum in self._mine:
                    signal.signal(signum, self._told)
            elif not self._leads and self.follows:
                ignore_stops()

    def release(self) -> None:
        """As before :meth:`hold`. A signal that came meanwhile is for the caller to obey."""
        self._held = False
        with contextlib.suppress(ValueError):
            while self._before:
                signal.signal(*self._before.popitem())

    def tell(self, signum: int) -> None:
        """Another rank was told to stop. From any thread."""
        self.signal = self.signal or signum
        if self._leads and self._pipe is not None:
            with contextlib.suppress(OSError):
                os.write(self._pipe[1], bytes([signum]))

    def obey(self) -> None:
        """Stop, if this process was told to while that was held back.

        Raises:
            Interrupted: with :attr:`checkpoint`.
        """
        if self.signal:
            raise Interrupted(self.signal, self.checkpoint, alone=True)

    def _told(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT and self.signal and self._leads:
            # A person who does not want to wait. Launchers send SIGTERM several times.
            self.release()
            raise KeyboardInterrupt
        if self.signal:
            return
        if signum == signal.SIGINT and not self._held:
            raise KeyboardInterrupt
        self.signal = signum
        if not self._held:
            self.obey()
        elif self._leads:
            # Not by print: the signal may have come in the middle of one.
            how = "; once more to stop at once, without saving" if signum == signal.SIGINT else ""
            os.write(2, f"stopping after this step{how}\n".encode())

    @staticmethod
    def name(signum: int) -> str:
        """For messages."""
        return "trainer.max_time" if signum == signal.SIGALRM else signal.Signals(signum).name


def _nothing(why: str) -> None:
    """A single process has nobody else to end."""


stopping = Stopping()
stopping.too_late = _nothing


def duration(text: str) -> timedelta:
    """A time as days:hours:minutes:seconds, as Lightning writes it, or as a number of hours.

    Raises:
        UserError: for anything else, and for none.
    """
    if match := re.fullmatch(r"(\d{1,5}):(\d\d):(\d\d):(\d\d)", text.strip()):
        days, hours, minutes, seconds = map(int, match.groups())
        made = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    elif re.fullmatch(r"\d{1,6}(\.\d+)?", text.strip()):
        made = timedelta(hours=float(text))
    else:
        made = timedelta(0)
    if not 0 < made.total_seconds() < 1e9:
        raise UserError(f"trainer.max_time={text!r}: give DD:HH:MM:SS, such as 00:11:30:00, or a number of hours, such as 11.5")
    return made
