"""What commands print with --json follows the schemas in docs/schemas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from nanproof.cli.shell import nanproof
from support.forked import run_python

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SCHEMAS = ROOT / "docs" / "schemas"
TRAIN = """
import torch

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for scale in (1.0, float("nan"), 1.0):
    optimizer.zero_grad()
    (model(torch.ones(2, 4)).square().mean() * scale).backward()
    optimizer.step()

def make():
    return model, lambda: model(torch.ones(2, 4)).square().mean(), optimizer
"""
PLAN = "stages: [{name: one, command: python steps.py, steps: 30}]\n"
STEPS = "import json\nfor s in range(1, 31):\n    print(json.dumps({'step': s, 'loss': 8 * 0.9**s}))\n"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which every command has something to say."""
    folder = tmp_path_factory.mktemp("project")
    lines = [f'{{"step": {s}, "loss": {"NaN" if s > 40 else 2.0}, "lr": 0.001}}' for s in range(60)]
    (folder / "log.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "other.jsonl").write_text("\n".join(lines[:40]) + "\n")
    (folder / "train.py").write_text(TRAIN)
    (folder / "bad.py").write_text("import torch\nloss = torch.log(torch.softmax(x, -1)).mean()\nloss.backward()\n")
    (folder / "config.yaml").write_text("lr: 0.1\nfp16: true\n")
    (folder / "plan.yaml").write_text(PLAN)
    (folder / "steps.py").write_text(STEPS)
    (folder / "data.jsonl").write_text('{"x": 1.0, "label": 0}\n{"x": NaN, "label": 1}\n')
    torch.save({"weight": torch.ones(2, 2)}, folder / "step_1.pt")
    torch.save({"weight": torch.full((2, 2), float("nan"))}, folder / "step_2.pt")
    return folder


@pytest.fixture(scope="module")
def run(project: Path) -> Any:
    done = run_python("-m", "nanproof", "run", "--json", "--run-dir", "runs/a", "train.py", cwd=project, apart=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check(verb: str, printed: Any) -> None:
    schema = json.loads((SCHEMAS / f"{verb}.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(printed)


@pytest.mark.parametrize(
    "words",
    [
        "",
        "case",
        "diagnose log.jsonl",
        "diagnose . --before-resume step_1.pt",
        "diagnose --data data.jsonl",
        "explain NP204",
        "explain bad-data",
        "explain fp16",
        "explain",
        "harden config.yaml --set lr=0.01 --diff",
        "lint bad.py",
        "lint bad.py --statistics",
        "lint bad.py --diff",
        "lint train.py",
        "report log.jsonl -o report.md",
        "report log.jsonl other.jsonl -o report.md",
        "rollout plan.yaml --check",
        "rollout plan.yaml",
        "scan .",
        "scan step_2.pt",
        "smoke train.py:make",
        "watch --once log.jsonl",
    ],
)
def test_output_follows_its_schema(
    words: str, project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    with pytest.raises(SystemExit) as end:
        nanproof.main(args=[*words.split(), "--json"], prog_name="nanproof")
    assert end.value.code in (0, 1)
    check(words.partition(" ")[0] or "nanproof", json.loads(capsys.readouterr().out))


def test_a_guarded_run_and_its_incident_follow_theirs(
    run: Any, project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check("run", run)
    assert run["attached"] is True
    monkeypatch.chdir(project)
    with pytest.raises(SystemExit):
        nanproof.main(args=["locate", "runs/a", "--json"], prog_name="nanproof")
    check("locate", json.loads(capsys.readouterr().out))


def test_every_command_has_a_schema_and_something_else_is_refused() -> None:
    verbs = set(nanproof.list_commands(None))  # type: ignore[arg-type]
    assert {p.stem for p in SCHEMAS.glob("*.json")} == verbs | {"nanproof"}
    for verb in verbs:
        with pytest.raises(jsonschema.ValidationError):
            check(verb, {"nothing": "of the kind"})
