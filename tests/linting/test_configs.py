"""Configs that `nanproof lint` meets: found, silenced, repaired and undone like code."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanproof import journal
from nanproof.linting import lint
from nanproof.linting.inspection import Inspection

CONFIG = "# größe\ntrain:\n  lr: 1e-4\n  epochs: 3\n  grad_clip: 1.0\n"
TRAIN = """import torch, yaml

cfg = yaml.safe_load(open("config.yaml"))["train"]
opt = torch.optim.Adam(model.parameters(), lr=cfg["lr"])
for epoch in range(cfg["epochs"]):
    step(cfg["grad_clip"])
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "data.json").write_text("[" + "1," * 1_000_000 + "1]")
    (tmp_path / "workflow.yml").write_text("on: push\njobs:\n  test: {runs-on: ubuntu}\n")
    return tmp_path


def test_configs_are_checked_with_the_code_around_them(project: Path) -> None:
    [found] = lint(project)
    assert (found.code, found.line, found.column) == ("NP708", 3, 7)
    assert found.safe
    assert lint(project / "config.yaml") == ()  # alone, nothing shows that anybody computes with it


def test_only_files_about_training_count(project: Path) -> None:
    assert [f.name for f in Inspection([project]).files] == ["train.py", "config.yaml"]


def test_a_key_that_the_code_converts_is_fine(project: Path) -> None:
    (project / "train.py").write_text(TRAIN.replace('lr=cfg["lr"]', 'lr=float(cfg["lr"])'))
    assert lint(project) == ()


@pytest.mark.parametrize(
    "silence",
    [
        lambda p: (p / "config.yaml").write_text(CONFIG.replace("1e-4", "1e-4  # noqa: NP708")),
        lambda p: (p / "config.yaml").write_text(CONFIG.replace("  lr", "  # nanproof: ignore[NP708]\n  lr")),
        lambda p: (p / "pyproject.toml").write_text("[tool.nanproof.lint]\nignore = ['NP7']\n"),
        lambda p: (p / "pyproject.toml").write_text("[tool.nanproof.lint]\nexclude = ['*.yaml']\n"),
        lambda p: (p / "pyproject.toml").write_text(
            "[tool.nanproof.lint.per-file-ignores]\n'config.yaml' = ['yaml-float-is-a-string']\n"
        ),
    ],
)
def test_findings_in_configs_are_silenced_alike(project: Path, silence: object) -> None:
    assert callable(silence)
    silence(project)
    assert lint(project) == ()


def test_select(project: Path) -> None:
    assert len(lint(project, select=["NP708"])) == 1
    assert lint(project, select=["NP2"]) == ()


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_config_is_repaired_verified_and_restored(project: Path, newline: str) -> None:
    text = CONFIG.replace("\n", newline).encode()
    (project / "config.yaml").write_bytes(text)
    run = Inspection([project])
    fixed = [f for _, f in run.fix(unsafe=False) if f is not None]
    outcome = run.apply(fixed, why="lint --fix")
    assert [(r.applied, r.gone, r.compiles) for r in outcome.repairs] == [(True, True, True)]
    assert (project / "config.yaml").read_bytes() == text.replace(b"1e-4", b"1.0e-4")
    journal.undo(project)
    assert (project / "config.yaml").read_bytes() == text


def test_a_copy_beside(project: Path) -> None:
    run = Inspection([project])
    outcome = run.apply_beside([f for _, f in run.fix(unsafe=False) if f is not None])
    assert all(r.verified for r in outcome.repairs)
    assert (project / "config.yaml").read_text() == CONFIG
    assert "1.0e-4" in (project / "config_stable.yaml").read_text()


@pytest.mark.parametrize("text", ["train: [lr: 1e-4", "lr: &a *a", "lr: !!python/object:os.system 1", "\x00lr: 1"])
def test_a_broken_config_does_not_stop_the_run(project: Path, text: str) -> None:
    (project / "config.yaml").write_text(text)
    lint(project)


def test_a_string_that_nobody_computes_with_is_left_alone(project: Path) -> None:
    (project / "train.py").write_text(TRAIN.replace("torch.optim.Adam(model.parameters(), lr=", "build(rate="))
    assert [f.code for f in lint(project)] == []
