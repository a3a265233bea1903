"""Requests out, features back: what the ranks of one host say to each other.

Two groups that torch.distributed's default one knows nothing of. On the control group (gloo) drafters send requests, which a
target takes from whoever comes first, so nothing needs a schedule; answers to calls come back on it, too. On the data group
(NCCL between GPUs of their own, else gloo) a target sends features to the drafter that asked. Between two ranks everything
arrives in the order in which it was asked for.

Gloo takes any connection that begins as one of its own does. So messages on the control group are signed, each with its place in the
line, and looked at before anything else is done with them: calls and their answers are pickles, and reading a stranger's pickle is
running his code. Features are numbers, and not signed: a pass over gigabytes a second would cost more than it protects.
"""

from __future__ import annotations

import hashlib
import hmac
import pickle
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from dflash_lit.placement.layout import Layout
from dflash_lit.placement.secret import MAC_BYTES, ForgedError
from dflash_lit.placement.world import NO_LIMIT, World

__all__ = ["Call", "Channel", "Goodbye", "Pending", "Rows", "TensorSpec"]

_REQUEST, _REQUEST_BODY, _ANSWER, _ANSWER_BODY, _DATA = 1, 2, 3, 4, 5  # tags
_ROWS, _CALL, _GOODBYE, _RETURNED = 1, 2, 3, 4  # kinds of messages

_POLL_S = 0.0002
"""Between looks for what comes over NCCL."""

_FIELDS = struct.Struct("<4q32s")
"""Of a header: kind, bytes of the body, R and S of rows, SHA-256 of the body. Its signature follows."""

_KEPT = 64
"""Messages on the control group that a rank has sent and not waited for yet. Older ones were taken long ago."""


@dataclass(frozen=True)
class Rows:
    """A request for features of token rows.

    Attributes:
        source: local rank of the drafter.
        rows: int32 [3, R, S]: ids, documents, positions.
    """

    source: int
    rows: Tensor


@dataclass(frozen=True)
class Call:
    """A request to call ``function(target, *arguments)`` and send back what it returns."""

    source: int
    function: Any
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Goodbye:
    """A drafter needs nothing more."""

    source: int


