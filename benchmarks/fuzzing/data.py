"""Files of prompts, records and responses. Each line that is taken has to be what it says; each other one is named."""

from __future__ import annotations

import gzip
import json
import logging
import random
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

import dflash_lit.target.embedded
from dflash_lit.data.chat import ChatSettings, ChatTokenizer
from dflash_lit.data.prompts import file_prompts
from dflash_lit.data.records import Columns, check_record
from dflash_lit.data.skips import Skip
from dflash_lit.data.store import StoreSettings, build_store
from dflash_lit.responses.raw_prompts import read_raw_prompts
from dflash_lit.responses.read_records import sample_documents
from dflash_lit.responses.record_file import RecordFile, dropped_path, settings_path
from fuzzing.case import Case, Wrong
from fuzzing.damage import dumped, entry_damaged, file_damaged, json_damaged

__all__ = ["Fuzzed", "tokenizer_with_template"]

_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
_TALK = [
    {"role": "user", "content": "what is {}?"},
    {"role": "assistant", "content": "it is a word of the test, {}, and no more"},
]


def tokenizer_with_template() -> Any:
    """The embedded target's, with a chat template as small as can be."""
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(dflash_lit.target.embedded.__path__[0])
    made.chat_template = _TEMPLATE
    return made


def _records() -> list[dict[str, Any]]:
    talks = [
        {"messages": [{**turn, "content": turn["content"].format(n)} for turn in _TALK], "finish_reason": "stop"}
        for n in range(3)
    ]
    plain = [{"prompt": f"say {n}", "response": f"{n} and {n + 1}, said twice {n}"} for n in range(3)]
    texts = [{"id": f"t{n}", "text": f"def f{n}(x):\n    return x + {n}\n"} for n in range(3)]
    tokens = [{"id": n, "input_ids": [5 + n, 6, 7, 8, 9, 10], "loss_mask": [0, 0, 1, 1, 1, 1]} for n in range(3)]
    return [*talks, *plain, *texts, *tokens]


def _prompts() -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = [{"prompt": f"def g{n}(a, b): # {'é' * n}", "id": str(n)} for n in range(5)]
    return made + [{"messages": [{"role": "user", "content": f"say {n}"}], "tools": [{"name": "f"}]} for n in range(4)]


