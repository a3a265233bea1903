"""A short fuzz of everything cheap, and the fuzz itself: it has to find what is wrong. Then one test for each kind of what it has found."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import fuzz as script
from fuzzing.case import Case, Wrong, judge
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException
from omegaconf import OmegaConf

from dflash_lit.commands import groups_explained, one_line
from dflash_lit.config import register
from dflash_lit.data.prompts import file_prompts
from dflash_lit.data.sources import find_sources
from dflash_lit.errors import Interrupted, UserError, stop_within
from dflash_lit.files import map_array, read_sealed, sealed
from dflash_lit.placement.children import die_with_parent
from dflash_lit.responses.raw_prompts import read_raw_prompts
from dflash_lit.responses.record_file import RecordFile
from dflash_lit.sweeps.trial import running_trial
from tests.fork_server import forked_python

ROOT = Path(__file__).parents[2]
FEW = {
    "config": 6,
    "data": 50,
    "store": 50,
    "export": 50,
    "target": 8,
    "run": 20,
    "checkpoint": 12,
    "environment": 2,
    "signals": 1,
}


@pytest.mark.parametrize(("area", "cases"), FEW.items())
def test_nothing_is_unexplained(area: str, cases: int, capsys: pytest.CaptureFixture[str]) -> None:
    counted = script.fuzz([area], cases, 1)[area]
    assert counted.total() == cases
    assert not counted["unexplained"], capsys.readouterr().out


def _raise(error: BaseException) -> Any:
    raise error


def _write(path: Path) -> None:
    path.write_text("stray")


@pytest.mark.parametrize(
    ("act", "check", "kind", "says"),
    [
        (lambda _: _raise(UserError("a.json: is broken")), None, "error", "a.json"),
        (lambda _: 3, lambda _: None, "right", ""),
        (lambda _: _raise(UserError("it is broken")), None, "unexplained", "has none of"),
        (lambda _: _raise(KeyError("a.json")), None, "unexplained", "traceback"),
        (lambda _: 3, None, "unexplained", "no error"),
        (lambda _: 3, lambda _: _raise(Wrong("4 were written")), "unexplained", "4 were written"),
        (lambda folder: _write(folder / "case" / "more"), lambda _: None, "unexplained", "case/more"),
        (lambda folder: _write(folder / "working" / "keep"), lambda _: None, "unexplained", "working/keep"),
        (lambda folder: os.open(folder / "case" / "pipe", os.O_RDONLY), lambda _: None, "unexplained", "not over"),
    ],
)
def test_what_counts_as_what(tmp_path: Path, act: Any, check: Any, kind: str, says: str) -> None:
    class Planted:
        name = "planted"

        def case(self, rng: random.Random, folder: Path) -> Case:
            os.mkfifo(folder / "pipe")
            return Case("planted", lambda: act(tmp_path / "now"), ["a.json"], check, limit_s=0.3)

    found = judge(Planted(), "seed", tmp_path / "now")
    assert (found.kind, says in found.said) == (kind, True), found


def test_a_case_is_a_function_of_its_seed(tmp_path: Path) -> None:
    (area,) = script._areas(["export"], tmp_path / "areas")
    said = [judge(area, "export:5:9", tmp_path / str(time)).about for time in range(2)]
    assert said[0] == said[1]


# -- what it has found


def test_pipes_are_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    os.mkfifo(path)
    for read in (lambda: read_raw_prompts(path), lambda: file_prompts(path, None, max_prompt_tokens=4)):  # type: ignore[arg-type]
        with pytest.raises(UserError, match=r"prompts\.jsonl: cannot be read \(it is a device or a pipe"):
            read()
    with pytest.raises(UserError, match="device or a pipe"), RecordFile(path, {}):
        pass


def test_a_response_without_a_count_of_tokens_is_named(tmp_path: Path) -> None:
    with RecordFile(tmp_path / "out.jsonl", {}):
        pass
    (tmp_path / "out.jsonl").write_text(
        '{"id": "a", "key": "b", "flags": []}\n{"id": "c", "key": "d", "flags": [], "tokens": null}\n'
    )
    with pytest.raises(UserError, match=r"out\.jsonl:1"), RecordFile(tmp_path / "out.jsonl", {}):
        pass
    (tmp_path / "out.jsonl").write_text(
        '{"id": "a", "key": "b", "flags": [[]], "tokens": 3}\n{"id": "c", "key": "d", "flags": [], "tokens": null}\n'
    )
    with pytest.raises(UserError, match=r"out\.jsonl:1"), RecordFile(tmp_path / "out.jsonl", {}):
        pass


def test_a_mapping_is_no_path() -> None:
    with pytest.raises(UserError, match=r"data\.path=\{'a': 1\}: is no path"):
        find_sources({"a": 1})  # type: ignore[arg-type]


def test_an_interpolation_names_its_field() -> None:
    error = ValueError("Interpolation key 'nowhere' not found\n    full_key: drafter.layers\n    object_type=DrafterSection")
    assert one_line(error) == "Interpolation key 'nowhere' not found (in drafter.layers)"
    assert one_line(ValueError("drafter.layers: wrong\n    full_key: drafter.layers")) == "drafter.layers: wrong"


def test_a_word_that_cannot_be_parsed_is_named() -> None:
    with pytest.raises(OverrideParseException) as caught:
        OverridesParser.create().parse_overrides(["target.path=["])
    assert one_line(caught.value).startswith("target.path=[: ")
    assert "quote" not in one_line(caught.value)


def test_a_choice_that_does_not_exist_names_all_that_do() -> None:
    options = "Available options in 'objective':\n\tdflash\n\tdpace\n\tsoft\nConfig search path:\n\tprovider=main"
    error = ValueError(f"Could not find 'objective/no'\n\n{options}")
    assert one_line(error) == "Could not find 'objective/no'; Available options in 'objective': dflash, dpace, soft"


def test_the_best_checkpoint_has_to_be_quoted() -> None:
    parser = OverridesParser.create()
    with pytest.raises(OverrideParseException) as caught:
        parser.parse_overrides(["ckpt_path=run/step=4.ckpt"])
    said = re.search(r"quote a value with = in it: '([^']*)'", one_line(caught.value))
    assert said is not None
    assert parser.parse_override(said[1]).value() == "run/step=4.ckpt"


def test_a_group_that_is_null_is_named() -> None:
    with (
        pytest.raises(UserError, match=r"^logger=null: a config group cannot be null"),
        groups_explained(["seed=1", "logger=null"]),
    ):
        raise ValueError("Config group override must be a string or a list. Got NoneType")
    with pytest.raises(ValueError, match="another"), groups_explained([]):
        raise ValueError("another")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"seed: 1\n  more: 2\n", r"train\.yaml:2: is not YAML \(mapping values are not allowed here\)"),
        (b"seed: 1\0\n", r"train\.yaml: is not YAML"),
        (b"seed: \xff\n", r"train\.yaml: is not YAML .*invalid start byte"),
        (b"a: " + b"[" * 5000, r"train\.yaml: is not YAML"),
        ("# @package\u00a0_global_\nseed: 1\n".encode(), r"train\.yaml: Expected header format"),
        (b"defaults:\n  - \n", r"defaults: the list of that name in a config file"),
    ],
)
def test_a_config_file_that_is_not_yaml_is_named(tmp_path: Path, text: bytes, says: str) -> None:
    (tmp_path / "train.yaml").write_bytes(text)
    with (
        pytest.raises(UserError, match=says),
        groups_explained([]),
        initialize_config_dir(str(tmp_path), version_base="1.3"),
    ):
        compose("train")


def test_a_name_below_a_list_that_is_not_set_is_named() -> None:
    register()
    words = ["seed=1", "+drafter.target_layer_ids.more=auto"]
    with (
        pytest.raises(UserError, match=r"^\+drafter\.target_layer_ids\.more=auto: there is nothing that could have"),
        groups_explained(words),
        initialize_config_dir(str(ROOT / "conf"), version_base="1.3"),
    ):
        compose("train", overrides=words)


def test_a_name_inside_a_list_is_named() -> None:
    with (
        pytest.raises(UserError, match=r"^a\.b\.more=3: a list has no entry 'more'; give the whole list"),
        groups_explained(["seed=1", "a.b.more=3"]),
    ):
        OmegaConf.update(OmegaConf.create({"a": {"b": [1]}}), "a.b.more", 3)
    with pytest.raises(ValueError, match="invalid literal"), groups_explained([]):
        int("more")


@pytest.mark.parametrize("stop", [Interrupted(15, None), KeyboardInterrupt()])
def test_what_fails_because_of_a_signal_is_the_signal(stop: BaseException) -> None:
    def leave() -> None:
        try:
            raise stop
        finally:
            raise RuntimeError("unexpected pos")  # as torch.save does when it is left in the middle

    with pytest.raises(RuntimeError) as failed:
        leave()
    assert stop_within(failed.value) is stop
    meant = UserError("no room")
    meant.__context__ = stop
    assert stop_within(meant) is None
    assert stop_within(RuntimeError()) is None


def test_a_trial_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for words in ("{}", "banana", '["sqlite:///nowhere/a.db", "study", 1]'):
        monkeypatch.setenv("DFLASH_LIT_TRIAL", words)
        with pytest.raises(UserError, match=r"^DFLASH_LIT_TRIAL="):
            running_trial(optuna.pruners.NopPruner())


def test_a_process_that_no_run_has_started_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for told in ("", "banana", "-1"):
        monkeypatch.setenv("DFLASH_LIT_PARENT", told)
        with pytest.raises(UserError, match=r"DFLASH_LIT_PARENT=.*unset both"):
            die_with_parent()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = subprocess.run(
        [forked_python(), "train.py", "debug=fast", f"hydra.run.dir={tmp_path}/file/run"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {tmp_path}/file/run: the run's folder cannot be made (Not a directory)")
    assert len(done.stderr.splitlines()) == 1
    (tmp_path / "run" / "train.log").mkdir(parents=True)  # which Hydra logs to
    done = subprocess.run(
        [forked_python(), "train.py", "debug=fast", f"hydra.run.dir={tmp_path}/run"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {tmp_path}/run/train.log: the run's folder cannot be made (Is a directory)")
    assert len(done.stderr.splitlines()) == 1


def test_sealed_files_are_whole_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "meta.json"
    path.write_text(sealed({"a": [1, 2]}))
    assert read_sealed(path) == {"a": [1, 2]}
    for damaged in (path.read_text().replace("1", "3", 1), path.read_text()[:-5], "[]", "{}"):
        path.write_text(damaged)
        with pytest.raises(ValueError, match=r"meta\.json"):
            read_sealed(path)
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00\x10\x00{'descr': ((((((((")
    with pytest.raises(ValueError, match=r"a\.npy"):
        map_array(tmp_path / "a.npy")
    np.save(tmp_path / "b.npy", np.arange(3, dtype=">i4" if sys.byteorder == "little" else "<i4"))
    with pytest.raises(ValueError, match=r"b\.npy: has the byte order of another machine"):
        map_array(tmp_path / "b.npy")
