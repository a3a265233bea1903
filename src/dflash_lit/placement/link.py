"""One drafter and one target: requests out, features and answers back.

Each such pair has groups of its own, which torch.distributed's default one knows nothing of. So a partner that is gone breaks
nothing but this pair, and a target that comes back is connected anew while the other pairs work. Over gloo one group carries
everything; where features go by NCCL, requests and answers still go over gloo, from host memory. Everything arrives in the order in
which it was asked for.

A receive over NCCL is a kernel that waits on the drafter's GPU, in the place of others. So it is begun when the target's GPU has the
features ready, which the target says by a byte over gloo.

Requests and answers are signed (:mod:`dflash_lit.placement.messages`), under a key of this pair and of this process of the target: what
was said to one that was lost means nothing to the one that has taken its place.
"""

from __future__ import annotations

import pickle
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dflash_lit.placement.layout import Transport
from dflash_lit.placement.messages import HEADER_BYTES, Messages, as_bytes
from dflash_lit.placement.world import NO_LIMIT, Stores, World

__all__ = [
    "Answer",
    "Begun",
    "Call",
    "DrafterLink",
    "Goodbye",
    "Pending",
    "Request",
    "Rows",
    "TargetLink",
    "TargetLostError",
    "TensorSpec",
]

_REQUEST, _REQUEST_BODY, _ANSWER, _ANSWER_BODY, _DATA, _READY = 1, 2, 3, 4, 5, 6  # tags
_ROWS, _CALL, _GOODBYE, _RETURNED = 1, 2, 3, 4  # kinds of messages
_DRAFTER, _TARGET = 0, 1  # ranks of a pair

_POLL_S = 0.0002
"""Between looks for what comes over NCCL."""

_LOOK_S = 0.1
"""Between looks at whether the target is lost, while gloo is waited for."""

_KEPT = 64
"""Messages that a rank has sent and not waited for yet. Older ones were taken long ago."""


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


Request = Rows | Call | Goodbye
Works = list[dist.Work]
Begun = torch.cuda.Event | None
"""Of receives over NCCL: what their stream has come to when all is there."""


