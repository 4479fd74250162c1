"""What of a program can be changed from outside, and how."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from nanproof.cure.change import Change, Edit, edited
from nanproof.cure.command import Command, read_command
from nanproof.cure.evidence import Evidence
from nanproof.cure.kinds import propose
from nanproof.cure.kinds.precision import pairs
from nanproof.cure.remedy import apply, remedy_of
from nanproof.cure.scratch import fingerprint, make_scratch
from nanproof.cure.surface import Surface, read_surface
from nanproof.errors import UsageError
from nanproof.journal import undo


def surface(folder: Path, script: str, *words: str, config: str = "") -> Surface:
    (folder / "train.py").write_text(script)
    if config:
        (folder / "config.yaml").write_text(config)
    return read_surface(read_command(["python", "train.py", *words]), folder)


def change(found: Surface, name: str, evidence: Evidence | None = None) -> Change:
    by_name = {c.name: c for c in propose(evidence or Evidence(), found)}
    assert name in by_name, list(by_name)
    return by_name[name]


def changed(found: Surface, name: str, tmp_path: Path, evidence: Evidence | None = None) -> tuple[Command, Path]:
    """The command and the folder of a trial of one candidate."""
    place = make_scratch(found.folder, tmp_path / "scratch", found.command, change(found, name, evidence).edits)
    return place.command, place.folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    return folder


ARGPARSE = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--learning-rate", type=float, default=0.1)
parser.add_argument("--fp16", action="store_true")
parser.add_argument("--seed", type=int, default=3)
parser.add_argument("--max-steps", type=int, default=500)
"""


def test_flags(project: Path, tmp_path: Path) -> None:
    found = surface(project, ARGPARSE, "--fp16")
    assert changed(found, "lr/5", tmp_path)[0].arguments == ("--fp16", "--learning-rate", "0.02")
    assert changed(found, "fp16=false", tmp_path)[0].arguments == ()
    assert found.schedule() == 500
    seed = found.seed(7)
    assert seed is not None
    assert (seed.route, seed.name, seed.text) == ("flag", "--seed", "7")


def test_a_config_file_is_changed_in_the_copy_only(project: Path, tmp_path: Path) -> None:
    script = "import yaml\nconfig = yaml.safe_load(open('config.yaml'))\n"
    text = "optimizer:\n  lr: 0.1  # peak\n  eps: 1.0e-10\n"
    found = surface(project, script, config=text)
    _, folder = changed(found, "lr/10", tmp_path)
    assert (folder / "config.yaml").read_text() == text.replace("0.1  #", "0.01  #")
    assert (project / "config.yaml").read_text() == text
    assert "eps=1e-06" in {c.name for c in propose(Evidence(), found)}


def test_words_environment_and_code(project: Path, tmp_path: Path) -> None:
    hydra = "import hydra\n@hydra.main(config_path='.', config_name='config')\ndef main(cfg): ...\n"
    found = surface(project, hydra, "--config-name", "config", config="optim:\n  lr: 0.1\n")
    assert changed(found, "lr/2", tmp_path)[0].arguments[-1] == "optim.lr=0.05"
    (project / "config.yaml").unlink()
    found = surface(project, "import os\nlr = float(os.environ.get('LR', '0.4'))\n")
    [edit] = change(found, "lr/2").edits
    assert (edit.route, edit.name, edit.text) == ("variable", "LR", "0.2")
    found = surface(project, "import torch\nopt = torch.optim.SGD(params, lr=0.5)\ntorch.manual_seed(0)\n")
    _, folder = changed(found, "lr/5", tmp_path)
    assert "lr=0.1)" in (folder / "train.py").read_text()
    assert "lr=0.5)" in (project / "train.py").read_text()
    seed = found.seed(4)
    assert seed is not None
    assert b"manual_seed(4)" in edited((project / "train.py").read_bytes(), [seed])


HALF = """
import torch
model = Net().half()
with torch.autocast("cuda", dtype=torch.float16):
    out = model(x)
"""


def test_formats_in_code_alone_and_in_pairs(project: Path, tmp_path: Path) -> None:
    found = surface(project, HALF)
    singles = propose(Evidence(), found)
    names = {c.name for c in pairs(singles)}
    assert names == {f"weights {a} + autocast {b}" for a in ("bfloat16", "float32") for b in ("bfloat16", "float32")}
    _, folder = changed(found, "autocast float32", tmp_path)
    assert "dtype=torch.float16, enabled=False" in (folder / "train.py").read_text()
    both = next(c for c in pairs(singles) if c.name == "weights float32 + autocast bfloat16")
    text = edited((project / "train.py").read_bytes(), list(both.edits))
    assert b"Net().float()" in text
    assert b"dtype=torch.bfloat16)" in text


