"""Documentation that cannot drift: its Python runs, its links lead somewhere, its generated parts are current."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import sessions  # noqa: E402 - the script that writes them is the one that checks them
import words  # noqa: E402

from nanproof import Guard, Policy  # noqa: E402
from nanproof.guard.options import Records, Watch  # noqa: E402
from support.forked import run_python  # noqa: E402

pytestmark = pytest.mark.slow

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def blocks(page: Path) -> list[str]:
    """The Python of a page; sessions with >>> run as doctests, files that a page shows run in its sessions."""
    text = sessions.FILE.sub("", page.read_text())
    found = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    return [b for b in found if not b.startswith(">>>")]


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.name)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text("\n".join(["import warnings; warnings.simplefilter('error', UserWarning)", *blocks(page)]))
    if "lightning" in script.read_text():  # its loader's workers do not start in a forked process
        done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    else:
        done = run_python(str(script), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert missing == []


def keywords(text: str, name: str) -> set[str]:
    """What a text passes to ``name(…)`` by keyword, calls within its arguments left out."""
    found = set()
    for call in re.finditer(rf"\b{name}\(", text):
        depth, inside = 1, ""
        for char in text[call.end() :]:
            depth += (char in "([{") - (char in ")]}")
            if depth == 0:
                break
            inside += char if depth == 1 else ""
        found |= set(re.findall(r"(\w+)\s*=(?!=)", inside))
    return found


def test_keywords_of_a_call_are_those_of_the_call_itself() -> None:
    assert keywords("`Guard(model, run_dir='a', policy=Policy(rerun=False))` and b=2", "Guard") == {"run_dir", "policy"}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_arguments_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    for made in (Guard, Policy, Watch, Records):
        assert keywords(text, made.__name__) <= set(inspect.signature(made).parameters), made.__name__


@pytest.mark.parametrize(
    "page",
    [p for p in sessions.pages() if p.name != "README.md" and not sessions.is_slow(p)],  # README: tests/test_wheel.py
    ids=lambda p: p.name,
)
def test_sessions_show_what_the_commands_print(page: Path, tmp_path: Path) -> None:
    assert sessions.difference(page, tmp_path) == "", "Next: make docs, read the difference, commit it"


def test_a_session_that_shows_something_else_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- session -->\n```text\n$ echo loss 1.25 at step 7\nloss 1.31 at step 8\n```\n")
    (tmp_path / "empty").mkdir()
    assert "+loss 0.0 at step 7" in sessions.difference(page, tmp_path / "empty")


def test_words_that_are_not_used_are_found_with_what_to_write_instead() -> None:
    assert words.found_in("fine\nthe colour at hand") == [
        (2, "at hand", "available, current, or nothing"),
        (2, "colour", "color, colored"),
    ]
    assert words.found_in("normalize the color; uninitialised-params, `normalise`") == []


def test_the_navigation_of_the_site_leads_to_pages() -> None:
    def pages_in(nav: object) -> list[str]:
        if isinstance(nav, dict):
            nav = list(nav.values())
        return [nav] if isinstance(nav, str) else [p for part in nav for p in pages_in(part)]  # type: ignore[attr-defined]

    class Loader(yaml.SafeLoader):
        """Reads mkdocs.yml without making the Python objects that it names."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    shown = pages_in(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"])
    assert [p for p in shown if not ((ROOT / "docs" / p).exists() or (ROOT / p).exists())] == []


def test_the_readme_is_short_and_shows_what_was_measured() -> None:
    readme, peers = (ROOT / "README.md").read_text(), (ROOT / "docs" / "peers.md").read_text()
    assert len(readme.splitlines()) <= 150
    measured = peers.split("<!-- remedies: begin -->")[1].split("<!-- remedies: end -->")[0]
    rows = [line for line in measured.splitlines() if line.startswith("|")]
    assert len(rows) > 6
    assert [row for row in rows if row not in readme] == []
