"""Rules, causes, log formats and integrations from another package: the one that CONTRIBUTING.md shows, installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import sessions  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as pip would unpack it, and a trainer library for its integration."""
    source, site = tmp_path_factory.mktemp("acme"), tmp_path_factory.mktemp("site")
    for name, content in sessions.FILE.findall((ROOT / "CONTRIBUTING.md").read_text()):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(content)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "dist"]
    subprocess.run(build, cwd=source, check=True, capture_output=True, timeout=600)
    (wheel,) = (source / "dist").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    (site / "acme_trainer.py").write_text("class Trainer:\n    def __init__(self):\n        self.callbacks = []\n")
    return site


def nanproof(site: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "nanproof", *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600, check=False)


def test_a_rule_is_found_explained_and_applied(site: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\nimport acme\n\nloss = acme.ratio_loss(torch.ones(1), y)\n")
    done = nanproof(site, tmp_path, "lint", "train.py", "--no-cache")
    assert "train.py:4:8: NP901 ratio_loss without eps divides by zero" in done.stdout, done.stderr
    assert "ratio-loss-without-eps" in nanproof(site, tmp_path, "explain", "NP901").stdout


def test_another_version_of_a_rule_is_asked_again(site: Path, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "train.py").write_text("import torch\nimport acme\n\nloss = acme.other_loss(torch.ones(1), y)\n")
    assert nanproof(site, tmp_path, "lint").returncode == 0
    (module,) = (p for p in site.rglob("*.py") if "ratio_loss" in p.read_text())
    old = module.read_text()
    module.write_text(old.replace('"ratio_loss"', '"other_loss"'))
    try:
        assert "NP901" in nanproof(site, tmp_path, "lint").stdout
    finally:
        module.write_text(old)


def test_a_cause_is_weighed_with_the_others(site: Path, tmp_path: Path) -> None:
    done = nanproof(site, tmp_path, "diagnose", "--fact", "only-with-padding=yes", "--json")
    assert "acme-packer" in [cause["name"] for cause in json.loads(done.stdout)["causes"]]


def test_a_log_format_is_read(site: Path, tmp_path: Path) -> None:
    lines = [f"<<acme {step} of 9>> loss {'nan' if step > 4 else 2.0}\n" for step in range(1, 10)]
    (tmp_path / "run.log").write_text("".join(lines))
    (state,) = json.loads(nanproof(site, tmp_path, "watch", "--once", "run.log", "--json").stdout)
    assert (state["step"], state["max_steps"], state["state"]["since"]) == (9, 9, 5)


def test_an_integration_is_attached_when_its_library_is_imported(site: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\nfrom acme_trainer import Trainer\nprint(Trainer().callbacks)\n")
    done = nanproof(site, tmp_path, "run", "--run-dir", "runs/a", "train.py")
    assert "the callback that tells the guard about steps" in done.stdout, done.stderr


def test_a_plugin_that_cannot_be_loaded_is_named(site: Path, tmp_path: Path) -> None:
    broken = tmp_path / "site"
    (broken / "bad-1.0.dist-info").mkdir(parents=True)
    (broken / "bad-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: bad\nVersion: 1.0\n")
    (broken / "bad-1.0.dist-info" / "entry_points.txt").write_text("[nanproof.rules]\nx = no_such_module:RULE\n")
    done = nanproof(broken, tmp_path, "lint", ".")
    assert done.returncode == 2
    assert "error: plug-in x of bad cannot be loaded: No module named 'no_such_module'" in done.stderr
    assert "hint: repair bad, or: pip uninstall bad" in done.stderr
