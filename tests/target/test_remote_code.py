"""Code that lies beside a model runs if it was asked for, and never otherwise."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path

import pytest

from dflash_lit.cli import main
from dflash_lit.drafter.model import Drafter
from dflash_lit.errors import UserError
from dflash_lit.export import save_drafter
from dflash_lit.target.frozen import EMBEDDED, TargetInfo, resolve_path
from tests.helpers import embedded_config
from tests.test_conf import configured, make_plan
from tests.test_train import ROOT

CODE = """
from pathlib import Path
from transformers import Qwen3Config
Path(__file__).with_name("ran").touch()
Path({marker!r}).touch()
class TheirConfig(Qwen3Config):
    model_type = "theirs"
"""


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A model with a config of its own code, and a file that is there once it has run."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = shutil.copytree(resolve_path(EMBEDDED), tmp_path / "target")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.TheirConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    marker = tmp_path / "ran"
    (folder / "theirs.py").write_text(CODE.format(marker=str(marker)))
    return folder, marker


def test_a_run_and_every_command_that_reads_a_target(
    target: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, marker = target
    (tmp_path / "prompts.txt").write_text("a prompt\n")
    record = {"prompt": "a", "response": "b"}
    (tmp_path / "data.jsonl").write_text(json.dumps(record) + "\n")
    data = str(tmp_path / "data.jsonl")
    drafter = save_drafter(Drafter(embedded_config()), tmp_path / "drafter")
    with pytest.raises(UserError, match=r"target\.trust_remote_code=true"):
        make_plan(configured("target=hf", f"target.path={folder}"))
    for command in (
        ["respond", str(tmp_path / "prompts.txt"), "--target", str(folder), "--out", str(tmp_path / "out.jsonl")],
        ["on-policy", data, "--target", str(folder)],
        ["data", "preview", data, "--target", str(folder)],
        ["data", "inspect", data, "--target", str(folder)],
        ["plan", "--target", str(folder)],
        ["evaluate", str(drafter), "--target", str(folder)],
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("builtins.input", lambda *_: pytest.fail("asked a question"))
            assert main(command) == 2, command
        said = capsys.readouterr().err
        assert said.count("error:") == 1, said
        assert "trust-remote-code" in said or "trust_remote_code" in said, (command, said)
    assert not marker.exists()


def test_where_it_was_asked_for(target: tuple[Path, Path]) -> None:
    folder, marker = target
    info = TargetInfo.load(str(folder), trust_remote_code=True)
    assert marker.exists()
    assert info.trust_remote_code


def test_nothing_is_read_without_saying_so() -> None:
    """Transformers asks on the terminal where nobody has said yes or no."""
    readers = {"AutoConfig", "AutoTokenizer", "AutoModelForCausalLM", "AutoModel"}
    seen = 0
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id in readers
                and node.func.attr in ("from_pretrained", "from_config")
            ):
                seen += 1
                given = {keyword.arg: keyword.value for keyword in node.keywords}
                assert "trust_remote_code" in given, f"{path}:{node.lineno}"
                assert not (isinstance(given["trust_remote_code"], ast.Constant) and given["trust_remote_code"].value is True)
    assert seen > 4
