"""The compile cache: its place, deletion at any moment, runs side by side."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import counters

from dflash_lit.attention.compiled import compiled
from dflash_lit.cli import main
from dflash_lit.compilation import archive, cache
from dflash_lit.compilation.cache import (
    INDUCTOR,
    TRITON,
    cache_dir,
    cache_key,
    cache_root,
    clear,
    surviving_deletion,
    use_cache,
)
from dflash_lit.errors import UserError
from tests.compilation.processes import CONTEXT, Child, alone, pick


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DFLASH_LIT_COMPILE_CACHE", str(tmp_path / "compile"))
    for name in (INDUCTOR, TRITON):
        # Set first: what is set within the test is then taken back.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return tmp_path / "compile"


def fill(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


# -- the place


def test_the_key_is_readable_and_stays() -> None:
    assert re.fullmatch(r"torch2\.\d+\.\d+-(triton[\d.]+-)?((cu|rocm)\d+-sm\d+|cpu-\w+)-py3\d+-[0-9a-f]{8}", cache_key())
    assert cache._KEY.fullmatch(cache_key())
    assert cache_key.__wrapped__() == cache_key()


def test_the_key_knows_the_code_but_not_its_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "__file__", str(tmp_path / "compilation" / "cache.py"))
    for folder, name in (("attention", "flex.py"), ("data", "packing.py")):
        fill(tmp_path / folder, **{name: "x = 1"})
    keys = [cache_key.__wrapped__()]
    for path, text in (("attention/flex.py", "x = 1  # one"), ("data/packing.py", "x = 2"), ("attention/flex.py", "x = 2")):
        (tmp_path / path).write_text(text)
        keys.append(cache_key.__wrapped__())
    assert keys[0] == keys[1] == keys[2] != keys[3]


def test_the_sources_of_the_key_exist() -> None:
    names = {text for text in cache._sources() if text.endswith(".py")}
    assert {"attention/compiled.py", "drafter/model.py", "objective/head.py", "target/packed_attention.py"} <= names
    assert all(any(Path(name).match(pattern) for name in names) for pattern in cache.GRAPHS)


def test_the_root_is_the_variable_or_in_the_users_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, root: Path) -> None:
    assert cache_root() == root
    monkeypatch.delenv("DFLASH_LIT_COMPILE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "dflash_lit" / "compile"


def _used() -> tuple[str, str, str]:
    torch.compile(torch.sin)
    # torch has now set it to its default. If not, `chosen_by_user` needs to know less.
    assert os.environ.get(INDUCTOR)
    return str(use_cache()), os.environ[INDUCTOR], os.environ[TRITON]


def test_torchs_own_default_is_no_wish_of_the_user(root: Path) -> None:
    folder = root / cache_key()
    assert alone(_used, DFLASH_LIT_COMPILE_CACHE=str(root)) == (str(folder), str(folder), str(folder / "triton"))
    assert (folder / "triton").is_dir()


def test_what_the_user_has_set_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INDUCTOR, str(tmp_path / "theirs"))
    assert use_cache() == tmp_path / "theirs"
    assert os.environ[TRITON] == str(tmp_path / "theirs" / "triton")
    monkeypatch.setenv(TRITON, str(tmp_path / "elsewhere"))
    monkeypatch.delenv(INDUCTOR)
    assert use_cache() == cache_dir()
    assert os.environ[TRITON] == str(tmp_path / "elsewhere")


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DFLASH_LIT_COMPILE_CACHE", str(tmp_path / "file" / "compile"))
    with pytest.raises(UserError, match=r"cannot be made .*: set DFLASH_LIT_COMPILE_CACHE to a folder that can"):
        use_cache()


OTHER = "torch2.9.0-triton3.5.0-cu128-sm90-py311-01234567"


@pytest.mark.parametrize("start", ["import train", "from dflash_lit.cli import main; main(['plan'])"])
def test_a_folder_that_torch_cannot_make_is_one_line_before_torch_is_imported(start: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "file" / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", start],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert re.fullmatch(
        r"error: TORCHINDUCTOR_CACHE_DIR='.*/file/cache': cannot be made \(Not a directory\); .*\n", done.stderr
    )


@pytest.mark.parametrize("name", ["HF_HUB_DOWNLOAD_TIMEOUT", "MPLBACKEND"])
def test_a_variable_that_a_library_fails_with_is_named(name: str) -> None:
    start = "import dflash_lit.early; import matplotlib; import huggingface_hub.constants"
    done = subprocess.run(
        [sys.executable, "-c", start], env={**os.environ, name: "soon"}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert re.fullmatch(rf"error: {name}='soon' in the environment: .*'soon'.*; correct or unset it\n", done.stderr)


def test_other_errors_keep_their_traceback() -> None:
    start = "import dflash_lit.early; import os; raise ValueError(repr(os.environ['MINE']))"
    done = subprocess.run(
        [sys.executable, "-c", start],
        env={**os.environ, "MINE": "soon"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")


def test_clear_deletes_this_key_and_all_those_of_ours(root: Path) -> None:
    loading, theirs = f".{OTHER}.1.2.loading", [".torch.deleted", "photographs"]
    for name in (cache_key(), OTHER, *theirs, f".{OTHER}.1.2.deleted", loading):
        fill(root / name, file="text")
    assert clear() == [cache_key()]
    assert {path.name for path in root.iterdir()} == {*theirs, OTHER, loading}
    assert clear() == []
    assert clear(everything=True) == [OTHER]
    assert {path.name for path in root.iterdir()} == {*theirs}


def test_info_and_clear_say_what_there_is(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(root / cache_key(), one="x" * 1_500_000, two="")
    fill(root / OTHER, one="x" * 300_000)
    assert main(["cache", "info"]) == 0
    said = capsys.readouterr().out
    assert (
        f"folder  {root / cache_key()}\nkey     {cache_key()}\nsize    1.5 MB in 2 files\nother   0.3 MB in 1 files of {OTHER}\n"
        in said
    )
    assert "note" not in said
    assert main(["cache", "clear", "--all"]) == 0
    assert f"deleted 0.3 MB in 1 files of {OTHER}\n" in capsys.readouterr().out
    assert main(["cache", "clear"]) == 0
    assert capsys.readouterr().out == f"nothing to delete in {root / cache_key()}\n"


def test_info_says_when_runs_use_another_folder(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(INDUCTOR, "/theirs")
    assert main(["cache", "info"]) == 0
    assert "TORCHINDUCTOR_CACHE_DIR=/theirs is set" in capsys.readouterr().out


# -- deletion: the rule


class Failing:
    """Does something and raises, ``times`` times; returns the folder from then on."""

    def __init__(self, times: int, error: Callable[[], BaseException], before: Callable[[], None] = lambda: None) -> None:
        self.times, self.error, self.before, self.calls = times, error, before, 0

    def __call__(self) -> str:
        self.calls += 1
        if self.calls <= self.times:
            self.before()
            raise self.error()
        assert Path(os.environ[TRITON]).is_dir()
        return os.environ[INDUCTOR]


def missing(path: Path) -> FileNotFoundError:
    return FileNotFoundError(2, "No such file or directory", str(path))


def wrapped(inner: Exception) -> Exception:
    """As Inductor does it: neither cause nor context."""
    error = RuntimeError("failed")
    error.inner_exception = inner  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    "error",
    [
        lambda: missing(cache_dir() / "ab" / "x.py"),
        lambda: wrapped(missing(cache_dir() / "triton" / "x.json")),
        lambda: RuntimeError(f"C++ compile error\n\ncc1plus: fatal error: {cache_dir()}/ab/x.cpp: No such file or directory\n"),
        lambda: ImportError(f"{cache_dir()}/ab/x.so: cannot open shared object file: No such file or directory"),
        lambda: RuntimeError(
            f"in a subprocess:\nFileNotFoundError: [Errno 2] No such file or directory: '{cache_dir()}/a' -> 'b'"
        ),
        lambda: wrapped(ValueError("@jit functions should be defined in a Python file")),  # Triton's, of a source that has gone
    ],
)
def test_a_missing_file_of_the_cache_is_tried_again(error: Callable[[], BaseException]) -> None:
    failing = Failing(2, error)
    assert surviving_deletion(failing) == str(cache_dir())
    assert failing.calls == 3


@pytest.mark.parametrize("delete", [lambda: shutil.rmtree(cache_dir()), lambda: shutil.rmtree(cache_dir() / "triton"), clear])
def test_whatever_is_raised_while_the_cache_is_deleted_is_tried_again(delete: Callable[[], None]) -> None:
    """A probe for the processor's vector instructions that lost its files ends in an AssertionError, far away."""
    failing = Failing(1, AssertionError, delete)
    assert surviving_deletion(failing) == str(cache_dir())
    assert failing.calls == 2


