"""The run's store as its processes use it: what they put there is signed, and what is not signed by one of them is not used."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from dflash_lit.placement.secret import MAC_BYTES, ForgedError, Key

__all__ = ["LARGEST", "SignedStore"]

LARGEST = 4 * 2**20
"""Bytes of a value. torch's store drops a connection that sends it more than 8 MiB."""


class SignedStore(dist.Store):
    """A store of torch.distributed whose values are signed, each for its own key.

    torch's store lets in whoever reaches its port. A stranger can still delete or overwrite, and so end a run; a value of his is never
    read. One that was put under another key, or by another run, is a stranger's, too.

    Gloo's process groups find each other's addresses through it, as they do through any store. They keep no Python object alive:
    whoever makes a group of it keeps it.

    Args:
        store: all processes of the run are connected to it.
        key: of the run.
        prefix: put before all keys, and signed with them.
    """

    def __init__(self, store: dist.Store, key: Key, prefix: str = "") -> None:
        super().__init__()
        self._store, self._key, self._prefix = store, key, prefix

    def under(self, prefix: str) -> SignedStore:
        """The same with a prefix of its own."""
        return SignedStore(self._store, self._key, f"{self._prefix}{prefix}/")

    def move(self, other: SignedStore) -> None:
        """Use the connection of another from now on, and let go of the own one; for a group that is kept after it has met."""
        self._store = other._store

    def _sealed(self, name: str, value: bytes) -> bytes:
        if len(value) > LARGEST:
            raise ValueError(f"{name}: a value of {len(value)} bytes is more than the {LARGEST} that ranks tell each other")
        return self._key.sign(name, value) + value

    def _opened(self, name: str, sealed: bytes) -> bytes:
        if len(sealed) > LARGEST + MAC_BYTES:
            raise ForgedError(f"{self._forged(name)}: it has {len(sealed)} bytes, and no rank tells more than {LARGEST}")
        code, value = sealed[:MAC_BYTES], sealed[MAC_BYTES:]
        if not self._key.is_signed(name, value, code):
            raise ForgedError(
                f"{self._forged(name)}: it is not signed with the run's secret. Somebody else has reached its port, or the processes "
                "have different secrets (DFLASH_LIT_SECRET, DFLASH_LIT_SECRET_FILE)"
            )
        return value

    @staticmethod
    def _forged(name: str) -> str:
        return f"the value {name!r} in the run's store was refused"

    # Named and typed as torch calls them, also from C++.

    def set(self, key: str, value: str | bytes) -> None:
        name = self._prefix + key
        # Strings of bytes: torch's own conversion of str would stop at none, and of bytes takes any.
        self._store.set(name, self._sealed(name, value.encode() if isinstance(value, str) else bytes(value)))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        name = self._prefix + key
        return self._opened(name, self._store.get(name))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        names = [self._prefix + key for key in keys]
        return [self._opened(name, sealed) for name, sealed in zip(names, self._store.multi_get(names), strict=True)]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Signatures have nothing random, so equal values are equal when signed, too. What is there afterwards is returned."""
        name = self._prefix + key
        old, new = (self._sealed(name, value.encode()) for value in (expected, desired))
        return self._opened(name, self._store.compare_set(name, old, new))  # type: ignore[arg-type]

    def check(self, keys: list[str]) -> bool:
        return self._store.check([self._prefix + key for key in keys])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        names = [self._prefix + key for key in keys]
        self._store.wait(names) if timeout is None else self._store.wait(names, timeout)

    def has_extended_api(self) -> bool:
        return False
