"""Every command in README.md and docs/ works: options parse, overrides compose, and what can run here does, in a small form."""

from __future__ import annotations

import argparse
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from dflash_lit.cli import main
from dflash_lit.compilation.cache import cache_key
from dflash_lit.config import TrainConfig, register
from tests.documented_shop import TINY, Shop
from tests.test_conf import CONF

ROOT = Path(__file__).parent.parent
register()

NOT_OURS = {
    "hf auth login": "a login at a hub",
    "mkdocs build --strict": "run by tests/test_docs_site.py",
    "mkdocs serve": "a server that does not end",
    "pip install -e '.[docs]'": "installs",
    "pip install -e '.[sweeps]'": "installs",
    "pytest tests/gpu": "needs a GPU",
    "python3 -m pip install -e .": "installs; the tests run in what it made",
    'python3 -m pip install -e ".[dev]"': "installs; the tests run in what it made",
    "python3 -m pytest -n auto --dist loadfile": "these tests",
    "python3 -m venv .venv": "makes the environment that the tests run in",
    "pip install wandb-workspaces": "installs",
    "wandb sync RUN_FOLDER/wandb/offline-run-*": "needs the network",
    "wandb sync": "needs the network",
}
"""Commands of other programs, and why they are not tried here; those of this repository are all tried."""

HOSTS = "needs several hosts; tests/placement/test_launch.py starts such runs on one"
GPU = "needs a GPU"
NOT_RUN = {
    r"MASTER_ADDR=.*|torchrun .*|srun .*": HOSTS,
    r".*hydra/launcher=parallel.*": "run by tests/sweeps",
    r".*hydra/launcher=slurm.*": "needs SLURM; tests/sweeps runs the local form of that launcher",
    r"python -m dflash_lit.target.embedded.build .*": "trains for many minutes; run small by tests/target/test_embedded.py",
    r"python benchmarks/(step|online).py .*|.* --target qwen3-8b --shape S": GPU,
    r"python benchmarks/ddtree_objectives.py run .*": "trains for hours; run small by tests/benchmarks",
    r"python benchmarks/decode.py.*": "run by tests/benchmarks",
    r"python benchmarks/data.py .*": "minutes; what it measures is tested in tests/data",
    r"python benchmarks/sides.py .*": "of sizes for a GPU; run small by tests/benchmarks",
    r"python benchmarks/placement.py .*": "minutes, of processes that are to have cores of their own",
    r"python benchmarks/compile_torture.py .*": "minutes of compiling; tests/compilation deletes caches",
    r"python benchmarks/timeline.py .*": "draws what a GPU run has left; tests/benchmarks draws such a trace",
    r"dflash-lit wandb-workspace ENTITY/PROJECT": "needs the network",
    r"dflash-lit replay .*bad_steps/.*": "needs a step that went wrong; run by tests/guard",
    r"python benchmarks/kill_resume.py .*": "minutes; run small by tests/benchmarks",
    r"python benchmarks/fuzz.py .*": "minutes; run small by tests/benchmarks",
    r"python benchmarks/faults.py .*": "minutes; run small by tests/benchmarks",
    r"python benchmarks/hosts.py .*": "needs root, and network namespaces",
    r"python benchmarks/soak.py .*": "minutes; run small by tests/placement",
}
"""Commands of this repository that are only parsed or composed, and why."""

_COMMAND = re.compile(r"(?:\w+=\S+ )*(?:python3?|dflash-lit|torchrun|srun|pytest|pip|mkdocs|wandb|hf)(?= )")
_PLACES = re.compile(r"```[^\n]*\n(.*?)```|^((?:    \S[^\n]*\n)+)|`([^`\n]+)`", re.DOTALL | re.MULTILINE)
_NUMBER = re.compile(r"[A-Z]{1,2}")
"""Stands for a number, as N and MS do; longer words stand for files and names. But shapes have such names."""


def documented() -> Iterator[tuple[str, str]]:
    """(file, command), each once: in fenced blocks, indented ones, and between backquotes."""
    for file in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        found: dict[str, None] = {}
        for place in _PLACES.finditer(file.read_text(encoding="utf-8")):
            text = next(part for part in place.groups() if part is not None)
            lines = re.sub(r"\\\n\s*", "", text).splitlines()
            for line in (part.strip() for whole in lines for part in whole.split("&&")):
                if _COMMAND.match(line) and not line.endswith("/"):
                    found[line] = None
        for command in found:
            yield file.name, command


class Parsed(Exception):  # noqa: N818
    """The options were taken; nothing further is run."""