@dataclass(frozen=True)
class TensorSpec:
    """Of one tensor that a target sends for a request."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class TargetLostError(Exception):
    """What was asked of a target will not come; ask another.

    Attributes:
        link: to it.
    """

    def __init__(self, link: DrafterLink) -> None:
        super().__init__(f"local rank {link.target} is lost")
        self.link = link


class _Arrivals(threading.Thread):
    """Waits for what gloo receives: its works never say that they are complete, except to who waits for them.

    Args:
        group: that receives. Should its partner be lost, it has to live as long as this waits: until the connection breaks.
    """

    def __init__(self, group: Any) -> None:
        super().__init__(name="dflash_lit-arrivals", daemon=True)
        self._group = group
        self._coming: SimpleQueue[tuple[Works, Callable[[], Begun], Future[Begun]] | None] = SimpleQueue()
        self.start()

    def of(self, works: Works, then: Callable[[], Begun] = lambda: None) -> Future[Begun]:
        """Done when all of them are, with what ``then`` begins after them; they are waited for in the order in which they are given."""
        arrival: Future[Begun] = Future()
        self._coming.put((works, then, arrival))
        return arrival

    def stop(self) -> None:
        """End when everything given here has come."""
        self._coming.put(None)

    def run(self) -> None:
        while (coming := self._coming.get()) is not None:
            self._wait(*coming)
            del coming  # else the last one's tensors live until the next comes
        del self._group

    @staticmethod
    def _wait(works: Works, then: Callable[[], Begun], arrival: Future[Begun]) -> None:
        try:
            for work in works:
                work.wait()
            begun = then()
        except Exception as error:  # whoever takes them gets to know
            arrival.set_exception(error.with_traceback(None))  # which would hold them, and it, in a circle
        else:
            arrival.set_result(begun)


class _Announcer(threading.Thread):
    """Says to a drafter that the features of its next request are ready, when the GPU has come so far.

    Args:
        device: the GPU.
        say: sends that.
        failed: told if it cannot be sent.
    """

    def __init__(self, device: torch.device, say: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        super().__init__(name="dflash_lit-ready", daemon=True)
        self._device, self._say, self._failed = device, say, failed
        self._made: SimpleQueue[torch.cuda.Event | None] = SimpleQueue()
        self.start()

    def after_this(self) -> None:
        """Say it when what is in line on the current stream is done."""
        made = torch.cuda.Event(blocking=True)
        made.record()
        self._made.put(made)

    def stop(self) -> None:
        self._made.put(None)
        self.join()

    def run(self) -> None:
        try:
            torch.cuda.set_device(self._device)  # a thread's own; else the first wait makes a context, of 0.5 GiB, on GPU 0
            while (made := self._made.get()) is not None:
                made.synchronize()
                self._say()
        except Exception as error:
            self._failed(error)


class _Link:
    """What both ends have: the groups of a pair, and the signatures of what goes over them.

    Connecting blocks until the other end connects, too.

    Args:
        own, other: local ranks of the ends.
    """

    def __init__(
        self,
        world: World,
        name: str,
        end: int,
        own: int,
        other: int,
        device: torch.device,
        transport: Transport,
        limit_gib: float,
        stores: Stores | None = None,
    ) -> None:
        self.device, self.transport = device, transport
        self._messages = Messages(world.key("link", name), own, other, limit_gib)
        self._control = world.group(f"{name}/control", end, 2, stores)
        if transport == "nccl":
            # Absent from builds without CUDA, so not imported above.
            options = dist.ProcessGroupNCCL.Options()
            # Private, and the only way to give one to a group made by hand; tests/gpu/test_split_gpu.py runs over it.
            options._timeout = NO_LIMIT
            store = dist.PrefixStore(f"{name}/data", (stores or world.stores).plain)
            self._data: Any = dist.ProcessGroupNCCL(store, end, 2, options)
        else:
            self._data = self._control
        if stores is not None:
            self._control.store.move(world.store)  # gloo has met; a connection for each link would be kept as long as the link
        self._aside = torch.cuda.Stream(device) if transport == "nccl" else None
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()
        # NCCL connects when something is sent; gloo's order of tags is tried, too.
        token = torch.zeros(1, device=device if transport == "nccl" else "cpu")
        (self._data.send if end == _TARGET else self._data.recv)([token], 1 - end, _DATA).wait()
        if token.is_cuda:
            torch.cuda.synchronize(device)

    def _send(self, tags: tuple[int, int], kind: int, body: Tensor | None, *shape: int) -> None:
        """Put a message in line, by the tags of its header and of its body; waits for nothing.

        Raises:
            ValueError: if it is too large; nothing of it is sent then.
        """
        messages = [(self._messages.header(tags[0], kind, body, *shape), tags[0])]
        if body is not None and body.numel():
            messages.append((body, tags[1]))
        self._sent.extend((self._control.send([message], self._partner, tag), message) for message, tag in messages)

    _partner: int

    def _shut(self) -> None:
        """Nothing is on its way any more."""
        if self.transport == "nccl":
            self._data.shutdown()  # else NCCL complains when the process ends


class DrafterLink(_Link):
    """A drafter's end.

    Args:
        world: of the drafter.
        name: of the pair, the same at the other end.
        target: local rank of the other end.
        device: of the drafter.
        transport: of features.
        limit_gib: larger requests and answers are neither sent nor received.
        stores: by another connection than the world's, for a link that another thread makes.
        life: of the target's process.

    Attributes:
        lost: whether nothing more can come from the target.
    """

    _partner = _TARGET

    def __init__(
        self,
        world: World,
        name: str,
        target: int,
        device: torch.device,
        transport: Transport,
        limit_gib: float,
        stores: Stores | None = None,
        life: int = 0,
    ) -> None:
        self.target, self.life, self.lost = target, life, False
        self._world, self._physical = world, world.layout.physical_rank(world.host, target)
        own = world.layout.local_rank(world.rank)
        super().__init__(world, name, _DRAFTER, own, target, device, transport, limit_gib, stores)
        self._features: _Arrivals | None = self._arrivals()
        self._others: _Arrivals | None = None
        self._beginning = threading.Lock()  # receives; none is begun once `lost` is set by who holds this
        self._coming: set[Pending] = set()
        self._unanswered: deque[Answer] = deque()

    def _arrivals(self) -> _Arrivals:
        thread = _Arrivals(self._control)
        weakref.finalize(self, thread.stop)  # of a run that fails nobody closes the links, and a sweep goes on in this process
        return thread

    def is_given_up(self) -> bool:
        """Whether the run goes on without that target."""
        return self._world.members.is_over(self._physical, self.life)

    def look(self) -> None:
        """While something is waited for.

        Raises:
            RankError: if the run has failed.
            TargetLostError: if the target is lost.
        """
        self._world.watch.check()
        if self.lost or self.is_given_up():
            raise TargetLostError(self)

    def until(self, arrival: Future[Begun]) -> Begun:
        """Wait for what gloo brings, as long as the target is there; returns what has been begun after it.

        Raises:
            TargetLostError: the connection has broken, or the run goes on without the target.
        """
        while not arrival.done():
            try:
                arrival.result(timeout=_LOOK_S)
            except TimeoutError:
                self.look()
            except Exception:
                break  # it is done, and said below
        if (error := arrival.exception()) is not None:
            raise TargetLostError(self) from error
        return arrival.result()

    def _request(self, kind: int, body: Tensor | None, *shape: int) -> None:
        """Put a request in line; neither side waits."""
        try:
            self._send((_REQUEST, _REQUEST_BODY), kind, body, *shape)
        except RuntimeError as error:
            raise TargetLostError(self) from error
        # What has been answered has been taken. What has not may never be: that is not waited for.
        self._trim(_KEPT + 2 * (len(self._coming) + len(self._unanswered)))

    def _trim(self, most: int) -> None:
        """Let go of the oldest messages, beyond ``most``."""
        while len(self._sent) > most:
            try:
                self._sent.popleft()[0].wait()
            except RuntimeError as error:
                raise TargetLostError(self) from error

    def ask(self, rows: Tensor, wanted: Sequence[TensorSpec]) -> Pending:
        """Ask for features of token rows.

        Args:
            rows: int32 [3, R, S] on the CPU.
            wanted: the tensors that the target will send.

        Raises:
            TargetLostError: if the connection has broken.
        """
        self._request(_ROWS, rows.contiguous(), *rows.shape[1:])
        # Not on the stream that computes: a receive waits for what is in line there, and with it the target that sends.
        with nullcontext() if self._aside is None else torch.cuda.stream(self._aside):
            buffers = [
                torch.empty(spec.shape, dtype=spec.dtype, pin_memory=self.device.type == "cuda")
                if self._aside is None
                else torch.empty(spec.shape, dtype=spec.dtype, device=self.device)
                for spec in wanted
            ]
        assert self._features is not None  # until it is closed
        try:
            if self._aside is None:
                works = [self._data.recv([as_bytes(buffer)], _TARGET, _DATA) for buffer in buffers]
                arrival = self._features.of(works)
            else:
                ready = torch.empty(1, dtype=torch.uint8)
                work = self._control.recv([ready], _TARGET, _READY)
                arrival = self._features.of([work], partial(self._receive_aside, buffers, ready))
        except RuntimeError as error:
            raise TargetLostError(self) from error
        pending = Pending(arrival, buffers, self.device, self)
        self._coming.add(pending)
        return pending

    def _receive_aside(self, buffers: Sequence[Tensor], *_: Tensor) -> torch.cuda.Event:
        """Receive over NCCL, from any thread; also takes what had to be kept until then.

        A work of NCCL says that it is complete when its partner is gone, too. An event of its stream is there before an abort only if
        everything is.
        """
        with torch.cuda.device(self.device), torch.cuda.stream(self._aside):
            with self._beginning:
                if self.lost:
                    raise TargetLostError(self)  # NCCL would connect anew, and wait for that for ever
                works = [self._data.recv([as_bytes(buffer)], _TARGET, _DATA) for buffer in buffers]
            for work in works:
                work.wait()  # the stream does
            whole = torch.cuda.Event()
            whole.record()
        return whole

    def call(self, function: Any, *arguments: Any) -> Answer:
        """Let the target call ``function(its target, *arguments)``.

        Args:
            function: of a module, so that it can be sent by its name.

        Raises:
            TargetLostError: if the connection has broken.
            ValueError: if the arguments are too large to be sent.
        """
        body = torch.frombuffer(bytearray(pickle.dumps((function, arguments))), dtype=torch.uint8)
        self._request(_CALL, body)
        answer = Answer(self)
        self._unanswered.append(answer)
        return answer

    def next_answer(self) -> None:
        """Wait for that to the oldest unanswered call.

        Raises:
            TargetLostError: it will not come.
            ForgedError: the target has not signed what has come.
            ValueError: it is too large.
        """
        header = self._messages.read(_ANSWER, self._receive(torch.empty(HEADER_BYTES, dtype=torch.uint8), _ANSWER))
        body = torch.empty(header.size, dtype=torch.uint8)
        if header.size:
            self._receive(body, _ANSWER_BODY)
        signed = self._messages.check(header, body)
        self._unanswered.popleft().value = pickle.loads(signed.numpy().tobytes())

    def _receive(self, message: Tensor, tag: int) -> Tensor:
        self._others = self._others or self._arrivals()
        try:
            work = self._control.recv([message], _TARGET, tag)
        except RuntimeError as error:
            raise TargetLostError(self) from error
        self.until(self._others.of([work]))
        return message

    def goodbye(self) -> None:
        """Nothing more will be asked; returns when the target has heard it, or is lost."""
        try:
            self._request(_GOODBYE, None)
            self._others = self._others or self._arrivals()
            self.until(self._others.of([work for work, _ in self._sent]))
        except TargetLostError:
            self.lost = True
        self._sent.clear()

    def settled(self, pending: Pending) -> None:
        self._coming.discard(pending)

    def close(self) -> None:
        """Let go of it, whether the target is there or not. What has not arrived by now will not."""
        threads = [thread for thread in (self._features, self._others) if thread is not None]
        broken = self.lost or self.is_given_up()
        if broken:
            for pending in list(self._coming):
                pending.settle()
        with self._beginning:
            self.lost = True
        for thread in threads:
            thread.stop()
        if broken and self.transport == "nccl":
            self._data.abort()  # ends the receives, which are kernels and would wait for ever
            for pending in self._coming:
                pending.let_go()
        elif not broken:
            for thread in threads:
                thread.join()
            self._shut()
        self._coming.clear()
        self._sent.clear()
        # Whoever still has this link, such as an exception that is yet to be collected, has no threads and handles of gloo with it.
        self._features = self._others = self._control = self._data = None


class Pending:
    """Tensors on their way to this drafter.

    Args:
        arrival: done when they are there; over NCCL when they are being received.
        buffers: where they come to.
        device: of the drafter.
        link: that they come by.
    """

    def __init__(
        self, arrival: Future[Begun], buffers: list[Tensor], device: torch.device, link: DrafterLink | None = None
    ) -> None:
        self._arrival, self._buffers, self._device = arrival, buffers, device
        self.link = link
        self._settled: bool | None = None

    def arrived(self) -> bool:
        """Also of a target that is lost, if it was lost later."""
        if self._settled is not None:
            return self._settled
        if not self._arrival.done():
            return False
        return self._arrival.exception() is not None or (begun := self._arrival.result()) is None or begun.query()

    def settle(self) -> None:
        """What has not arrived from a lost target will not; what an abort leaves in memory is not it."""
        if self._settled is None:
            self._settled = self.arrived() and self._arrival.exception() is None

    def let_go(self) -> None:
        """Of memory for what will not arrive. A thread may wait for a target that is stopped as long as that is, and hold the list."""
        if self._settled is False:
            self._buffers.clear()

    def take(self) -> list[Tensor]:
        """The tensors on the drafter's device, once they are there.

        The host waits, as for any loader, and not for what the device computes: receives are on a stream of their own. Would it
        only put a wait in line, it went on until the device's queue is full; a launch that then blocks can hold up all threads of
        this process, those of its watch among them.

        Raises:
            TargetLostError: they will not come.
        """
        link = self.link
        if link is not None and self._settled is False:
            raise TargetLostError(link)
        begun = self._arrival.result() if link is None else link.until(self._arrival)
        while not self.arrived():
            if link is not None:
                link.look()
            time.sleep(_POLL_S)
        if begun is not None:  # made on the stream of the receives
            computing = torch.cuda.current_stream(self._device)
            computing.wait_event(begun)
            for buffer in self._buffers:
                buffer.record_stream(computing)
        if link is not None:
            link.settled(self)
        # A loader still holds this when it asks for the next, and no batch with it.
        buffers, self._buffers = self._buffers, []
        return [buffer.to(self._device, non_blocking=True) for buffer in buffers]


class Answer:
    """To a call, on its way. Of one target they come in the order of the calls."""

    def __init__(self, link: DrafterLink) -> None:
        self.link = link
        self.value: tuple[bool, Any] | None = None

    def take(self) -> Any:
        """What the call returned; the exception that it raised is raised here.

        Raises:
            TargetLostError: it will not come.
        """
        while self.value is None:
            self.link.look()
            self.link.next_answer()
        good, value = self.value
        if not good:
            raise value
        return value


class TargetLink(_Link):
    """A target's end. A thread takes the drafter's requests and puts them in line with those of the others.

    Args:
        world: of the target.
        name: of the pair, the same at the other end.
        drafter: local rank of the other end.
        device: of the target.
        transport: of features.
        requests: where they are put, and an exception if the connection breaks or a message was not signed.
        limit_gib: larger requests and answers are neither sent nor received.
    """

    _partner = _DRAFTER

    def __init__(
        self,
        world: World,
        name: str,
        drafter: int,
        device: torch.device,
        transport: Transport,
        requests: SimpleQueue[Request | Exception],
        limit_gib: float,
    ) -> None:
        own = world.layout.local_rank(world.rank)
        super().__init__(world, name, _TARGET, own, drafter, device, transport, limit_gib)
        self._drafter, self._requests = drafter, requests
        self._announcer = _Announcer(device, self._say_ready, requests.put) if transport == "nccl" else None
        self._receiver = threading.Thread(target=self._receive, name="dflash_lit-requests", daemon=True)
        self._receiver.start()

    def _receive(self) -> None:
        try:
            while True:
                request = self._next()
                self._requests.put(request)
                if isinstance(request, Goodbye):
                    return
        except Exception as error:
            self._requests.put(error)

    def _next(self) -> Request:
        raw = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        self._control.recv([raw], _DRAFTER, _REQUEST).wait()
        header = self._messages.read(_REQUEST, raw)
        if header.kind == _GOODBYE:
            return Goodbye(self._drafter)
        if header.kind == _ROWS and header.size != 12 * header.rows * header.tokens:
            raise self._messages.forged()
        shape = (3, header.rows, header.tokens)
        body = torch.empty(shape, dtype=torch.int32) if header.kind == _ROWS else torch.empty(header.size, dtype=torch.uint8)
        if header.size:
            self._control.recv([body], _DRAFTER, _REQUEST_BODY).wait()
        self._messages.check(header, body)
        if header.kind == _ROWS:
            return Rows(self._drafter, body)
        function, arguments = pickle.loads(body.numpy().tobytes())  # signed
        return Call(self._drafter, function, arguments)

    def send_features(self, tensors: Sequence[Tensor]) -> list[tuple[dist.Work, Tensor]]:
        """Send what a request asked for; what is on its way is for the caller to wait for (:meth:`finish`), and to keep."""
        sent = []
        if self._announcer is not None:
            self._announcer.after_this()
        for tensor in tensors:
            ready = tensor.contiguous()
            if self.transport == "gloo" and ready.is_cuda:
                ready = torch.empty_like(ready, device="cpu", pin_memory=True).copy_(ready)
            sent.append((self._data.send([as_bytes(ready)], _DRAFTER, _DATA), ready))
        return sent

    def _say_ready(self) -> None:
        ready = torch.ones(1, dtype=torch.uint8)
        self._control.send([ready], _DRAFTER, _READY).wait()

    def finish(self, work: dist.Work) -> None:
        """Wait until features have left."""
        if self._aside is None:
            work.wait()
            return
        # For NCCL that is a wait of the stream; the host has to wait, too, or it would fill the memory with batches. On a
        # stream aside, so that it waits for this alone and not for the pass that was put in line meanwhile.
        with torch.cuda.stream(self._aside):
            work.wait()
        self._aside.synchronize()

    def send_answer(self, good: bool, value: Any) -> None:
        try:
            data = pickle.dumps((good, value))
            if not good:
                pickle.loads(data)
        except Exception:  # some exceptions cannot be sent, or come out otherwise than they went in
            data = pickle.dumps((False, RuntimeError(f"{type(value).__name__}: {value}")))
        body = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        try:
            self._send((_ANSWER, _ANSWER_BODY), _RETURNED, body)
        except ValueError as error:
            self.send_answer(False, error)
            return
        while len(self._sent) > _KEPT:
            self._sent.popleft()[0].wait()

    def close(self, *, orderly: bool) -> None:
        """Wait until everything sent has left; ``orderly``: the drafter has said goodbye."""
        if not orderly:
            return
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()
        self._receiver.join()
        if self._announcer is not None:
            self._announcer.stop()
        self._shut()
