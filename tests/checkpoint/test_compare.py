"""Against a reference checkpoint, and against a config file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint import writers
from nanproof.checkpoint import scan
from nanproof.checkpoint.against import Comparison, compare
from nanproof.checkpoint.config import differences
from nanproof.checkpoint.layout import discover
from nanproof.config import load
from nanproof.errors import FormatError, UsageError


def compared(new: Any, old: Any, folder: Path) -> Comparison:
    torch.save(new, folder / "new.pt")
    torch.save(old, folder / "old.pt")
    return compare(discover([folder / "new.pt"])[0], discover([folder / "old.pt"])[0])


def test_keys_shapes_and_movement(tmp_path: Path) -> None:
    a, b = torch.randn(20, 30), torch.randn(8)
    old = {"a": a, "b": b, "gone": b, "grew": torch.zeros(2, 3), "half": a.half(), "same": b.clone()}
    new = {"a": a * 1.5, "b": b + 1e-3, "more": b, "grew": torch.zeros(3, 3), "half": (a * 2).half(), "same": b.clone()}
    found = compared(new, old, tmp_path)
    assert (found.missing, found.unexpected) == (("gone",), ("more",))
    assert found.reshaped == ("grew [2, 3] → [3, 3]",)
    moved = {c.name: c.relative for c in found.changes}
    assert moved["a"] == pytest.approx(0.5, rel=1e-5)
    assert moved["half"] == pytest.approx(1.0, rel=1e-3)
    assert moved["b"] == pytest.approx(float(((b + 1e-3).double() - b.double()).norm() / b.double().norm()), rel=1e-6)
    assert found.stuck == ("same",)
    assert not found.ok


def test_what_should_have_moved(tmp_path: Path) -> None:
    old = writers.training_state(1)
    new = writers.training_state(5)
    assert compared(new, old, tmp_path).ok
    new["model"]["4.weight"] = old["model"]["4.weight"]
    found = compared(new, old, tmp_path)
    assert (found.stuck, found.should_move, found.ok) == (("model.4.weight",), True, False)
    frozen = compared(
        {"a": torch.ones(3), "lora": torch.ones(3)}, {"a": torch.ones(3), "lora": torch.zeros(3)}, tmp_path
    )
    assert (frozen.stuck, frozen.should_move, frozen.ok) == (("a",), False, True)
    assert not compared(old, old, tmp_path).ok  # nothing moved at all


def settings_of(path: Path, **group: Any) -> Any:
    state = writers.training_state()
    state["optimizer"]["param_groups"][0].update(group)
    torch.save({k: v for k, v in state.items() if k != "scheduler"}, path)
    return scan(path).settings


def test_the_rate_that_would_be_restored(tmp_path: Path) -> None:
    """System D: the config says 1e-4, the checkpoint's scheduler brings 4.92e-4 back."""
    settings = settings_of(tmp_path / "a.pt", lr=4.92e-4, initial_lr=4.92e-4, max_lr=4.92e-4, betas=(0.9, 0.999))
    config = tmp_path / "c.yaml"
    config.write_text("optimizer:\n  lr: 1e-4\n  betas: [0.9, 0.95]\n  eps: 1e-8\nwarmup_steps: 100\n")
    found = [str(d) for d in differences(settings, load(config).numbers())]
    assert found == [
        "checkpoint will restore lr 0.000492, config says 0.0001 (optimizer.lr)",
        "checkpoint will restore beta2 0.999, config says 0.95 (optimizer.betas.1)",
    ]
    config.write_text("train: {learning_rate: 4.92e-4, adam_epsilon: 1.0e-6}")
    found = [str(d) for d in differences(settings, load(config).numbers())]
    assert found == ["checkpoint will restore eps 1e-08, config says 1e-06 (train.adam_epsilon)"]


def test_betas_and_warm_up(tmp_path: Path) -> None:
    state = {
        "optimizer": {"param_groups": [{"lr": 1.0, "betas": (0.9, 0.999)}]},
        "scheduler": {"base_lrs": [1.0], "warmup_steps": 10},
    }
    torch.save(state | {"w": torch.randn(2)}, tmp_path / "a.pt")
    (tmp_path / "c.json").write_text('{"lr": 1, "optim": {"betas": [0.9, 0.95]}, "scheduler": {"warmup_steps": 2000}}')
    found = differences(scan(tmp_path / "a.pt").settings, load(tmp_path / "c.json").numbers())
    assert {d.setting: (d.checkpoint, d.config) for d in found} == {"beta2": (0.999, 0.95), "warm-up": (10, 2000)}


BOMB = "a0: &a0 [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("laughs.yaml", BOMB, "unfolds to too many values"),
        ("deep.yaml", "[" * 5000, "nested"),
        ("deep.json", "[" * 100_000, "not JSON"),
        ("list.yaml", "- 1\n- 2\n", "not a mapping"),
        ("text.yml", "hello", "not a mapping"),
        ("bad.yaml", "a: [1", "not YAML"),
        ("tag.yaml", "a: !!python/object/apply:os.system [ls]", "not YAML"),
        ("bad.json", "{", "not JSON"),
        ("self.yaml", "a: &a [*a]", "too many values"),
    ],
)
def test_hostile_configs_get_a_sentence(name: str, text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(FormatError, match=words):
        load(tmp_path / name)


def test_a_config_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        load(tmp_path / "none.yaml")