def test_a_deletion_that_is_under_way_counts() -> None:
    """Folders are deleted file by file: the file that a compile needed may be gone before the others."""
    deletion = threading.Timer(0.3, lambda: shutil.rmtree(cache_dir()))
    failing = Failing(1, ValueError, deletion.start)
    assert surviving_deletion(failing) == str(cache_dir())
    assert failing.calls == 2


def test_what_the_user_can_mend_is_raised_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_lit.compilation.cache.DELETING_S", 60.0)
    failing = Failing(1, lambda: UserError("drafter.anchors=0: must be positive"))
    with pytest.raises(UserError):
        surviving_deletion(failing)
    assert failing.calls == 1


def test_a_failed_compile_that_is_told_to_the_user_is_tried_again() -> None:
    """As of a target's layers: whatever the advice, here it was a deletion."""

    def told() -> UserError:
        error = UserError("its layers could not be compiled")
        error.__cause__ = cause = TorchDynamoException()
        cause.__cause__ = missing(cache_dir() / "ab" / "x.py")
        return error

    failing = Failing(2, told)
    assert surviving_deletion(failing) == str(cache_dir())
    assert failing.calls == 3


def test_short_memory_is_raised_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_lit.compilation.cache.DELETING_S", 60.0)
    failing = Failing(1, lambda: torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        surviving_deletion(failing)
    assert failing.calls == 1


def test_an_entry_that_a_deletion_left_in_part_costs_time_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Triton writes the list of a kernel's files last: a deletion between leaves a list of files that are not there, for ever."""
    monkeypatch.setattr("dflash_lit.compilation.cache.DELETING_S", 0.1)
    entry = cache_dir() / "triton" / "XYZ" / "__grp__kernel.json"
    fill(entry.parent, **{entry.name: "{}"})

    def compiles() -> str:
        if (Path(os.environ[TRITON]) / "XYZ" / entry.name).exists():
            raise KeyError("Unknown key: 'cubin'")
        return os.environ[INDUCTOR]

    assert surviving_deletion(compiles) != str(cache_dir())
    assert "held a broken entry (KeyError: \"Unknown key: 'cubin'\"), and was cleared" in caplog.text
    assert not entry.exists()
    assert surviving_deletion(compiles) == str(cache_dir())


@pytest.mark.parametrize(
    "error",
    [
        ValueError,
        lambda: missing(Path("/data/rows.arrow")),
        lambda: RuntimeError(f"{cache_dir()}/ab/x.main.cpp:3:10: fatal error: omp.h: No such file or directory"),
    ],
)
def test_other_errors_are_raised_by_the_second_attempt(
    error: Callable[[], BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_lit.compilation.cache.DELETING_S", 0.1)
    fill(cache_dir(), kept="")
    failing = Failing(9, error)
    with pytest.raises(type(error())):
        surviving_deletion(failing)
    assert failing.calls == 2
    assert (cache_dir() / "kept").exists()


def test_an_interrupt_is_none_of_its_business() -> None:
    failing = Failing(9, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        surviving_deletion(failing)
    assert failing.calls == 1


def test_the_last_attempt_has_a_folder_of_its_own() -> None:
    failing = Failing(2, ValueError, lambda: shutil.rmtree(cache_dir()))
    folder = surviving_deletion(failing, attempts=3)
    assert Path(folder) != cache_dir()
    assert Path(folder).is_dir()  # until the process ends
    assert os.environ[INDUCTOR] == str(cache_dir())
    assert os.environ[TRITON] == str(cache_dir() / "triton")


def test_the_last_error_is_raised() -> None:
    failing = Failing(9, lambda: ValueError(f"{failing.calls}"), lambda: shutil.rmtree(os.environ[INDUCTOR]))
    with pytest.raises(ValueError, match="3"):
        surviving_deletion(failing, attempts=3)
    assert failing.calls == 3


def test_nothing_is_left_in_the_cache() -> None:
    assert surviving_deletion(lambda: 7) == 7
    assert [path.name for path in cache_dir().rglob("*")] == ["triton"]


# -- deletion: real compiles


def settings() -> None:
    from torch._inductor import config, cpu_vec_isa

    config.compile_threads = 2  # as on a machine with more than one core
    cpu_vec_isa.VecISA.check_build = lambda self, code: False  # type: ignore[method-assign]  # seconds of small compiles


def functions(count: int) -> list[Callable[[Tensor], Tensor]]:
    def make(number: float) -> Callable[[Tensor], Tensor]:
        def function(x: Tensor) -> Tensor:
            return (x.sin() * number).exp().softmax(-1)

        return function

    return [make(0.5 + number) for number in range(count)]


def called(graph: Callable[[], Tensor], attempts: int | None) -> Tensor:
    return graph() if attempts is None else surviving_deletion(graph, attempts)


def _compile(graphs: int, attempts: int | None) -> list[str]:
    """The error of each graph; "" for one that gives the right values."""
    settings()
    use_cache()
    x, errors = torch.linspace(-1, 1, 64).view(4, 16), []
    for function in functions(graphs):
        graph = compiled(function)
        try:
            torch.testing.assert_close(called(lambda: graph(x), attempts), function(x))  # noqa: B023
            errors.append("")
        except Exception as error:
            errors.append(pick(error))
    return errors


def _delete_always(started: Any, stop: Any) -> int:
    deleted, started_at = 0, time.monotonic()
    started.set()
    while not stop.is_set() and time.monotonic() - started_at < 100:
        if cache_dir().exists():
            shutil.rmtree(cache_dir(), ignore_errors=True)
            deleted += 1
        time.sleep(0.005)
    return deleted


def test_compiles_survive_a_process_that_deletes_the_cache_all_the_time(root: Path) -> None:
    environment = {"DFLASH_LIT_COMPILE_CACHE": str(root)}
    started, stop = CONTEXT.Event(), CONTEXT.Event()
    deleting = Child(_delete_always, started, stop, **environment)
    try:
        assert started.wait(60)
        bare = alone(_compile, 2, None, **environment)
        surviving = alone(_compile, 2, 2, **environment)
    finally:
        stop.set()
    assert deleting.result() > 10
    assert all(error.startswith("InductorError") for error in bare)
    assert surviving == ["", ""]


def _delete_once(attempts: int | None) -> tuple[str, str, int]:
    """The errors of two calls in a row; only during the first is the cache deleted, as a C++ compiler starts."""
    from torch._inductor.cpp_builder import CppBuilder

    settings()
    folder, build, deleted = use_cache(), CppBuilder.build, []

    def build_and_lose(builder: CppBuilder) -> None:
        if not deleted:
            deleted.append(shutil.rmtree(folder))
        build(builder)

    torch._inductor.config.cpp_cache_precompile_headers = False  # those are built elsewhere, and first
    CppBuilder.build = build_and_lose  # type: ignore[method-assign]
    graph, x, errors = compiled(functions(1)[0]), torch.ones(2, 8), []
    for _ in range(2):
        try:
            called(lambda: graph(x), attempts)
            errors.append("")
        except Exception as error:
            errors.append(pick(error))
    return errors[0], errors[1], len(deleted)


def test_a_failed_compile_is_forgotten(root: Path) -> None:
    """Inductor raises it again for ever, though the folder is back. Should that change, `_forget_files` can be shorter."""
    first, second, deleted = alone(_delete_once, None, DFLASH_LIT_COMPILE_CACHE=str(root))
    assert deleted == 1
    assert first.startswith("InductorError")
    assert second.startswith("InductorError")
    assert alone(_delete_once, 2, DFLASH_LIT_COMPILE_CACHE=str(root)) == ("", "", 1)


def _lose_the_probe() -> list[str]:
    from torch._inductor import cpu_vec_isa

    def isa(found: bool) -> str:
        cpu_vec_isa.VecISA.check_build = lambda self, code: found  # type: ignore[method-assign]
        return str(cpu_vec_isa.pick_vec_isa())

    lost = [isa(False), isa(True)]
    cache._forget_files()
    return [*lost, isa(True)]


def test_a_failed_probe_for_vector_instructions_is_forgotten() -> None:
    lost, still, found = alone(_lose_the_probe)
    assert lost == still == "INVALID_VEC_ISA"
    if torch.backends.cpu.get_cpu_capability() != "DEFAULT":
        assert found != "INVALID_VEC_ISA"


# -- runs side by side


def _compile_with_others(barrier: Any) -> tuple[list[str], int, int]:
    barrier.wait(60)
    errors = _compile(2, None)
    return errors, counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"]


def _found(root: Path, processes: int) -> list[int]:
    """How many of two graphs each of so many processes found in the cache; all gave the right values."""
    barrier, found = CONTEXT.Barrier(processes), []
    for process in [Child(_compile_with_others, barrier, DFLASH_LIT_COMPILE_CACHE=str(root)) for _ in range(processes)]:
        errors, misses, hits = process.result()
        assert errors == ["", ""]
        assert misses + hits == 2
        found.append(hits)
    return found


def test_processes_share_a_cache_and_hosts_a_copy(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three start cold at once and compile the same graphs; three more find them, and so does one elsewhere."""
    _found(root, 3)
    assert _found(root, 3) == [2, 2, 2]
    archive.save(root / "cache.tar.gz")
    there = root / "there"
    monkeypatch.setenv("DFLASH_LIT_COMPILE_CACHE", str(there))
    archive.load(root / "cache.tar.gz")
    shutil.rmtree(root / cache_key())
    assert _found(there, 1) == [2]
