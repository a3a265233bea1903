"""How commands end: an exit code, and one line instead of a traceback where the input was wrong."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from dflash_lit.errors import Interrupted, RankError, UserError
from dflash_lit.stopping import PREEMPTS, stopping

__all__ = ["exits_on_user_error", "groups_explained", "one_line", "run_command", "stop_code", "stop_line"]


def one_line(error: BaseException) -> str:
    """The message of an error on one line; for Hydra's, with what OmegaConf said beneath it."""
    parts: list[str] = []
    current: BaseException | None = error
    while current is not None:
        # OmegaConf appends lines that name its own classes; the first says what is wrong.
        for line in str(current).splitlines():
            text = line.strip()
            if (key := text.removeprefix("full_key: ")) != text and parts and not any(key in part for part in parts):
                parts[-1] += f" (in {key})"
            if text == "Config search path:":  # Hydra's own, and the last that it says
                break
            if text and parts and parts[-1].startswith("Available options in"):  # Hydra lists them a line each
                parts[-1] += f" {text}" if parts[-1].endswith(":") else f", {text}"
                continue
            if (
                text
                and not text.startswith(("full_key:", "object_type=", "reference_type=", "To append to your config"))
                and not any(text in part for part in parts)
            ):
                parts.append(text)
        # Hydra's parser says at which character, of which word it does not.
        if parts and isinstance(word := getattr(current, "override", None), str) and word not in " ".join(parts):
            key, _, value = word.partition("=")
            # As that of the best checkpoint, which has its step in its name.
            quoted = (
                f"; quote a value with = in it: '{key}=\"{value}\"'" if "=" in value and not set(value) & set("'\"") else ""
            )
            parts[0] = f"{word}: {parts[0]}{quoted}"
        current = current.__cause__
    return "; ".join(parts[:3]) or type(error).__name__


def stop_code(error: Interrupted) -> int:
    """Exit code of a run that was told to stop and has done so."""
    return 0 if error.signal in PREEMPTS else 128 + error.signal


def stop_line(error: Interrupted) -> str:
    """What has stopped a run, and what goes on from there."""
    how = f"stopped by {stopping.name(error.signal)}" if error.signal in PREEMPTS else "interrupted"
    saved = f"; ckpt_path={error.checkpoint} goes on from here" if error.checkpoint else " before there was anything to save"
    return f"{how}{saved}" + (f"; {error.requeued}" if error.requeued else "")


@contextmanager
def exits_on_user_error(*, quiet: bool = False) -> Iterator[None]:
    """Inside a Hydra job: wrong input ends the process with its one line and 2, another rank's failure with its line and 1.

    Hydra would put a line of its own before it, but lets an exit pass.

    Args:
        quiet: leave the line to rank 0.
    """
    try:
        yield
    except (UserError, RankError) as error:
        if not quiet:
            # What another rank's failure did to this one is not the cause.
            print(f"error: {one_line(error) if isinstance(error, UserError) else error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, UserError) else 1) from error


@contextmanager
def groups_explained(words: Sequence[str]) -> Iterator[None]:
    """Around composing a config: what Hydra and OmegaConf have bare errors for is named.

    A group that is set to null, a list's key, a file that is not YAML.

    Args:
        words: of the command line.

    Raises:
        UserError: naming the words that may be it.
    """
    try:
        yield
    except (YAMLError, UnicodeDecodeError, RecursionError) as error:
        if (file := _config_file(error)) is None:
            raise
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        said = getattr(error, "problem", None) or " ".join(str(error).split())[:200]
        raise UserError(
            f"{file}{line}: is not YAML ({said}); correct it, or take the file from where it came from again"
        ) from None
    except AssertionError as error:  # OmegaConf's own, of a key below a list that is not set
        if not _raised_in(error, "omegaconf"):
            raise
        named = " ".join(word for word in words if "." in word.partition("=")[0]) or " ".join(words)
        raise UserError(
            f"{named}: there is nothing that could have such an entry; give the whole value, such as [1,2]"
        ) from None
    except ValueError as error:
        if not isinstance(error, UnicodeError) and (file := _config_file(error)):
            raise UserError(f"{file}: {' '.join(str(error).split())}; correct it") from None
        if str(error).startswith("Unsupported type in defaults"):
            raise UserError(
                f"defaults: the list of that name in a config file has an entry that is none ({error}); correct it"
            ) from None
        key = re.fullmatch(r"invalid literal for int\(\) with base 10: '(.*)'", str(error))
        if str(error).startswith("Config group override must be"):
            named = " ".join(word for word in words if word.endswith(("=null", "=None", "="))) or " ".join(words)
            raise UserError(f"{named}: a config group cannot be null; choose one of its files, or leave it out") from None
        if key and _raised_in(error, "omegaconf"):
            named = " ".join(word for word in words if word.partition("=")[0].endswith(f".{key[1]}")) or " ".join(words)
            raise UserError(f"{named}: a list has no entry {key[1]!r}; give the whole list, such as [1,2]") from None
        raise


def _raised_in(error: BaseException, package: str) -> bool:
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).partition(".")[0] == package


