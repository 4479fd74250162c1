"""`nanproof lint` as a person, a CI job and an editor meet it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

pytestmark = pytest.mark.slow

UNSTABLE = """import torch


def loss(x, valid):
    first = -torch.log(torch.sigmoid(x)).mean()
    return first + (x * valid).sum() / valid.sum()
"""
SAFE = UNSTABLE.replace("torch.log(torch.sigmoid(x))", "torch.nn.functional.logsigmoid(x)")


def run(*arguments: str, cwd: Path, stdin: str | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nanproof", "lint", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=cwd,
        input=stdin,
        env={**os.environ, **env},
    )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "train.py").write_text(UNSTABLE)
    (tmp_path / "clean.py").write_text("import torch\n")
    return tmp_path


def test_findings_look_like_this(project: Path) -> None:
    done = run(".", cwd=project)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0].startswith("train.py:5:14: NP206 ")
    assert lines[1:6] == [
        "  |",
        "4 | def loss(x, valid):",
        "5 |     first = -torch.log(torch.sigmoid(x)).mean()",
        "  |              ^^^^^^^^^^^^^^^^^^^^^^^^^^^",
        "6 |     return first + (x * valid).sum() / valid.sum()",
    ]
    assert lines[6].startswith("  = help: ")
    assert lines[7] == "  = fix: safe, applied by --fix"
    assert lines[-1] == ("2 findings in 1 of 2 files, 1 with a safe fix (--fix), 1 with an unsafe fix (--unsafe-fixes)")


def test_clean_and_nothing(project: Path) -> None:
    done = run("clean.py", cwd=project)
    assert (done.returncode, done.stdout) == (0, "1 file linted, nothing found\n")
    (project / "empty").mkdir()
    done = run("empty", cwd=project)
    assert done.returncode == 0
    assert "no Python file and no notebook in empty" in done.stdout
    assert run("clean.py", "--quiet", cwd=project).stdout == ""


@pytest.mark.parametrize(
    ("arguments", "words", "hint"),
    [
        (["nowhere"], "nowhere does not exist", "name a file or a folder"),
        (["--select", "NP9", "."], "no rule is called 'NP9'", "did you mean"),
        (["-", "train.py"], "- stands for standard input and goes alone", "nanproof lint -"),
        (["--undo"], "there is nothing to undo", "run it where"),
        (["--fix", "--beside", "."], "--fix writes into the files, --beside next to them", "give one"),
        (["--json", "--format", "sarif", "."], "--json and --format sarif are two formats", "give one"),
    ],
)
def test_a_mistake_is_one_line_and_a_hint(project: Path, arguments: list[str], words: str, hint: str) -> None:
    done = run(*arguments, cwd=project)
    assert done.returncode == 2
    first, second = done.stderr.splitlines()
    assert first.startswith(f"error: {words}")
    assert second.startswith(f"  hint: {hint}")


def test_select_and_ignore(project: Path) -> None:
    assert "NP201" not in run(".", "--select", "NP206,NP301", cwd=project).stdout
    assert run(".", "--ignore", "NP2", cwd=project).returncode == 0


def test_json(project: Path) -> None:
    done = run(".", "--json", cwd=project)
    assert done.returncode == 1
    data = json.loads(done.stdout)
    assert data["files"] == 2
    assert [f["code"] for f in data["findings"]] == ["NP206", "NP201"]
    edit = data["findings"][0]["edits"][0]
    assert UNSTABLE[edit["start"] : edit["end"]] == "torch.log(torch.sigmoid(x))"
    assert run(".", "--format", "json", cwd=project).stdout == done.stdout


SARIF = {
    "type": "object",
    "required": ["version", "runs"],
    "properties": {
        "version": {"const": "2.1.0"},
        "runs": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["tool", "results"],
                "properties": {
                    "results": {
                        "type": "array",
                        "minItems": 2,
                        "items": {
                            "type": "object",
                            "required": ["ruleId", "ruleIndex", "message", "locations"],
                            "properties": {
                                "message": {"type": "object", "required": ["text"]},
                                "level": {"enum": ["none", "note", "warning", "error"]},
                                "ruleIndex": {"type": "integer", "minimum": 0},
                            },
                        },
                    }
                },
            },
        },
    },
}


def test_sarif(project: Path) -> None:
    data = json.loads(run(".", "--format", "sarif", cwd=project).stdout)
    jsonschema.validate(data, SARIF)
    ran = data["runs"][0]
    rules = ran["tool"]["driver"]["rules"]
    for result in ran["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        place = result["locations"][0]["physicalLocation"]
        assert place["artifactLocation"]["uri"] == "train.py"
        assert place["region"]["startLine"] in (5, 6)
    change = ran["results"][0]["fixes"][0]["artifactChanges"][0]["replacements"][0]
    start = change["deletedRegion"]["byteOffset"]
    assert UNSTABLE[start : start + change["deletedRegion"]["byteLength"]] == "torch.log(torch.sigmoid(x))"


def test_github(project: Path) -> None:
    done = run(".", "--format", "github", cwd=project)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("::error file=train.py,line=5,col=14,title=NP206::")
    assert len(lines) == 2


def test_the_diff_is_a_patch(project: Path) -> None:
    done = run(".", "--diff", cwd=project)
    assert done.returncode == 1
    assert (project / "train.py").read_text() == UNSTABLE
    subprocess.run(["patch", "-p1"], input=done.stdout, text=True, cwd=project, check=True, stdout=subprocess.DEVNULL)
    assert (project / "train.py").read_text() == SAFE
    assert "clamp(min=1)" in run(".", "--diff", "--unsafe-fixes", cwd=project).stdout


def test_fix_verify_undo(project: Path) -> None:
    done = run(".", "--fix", cwd=project)
    assert done.returncode == 1  # the unsafe one is left
    assert (project / "train.py").read_text() == SAFE
    assert "verified train.py:5: NP206 applied, finding gone, compiles" in done.stdout
    assert "undo: nanproof lint --undo 0001" in done.stdout
    done = run(".", "--unsafe-fixes", cwd=project)
    assert done.returncode == 0
    again = run(".", "--unsafe-fixes", cwd=project)
    assert "no fix to apply" in again.stdout
    assert run("--undo", cwd=project).stdout == f"restored {project / 'train.py'}\n"
    assert (project / "train.py").read_text() == SAFE
    (project / "train.py").write_text(SAFE + "# mine\n")
    done = run("--undo", "0001", cwd=project)
    assert done.returncode == 2
    assert "train.py was edited since lint --fix changed it; nothing was undone" in done.stderr
    (project / "train.py").write_text(SAFE)
    assert run("--undo", "0001", cwd=project).returncode == 0
    assert (project / "train.py").read_text() == UNSTABLE


def test_fixes_as_json(project: Path) -> None:
    data = json.loads(run(".", "--fix", "--json", cwd=project).stdout)
    assert [f["code"] for f in data["findings"]] == ["NP201"]
    [repair] = data["repairs"]
    assert (repair["applied"], repair["gone"], repair["compiles"]) == (True, True, True)
    assert data["application"]["id"] == "0001"


def test_beside(project: Path) -> None:
    done = run("train.py", "--beside", "--unsafe-fixes", cwd=project)
    assert done.returncode == 0
    assert "wrote train_stable.py" in done.stdout
    assert (project / "train.py").read_text() == UNSTABLE
    assert run("train_stable.py", cwd=project).returncode == 0
    assert "removed" in run("--undo", cwd=project).stdout
    assert not (project / "train_stable.py").exists()


def test_standard_input(project: Path) -> None:
    done = run("-", cwd=project, stdin=UNSTABLE)
    assert done.returncode == 1
    assert done.stdout.startswith("<stdin>:5:14: NP206")
    assert run("-", "--fix", cwd=project, stdin=UNSTABLE).stdout == SAFE
    assert run("-", "--fix", cwd=project, stdin="x = 1\n").stdout == "x = 1\n"
    assert "+++ b/<stdin>" in run("-", "--diff", cwd=project, stdin=UNSTABLE).stdout


def test_the_journal_stays_with_a_file_outside_of_here(project: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    target = str(project / "train.py")
    done = run(target, "--fix", cwd=elsewhere)
    assert f"undo: nanproof lint --undo 0001 {target}" in done.stdout
    assert not (elsewhere / ".nanproof").exists()
    assert run("--undo", "0001", target, cwd=elsewhere).returncode == 0
    assert (project / "train.py").read_text() == UNSTABLE


def test_a_killed_fix_is_taken_back_by_the_next_run(project: Path) -> None:
    (project / "other.py").write_text(UNSTABLE)
    done = run(".", "--fix", cwd=project, NANPROOF_FAULT="rename:7:kill")
    assert done.returncode == -signal.SIGKILL
    texts = [(project / name).read_text() for name in ("other.py", "train.py")]
    assert texts == [SAFE, UNSTABLE]
    done = run("clean.py", cwd=project)
    assert done.stderr == "lint --fix (0001) was killed half-way: its changes were taken back\n"
    texts = [(project / name).read_text() for name in ("other.py", "train.py")]
    assert texts == [UNSTABLE, UNSTABLE]


def test_a_read_only_tree_is_refused(project: Path) -> None:
    (project / "train.py").chmod(0o444)
    done = run(".", "--fix", cwd=project)
    assert done.returncode == 2
    assert "train.py is read-only; nothing was changed" in done.stderr
    assert (project / "train.py").read_text() == UNSTABLE


def test_control_characters_do_not_reach_the_terminal(project: Path) -> None:
    (project / "train.py").write_text("import torch\n\ty = torch.log(torch.sigmoid('\x1b[31m'))\n".replace("\t", ""))
    assert "\x1b" not in run("train.py", cwd=project).stdout


def test_it_does_not_import_torch(project: Path) -> None:
    code = (
        "import sys; sys.argv = ['nanproof', 'lint', 'train.py', '--diff']\n"
        "try: from nanproof.cli import main; main()\nexcept SystemExit as e: assert e.code == 1\n"
        "loaded = {'torch', 'numpy', 'transformers'} & set(sys.modules); assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600, cwd=project, stdout=subprocess.DEVNULL)
