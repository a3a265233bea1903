"""Reads back what W&B wrote of an offline run, by W&B's own `wandb leet inspect` (of 0.31 and newer)."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any


class OfflineRun:
    """Records of the only offline run below a folder."""

    def __init__(self, run_folder: Path) -> None:
        found = sorted(run_folder.glob("wandb/offline-run-*/run-*.wandb"))
        assert len(found) == 1, f"{len(found)} W&B runs in {run_folder}, not one"
        self.folder = found[0].parent
        command = ["wandb", "leet", "inspect", "--json", str(found[0])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, f"W&B no longer reads its files by {command[:4]}: {done.stderr}"
        self.records = [json.loads(line) for line in done.stdout.splitlines()]

    def all(self, kind: str) -> list[dict[str, Any]]:
        return [record[kind] for record in self.records if record["type"] == kind]

    @property
    def id(self) -> str:
        return self.all("run")[0]["run_id"]

    @property
    def exit_code(self) -> int:
        return self.all("exit")[0].get("exit_code", 0)

    @property
    def config(self) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for one in [self.all("run")[0]["config"], *self.all("config")]:
            merged |= one["update"]
        return merged

    @property
    def summary(self) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for one in self.all("summary"):
            merged |= one.get("update", {})
        return merged

    def series(self, name: str) -> list[tuple[int, float]]:
        """(optimizer step, value)"""
        items = [one["item"] for one in self.all("history")]
        return [(item["trainer/global_step"], item[name]) for item in items if name in item]

    def tables(self, name: str) -> list[dict[str, Any]]:
        """Tables of that name, in the order in which they were logged."""
        paths = [item["item"][f"{name}.path"] for item in self.all("history") if f"{name}.path" in item["item"]]
        return [json.loads((self.folder / "files" / path).read_text()) for path in paths]

    def images(self, name: str) -> list[Path]:
        paths = [item["item"][f"{name}.path"] for item in self.all("history") if f"{name}.path" in item["item"]]
        return [self.folder / "files" / path for path in paths]

    def artifacts(self, kind: str) -> list[dict[str, Any]]:
        return [one for one in self.all("artifact") if one["type"] == kind]
