from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_lit.target.frozen import EMBEDDED, resolve_path

# ChatML, by whose marks the server finds where a turn of a Qwen model begins; here they are ordinary text.
TEMPLATE = """{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content }}
{%- if message.role == 'assistant' -%}<|endoftext|>{%- endif -%}{{ '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{%- if shout is defined and shout -%}{{ 'def main():\\n    return [1, 2, 3]\\n' }}{%- endif -%}{{ '<|im_start|>assistant\\n' }}
{%- endif -%}"""


@pytest.fixture(scope="session")
def chat_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded target with a chat template: that of most chat models."""
    folder = tmp_path_factory.mktemp("chat") / "target"
    shutil.copytree(resolve_path(EMBEDDED), folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def served_target(chat_target: Path) -> Iterator[tuple[str, Path]]:
    """A ``transformers serve`` of it: address and folder, which is the model's name there."""
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    log = chat_target.parent / "log"
    options = ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "transformers.cli.transformers", "serve", str(chat_target), *options],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )
    try:
        until = time.monotonic() + 120
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    break
            except OSError:
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < until, log.read_text()
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1", chat_target
    finally:
        process.kill()
        process.wait()
