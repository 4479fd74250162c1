"""``nanproof harden`` as a user meets it: what it prints, and with which code it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from nanproof.cli.shell import nanproof


def run(*arguments: object) -> Result:
    return CliRunner().invoke(nanproof, ["harden", *map(str, arguments)])


def lines(result: Result) -> list[str]:
    return [" ".join(line.split()) for line in result.output.splitlines()]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text("optimizer: adamw\nlr: 1.0e-4  # peak\nwarmup_steps: 100\nmax_grad_norm: 1.0\n")
    return Path("c.yaml")


def test_the_table_of_changes(config: Path) -> None:
    result = run(config, "--conservative", "--set", "max_grad_norm=0.5")
    assert result.exit_code == 0
    assert lines(result) == [
        "setting before after why",
        "max_grad_norm 1 0.5 asked for",
        "low value: under Adam a lower limit scales all gradients alike, and Adam divides the scale",
        "out again",
        "lr 0.0001 5e-05 --conservative: 0.5 times the rate",
        "warmup_steps 100 200 --conservative: twice the warm-up",
        "left alone accumulation: this config has no key for it, and no reader is known that takes one",
        "left alone checkpoints: this config does not say how often they are written",
        "wrote c_stable.yaml",
        "take it back: nanproof harden c.yaml --undo",
    ]
    assert "lr: 5.0e-5  # peak\n" in Path("c_stable.yaml").read_text()


def test_nothing_to_do(config: Path) -> None:
    result = run(config)
    assert result.exit_code == 0
    assert result.output.startswith("nothing to change: nothing here has evidence against it; --conservative")
    assert not Path("c_stable.yaml").exists()


def test_diff_exits_1(config: Path) -> None:
    result = run(config, "--set", "lr=5e-5", "--diff")
    assert result.exit_code == 1
    assert lines(result)[:2] == ["--- c.yaml", "+++ c_stable.yaml"]
    assert "+lr: 5.0e-5  # peak" in result.output
    assert not Path("c_stable.yaml").exists()
    assert run(config, "--diff").exit_code == 0


def test_in_place_and_back(config: Path) -> None:
    before = config.read_bytes()
    assert run(config, "--set", "lr=5e-5", "--apply").exit_code == 0
    assert b"5.0e-5" in config.read_bytes()
    assert lines(run("./c.yaml", "--undo"))[-1].endswith("c.yaml")
    assert config.read_bytes() == before


def test_out(config: Path) -> None:
    assert "wrote safe.yaml" in run(config, "--set", "lr=5e-5", "-o", "safe.yaml").output
    assert "5.0e-5" in Path("safe.yaml").read_text()


def test_json_for_machines(config: Path) -> None:
    result = run(config, "--set", "lr=5e-5", "--json", "--fact", "gpu=A100")
    data = json.loads(result.stdout, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert data["written"] == "c_stable.yaml"
    [change] = data["changes"]
    assert (change["key"], change["before"], change["after"], change["why"]) == ("lr", 1e-4, 5e-5, "asked for")
    assert data["diff"].startswith("--- c.yaml")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.yaml"], "none.yaml cannot be read"),
        (["c.yaml", "--set", "lr"], "'lr' is not a change of a setting"),
        (["c.yaml", "--fact", "gpu"], "'gpu' is not a fact"),
        (["c.yaml", "--fact", "mood=bad"], "mood is not a fact that hardening knows"),
        (["c.yaml", "--apply", "-o", "x.yaml", "--set", "lr=1"], "give one of them"),
        (["c.yaml", "--undo"], "no hardening of c.yaml is left to undo"),
        (["c.yaml", "--set", "lr=1,2"], "gives several values"),
        (["."], "is a folder"),
    ],
)
def test_wrong_usage(config: Path, words: list[str], message: str) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_control_characters_do_not_reach_the_terminal(config: Path) -> None:
    config.write_text('optimizer: adamw\nlr: 1.0e-4\n"\\e[31mwarmup_steps": 3\n')
    result = run(config, "--set", "lr=5e-5", "--diff")
    assert "\x1b" not in result.output
