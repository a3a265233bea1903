from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest

from dflash_lit.errors import UserError
from dflash_lit.responses.raw_prompts import RawPrompt
from dflash_lit.responses.record_file import RecordFile, dropped_path, settings_path
from dflash_lit.responses.reply import Reply

SETTINGS: dict[str, Any] = {"temperature": 1.0, "extra_body": {"top_k": 5}}


def prompt(name: str, key: str | None = None) -> RawPrompt:
    return RawPrompt(name, key or f"key {name}", f"text {name}", None, None, f"p.jsonl:{name}")


def fill(path: Path, *names: str, text: str = "fine") -> None:
    with RecordFile(path, SETTINGS) as records:
        for name in names:
            records.add(prompt(name), [(0, Reply(text, "stop", tokens=3))])


def ids(path: Path) -> list[str]:
    return [json.loads(line)["id"] for line in path.read_text().splitlines()]


def test_what_is_there_is_not_pending(tmp_path: Path):
    out = tmp_path / "new" / "out.jsonl"
    fill(out, "a", "b")
    fill(out, "c", text="")
    assert ids(out) == ["a", "b"]
    assert ids(dropped_path(out)) == ["c"]
    with RecordFile(out, SETTINGS) as records:
        assert [p.id for p in records.pending(map(prompt, "abcd"))] == ["d"]
        assert (records.responses, records.dropped, records.tokens, records.flags["empty"]) == (3, 1, 9, 1)


@pytest.mark.parametrize(
    "tail", [b"{", b'{"id":"z","key":"k","flags":[],"tok', b"\x00" * 50, b"\x00\x00\n", b'"half"\n', b"\xff\n"]
)
@pytest.mark.parametrize("which", [lambda out: out, dropped_path])
def test_a_torn_end_is_cut_off(tmp_path: Path, tail: bytes, which: Any):
    out = tmp_path / "out.jsonl"
    fill(out, "a")
    fill(out, "b", text="")
    whole = which(out).read_bytes()
    which(out).write_bytes(whole + tail)
    with RecordFile(out, SETTINGS) as records:
        assert records.torn == len(tail)
        assert [p.id for p in records.pending(map(prompt, "abz"))] == ["z"]
        records.add(prompt("z"), [(0, Reply("fine", "stop"))])
    assert ids(out) == ["a", "z"]
    assert ids(dropped_path(out)) == ["b"]


def test_damage_in_the_middle_is_not_repaired_silently(tmp_path: Path):
    out = tmp_path / "out.jsonl"
    fill(out, "a", "b", "c")
    lines = out.read_bytes().splitlines(keepends=True)
    damaged = lines[0] + lines[1][:10] + b"\n" + lines[2]
    out.write_bytes(damaged)
    with pytest.raises(UserError, match=r"out.jsonl:2: is not a line"), RecordFile(out, SETTINGS):
        pass
    assert out.read_bytes() == damaged


def test_other_settings_do_not_get_into_the_same_file(tmp_path: Path):
    out = tmp_path / "out.jsonl"
    fill(out, "a")
    with (
        pytest.raises(UserError, match=r"made with temperature 1.0, not 0.7"),
        RecordFile(out, {**SETTINGS, "temperature": 0.7}),
    ):
        pass
    with pytest.raises(UserError, match=r"made with model None, not 'x'"), RecordFile(out, {**SETTINGS, "model": "x"}):
        pass
    settings_path(out).write_text("{")
    with pytest.raises(UserError, match=r"settings.json: is damaged"), RecordFile(out, SETTINGS):
        pass


def test_a_file_of_somebody_else_is_left_as_it_is(tmp_path: Path):
    out = tmp_path / "prompts.jsonl"
    out.write_text('{"prompt": "mine"}')  # no line break: it looks torn
    with pytest.raises(UserError, match=r"was not written by this command"), RecordFile(out, SETTINGS):
        pass
    assert out.read_text() == '{"prompt": "mine"}'


def test_an_id_that_stands_for_another_prompt_now(tmp_path: Path):
    out = tmp_path / "out.jsonl"
    fill(out, "a")
    with RecordFile(out, SETTINGS) as records, pytest.raises(UserError, match=r"p.jsonl:a: .*another prompt of id 'a'"):
        list(records.pending([prompt("a", "other")]))


def test_one_run_at_a_time(tmp_path: Path):
    out = tmp_path / "out.jsonl"
    fill(out, "a")
    with (
        RecordFile(out, SETTINGS),
        pytest.raises(UserError, match=r"another run is writing"),
        RecordFile(out, SETTINGS),
    ):
        pass
    fill(out, "b")  # the lock went with the run
    assert ids(out) == ["a", "b"]


def test_places_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be written"), RecordFile(tmp_path / "file" / "out.jsonl", SETTINGS):
        pass
    with pytest.raises(UserError, match=r"must end with .jsonl"):
        RecordFile(tmp_path / "out.json", SETTINGS)


def test_a_full_disk_loses_nothing_that_was_there(tmp_path: Path):
    out = tmp_path / "out.jsonl"
    fill(out, "a", "b")
    # With a limit to the size of files a write comes back short, as it does on a full disk.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with RecordFile(out, SETTINGS) as records:
        resource.setrlimit(resource.RLIMIT_FSIZE, (out.stat().st_size + 50, hard))
        try:
            with pytest.raises(UserError, match=r"cannot be written \(the disk is full\)"):
                records.add(prompt("c"), [(0, Reply("".join(map(str, range(100))), "stop"))])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not out.read_bytes().endswith(b"\n")
    fill(out, "c")
    assert ids(out) == ["a", "b", "c"]