def words(command: str) -> list[str]:
    """As a shell would split it, without a comment, variables before it, or a launcher; `[x]` and `x ...` are what may be there."""
    command = re.sub(r"(?<= )\[([^\]=]+)\]", r"\1", command).replace(" ...", "")
    parts = shlex.split(command, comments=True)
    while re.fullmatch(r"[A-Z_]+=\S*", parts[0]):
        parts.pop(0)
    if parts[0] in ("torchrun", "srun"):
        parts = ["python", *parts[parts.index("train.py") :]]
    return parts


def first_values(overrides: list[str]) -> list[str]:
    """A sweep's first job."""

    def first(override: Override) -> str:
        if override.is_interval_sweep():
            return f"{override.get_key_element()}={override.value().start}"  # type: ignore[union-attr]
        if override.is_sweep_override():
            return f"{override.get_key_element()}={next(iter(override.sweep_string_iterator()))}"
        assert override.input_line is not None
        return override.input_line

    return [first(override) for override in OverridesParser.create().parse_overrides(overrides)]


def check_training(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()  # Hydra's options, as far as they are documented
    parser.add_argument("-m", action="store_true")
    parser.add_argument("--cfg", choices=["job", "hydra", "all"])
    parser.add_argument("--config-dir")
    parser.add_argument("--config-name")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_intermixed_args(arguments)
    overrides = given.overrides
    if not given.m:
        assert not any(one.is_sweep_override() for one in OverridesParser.create().parse_overrides(overrides)), "-m is missing"
    needed = [] if any("data.prompts" in word for word in overrides) else ["data.prompts=prompts.jsonl"]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        composed = compose("train", overrides=["paths.output_dir=/nowhere", *needed, *first_values(overrides)])
    cfg = OmegaConf.to_object(composed)
    assert isinstance(cfg, TrainConfig)


def check_options(program: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = argparse.ArgumentParser.parse_args

    def parse_args(self: argparse.ArgumentParser, *positional: object, **named: object) -> None:
        raise Parsed(real(self, *positional, **named))  # type: ignore[call-overload]

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    pairs = zip(["", *arguments], arguments, strict=False)
    given = ["1" if _NUMBER.fullmatch(word) and before != "--shape" else word for before, word in pairs]
    monkeypatch.setattr(sys, "argv", [program, *given])
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    try:
        if program.endswith(".py"):
            runpy.run_path(str(ROOT / program), run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__")
    except Parsed:
        return
    except SystemExit as error:
        pytest.fail(f"{program} does not take {' '.join(arguments)} (exit {error.code})")
    pytest.fail(f"{program}: ran without reading its options")


COMMANDS = [pair for pair in documented() if pair[1] not in NOT_OURS]


@pytest.mark.parametrize(("file", "command"), COMMANDS, ids=[f"{file}: {command}"[:90] for file, command in COMMANDS])
def test_documented_commands_are_taken(file: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *rest = words(command)
    if program == "dflash-lit":
        if all(re.fullmatch(r"[a-z][a-z-]*", word) for word in rest):
            with pytest.raises(SystemExit) as ended:  # the command is named, not called
                main([*rest, "--help"])
            assert ended.value.code == 0, f"does not take {rest}"
            return
        check_options("dflash_lit.cli", rest, monkeypatch)
        return
    assert program in ("python", "python3"), f"{file}: {command}: neither one of this repository's nor in NOT_OURS"
    if rest[0] == "-m":
        check_options(rest[1], rest[2:], monkeypatch)
    elif rest[0] == "train.py":
        check_training(rest[1:])
    else:
        check_options(rest[0], rest[1:], monkeypatch)


def not_run(command: str) -> str | None:
    return next((why for pattern, why in NOT_RUN.items() if re.fullmatch(pattern, command)), None)


def to_run() -> list[str]:
    """Each once, however it is spaced; not those that are a name with nothing behind it."""
    found: dict[tuple[str, ...], str] = {}
    for _, command in COMMANDS:
        program, *rest = words(command)
        named = program == "dflash-lit" and set(rest) <= {"cache", "data", "respond", "on-policy", "evaluate"}
        if not named and not not_run(command):
            same = command.replace("RUN_FOLDER", "outputs/RUN").replace("SWEEP_FOLDER", "outputs/SWEEP")
            found.setdefault(tuple(sorted([program.replace("python3", "python"), *words(same)[1:]])), command)
    # The archive is saved before it is loaded, and the cache cleared last.
    return sorted(found.values(), key=lambda command: ("cache" in command, "load" in command, "clear" in command))


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    made = Shop(tmp_path_factory.mktemp("documented"))
    compiled = Path(made.folder / "compiled" / cache_key() / "inductor")
    compiled.mkdir(parents=True)
    (compiled / "graph").write_text("x")
    yield made
    made.close()


def small(command: str, shop: Shop) -> list[str]:
    """The command with what it names put in its place, and as little to do as possible."""
    program, *rest = words(command)
    theirs = "Qwen" in command
    run = ["outputs/THEIRS", "target=hf", f"target.path={shop.model}", "drafter.features=3"] if theirs else ["outputs/RUN"]
    places: dict[str, Callable[[], str]] = {
        r"outputs/RUN|RUN_FOLDER": lambda: str(shop.train(*run)),
        r"outputs/SWEEP|SWEEP_FOLDER": lambda: str(shop.train("outputs/SWEEP", "-m", "objective=dflash")),
        r"(?<=init_from=)FOLDER": lambda: str(shop.train("outputs/RUN") / "drafter"),
        r"(?<=^)(Qwen/Qwen3-8B|FOLDER)$": lambda: "m" if "--server" in rest else str(shop.model),
        r"(?<==)Qwen/Qwen3-8B$": lambda: str(shop.model),
        r"^URL$|http://127.0.0.1:8000/v1": lambda: shop.server.url,
        r"^NAME$": lambda: "m",
        r"^FILE$": lambda: "chat.jsonl",
        r"OUT/records.jsonl|(?=docs/)": lambda: f"{ROOT}/" + ("docs/ddtree_built.jsonl.gz" if "OUT/" in command else ""),
    }
    if "plan" in rest:  # knows its sizes
        return [program, *rest]
    given = []
    for before, word in zip(["", *rest], rest, strict=False):
        for pattern, place in places.items():
            if re.search(pattern, word):
                word = re.sub(pattern, place(), word)
        if word.endswith(".jsonl") and before == "--out":
            word = str(shop.folder / f"out{len(list(shop.folder.glob('out*')))}.jsonl")
        given.append(word.replace("FILE.jsonl", "responses.jsonl"))
    if program == "dflash-lit":
        return [program, *given, *LITTLE.get(rest[0], "").split()]
    if given[0] == "-m" or given[0] != "train.py" or "--cfg" in given:
        return given
    if "sweep=tpe" in given:
        little = ["hydra.sweeper.trials=1"]
    else:
        options, overrides = [w for w in given[1:] if "=" not in w], [w for w in given[1:] if "=" in w]
        if "--config-dir" in given:  # with values
            return [*given, *TINY[:4]]
        given, little = ["train.py", *options, *first_values(overrides)], []
    little += TINY
    if theirs or "+experiment=q" in command or "+experiment=l" in command:
        little += [f"target.path={shop.model}", "drafter.intermediate_size=null"]
    if "data=chat" in command:
        little += ["data.held_out_share=0.5", "data.prompt_tokens=64"]
    if "ckpt_path" in command:
        little += ["trainer.max_steps=3"]
    if "split" in command:
        little += [f"placement.targets={2 if 'tolerate' in command else 1}", "placement.drafters=1"]
    elif "placement.drafters" in command:
        little += ["placement.drafters=2"]
    place = shop.folder / "trained" / str(len(list(shop.folder.glob("trained/*"))))
    return [*given, *little, f"hydra.run.dir={place}", f"hydra.sweep.dir={place}"]


LITTLE = {
    "evaluate": "--count 1 --max-new-tokens 4",
    "respond": "--max-tokens 4",
    "doctor": "",
    "data": "",
    "on-policy": "--count 4",
}
"""Appended to commands of dflash-lit."""


@pytest.mark.parametrize("command", to_run(), ids=[command[:90] for command in to_run()])
def test_documented_commands_run(command: str, shop: Shop) -> None:
    code, said = shop.run(*small(command, shop))
    assert code in (None, 0), said[-3000:]
    assert "Traceback" not in said


def test_the_list_of_commands_that_are_not_run_is_not_longer_than_it_has_to_be() -> None:
    everything = [command for _, command in documented()]
    assert [pattern for pattern in NOT_RUN if not any(re.fullmatch(pattern, command) for command in everything)] == []


def test_commands_are_found_and_the_list_of_others_is_not_longer_than_it_has_to_be() -> None:
    everything = {command for _, command in documented()}
    assert len(COMMANDS) > 40
    assert set(NOT_OURS) <= everything, set(NOT_OURS) - everything


@pytest.mark.parametrize(
    "command",
    [
        "python train.py trainer.max_stepz=1",
        "python train.py seed=1,2",
        "dflash-lit mask --outt x",
        "python benchmarks/step.py -q",
    ],
)
def test_a_wrong_command_would_be_noticed(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BaseException, match=r"max_stepz|-m is missing|does not take"):
        test_documented_commands_are_taken("x.md", command, monkeypatch)