def test_a_broken_sample_is_left_out(project: Path, tmp_path: Path) -> None:
    script = "from torch.utils.data import DataLoader\nloader = DataLoader(data, batch_size=4)\n"
    evidence = Evidence(step=3, samples=(17,), bad_batch=True)
    _, folder = changed(surface(project, script), "without sample 17", tmp_path, evidence)
    assert "Subset(data, [i for i in range(len(data)) if i not in {17}])" in (folder / "train.py").read_text()


def test_attention_scores_at_the_located_line(project: Path, tmp_path: Path) -> None:
    script = "def score(q, k):\n    return q @ k.transpose(-1, -2)\n"
    found = surface(project, script)
    place = {"mechanism": "range-overflow", "file": str(project / "train.py"), "line": 2}
    _, folder = changed(found, "scores/√d at line 2", tmp_path, Evidence(step=1, location=place))
    assert "(q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)" in (folder / "train.py").read_text()


def test_results_of_other_runs_stay_behind(project: Path, tmp_path: Path) -> None:
    found = surface(project, "print()\n", "--data", "data/a.csv", "--out", str(project / "runs" / "a"))
    for name in ("runs/a/log.txt", "data/a.csv", ".git/config", "pkg/__init__.py"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("x")
    place = make_scratch(project, project / "cures" / "t" / "project", found.command, ())
    assert sorted(p.name for p in place.folder.iterdir()) == ["data", "pkg", "train.py"]
    assert place.command.arguments[-1] == str(place.folder / "runs" / "a")


def test_changes_of_the_same_thing_exclude_each_other() -> None:
    def of(name: str, start: int, end: int) -> Change:
        return Change(
            name=name, kind="code", why="", size=1, edits=(Edit(route="file", name="a.py", start=start, end=end),)
        )

    assert not of("a", 0, 5).fits(of("b", 4, 8))
    assert of("a", 0, 5).fits(of("b", 5, 8))


def test_a_cure_is_applied_to_the_config_and_taken_back(project: Path) -> None:
    text = "optim:\n  lr: 0.1  # peak\n"
    hydra = "import hydra\n@hydra.main(config_path='.', config_name='config')\ndef main(cfg): ...\n"
    found = surface(project, hydra, "--config-name", "config", config=text)
    cure = change(found, "lr/10")
    assert remedy_of(cure, found).command == "python train.py --config-name config optim.lr=0.01"
    assert apply(cure, found) == ((project / "config.yaml").resolve(),)
    assert (project / "config.yaml").read_text() == "optim:\n  lr: 0.01  # peak\n"
    assert undo(project) == ((project / "config.yaml").resolve(),)
    assert (project / "config.yaml").read_text() == text


def test_a_file_that_was_edited_during_the_search_is_left_alone(project: Path) -> None:
    hydra = "import hydra\n@hydra.main(config_path='.', config_name='config')\ndef main(cfg): ...\n"
    found = surface(project, hydra, "--config-name", "config", config="optim:\n  lr: 0.1\n")
    (project / "config.yaml").write_text("optim:\n  lr: 0.2  # mine\n")
    with pytest.raises(UsageError, match=r"config\.yaml was edited since it was read; nothing was written"):
        apply(change(found, "lr/10"), found)
    assert (project / "config.yaml").read_text() == "optim:\n  lr: 0.2  # mine\n"


def test_what_lives_on_the_command_line_is_not_applied_to_files(project: Path) -> None:
    found = surface(project, ARGPARSE)
    with pytest.raises(UsageError, match="is no change of a file") as told:
        apply(change(found, "lr/10"), found)
    assert told.value.hint == "run: python train.py --learning-rate 0.01"


def test_a_search_is_that_of_one_state_of_the_code(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("lr = 1\n")
    (tmp_path / "runs").mkdir()
    before = fingerprint(tmp_path)
    (tmp_path / "runs" / "settings.yaml").write_text("lr: 3")
    (tmp_path / "config_cured.yaml").write_text("lr: 3")
    (tmp_path / "weights.bin").write_bytes(b"123")
    assert fingerprint(tmp_path) == before
    (tmp_path / "train.py").write_text("lr = 2\n")
    assert fingerprint(tmp_path) != before


@pytest.mark.parametrize(
    ("cast", "proposed"), [(".half()", ["Adam eps=0.003", "Adam eps=0.01"]), ("", ["Adam eps=0.0001"])]
)
def test_the_eps_of_adam_fits_the_weights(project: Path, cast: str, proposed: list[str]) -> None:
    """With float16 weights 1e-4 is finite, and makes updates far longer than the learning rate."""
    script = f"import torch\nmodel = torch.nn.Linear(2, 2){cast}\nopt = torch.optim.Adam(model.parameters(), lr=1e-3)\n"
    found = surface(project, script)
    assert [c.name for c in propose(Evidence(), found) if c.name.startswith("Adam")] == proposed
    remedy = remedy_of(change(found, proposed[0]), found)
    assert f"lr=1e-3, {proposed[0].removeprefix('Adam ')})" in remedy.diff


HYDRA = """
import hydra
import torch

DTYPES = {"fp16": torch.float16, "fp32": torch.float32}

@hydra.main(version_base=None, config_path="settings", config_name="base")
def main(cfg):
    torch.manual_seed(cfg.seed)
    torch.optim.SGD([], lr=cfg.optim.lr)
"""


def test_the_config_of_a_hydra_program_is_found_by_its_decorator(project: Path, tmp_path: Path) -> None:
    (project / "settings" / "optim").mkdir(parents=True)
    (project / "settings" / "base.yaml").write_text(
        "defaults:\n  - optim: sgd\n  - _self_\nseed: 7\nprecision: fp16\nmax_steps: 90\n"
    )
    (project / "settings" / "optim" / "sgd.yaml").write_text("lr: 0.4\n")
    found = surface(project, HYDRA)
    assert found.schedule() == 90
    assert changed(found, "lr/2", tmp_path)[0].arguments == ("optim.lr=0.2",)
    assert changed(found, "precision=fp32", tmp_path)[0].arguments == ("precision=fp32",)
    seed = found.seed(1)
    assert seed is not None
    assert (seed.route, seed.name, seed.text) == ("word", "seed", "1")


def test_a_small_number_on_the_command_line_is_no_word_of_yaml(project: Path, tmp_path: Path) -> None:
    (project / "config.yaml").write_text("lr: 3.0e-3\n")
    script = "import sys, yaml, omegaconf\nyaml.safe_load(open('config.yaml'))\nomegaconf.OmegaConf.from_cli()\n"
    (word,) = changed(surface(project, script), "lr/100", tmp_path)[0].arguments
    assert yaml.safe_load(word.partition("=")[2]) == 3e-5


def test_the_rates_of_parameter_groups_are_lowered_together(project: Path, tmp_path: Path) -> None:
    script = 'import torch\ntorch.optim.Adam([{"params": a, "lr": 1e-3}, {"params": [b], "lr": 2.0}])\n'
    _, folder = changed(surface(project, script), "lr/10", tmp_path)
    assert '{"params": a, "lr": 0.0001}, {"params": [b], "lr": 0.2}' in (folder / "train.py").read_text()


@pytest.mark.parametrize(
    ("script", "route", "name"),
    [
        ("import lightning as L\nL.seed_everything(3)\n", "file", "train.py"),
        ("from transformers import HfArgumentParser\nHfArgumentParser(())\n", "flag", "--seed"),
    ],
)
def test_seeds_of_trainers(project: Path, script: str, route: str, name: str) -> None:
    edit = surface(project, script).seed(11)
    assert edit is not None
    assert (edit.route, Path(edit.name).name, edit.text) == (route, name, "11")


def seen(project: Path, op: str, line: int, mechanism: str = "pole") -> Evidence:
    """What a trial in a scratch copy has recorded, seen from the project."""
    scratch = project.parent / "runs" / "original" / "project"
    place = {"op": op, "mechanism": mechanism, "file": str(scratch / "train.py"), "line": line}
    found = Evidence(step=3, location=place).seen_from(scratch, project)
    assert found.file == str(project / "train.py")
    return found


LOGS = """
import torch

def nll(mean, var, y):
    return (torch.log(var) + (y - mean) ** 2 / (2 * var) + y / 2).mean()

class Lit:
    def training_step(self, x):
        self.log("loss", x)
        return (x / 2).log()

loss = nll(*model(x), y)
loss.backward()
"""


@pytest.mark.parametrize(
    ("line", "mechanism", "wanted"),
    [
        (5, "pole", ["torch.log((var + 1e-6)) + (y - mean) ** 2 / (2 * (var + 1e-6)) + y / 2", "(x / 2).log()"]),
        (10, "invalid", ["torch.log(var)", "((x / 2).clamp_min(1e-6)).log()"]),
        (13, "pole", ["torch.log((var + 1e-6))", "(((x / 2) + 1e-6)).log()"]),  # of backward: it could be any
    ],
)
def test_a_floor_where_the_located_operation_met_zero(
    project: Path, tmp_path: Path, line: int, mechanism: str, wanted: list[str]
) -> None:
    found = surface(project, LOGS)
    _, folder = changed(found, "floor under log", tmp_path, seen(project, "log", line, mechanism))
    text = (folder / "train.py").read_text()
    compile(text, "train.py", "exec")
    assert 'self.log("loss", x)' in text
    for part in wanted:
        assert part in text, text


def test_no_floor_under_what_has_not_met_zero(project: Path) -> None:
    found = surface(project, LOGS)
    for op, mechanism in (("log", "range-overflow"), ("mul", "pole")):
        assert not [c for c in propose(seen(project, op, 5, mechanism), found) if c.name.startswith("floor")]