def _config_file(error: Exception) -> str | None:
    """The file that Hydra was reading."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        place = (frame.f_globals.get("__name__"), frame.f_code.co_name)
        if place == ("hydra._internal.core_plugins.file_config_source", "load_config"):
            return str(frame.f_locals.get("full_path"))
    return None


def _makes_folder(error: Exception) -> bool:
    """Whether it was Hydra that met with it, making a run's folder, before it has called anything of ours."""
    trace = error.__traceback__
    while trace is not None:
        if (trace.tb_frame.f_globals.get("__name__"), trace.tb_frame.f_code.co_name) == ("hydra.core.utils", "run_job"):
            inside = trace.tb_next
            return inside is not None and inside.tb_frame.f_code.co_name in ("mkdir", "_save_config", "configure_log")
        trace = trace.tb_next
    return False


def run_command(command: Callable[[], Any]) -> int:
    """Run ``command``; its own exit code if it returns one, else 0; 2 with one line on stderr for wrong input, 130 if interrupted;
    0 for a run that SIGTERM, SIGUSR1 or ``trainer.max_time`` has stopped.

    Other exceptions are defects or accidents and keep their traceback.
    """
    chosen = os.environ.get("HYDRA_FULL_ERROR")
    # Hydra would print its own several lines and exit; with this it raises instead.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        with groups_explained(sys.argv[1:]):
            result = command()
    except (UserError, HydraException, OmegaConfBaseException) as error:
        if chosen == "1":
            raise
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    except (OSError, ValueError) as raised:
        # Of a file to log to there is a ValueError, for the error that says why.
        cause = raised if isinstance(raised, OSError) else raised.__cause__
        if chosen == "1" or not isinstance(cause, OSError) or not _makes_folder(raised):
            raise
        print(
            f"error: {cause.filename or 'hydra.run.dir'}: the run's folder cannot be made ({cause.strerror}); name another with hydra.run.dir, "
            "or a place for all runs with DFLASH_LIT_RUNS",
            file=sys.stderr,
        )
        return 2
    except Interrupted as error:
        print(stop_line(error), file=sys.stderr)
        return stop_code(error)
    except (KeyboardInterrupt, SystemExit) as error:
        # Lightning makes a SystemExit of Ctrl-C after it has shut down.
        if isinstance(error, SystemExit) and not isinstance(error.__context__, KeyboardInterrupt):
            raise
        print("interrupted; ckpt_path=RUN/checkpoints/last.ckpt goes on from the last checkpoint", file=sys.stderr)
        return 130
    finally:
        if chosen is None:
            os.environ.pop("HYDRA_FULL_ERROR", None)
    return result if isinstance(result, int) else 0
