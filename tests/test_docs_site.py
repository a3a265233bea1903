"""The site builds, and no link of it or of the README leads nowhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A copy of what the site is made of."""
    pytest.importorskip("material", reason="the extra [docs] is not installed")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    return tmp_path


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]  # with --quiet it would count no warnings
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=120, check=False)


def test_the_site_builds_and_has_every_page(site: Path) -> None:
    done = build(site)
    assert done.returncode == 0, done.stderr
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    made = {path.parent.name for path in (site / "site").glob("*/index.html")} | {"index"}
    assert pages <= made
    sources = re.findall(
        r'(?:src|href)="(https?://[^"]+\.(?:js|css)|https?://fonts[^"]*)"', (site / "site/index.html").read_text()
    )
    assert sources == []  # nothing is loaded from elsewhere


@pytest.mark.parametrize("broken", ["[x](nowhere.md)", "[x](glossary.md#nothing)", "![x](nowhere.png)"])
def test_a_link_that_leads_nowhere_is_an_error(site: Path, broken: str) -> None:
    with (site / "docs" / "glossary.md").open("a") as page:
        page.write(f"\n{broken}\n")
    assert build(site).returncode != 0


def test_a_page_outside_the_navigation_is_an_error(site: Path) -> None:
    (site / "docs" / "forgotten.md").write_text("# Forgotten\n")
    assert build(site).returncode != 0


def test_the_links_of_the_readme_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    inside = [link for link in links if not link.startswith("http")]
    assert len(inside) > 5
    assert [link for link in inside if not (ROOT / link).exists()] == []


def test_the_glossary_is_in_order_and_has_the_words_of_the_progress_line() -> None:
    words = re.findall(r"^\| \*\*(.+?)\*\* \|", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert words == sorted(words, key=str.lower)
    known = {part for word in words for part in word.split(", ")}
    assert {"chain EAL", "tree EAL@budget", "tau", "Ktok/s", "wait share"} <= known
