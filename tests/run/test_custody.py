"""Saves under `nanproof run`: a training state that is not finite is not written, everything else is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from run.launch import Ran, guarded, is_finite

TRAINED = """
import sys
import torch
from torch import nn
folder = sys.argv[1]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
def train(n=3):
    for _ in range(n):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
def poison():
    model[1].running_var[1] = float("nan")
train()
"""


def run(tmp_path: Path, source: str, **options: Any) -> Ran:
    return guarded(tmp_path, TRAINED + source, str(tmp_path), **options)


def test_a_poisoned_save_leaves_the_good_file(tmp_path: Path) -> None:
    ran = run(
        tmp_path,
        """
path = folder + "/a.pt"
torch.save({"net": model.state_dict(), "opt": optimizer.state_dict()}, path)
poison()
torch.save({"net": model.state_dict(), "opt": optimizer.state_dict()}, path)
""",
    )
    assert is_finite(torch.load(tmp_path / "a.pt"))
    (said,) = ran.outcome.guarded[0]["blocked"]
    assert "a.pt: 1.running_var [4] float32: 1 NaN of 4" in said
    assert [line["event"] for line in ran.log if "event" in line] == ["save-blocked"]


@pytest.mark.parametrize(
    "save",
    [
        "torch.save(model, path)",
        "torch.save(f=path, obj=model.state_dict())",
        "torch.save([{'m': {'module.' + k: v for k, v in model.state_dict().items()}}], path)",
        "optimizer.state[model[0].weight]['exp_avg'][0] = float('inf'); torch.save(optimizer.state_dict(), path)",
        "from safetensors.torch import save_file; save_file(model.state_dict(), path)",
        "from safetensors.torch import save_model; save_model(model, path)",
    ],
)
def test_every_way_to_save_is_watched(save: str, tmp_path: Path) -> None:
    run(tmp_path, f"\npath = folder + '/a.pt'\npoison()\n{save}\n")
    assert not (tmp_path / "a.pt").exists()


def test_the_same_saves_work_while_the_state_is_good(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
from safetensors.torch import save_file, save_model
torch.save(model, folder + "/1")
torch.save(obj=optimizer.state_dict(), f=folder + "/2")
save_file(model.state_dict(), folder + "/3")
save_model(model, folder + "/4")
""",
    )
    assert all((tmp_path / str(i)).stat().st_size for i in (1, 2, 3, 4))


def test_what_is_no_training_state_may_hold_anything(tmp_path: Path) -> None:
    run(tmp_path, "\npoison()\ntorch.save({'features': torch.full((3,), float('nan'))}, folder + '/cache.pt')\n")
    assert torch.load(tmp_path / "cache.pt")["features"].isnan().all()


def test_masks_of_infinities_are_saved(tmp_path: Path) -> None:
    mask = "nn.BatchNorm1d(4))\nmodel.register_buffer('m', torch.tensor(-1e999))"
    source = TRAINED.replace("nn.BatchNorm1d(4))", mask)
    ran = guarded(tmp_path, source + "\ntorch.save(model.state_dict(), folder + '/a.pt')\n", str(tmp_path))
    assert torch.load(tmp_path / "a.pt")["m"] == float("-inf")
    assert "not_saved" not in ran.outcome.guarded[0]


def test_an_open_file_is_not_left_empty_in_silence(tmp_path: Path) -> None:
    """The usual way to save atomically would put the empty file in the place of the good one."""
    ran = run(
        tmp_path,
        """
import os
torch.save(model.state_dict(), folder + "/a.pt")
poison()
try:
    with open(folder + "/new", "wb") as file:
        torch.save(model.state_dict(), file)
    os.replace(folder + "/new", folder + "/a.pt")
except ArithmeticError as error:
    said = str(error)
""",
    )
    assert ran.main["said"].startswith("refused to save into an open file: 1.running_var")
    assert is_finite(torch.load(tmp_path / "a.pt"))


def test_after_a_blocked_save_the_state_is_healed(tmp_path: Path) -> None:
    ran = run(tmp_path, "\npoison()\ntorch.save(model.state_dict(), folder + '/a.pt')\ntrain()\n")
    assert is_finite(ran.main["model"].state_dict())
    (incident,) = ran.incidents
    assert (incident["verdict"]["level"], incident["action"]["kind"]) == ("buffer", "rollback")


def test_observing_blocks_nothing(tmp_path: Path) -> None:
    run(tmp_path, "\npoison()\ntorch.save(model.state_dict(), folder + '/a.pt')\n", policy="observe")
    assert not is_finite(torch.load(tmp_path / "a.pt"))


def test_a_whole_model_in_a_file_needs_nothing_of_ours(tmp_path: Path) -> None:
    run(tmp_path, "\ntorch.save(model, folder + '/a.pt')\ntrain()\ntorch.save(model, folder + '/b.pt')\n")
    assert b"nanproof" not in (tmp_path / "b.pt").read_bytes()
    model = torch.load(tmp_path / "b.pt", weights_only=False)
    assert model(torch.ones(2, 4)).shape == (2, 4)


def test_a_copy_of_a_guarded_model_is_not_guarded(tmp_path: Path) -> None:
    ran = run(
        tmp_path,
        """
import copy, pickle
from torch.optim.swa_utils import AveragedModel
average, twin, thawed = AveragedModel(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))
twin(torch.full((2, 4), float("nan")))
thawed(torch.ones(2, 4))
average.update_parameters(model)
train()
""",
    )
    assert ran.outcome.exit_code == 0
    assert ran.incidents == []