class Fuzzed:
    """Reads damaged files as training, ``respond`` and ``on-policy`` do."""

    name = "data"

    def __init__(self, scratch: Path) -> None:
        logging.getLogger("transformers").setLevel(logging.ERROR)
        self.tokenizer = tokenizer_with_template()
        self.settings = StoreSettings(Columns(), ChatSettings(vocab_size=512), skip_limit=1.0)
        self.chat = ChatTokenizer(self.tokenizer, self.settings.chat)
        self.out = scratch / "out.jsonl"
        with RecordFile(self.out, {"temperature": 1.0, "model": "m"}):
            pass
        lines = [{"id": f"{n}", "key": f"k{n}", "flags": [], "tokens": n, "prompt": "a", "response": "b c"} for n in range(6)]
        self.out.write_bytes(b"".join(dumped(line) + b"\n" for line in lines))

    def case(self, rng: random.Random, folder: Path) -> Case:
        kind = rng.choice(
            (
                self._store,
                self._store,
                self._store,
                self._prompts,
                self._prompts,
                self._raw,
                self._responses,
                self._sample,
                self._paths,
            )
        )
        return kind(rng, folder)

    def _damaged(self, records: list[dict[str, Any]], path: Path, rng: random.Random) -> str:
        """Write the lines with one of them, or their bytes, damaged."""
        lines = [dumped(record) for record in records]
        if rng.random() < 0.5:
            number = rng.randrange(len(lines))
            value, about = json_damaged(records[number], rng)
            lines[number] = dumped(value)
            data, about = b"\n".join(lines) + b"\n", f"line {number + 1}: {about}"
        else:
            data, about = file_damaged(b"\n".join(lines) + b"\n", rng, gentle=rng.random() < 0.4)
        if path.name.endswith(".gz"):
            data = gzip.compress(data, mtime=0)
            if rng.random() < 0.5:
                data, about = file_damaged(data, rng, text=False)
                about = f"compressed {about}"
        path.write_bytes(data)
        if rng.random() < 0.1:
            about = entry_damaged(path, rng)
        return f"{path.name}: {about}"

    # -- records to train on

    def _store(self, rng: random.Random, folder: Path) -> Case:
        path = folder / rng.choice(["a.jsonl", "a.jsonl", "a.jsonl.gz", "a.parquet"])
        if path.suffix == ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(_records()), path, compression=rng.choice(["none", "zstd"]))
            data, about = file_damaged(path.read_bytes(), rng, text=False, gentle=rng.random() < 0.5)
            path.write_bytes(data)
        else:
            about = self._damaged(_records(), path, rng)

        def act() -> Any:
            return build_store(str(path), self.tokenizer, self.settings, folder / "cache", workers=1, progress=False)[0]

        def check(store: Any) -> None:
            documents = {store.name(number): store.input_ids(number).tolist() for number in range(len(store))}
            if path.suffix == ".parquet":
                # Undamaged pages; what a damaged one gives is for the format's own checksums to find.
                if store.skips.seen != len(_records()):
                    raise Wrong(f"{store.skips.seen} records, {len(_records())} were written")
                return
            with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as file:
                lines = [(f"{path}:{number}", line) for number, line in enumerate(file, start=1) if line.strip()]
            if store.skips.seen != len(lines):
                raise Wrong(f"{store.skips.seen} records seen, there are {len(lines)} lines")
            left = store.skips.broken.total() + store.skips.left_out.total()
            if len(documents) + left != len(lines):
                raise Wrong(f"{len(documents)} documents and {left} skipped are not {len(lines)} lines")
            for place, line in lines:
                if place in documents and documents[place] != self._alone(line, place):
                    raise Wrong(f"{place} gives other tokens than by itself")

        return Case(f"records: {about}", act, [path.name, "data.skip_limit", "data.path"], check, may_write=["cache"])

    def _alone(self, line: bytes, place: str) -> list[int] | None:
        try:
            record = check_record(json.loads(line.decode("utf-8-sig")), Columns(), place)
            return self.chat.documents(record)[0].input_ids.tolist()  # type: ignore[no-any-return]
        except (Skip, ValueError):
            return None

    # -- prompts

    def _prompts(self, rng: random.Random, folder: Path) -> Case:
        path = folder / "prompts.jsonl"
        about = self._damaged(_prompts(), path, rng)
        if rng.random() < 0.2 and path.is_file() and not path.is_symlink():
            path.rename(path := folder / rng.choice(["prompts.txt", "prompts", "prompts.json"]))

        def check(prompts: Any) -> None:
            lines = path.read_text(encoding="utf-8-sig").split("\n")  # as of any system's text files
            for prompt in prompts:
                line = lines[int(prompt.name.rsplit(":", 1)[1]) - 1]
                text = line.rstrip("\r")
                if path.suffix == ".jsonl":
                    entry = json.loads(line)
                    text = entry["prompt"] if "prompt" in entry else self.tokenizer.apply_chat_template(
                        entry["messages"][:-1] if entry["messages"][-1]["role"] == "assistant" else entry["messages"],
                        add_generation_prompt=True, tokenize=False,
                    )  # fmt: skip
                if prompt.input_ids != self.tokenizer(text, add_special_tokens=False)["input_ids"][-64:]:
                    raise Wrong(f"{prompt.name} has other tokens than its text")
            if not 0 < len(prompts) <= sum(bool(line.strip()) for line in lines):
                raise Wrong(f"{len(prompts)} prompts of {len(lines)} lines")

        return Case(f"prompts: {about}", lambda: file_prompts(path, self.tokenizer, max_prompt_tokens=64), [path.name], check)

    def _raw(self, rng: random.Random, folder: Path) -> Case:
        path = folder / "prompts.jsonl"
        about = self._damaged(_prompts(), path, rng)
        endpoint = rng.choice(["auto", "chat", "completions"])

        def check(found: Any) -> None:
            lines = path.read_bytes().decode("utf-8-sig").split("\n")
            for prompt in found.prompts:
                entry = json.loads(lines[int(prompt.place.rsplit(":", 1)[1]) - 1])
                said = prompt.text if prompt.text is not None else prompt.messages[-1]["content"]
                wanted = (
                    entry["prompt"]
                    if "prompt" in entry
                    else [turn for turn in entry["messages"] if turn["role"] != "assistant"][-1]["content"]
                )
                if said != wanted:
                    raise Wrong(f"{prompt.place}: {said!r} is not {wanted!r}")

        return Case(
            f"respond's prompts ({endpoint}): {about}", lambda: read_raw_prompts(path, endpoint=endpoint), [path.name], check
        )

    # -- responses

    def _responses(self, rng: random.Random, folder: Path) -> Case:
        path = folder / "out.jsonl"
        for of in (lambda p: p, dropped_path, settings_path):
            shutil.copy(of(self.out), of(path))
        which = rng.choice([path, path, path, settings_path(path), dropped_path(path)])
        if rng.random() < 0.15:
            about = entry_damaged(which, rng)
        elif (data := which.read_bytes()) and rng.random() < 0.7:
            changed, about = file_damaged(data, rng)
            which.write_bytes(changed)
        else:
            lines = [json.loads(line) for line in path.read_bytes().splitlines()]
            which, number = path, rng.randrange(len(lines))
            value, about = json_damaged(lines[number], rng)
            lines[number] = value
            path.write_bytes(b"".join(dumped(line) + b"\n" for line in lines))
        before = path.read_bytes() if path.is_file() else b""

        def act() -> Any:
            with RecordFile(path, {"temperature": 1.0, "model": "m"}) as file:
                return dict(file.done), file.torn

        def check(found: Any) -> None:
            done, torn = found
            after = path.read_bytes()
            if before[: len(after)] != after or (len(before) - len(after) != torn and which == path):
                raise Wrong("more was cut off than is said")
            kept = [json.loads(line) for line in after.splitlines()]
            if not {line["id"] for line in kept} <= done.keys():
                raise Wrong("a line that is there does not count")

        names = [path.stem]
        writes = ["out.jsonl", "out.dropped.jsonl", "out.settings.json", "out.settings.part"]
        return Case(
            f"responses: {which.name}: {about}",
            act,
            names,
            check,
            may_write=[*writes, "away_out.jsonl", "away_out.dropped.jsonl", "nothing"],
        )

    def _sample(self, rng: random.Random, folder: Path) -> Case:
        path = folder / "said.jsonl"
        about = self._damaged(_records(), path, rng)

        def check(documents: Any) -> None:
            for document in documents:
                if len(document.input_ids) != len(document.supervised) or document.input_ids.ndim != 1:
                    raise Wrong(f"{document.name}: tokens and mask do not fit")
                if not ((document.input_ids >= 0) & (document.input_ids < 2**31)).all():
                    raise Wrong(f"{document.name}: token ids out of range")

        return Case(
            f"on-policy's sample: {about}", lambda: sample_documents(path, self.tokenizer, count=20), [path.name], check
        )

    # -- what data.path may be

    def _paths(self, rng: random.Random, folder: Path) -> Case:
        good = folder / "good" / "a.jsonl"
        good.parent.mkdir()
        good.write_bytes(b"\n".join(dumped(record) for record in _records()))
        path: Any = rng.choice(
            [str(good.parent), str(good), f"{good.parent}/*.jsonl", f"{folder}/none", f"{folder}/*.none", "", "\0", "~nobody/x", 5, None, [],
             [str(good), str(good)], [str(good), None], "/dev/null", "/dev/zero", "/proc/self/mem", f"{folder}/loop", f"{folder}/pipe.jsonl",
             f"{folder}/dir.jsonl", f"{folder}/out", "x" * 5000, f"{folder}/[", {"a": 1}, True, f"{folder}/**", "é\ud800"]
        )  # fmt: skip
        (folder / "loop").symlink_to("loop")
        (folder / "out").symlink_to(good.parent)
        (folder / "dir.jsonl").mkdir()
        import os

        os.mkfifo(folder / "pipe.jsonl")

        def act() -> Any:
            return build_store(path, self.tokenizer, self.settings, folder / "cache", workers=1, progress=False)[0]

        def check(store: Any) -> None:
            if len(store) != len(_records()):
                raise Wrong(f"{len(store)} documents of {path!r}")

        return Case(f"data.path={str(path)[:60]!r}", act, ["data.path", "a.jsonl"], check, may_write=["cache"])
