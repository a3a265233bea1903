"""Messages between the two ends of a link: signed, numbered, and of limited size.

Gloo takes any connection that begins as one of its own does. So each header is signed with its place in the line, holds the digest of its
body, and is looked at before anything else is done with either: calls and their answers are pickles, and reading a stranger's pickle
is running his code. Features are numbers, and not signed: a pass over gigabytes a second would cost more than it protects.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_lit.placement.secret import MAC_BYTES, ForgedError, Key

__all__ = ["HEADER_BYTES", "Header", "Messages", "as_bytes"]

_FIELDS = struct.Struct("<4q32s")
"""Of a header: kind, bytes of the body, R and S of rows, SHA-256 of the body. Its signature follows."""

HEADER_BYTES = _FIELDS.size + MAC_BYTES


@dataclass(frozen=True)
class Header:
    """What a header says, once it was found to be signed.

    Attributes:
        kind: of the message, as the sender numbers them.
        size: bytes of the body, which comes only if there are any.
        rows, tokens: R and S of a request for features.
        digest: of the body.
    """

    kind: int
    size: int
    rows: int
    tokens: int
    digest: bytes


class Messages:
    """Signs what one end sends and looks at what it receives. Each line (a tag) has one sender and one receiver, in order.

    Args:
        key: of this link alone: of this pair, and of these two processes.
        own, other: local ranks of the two ends.
        limit_gib: larger messages are neither sent nor received.
    """

    def __init__(self, key: Key, own: int, other: int, limit_gib: float) -> None:
        self._key, self._own, self._other, self._limit_gib = key, own, other, limit_gib
        self._sent: Counter[int] = Counter()  # numbers of the newest, by line
        self._taken: Counter[int] = Counter()

    def header(self, line: int, kind: int, body: Tensor | None, *shape: int) -> Tensor:
        """The header, uint8 [HEADER_BYTES], of the next message in a line.

        Raises:
            ValueError: if the body is too large; nothing is to be sent then.
        """
        size = body.numel() * body.element_size() if body is not None else 0
        self._check_size(size)
        fields = _FIELDS.pack(kind, size, *shape, *[0] * (2 - len(shape)), _digest(body))
        self._sent[line] += 1
        code = self._key.sign(_place(self._own, self._other, line, self._sent[line]), fields)
        return torch.frombuffer(bytearray(fields + code), dtype=torch.uint8)

    def read(self, line: int, header: Tensor) -> Header:
        """What has come as the next header of a line, before its body.

        Raises:
            ForgedError: if the other end has not signed it as that.
            ValueError: if the body is too large.
        """
        raw = header.numpy().tobytes()
        fields, code = raw[: _FIELDS.size], raw[_FIELDS.size :]
        self._taken[line] += 1
        if not self._key.is_signed(_place(self._other, self._own, line, self._taken[line]), fields, code):
            raise self.forged()
        read = Header(*_FIELDS.unpack(fields))
        self._check_size(read.size)
        return read

    def check(self, header: Header, body: Tensor) -> Tensor:
        """The body, if it is the one that its header means.

        Raises:
            ForgedError: if not.
        """
        if not hmac.compare_digest(_digest(body), header.digest):
            raise self.forged()
        return body

    def forged(self) -> ForgedError:
        return ForgedError(
            f"a message to local rank {self._own} was refused: local rank {self._other}, from which it claims to be, has not "
            "signed it. Somebody else has reached a port of this run"
        )

    def _check_size(self, size: int) -> None:
        if not 0 <= size <= self._limit_gib * 2**30:
            raise ValueError(
                f"a message of {size / 2**30:.3g} GiB between local ranks {self._own} and {self._other}: the limit is "
                f"placement.message_limit_gib={self._limit_gib:g}; raise it, or decode fewer prompts or smaller trees at a time"
            )


def _place(source: int, destination: int, line: int, number: int) -> str:
    """Of a message among all of a link: an old one that comes again is not signed for it."""
    return f"{source} to {destination}, line {line}, {number}"


def _digest(body: Tensor | None) -> bytes:
    return hashlib.sha256(b"" if body is None else as_bytes(body).numpy().data).digest()


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes: gloo does not carry every dtype."""
    return tensor.view(torch.uint8)