@dataclass(frozen=True)
class TensorSpec:
    """Of one tensor that a target sends for a request."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Pending:
    """Tensors on their way to this drafter.

    Args:
        arrival: over gloo, done when they are there.
        check: raises if the run has failed meanwhile.
    """

    def __init__(
        self,
        works: list[dist.Work],
        buffers: list[Tensor],
        device: torch.device,
        arrival: Future[None] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._works, self._buffers, self._device, self._arrival = works, buffers, device, arrival
        self._check = check

    def arrived(self) -> bool:
        return self._arrival.done() if self._arrival else all(work.is_completed() for work in self._works)

    def take(self) -> list[Tensor]:
        """The tensors on the drafter's device, once they are there.

        The host waits, as for any loader, and not for what the device computes: receives are on a stream of their own. Would it
        only put a wait in line, it went on until the device's queue is full; a launch that then blocks can hold up all threads of
        this process, those of its watch among them.
        """
        if self._arrival:
            self._arrival.result()
        else:
            while not self.arrived():
                self._check()
                time.sleep(_POLL_S)
            for work in self._works:
                work.wait()
            for buffer in self._buffers:
                if buffer.is_cuda:  # made on the stream of the receives
                    buffer.record_stream(torch.cuda.current_stream(self._device))
        # A loader still holds this when it asks for the next, and no batch with it.
        buffers, self._buffers, self._works = self._buffers, [], []
        return [buffer.to(self._device, non_blocking=True) for buffer in buffers]


class _Arrivals(threading.Thread):
    """Waits for what gloo receives: its works never say that they are complete, except to who waits for them."""

    def __init__(self) -> None:
        super().__init__(name="dflash_lit-arrivals", daemon=True)
        self._coming: SimpleQueue[tuple[list[dist.Work], Future[None]]] = SimpleQueue()
        self.start()

    def of(self, works: list[dist.Work]) -> Future[None]:
        """Done when all of them are; they are waited for in the order in which they were given here."""
        arrival: Future[None] = Future()
        self._coming.put((works, arrival))
        return arrival

    def run(self) -> None:
        while True:
            self._wait(*self._coming.get())

    @staticmethod
    def _wait(works: list[dist.Work], arrival: Future[None]) -> None:
        try:
            for work in works:
                work.wait()
        except Exception as error:  # whoever takes them gets to know
            arrival.set_exception(error)
        else:
            arrival.set_result(None)


class Channel:
    """This rank's end of it.

    Made by all ranks of a host at the same time; connects every pair of drafter and target, in one order.

    Args:
        world: of this rank.
        device: of this rank.
        transport: of the data group.
        limit_gib: larger messages on the control group are neither sent nor received.
    """

    def __init__(
        self, world: World, device: torch.device, transport: Literal["nccl", "gloo"], *, limit_gib: float = 4.0
    ) -> None:
        self.layout: Layout = world.layout
        self.rank = world.layout.local_rank(world.rank)
        self.device, self.transport, self._watch = device, transport, world.watch
        size, name = self.layout.ranks_per_host, f"host/{world.host}"
        self._key, self._limit_gib = world.key("channel", name), limit_gib
        self._numbers: Counter[tuple[bool, int, int]] = Counter()  # of messages so far: to or from a rank
        self._control = world.group(f"{name}/control", self.rank, size)
        if transport == "nccl":
            # Absent from builds without CUDA, so not imported above.
            options = dist.ProcessGroupNCCL.Options()
            # Private, and the only way to give one to a group made by hand; tests/gpu/test_split_gpu.py runs over it.
            options._timeout = NO_LIMIT
            store = dist.PrefixStore(f"{name}/data", world.plain_store)
            self._data: Any = dist.ProcessGroupNCCL(store, self.rank, size, options)
        else:
            self._data = world.group(f"{name}/data", self.rank, size)
        self._aside = torch.cuda.Stream(device) if transport == "nccl" else None
        self._arrivals = None if transport == "nccl" else _Arrivals()
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()
        self._connect(world)

    def _connect(self, world: World) -> None:
        """Send a token over each pair: connecting blocks both sides, so all keep to one order."""
        device = self.device if self.transport == "nccl" else torch.device("cpu")
        for drafter, target in self.layout.pairs_of_host(world.host):
            token = torch.zeros(1, device=device)
            if world.rank == target:
                self._data.send([token], self.layout.local_rank(drafter), _DATA).wait()
            elif world.rank == drafter:
                self._data.recv([token], self.layout.local_rank(target), _DATA).wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    # -- messages

    def _put(self, rank: int, tags: tuple[int, int], kind: int, body: Tensor | None, *shape: int) -> None:
        """Put a message in line; neither side waits.

        Args:
            tags: of its header and of its body.

        Raises:
            ValueError: if it is too large.
        """
        size = body.numel() * body.element_size() if body is not None else 0
        self._check_size(size, rank)
        digest = _digest(body)
        fields = _FIELDS.pack(kind, size, *shape, *[0] * (2 - len(shape)), digest)
        header = fields + self._key.sign(self._place(self.rank, rank, tags[0]), fields)
        messages = [(torch.frombuffer(bytearray(header), dtype=torch.uint8), tags[0])]
        if body is not None and size:
            messages.append((body, tags[1]))
        self._sent.extend((self._control.send([message], rank, tag), message) for message, tag in messages)
        self._trim(_KEPT)

    def _place(self, source: int, destination: int, tag: int) -> str:
        """Of the next message from a rank to another: an old one that comes again is not signed for it."""
        line = (source == self.rank, destination if source == self.rank else source, tag)
        self._numbers[line] += 1
        return f"{source} to {destination}, line {tag}, {self._numbers[line]}"

    def _check_size(self, size: int, rank: int) -> None:
        if not 0 <= size <= self._limit_gib * 2**30:
            raise ValueError(
                f"a message of {size / 2**30:.3g} GiB between local ranks {self.rank} and {rank}: the limit is "
                f"placement.message_limit_gib={self._limit_gib:g}; raise it, or decode fewer prompts or smaller trees at a time"
            )

    def _take(self, source: int | None, tag: int) -> tuple[int, int, tuple[int, int, int], bytes]:
        """The next header from a rank, or from any: who sent it, its kind, (bytes of the body, R, S), and the body's digest.

        Raises:
            ForgedError: if no rank of the run has signed it as the next one of this line.
        """
        header = torch.empty(_FIELDS.size + MAC_BYTES, dtype=torch.uint8)
        if source is None:
            work = self._control.recv_anysource([header], tag)
            work.wait()
            # Private, and the only way to learn who sent it; tests/placement/test_channel.py.
            source = work._source_rank()
        else:
            self._control.recv([header], source, tag).wait()
        raw = header.numpy().tobytes()
        fields, code = raw[: _FIELDS.size], raw[_FIELDS.size :]
        if not self._key.is_signed(self._place(source, self.rank, tag), fields, code):
            raise ForgedError(self._forged(source))
        kind, size, rows, tokens, digest = _FIELDS.unpack(fields)
        self._check_size(size, source)
        return source, kind, (size, rows, tokens), digest

    def _take_body(self, source: int, tag: int, body: Tensor, digest: bytes) -> Tensor:
        if body.numel():
            self._control.recv([body], source, tag).wait()
        if not hmac.compare_digest(_digest(body), digest):
            raise ForgedError(self._forged(source))
        return body

    def _forged(self, source: int) -> str:
        return (
            f"a message to local rank {self.rank} was refused: local rank {source}, from which it claims to be, has not signed it. "
            "Somebody else has reached a port of this run"
        )

    # -- drafters

    def _send(self, target: int, kind: int, body: Tensor | None, *shape: int) -> None:
        """Put a request in line."""
        self._put(target, (_REQUEST, _REQUEST_BODY), kind, body, *shape)

    def _trim(self, most: int) -> None:
        """Let go of the oldest messages, beyond ``most``; waits for those that have not been taken."""
        while len(self._sent) > most:
            self._finish(self._sent.popleft()[0])

    def ask(self, target: int, rows: Tensor, wanted: Sequence[TensorSpec]) -> Pending:
        """Ask a target for features of token rows.

        Args:
            target: its local rank.
            rows: int32 [3, R, S] on the CPU.
            wanted: the tensors it will send.
        """
        self._send(target, _ROWS, rows.contiguous(), *rows.shape[1:])
        nccl = self.transport == "nccl"
        # Not on the stream that computes: a receive waits for what is in line there, and with it the targets that send.
        with nullcontext() if self._aside is None else torch.cuda.stream(self._aside):
            buffers = [
                torch.empty(spec.shape, dtype=spec.dtype, device=self.device)
                if nccl
                else torch.empty(spec.shape, dtype=spec.dtype, pin_memory=self.device.type == "cuda")
                for spec in wanted
            ]
            works = [self._data.recv([_bytes(buffer)], target, _DATA) for buffer in buffers]
        arrival = self._arrivals.of(works) if self._arrivals else None
        return Pending(works, buffers, self.device, arrival, self._watch.check)

    def call(self, target: int, function: Any, *arguments: Any) -> None:
        """Let a target call ``function(its target, *arguments)``; :meth:`answer` gives what it returns, call by call.

        Args:
            function: of a module, so that it can be sent by its name.
        """
        body = torch.frombuffer(bytearray(pickle.dumps((function, arguments))), dtype=torch.uint8)
        self._send(target, _CALL, body)

    def answer(self, target: int) -> Any:
        """What the oldest unanswered call to that target returned; the exception that it raised is raised here."""
        _, _, (size, _, _), digest = self._take(target, _ANSWER)
        body = self._take_body(target, _ANSWER_BODY, torch.empty(size, dtype=torch.uint8), digest)
        good, value = pickle.loads(body.numpy().tobytes())  # signed
        if not good:
            raise value
        return value

    def goodbye(self) -> None:
        """Tell all targets of this host that this drafter needs nothing more."""
        for target in self.layout.targets_of_host(0):  # local ranks are those of host 0
            self._send(target, _GOODBYE, None)
        self.finish()

    # -- targets

    def next_request(self) -> Rows | Call | Goodbye:
        """Wait for a request, from whichever drafter."""
        source, kind, (size, rows, tokens), digest = self._take(None, _REQUEST)
        if kind == _GOODBYE:
            return Goodbye(source)
        if kind == _ROWS and size != 12 * rows * tokens:
            raise ForgedError(self._forged(source))
        empty = torch.empty((3, rows, tokens), dtype=torch.int32) if kind == _ROWS else torch.empty(size, dtype=torch.uint8)
        body = self._take_body(source, _REQUEST_BODY, empty, digest)
        if kind == _ROWS:
            return Rows(source, body)
        function, arguments = pickle.loads(body.numpy().tobytes())  # signed
        return Call(source, function, arguments)

    def send_features(self, drafter: int, tensors: Sequence[Tensor], most: int) -> None:
        """Send what a request asked for. At most ``most`` tensors are on their way at a time; else this waits for the oldest."""
        for tensor in tensors:
            ready = tensor.contiguous()
            if self.transport == "gloo" and ready.is_cuda:
                ready = torch.empty_like(ready, device="cpu", pin_memory=True).copy_(ready)
            self._sent.append((self._data.send([_bytes(ready)], drafter, _DATA), ready))
        self._trim(most)

    def _finish(self, work: dist.Work) -> None:
        if self._aside is None:
            work.wait()
            return
        # For NCCL that is a wait of the stream; the host has to wait, too, or it would fill the memory with batches. On a
        # stream aside, so that it waits for this alone and not for the pass that was put in line meanwhile.
        with torch.cuda.stream(self._aside):
            work.wait()
        self._aside.synchronize()

    def send_answer(self, drafter: int, good: bool, value: Any) -> None:
        try:
            data = pickle.dumps((good, value))
            if not good:
                pickle.loads(data)
        except Exception:  # some exceptions cannot be sent, or come out otherwise than they went in
            data = pickle.dumps((False, RuntimeError(f"{type(value).__name__}: {value}")))
        body = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        try:
            self._put(drafter, (_ANSWER, _ANSWER_BODY), _RETURNED, body)
        except ValueError as error:
            self.send_answer(drafter, False, error)

    def finish(self) -> None:
        """Wait until everything sent has left."""
        self._trim(0)


def _digest(body: Tensor | None) -> bytes:
    return hashlib.sha256(b"" if body is None else _bytes(body).numpy().data).digest()


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes: gloo does not carry every dtype."""
    return tensor.view(torch.uint8)
