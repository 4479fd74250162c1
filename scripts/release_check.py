"""Is this tree ready to be released? Builds wheel and sdist and looks at them; ``make release-check`` runs it.

Checked: versions agree (pyproject, package, changelog, wheel, sdist), metadata is complete, the README renders and its
links lead into the sdist, the wheel installs into an empty environment and works without torch.
"""

from __future__ import annotations

import email
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIGHT = "import sys, nanproof; assert 'torch' not in sys.modules; print(nanproof.__version__)"


def run(*words: str, cwd: Path = ROOT) -> str:
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise AssertionError(f"{' '.join(words)}: {done.stderr[-1000:] or done.stdout[-1000:]}")
    return done.stdout


class Release:
    """A built release, and the checks on it: each returns what it saw, or raises AssertionError with what is wrong."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        self.version: str = self.project["version"]
        run(sys.executable, "-m", "hatchling", "build", "-d", str(folder))
        (self.wheel,) = folder.glob("*.whl")
        (self.sdist,) = folder.glob("*.tar.gz")
        archive = zipfile.ZipFile(self.wheel)
        self.names = set(archive.namelist())
        (metadata,) = (n for n in self.names if n.endswith(".dist-info/METADATA"))
        self.metadata = email.message_from_string(archive.read(metadata).decode())
        with tarfile.open(self.sdist) as packed:
            self.packed = {n.partition("/")[2] for n in packed.getnames()}

    def versions(self) -> str:
        own = re.search(r'__version__ = "([^"]+)"', (ROOT / "src" / "nanproof" / "__init__.py").read_text())
        if own is not None:
            assert own[1] == self.version, f"__version__ is {own[1]}, pyproject says {self.version}"
        first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
        assert first is not None, "CHANGELOG.md has no section"
        assert first[1].strip("[]").lower() in (self.version, "unreleased"), f"CHANGELOG.md begins with {first[1]}"
        for built in (self.wheel.name, self.sdist.name, self.metadata["Version"]):
            assert self.version in built, f"{built} is not {self.version}"
        return self.version

    def contents(self) -> str:
        tracked = set(run("git", "ls-files", "src/nanproof").split())
        missing = {t for t in tracked if t.removeprefix("src/") not in self.names}
        assert not missing, f"not in the wheel: {sorted(missing)[:5]}"
        extra = {n for n in self.names if not n.startswith("nanproof") or "__pycache__" in n}
        assert not extra, f"in the wheel: {sorted(extra)[:5]}"
        assert {"README.md", "LICENSE", "pyproject.toml"} <= self.packed, "the sdist lacks README, LICENSE or pyproject"
        return f"{len(self.names)} files in the wheel, {len(self.packed)} in the sdist"

    def described(self) -> str:
        for key in ("Name", "Summary", "License-Expression", "Requires-Python", "Keywords", "Classifier"):
            assert self.metadata[key], f"metadata has no {key}"
        assert self.metadata["Description-Content-Type"] == "text/markdown"
        assert any("entry_points.txt" in n for n in self.names), "no console script"
        return f"{len(self.metadata.get_all('Provides-Extra') or [])} extras"

    def readme(self) -> str:
        from markdown_it import MarkdownIt

        text = (ROOT / "README.md").read_text()
        assert self.metadata.get_payload().strip() == text.strip(), "the README in the wheel is another one"
        page = MarkdownIt("commonmark").enable("table").render(text)
        assert page.count("<h1>") == 1, "one title is expected"
        assert page.count("<table>") == len(re.findall(r"^\|[-| ]+\|$", text, re.M)), "a table is not rendered"
        broken = [t for t in re.findall(r'(?:href|src)="([^"#]+)', page) if "://" not in t and t not in self.packed]
        assert not broken, f"not in the sdist: {broken}"
        return f"{len(text.splitlines())} lines"

    def works(self) -> str:
        home = self.folder / "env"
        venv.create(home, with_pip=False, symlinks=True)
        python = str(home / "bin" / "python")
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check"]
        run(*pip, "-c", str(ROOT / "constraints.txt"), str(self.wheel))
        assert run(python, "-c", LIGHT, cwd=self.folder).strip() == self.version, "another version is imported"
        assert self.version in run(str(home / "bin" / "nanproof"), "--version", cwd=self.folder)
        run(str(home / "bin" / "nanproof"), "explain", "NP204", cwd=self.folder)
        return "imported and run without torch"


def main() -> int:
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        release = Release(Path(folder))
        checks: tuple[Callable[[], str], ...] = (
            release.versions,
            release.contents,
            release.described,
            release.readme,
            release.works,
        )
        for check in checks:
            try:
                print(f"ok      {check.__name__:<10} {check()}")
            except AssertionError as error:
                failed += 1
                print(f"FAILED  {check.__name__:<10} {error}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
