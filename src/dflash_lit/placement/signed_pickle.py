"""Objects as bytes that only a process of the run can have made: reading a pickle is running its code, so its signature comes first."""

from __future__ import annotations

import pickle
from typing import Any

from dflash_lit.placement.secret import MAC_BYTES, ForgedError, Key

__all__ = ["seal", "unseal"]


def seal(key: Key, place: str, value: object) -> bytes:
    """A pickle, signed for its place among all that this run tells."""
    data = pickle.dumps(value)
    return key.sign(place, data) + data


def unseal(key: Key, place: str, sealed: bytes, who: str) -> Any:
    """The object again.

    Args:
        who: is said to have told it.

    Raises:
        ForgedError: if it was not signed for that place; it has not been read then.
    """
    code, data = sealed[:MAC_BYTES], sealed[MAC_BYTES:]
    if not key.is_signed(place, data, code):
        raise ForgedError(
            f"what {who} tells the others was refused: it has not signed it. Somebody else has reached a port of this run"
        )
    return pickle.loads(data)
