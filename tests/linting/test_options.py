"""The options that users of other linters expect: baseline, noqa, statistics, ignore files, output, notebooks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from nanproof.linting.gitignore import compile_lines, decide

pytestmark = pytest.mark.slow

UNSTABLE = """import torch


def loss(x, valid):
    first = -torch.log(torch.sigmoid(x)).mean()
    return first + (x * valid).sum() / valid.sum()
"""


def run(*arguments: str, cwd: Path, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nanproof", "lint", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=cwd,
        input=stdin,
    )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "train.py").write_text(UNSTABLE)
    return tmp_path


def test_without_a_path_the_current_folder_is_linted(project: Path) -> None:
    done = run("--quiet", cwd=project)
    assert done.returncode == 1
    assert [line.split(":")[0] for line in done.stdout.splitlines()[:2]] == ["train.py", "train.py"]


def test_statistics_and_exit_zero(project: Path) -> None:
    done = run("--statistics", "--exit-zero", cwd=project)
    assert done.returncode == 0
    assert done.stdout.split() == ["1", "NP206", "[*]", "log-of-probability", "1", "NP201", "masked-mean-empty"]
    assert {r["code"] for r in json.loads(run("--statistics", "--json", cwd=project).stdout)["statistics"]} == {
        "NP201",
        "NP206",
    }


def test_an_output_file(project: Path) -> None:
    done = run("--format", "sarif", "--output-file", "out.sarif", cwd=project)
    assert done.returncode == 1
    assert len(json.loads((project / "out.sarif").read_text())["runs"][0]["results"]) == 2
    assert done.stdout == "wrote out.sarif\n"


def test_a_baseline_leaves_out_what_was_there(project: Path) -> None:
    assert run("--baseline", "b.json", "--write-baseline", cwd=project).returncode == 0
    assert run("--baseline", "b.json", cwd=project).returncode == 0
    text = "# a line above\n" + UNSTABLE + "\n\ndef new_loss(x):\n    return x.sigmoid().log().mean()\n"
    (project / "train.py").write_text(text)
    done = run("--baseline", "b.json", "--quiet", cwd=project)
    assert done.returncode == 1
    assert [line.split(" ")[0] for line in done.stdout.splitlines()[:1]] == ["train.py:11:12:"]
    for broken in ("no", "[]"):
        (project / "b.json").write_text(broken)
        done = run("--baseline", "b.json", cwd=project)
        assert done.returncode == 2
        assert "is not a baseline" in done.stderr
    assert run("--write-baseline", cwd=project).returncode == 2
    assert run("--baseline", "gone.json", cwd=project).returncode == 2


def test_noqa_comments_are_added_once_and_taken_back(project: Path) -> None:
    long = UNSTABLE.replace(
        "(x * valid).sum() / valid.sum()", "(\n        x * valid\n    ).sum() / valid.sum()  # noqa: E501"
    )
    (project / "train.py").write_text(long)
    assert run("--add-noqa", cwd=project).returncode == 0
    text = (project / "train.py").read_text()
    assert "# noqa: NP206" in text
    compile(text, "train.py", "exec")
    done = run(cwd=project)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "1 file linted, nothing found")
    assert run("--undo", cwd=project).returncode == 0
    assert (project / "train.py").read_text() == long


def test_exclude_and_gitignore(project: Path) -> None:
    (project / ".git").mkdir()
    for name in ("build/a.py", "pkg/b.py", "pkg/keep_gen.py", "pkg/c_gen.py"):
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text(UNSTABLE)
    (project / ".gitignore").write_text("build/\n*_gen.py\n!keep_gen.py\n")

    def files(*options: str) -> set[str]:
        found = json.loads(run("--json", *options, cwd=project).stdout)["findings"]
        return {f["path"] for f in found}

    assert files() == {"train.py", "pkg/b.py", "pkg/keep_gen.py"}
    assert files("--exclude", "pkg") == {"train.py"}
    assert files("--no-gitignore") == {"train.py", "build/a.py", "pkg/b.py", "pkg/c_gen.py", "pkg/keep_gen.py"}
    assert files("build") == {"build/a.py"}


@pytest.mark.parametrize(
    ("pattern", "path", "folder", "expected"),
    [
        ("/data", "data", True, True),
        ("/data", "a/data", True, None),
        ("a/**/b", "a/x/y/b", False, True),
        ("*.py", "a/b.py", False, True),
        ("a/*.py", "a/b/c.py", False, None),
        ("x[0-9].py", "x3.py", False, True),
        ("out/", "out", False, None),
        ("out/", "a/out", True, True),
        ("\\#x", "#x", False, True),
        ("a?", "ab", False, True),
    ],
)
def test_patterns_of_gitignore(pattern: str, path: str, folder: bool, expected: bool | None) -> None:
    assert decide(compile_lines([pattern]), path, folder) is expected


def test_standard_input_with_a_name(project: Path) -> None:
    settings = '[tool.nanproof.lint.per-file-ignores]\n"train.py" = ["NP201"]\n'
    (project / "pyproject.toml").write_text(settings)
    done = run("--stdin-filename", "train.py", "--quiet", cwd=project, stdin=UNSTABLE)
    assert done.stdout.splitlines()[0].startswith("train.py:5:14: NP206")
    assert "NP201" not in done.stdout


@pytest.mark.parametrize("indent", [None, 1])
def test_the_line_of_a_finding_in_a_notebook_is_a_line_of_the_file(tmp_path: Path, indent: int | None) -> None:
    cells = [
        {"cell_type": "markdown", "metadata": {}, "source": ["# a title\n", "text"]},
        {
            "cell_type": "code",
            "metadata": {},
            "outputs": [],
            "execution_count": 1,
            "source": ["import torch\n", "y = torch.log(torch.sigmoid(x))"],
        },
    ]
    book = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    text = json.dumps(book, indent=indent)
    (tmp_path / "a.ipynb").write_text(text)
    wanted = next(n for n, line in enumerate(text.splitlines(), 1) if "torch.sigmoid" in line)
    [finding] = json.loads(run("a.ipynb", "--json", cwd=tmp_path).stdout)["findings"]
    assert (finding["path"], finding["cell"], finding["line"], finding["file_line"]) == ("a.ipynb", 2, 2, wanted)
    line = text.splitlines()[wanted - 1]
    assert line[finding["file_column"] - 1 :].startswith("torch.log")
    assert f"file=a.ipynb,line={wanted}," in run("a.ipynb", "--format", "github", cwd=tmp_path).stdout
    sarif = json.loads(run("a.ipynb", "--format", "sarif", cwd=tmp_path).stdout)
    [result] = sarif["runs"][0]["results"]
    assert result["locations"][0]["physicalLocation"]["region"]["startLine"] == wanted


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_wide_encodings_are_errors(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.py").write_bytes(UNSTABLE.encode(encoding))
    done = run("a.py", "--quiet", cwd=tmp_path)
    assert done.returncode == 1
    assert "NP001 not linted: it is UTF-16 or UTF-32 text" in done.stdout


def test_the_hook_and_the_action_name_what_exists(project: Path) -> None:
    root = Path(__file__).parents[2]
    for hook in yaml.safe_load((root / ".pre-commit-hooks.yaml").read_text()):
        words = [*hook["entry"].split(), *hook["args"]]
        assert not hook["pass_filenames"]
        done = run(*words[2:], cwd=project)
        assert done.returncode in (0, 1)
        assert done.stderr == ""
    action = yaml.safe_load((root / "action.yml").read_text())
    assert action["runs"]["using"] == "composite"
    [step] = [s for s in action["runs"]["steps"] if s.get("id") == "lint"]
    script = step["run"].replace("nanproof lint", f"{sys.executable} -m nanproof lint")
    env = {"LINT_PATH": ".", "LINT_ARGS": "", "GITHUB_OUTPUT": str(project / "out"), "PATH": "/usr/bin:/bin"}
    (project / "train.py").write_text(UNSTABLE)
    done = subprocess.run(["bash", "-e", "-c", script], cwd=project, env=env, timeout=600, check=False)
    assert done.returncode == 0
    assert (project / "out").read_text() == "status=1\n"
    assert json.loads((project / "nanproof.sarif").read_text())["version"] == "2.1.0"


def test_the_cache_reads_clean_files_once_and_forgets_them_when_anything_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nanproof.linting.engine import Linter
    from nanproof.linting.inspection import Inspection

    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "good.py").write_text("import torch\nx = torch.ones(3)\n")
    (tmp_path / "bad.py").write_text("import torch\n\ndef loss(x):\n    return torch.log(torch.sigmoid(x)).mean()\n")
    read: list[str] = []
    one = Linter.file
    monkeypatch.setattr(Linter, "file", lambda self, path: (read.append(path.name), one(self, path))[1])

    def codes() -> list[str]:
        read.clear()
        return [p.finding.code for c in Inspection([tmp_path], cache=True).lint() for p in c.problems]

    assert codes() == ["NP206"]
    assert sorted(read) == ["bad.py", "good.py"]
    assert codes() == ["NP206"]
    assert read == ["bad.py"]
    (tmp_path / "good.py").write_text("import torch\n\ndef loss(x):\n    return torch.log(torch.sigmoid(x)).sum()\n")
    assert codes() == ["NP206", "NP206"]
    (tmp_path / ".nanproof/cache/lint.json").write_text('{"key": 3, "clean": [')
    assert codes() == ["NP206", "NP206"]
    (tmp_path / "pyproject.toml").unlink()
    assert codes() == ["NP206", "NP206"]
