"""Scripts that skip bad steps themselves: they go on as they would, and what they skip is counted and said."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanproof import Policy
from nanproof.guard.left_out import FOLLOWS
from run.launch import different, guarded, is_finite, plain

HEAD = """
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(96, 4)
x[{row}] = {value}
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.1), torch.nn.Linear(4, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(x), batch_size=8)
"""
BEFORE_BACKWARD = """
for (batch,) in loader:
    output = model(batch)
    loss = (output.square() + torch.log(batch + 40)).mean()
    if not torch.isfinite(loss):
        continue
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
end = optimizer.state_dict(), model.state_dict(), torch.get_rng_state()
"""
IN_A_FUNCTION = """
def loss_of(batch):
    return (model(batch).square() + torch.log(batch + 40)).mean()

def train():
    for (batch,) in loader:
        loss = loss_of(batch)
        if loss.isnan():
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

train()
end = optimizer.state_dict(), model.state_dict(), torch.get_rng_state()
"""
ZEROED_IN_PLACE = """
for (batch,) in loader:
    loss = (model(batch).square() + torch.log(batch + 40)).mean()
    loss.backward()
    if all(bool(p.grad.isfinite().all()) for p in model.parameters()):
        optimizer.step()
    optimizer.zero_grad(set_to_none=False)
end = optimizer.state_dict(), model.state_dict(), torch.get_rng_state()
"""
FINITE_LOSS = """
for (batch,) in loader:
    optimizer.zero_grad()
    output = model(batch)
    output.sum().backward()
    if batch.max() > 1e3:
        model[0].weight.grad.fill_(float("nan"))
    if all(bool(p.grad.isfinite().all()) for p in model.parameters()):
        optimizer.step()
end = optimizer.state_dict(), model.state_dict(), torch.get_rng_state()
"""


@pytest.mark.parametrize(
    ("loop", "row", "value"),
    [
        (BEFORE_BACKWARD, "29, 1", 'float("nan")'),
        (BEFORE_BACKWARD, "29", "1e30"),
        (BEFORE_BACKWARD, "29, 1", "-50.0"),
        (IN_A_FUNCTION, "29, 1", "-50.0"),
        (ZEROED_IN_PLACE, "29, 1", 'float("nan")'),
        (FINITE_LOSS, "29, 1", "1e4"),
    ],
    ids=["input", "output", "loss", "function", "in-place", "gradient"],
)
def test_what_a_script_skips_itself_is_counted_and_named(
    loop: str, row: str, value: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if loop in (BEFORE_BACKWARD, IN_A_FUNCTION) and "nan" not in value and not FOLLOWS:
        pytest.skip("outputs and losses cannot be followed in this torch")
    source = HEAD.format(row=row, value=value) + loop
    ran, bare = guarded(tmp_path, source), plain(tmp_path, source)
    assert different(ran.main["end"], bare["end"]) == []
    (account,) = ran.outcome.guarded
    assert (account["steps"], account["updates"], account["discarded"]) == (11, 11, 1)
    assert "nothing went wrong" not in account["summary"]
    assert ran.incidents == []
    said = "the script left out a pass that was not finite: DataLoader batch 3 (dataset indices 24–31)"
    assert caplog.text.count(said) == 1


STATISTICS = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for i in range(40):
    x = torch.randn(4, 4)
    if i == 5:
        if {without}:
            continue
        x[0, 0] = float("nan")
    loss = model(x).square().mean()
    {skip}
end = model.state_dict()
"""
SKIPS = {
    "before backward": """
    if not loss.isfinite():
        continue
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    """,
    "after backward": """
    loss.backward()
    if torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
        optimizer.step()
    optimizer.zero_grad()
    """,
}


@pytest.mark.parametrize("skip", SKIPS)
def test_statistics_are_as_before_a_pass_that_the_script_leaves_out(skip: str, tmp_path: Path) -> None:
    """NaN in them would be found by the guard later, and cost all updates since its last snapshot."""
    bare = plain(tmp_path, STATISTICS.format(without=False, skip=SKIPS[skip].strip()))
    assert not is_finite(bare["end"])
    ran = guarded(
        tmp_path, STATISTICS.format(without=False, skip=SKIPS[skip].strip()), guard={"policy": Policy(snapshot_every=4)}
    )
    never_saw = plain(tmp_path, STATISTICS.format(without=True, skip=SKIPS[skip].strip()))
    assert different(ran.main["end"], never_saw["end"]) == []
    (account,) = ran.outcome.guarded
    assert account["updates"] == 39


def test_tensors_without_memory_do_not_end_the_guard(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """torch.compile leaves fake tensors in the heap, where losses are searched for."""
    fake = """
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    traced = torch.ones((), requires_grad=True) * 2
shapes = torch.ones((), requires_grad=True, device="meta") * 2
"""
    ran = guarded(tmp_path, HEAD.format(row="29, 1", value='float("nan")') + fake + BEFORE_BACKWARD)
    (account,) = ran.outcome.guarded
    assert (account["steps"], account["discarded"]) == (11, 1)
    assert "guard-failed" not in caplog.text


def test_calls_that_are_used_later_or_are_finite_are_not_counted(tmp_path: Path) -> None:
    """A generator's output waits while the discriminator steps; an evaluation with gradients is no step."""
    source = """
        import torch
        torch.manual_seed(0)
        nets = {k: torch.nn.Linear(4, 4) for k in "gd"}
        optimizers = {k: torch.optim.SGD(n.parameters(), lr=0.01) for k, n in nets.items()}
        generator, critic = nets["g"], nets["d"]
        for i in range(8):
            made = generator(torch.randn(8, 4) * (float("nan") if i == 4 else 1.0))
            optimizers["d"].zero_grad()
            (critic(torch.randn(8, 4)).mean() - critic(made.detach()).mean()).backward()
            optimizers["d"].step()
            optimizers["g"].zero_grad()
            critic(made).mean().backward()
            optimizers["g"].step()
            seen = [critic(torch.randn(8, 4)).sum() for _ in range(20)]
    """
    ran = guarded(tmp_path, source)
    (account,) = ran.outcome.guarded
    assert account["actions"]["skip"] == 2
    assert "discarded" not in account


SEVERAL_MODULES = """
import torch
torch.manual_seed(0)

class Head(torch.nn.Linear):
    def forward(self, h):
        return super().forward(torch.log(h))

encoder, head = torch.nn.Linear(4, 8), Head(8, 1)
optimizer = torch.optim.Adam([*encoder.parameters(), *head.parameters()], lr=1e-2)
for step in range(6):
    hidden = encoder(torch.randn(3, 4)).exp()
    optimizer.zero_grad()
    head(hidden * (step != 3)).square().mean().backward()
    optimizer.step()
"""


def test_of_several_modules_the_first_bad_call_is_located(tmp_path: Path) -> None:
    (incident,) = guarded(tmp_path, SEVERAL_MODULES).incidents
    place = incident["location"]
    assert "torch.log(h)" in SEVERAL_MODULES.splitlines()[place["line"] - 1]
    assert (place["op"], place["mechanism"]) == ("log", "pole")
