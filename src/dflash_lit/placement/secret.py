"""What the processes of one run know and nobody else does: the secret by which they tell each other's messages from a stranger's.

Rank 0 makes one for each run whose processes it starts itself. Where somebody else starts them (torchrun, SLURM, a person on several
hosts) they have to find the same one: ``DFLASH_LIT_SECRET``, else the file that ``DFLASH_LIT_SECRET_FILE`` names, else a file in the
user's configuration, which the first process makes.

Messages are signed with HMAC-SHA256 (RFC 2104, FIPS 180-4).
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path

from dflash_lit.errors import UserError

__all__ = ["FILE_VARIABLE", "MAC_BYTES", "VARIABLE", "ForgedError", "Key", "find_secret", "new_secret"]

VARIABLE, FILE_VARIABLE = "DFLASH_LIT_SECRET", "DFLASH_LIT_SECRET_FILE"
MAC_BYTES = 32
_SHORTEST = 16
"""Characters; of 32 hexadecimal digits made by us, half."""


class ForgedError(UserError):
    """A message is not one of this run's: nothing of it has been used."""


class Key:
    """Signs messages.

    Args:
        secret: of the run.
        purpose: messages signed for one purpose are refused for any other.
    """

    def __init__(self, secret: str, *purpose: str) -> None:
        self._key = secret.encode()
        for word in purpose:
            self._key = hmac.digest(self._key, word.encode(), hashlib.sha256)

    def sign(self, place: str, message: bytes) -> bytes:
        """The code, 32 bytes, of a message at a place: the name of a key, or the number of a message from one rank to another."""
        name = place.encode()
        return hmac.digest(self._key, len(name).to_bytes(8, "big") + name + message, hashlib.sha256)

    def is_signed(self, place: str, message: bytes, code: bytes) -> bool:
        return hmac.compare_digest(self.sign(place, message), code)


def new_secret() -> str:
    return secrets.token_hex(32)


def find_secret() -> str:
    """The secret that was given to this process, or the user's own.

    One in the environment is taken out of it: programs that this process starts have no need of it.

    Raises:
        UserError: for one that is too short, and for a file that others can read or that cannot be made.
    """
    if (given := os.environ.pop(VARIABLE, None)) is not None:
        return _checked(given, VARIABLE)
    if named := os.environ.get(FILE_VARIABLE):
        return _read(Path(named).expanduser(), f"{FILE_VARIABLE}={named!r}")
    path = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "dflash_lit" / "secret"
    try:
        if not path.exists():
            _make(path)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be made ({error.strerror}); give all processes of the run the same {VARIABLE} or {FILE_VARIABLE}"
        ) from error
    return _read(path, str(path))


def _make(path: Path) -> None:
    """Of several processes that do so at the same time the first one counts."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(new_secret() + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink()


def _without_waiting(path: str, flags: int) -> int:
    """A pipe that nobody writes to is empty."""
    return os.open(path, flags | os.O_NONBLOCK)


def _read(path: Path, name: str) -> str:
    try:
        # What is looked at is what is read.
        with open(path, encoding="utf-8", opener=_without_waiting) as file:
            facts = os.fstat(file.fileno())
            text = file.read(4096)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UserError(
            f"{name}: cannot be read ({reason}); it has to hold a secret of {_SHORTEST} characters or more"
        ) from error
    if facts.st_mode & (stat.S_IRWXG | stat.S_IRWXO) or facts.st_uid != os.geteuid():
        raise UserError(f"{name}: others can read or write it, or own it; it holds the secret of runs: chmod 600 {path}")
    return _checked(text.strip(), name)


def _checked(secret: str, name: str) -> str:
    if len(secret) < _SHORTEST:
        raise UserError(f"{name}: a secret of {len(secret)} characters is too short; give {_SHORTEST} or more, at random")
    return secret
