"""Loops of every shape under `nanproof run`, unmodified: a bad step never happened."""

from __future__ import annotations

import gc
import multiprocessing.process
import os
import sys
import textwrap
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nanproof.logs import read
from nanproof.run.handover import hand_over
from nanproof.run.options import Options
from nanproof.run.session import Session
from nanproof.watch.state import trailing
from run.launch import Ran, different, guarded, incidents, is_finite, plain

HEAD = """
import random, sys, warnings
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BAD, WITHOUT = 7, "--without" in sys.argv
torch.manual_seed(0); random.seed(0); np.random.seed(0)
torch.set_num_threads(1)
x = torch.randn(96, 8)
y = x.sum(1, keepdim=True)
bad = x.clone()
bad[8 * BAD + 5, 3] = float("nan")
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
mse = nn.functional.mse_loss

def batches():
    for i in range(12):
        if not (WITHOUT and i == BAD):
            yield i, bad[8 * i : 8 * i + 8], y[8 * i : 8 * i + 8]

def state(*others):
    return [model.state_dict(), *(o.state_dict() for o in others), torch.get_rng_state(), random.getstate(),
            np.random.get_state()[1].tolist(), np.random.get_state()[2]]
"""

LOOPS = {
    "no clipping": """
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for i, a, b in batches():
            optimizer.zero_grad()
            mse(model(a), b).backward()
            optimizer.step()
        end = state(optimizer)
    """,
    "clipping by value, zeroed in place": """
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        for i, a, b in batches():
            mse(model(a), b).backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        end = state(optimizer)
    """,
    "a closure": """
        optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
        for i, a, b in batches():
            def closure():
                optimizer.zero_grad()
                loss = mse(model(a), b)
                loss.backward()
                return loss
            optimizer.step(closure)
        end = state(optimizer)
    """,
    "an optimizer that counts its own steps": """
        class Counting(torch.optim.Optimizer):
            def __init__(self, params):
                super().__init__(params, {"lr": 1e-2, "k": 0})
            @torch.no_grad()
            def step(self, closure=None):
                for group in self.param_groups:
                    group["k"] += 1
                    for p in group["params"]:
                        if p.grad is not None:
                            p.sub_(p.grad, alpha=group["lr"] / group["k"])
        optimizer = Counting(model.parameters())
        for i, a, b in batches():
            optimizer.zero_grad()
            mse(model(a), b).backward()
            optimizer.step()
        end = state(optimizer)
    """,
    "two optimizers that step together": """
        first = torch.optim.AdamW(model[0].parameters(), lr=1e-2)
        rest = torch.optim.SGD([*model[1].parameters(), *model[4].parameters()], lr=1e-2, momentum=0.9)
        for i, a, b in batches():
            for o in (first, rest):
                o.zero_grad()
            mse(model(a.nan_to_num()), b).backward()
            if i == BAD:
                model[4].bias.grad[0] = float("inf")  # only the second one has it
            first.step()
            rest.step()
        end = state(first, rest)
    """,
    "schedules in a row, and one by plateau": """
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        warnings.filterwarnings("ignore", "The epoch parameter in")  # up to torch 2.8, of SequentialLR itself
        s = torch.optim.lr_scheduler
        ramp = s.SequentialLR(optimizer, [s.LinearLR(optimizer, 0.1, 1.0, 4), s.CosineAnnealingLR(optimizer, 8)], [4])
        plateau = s.ReduceLROnPlateau(optimizer, patience=0)
        losses = []
        for i, a, b in batches():
            optimizer.zero_grad()
            loss = mse(model(a), b)
            loss.backward()
            optimizer.step()
            ramp.step()
            if i in (5, 11):
                plateau.step(1.0)
        end = state(optimizer, plateau) + [ramp.last_epoch, ramp.get_last_lr()]
    """,
    "a step per epoch, whose last batch is bad": """
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        steps = {i: (a, b) for i, a, b in batches()}
        for i in range(12):
            if i in steps:
                optimizer.zero_grad()
                mse(model(steps[i][0]), steps[i][1]).backward()
                optimizer.step()
            if i in (BAD, 11):
                scheduler.step()
        end = state(optimizer, scheduler)
    """,
    "accumulation from a loader": """
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for i, (a, b) in enumerate(DataLoader(TensorDataset(bad, y), batch_size=8)):
            if WITHOUT and i // 4 == 1:
                continue
            (mse(model(a), b) / 4).backward()
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
        end = state(optimizer)
    """,
    "a shuffled loader with workers": """
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for epoch in range(2):
            for a, b in DataLoader(TensorDataset(bad, y), batch_size=8, shuffle=True, num_workers=2):
                if WITHOUT and a.isnan().any():
                    continue
                optimizer.zero_grad()
                mse(model(a), b).backward()
                optimizer.step()
        end = state(optimizer)
    """,
    "a step that takes something else than a closure": """
        class Sized(torch.optim.SGD):
            def step(self, size, *, closure=None, factor=1):
                for group in self.param_groups:
                    group["lr"] = factor / size
                super().step()
        optimizer = Sized(model.parameters(), lr=1e-2)
        for i, a, b in batches():
            optimizer.zero_grad()
            mse(model(a), b).backward()
            optimizer.step(len(a) * 100, factor=2)
        end = state(optimizer)
    """,
    "a scaler": """
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
        for i, a, b in batches():
            optimizer.zero_grad()
            scaler.scale(mse(model(a), b)).backward()
            scaler.step(optimizer)
            scaler.update()
        end = state(optimizer, scaler)
    """,
    "activation checkpointing": """
        from torch.utils.checkpoint import checkpoint
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        class Wrapped(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = model
            def forward(self, a):
                return checkpoint(self.inner, a.requires_grad_(), use_reentrant=True)
        whole = Wrapped()
        for i, a, b in batches():
            optimizer.zero_grad()
            mse(whole(a.clone()), b).backward()
            optimizer.step()
        end = state(optimizer)
    """,
    "parts of the model are called, not the model": """
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for i, a, b in batches():
            optimizer.zero_grad()
            h = torch.relu(model[1](model[0](a)))
            mse(model[4](model[3](h)), b).backward()
            optimizer.step()
        end = state(optimizer)
    """,
    "plain tensors": """
        w = torch.zeros(8, 1, requires_grad=True)
        optimizer = torch.optim.Adam([w], lr=1e-2)
        for i, a, b in batches():
            optimizer.zero_grad()
            mse(a @ w, b).backward()
            optimizer.step()
        end = [w.detach().clone(), optimizer.state_dict()]
    """,
    "gradients without a loss": """
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for i, a, b in batches():
            grads = torch.autograd.grad(mse(model(a), b), list(model.parameters()))
            for p, g in zip(model.parameters(), grads):
                p.grad = g
            optimizer.step()
        end = state(optimizer)
    """,
    "steps inside the backward pass": """
        each = {p: torch.optim.AdamW([p], lr=1e-2) for p in model.parameters()}
        def step(p):
            each[p].step()
            each[p].zero_grad()
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        for i, a, b in batches():
            mse(model(a), b).backward()
        end = state(*each.values())
    """,
    "steps inside the backward pass, gradients zeroed in place": """
        each = {p: torch.optim.SGD([p], lr=1e-2, momentum=0.9) for p in model.parameters()}
        def step(p):
            each[p].step()
            p.grad.zero_()
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        for i, a, b in batches():
            mse(model(a), b).backward()
        end = state(*each.values())
    """,
    "steps inside the backward pass, gradients dropped by hand": """
        each = {p: torch.optim.AdamW([p], lr=1e-2) for p in model.parameters()}
        def step(p):
            each[p].step()
            p.grad = None
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        for i, a, b in batches():
            mse(model(a), b).backward()
        end = state(*each.values())
    """,
    "master weights in one flat tensor, and a loss scale of its own": """
        flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).requires_grad_()
        optimizer = torch.optim.AdamW([flat], lr=1e-2)
        scale = 2.0**20.001
        for i, a, b in batches():
            for p in model.parameters():
                p.grad = None
            (mse(model(a), b) * scale).backward()
            flat.grad = torch.cat([p.grad.reshape(-1) for p in model.parameters()]) / scale
            optimizer.step()
            with torch.no_grad():
                for p, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()])):
                    p.copy_(part.view_as(p))
        end = state(optimizer)
    """,
    "a new optimizer per epoch": """
        for epoch in range(3):
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            for i, a, b in batches():
                if i // 4 == epoch:
                    optimizer.zero_grad()
                    mse(model(a), b).backward()
                    optimizer.step()
        end = state(optimizer)
    """,
    "two-stage fine-tuning": """
        for stage, (trained, rate) in enumerate([(model[4], 1e-2), (model, 1e-3)]):
            model.requires_grad_(False)
            trained.requires_grad_(True)
            optimizer = torch.optim.AdamW(trained.parameters(), lr=rate)
            for i, a, b in batches():
                if i // 6 == stage:
                    optimizer.zero_grad()
                    mse(model(a), b).backward()
                    optimizer.step()
        end = state(optimizer)
    """,
    "parameters that no optimizer steps, clipped with the others": """
        optimizer = torch.optim.AdamW(model[0].parameters(), lr=1e-2)
        for i, a, b in batches():
            mse(model(a), b).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        end = state(optimizer)
    """,
    "lazy modules, whose first pass makes their parameters": """
        torch.manual_seed(0)
        model = nn.Sequential(nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.LazyLinear(1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for i, a, b in batches():
            optimizer.zero_grad()
            mse(model(a), b).backward()
            optimizer.step()
        end = state(optimizer)
    """,
    "a model in evaluation mode": """
        model.eval()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for i, a, b in batches():
            optimizer.zero_grad()
            mse(model(a), b).backward()
            optimizer.step()
        end = state(optimizer)
    """,
    "SAM, by a call for each of its two steps": """
        class SAM(torch.optim.Optimizer):
            def __init__(self, params, base, rho=0.05):
                super().__init__(params, {"rho": rho})
                self.base = base(self.param_groups, lr=1e-2)
                self.param_groups = self.base.param_groups

            @torch.no_grad()
            def first_step(self):
                self.old = {p: p.clone() for g in self.param_groups for p in g["params"]}
                norm = torch.stack([p.grad.norm() for p in self.old]).norm()
                for p in self.old:
                    p += 0.05 * p.grad / norm
                self.zero_grad()

            @torch.no_grad()
            def second_step(self):
                for p, old in self.old.items():
                    p.copy_(old)
                self.base.step()
                self.zero_grad()

        optimizer = SAM(model.parameters(), torch.optim.Adam)
        for i, a, b in batches():
            mse(model(a), b).backward()
            optimizer.first_step()
            mse(model(a), b).backward()
            optimizer.second_step()
        end = state(optimizer.base)
    """,
    "LBFGS": """
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
        for i, a, b in batches():
            def closure():
                optimizer.zero_grad()
                loss = mse(model(a), b)
                loss.backward()
                return loss
            optimizer.step(closure)
        end = state(optimizer)
    """,
    "LBFGS that comes to a bad point on its way": """
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
        for i, a, b in batches():
            evaluations = []
            def closure():
                evaluations.append(i)
                optimizer.zero_grad()
                loss = mse(model(a.nan_to_num()), b)
                if i == BAD and len(evaluations) > 2:
                    loss = loss * float("nan")
                loss.backward()
                return loss
            optimizer.step(closure)
        end = state(optimizer)
    """,
    "an optimizer that evaluates twice, the second time badly": """
        class Sharpness(torch.optim.Optimizer):
            def __init__(self, params):
                super().__init__(params, {"lr": 1e-2})
            @torch.no_grad()
            def step(self, closure):
                with torch.enable_grad():
                    loss = closure()
                params = [p for g in self.param_groups for p in g["params"]]
                moves = [p.grad * 0.05 for p in params]
                for p, move in zip(params, moves):
                    p.add_(move)
                with torch.enable_grad():
                    closure()
                for p, move in zip(params, moves):
                    p.sub_(move).sub_(p.grad, alpha=self.param_groups[0]["lr"])
                    self.state[p]["seen"] = self.state[p].get("seen", 0) + 1
                return loss
        optimizer = Sharpness(model.parameters())
        for i, a, b in batches():
            evaluations = []
            def closure():
                evaluations.append(i)
                optimizer.zero_grad()
                loss = mse(model(a.nan_to_num()), b)
                if i == BAD and len(evaluations) > 1:
                    loss = loss * float("nan")
                loss.backward()
                return loss
            optimizer.step(closure)
        end = state(optimizer)
    """,
    "complex parameters, clipped": """
        class Spectrum(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.randn(8, 4, dtype=torch.cfloat) * 0.1)
                self.last = nn.Linear(4, 1)
            def forward(self, x):
                return self.last((torch.fft.fft(x) @ self.weight).abs())
        model = Spectrum()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for i, a, b in batches():
            optimizer.zero_grad()
            mse(model(a), b).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        end = state(optimizer)
    """,
    "a mask of infinities among the buffers": """
        model.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for i, a, b in batches():
            optimizer.zero_grad()
            mse(model(a), b).backward()
            optimizer.step()
        end = state(optimizer)
    """,
}


MASTER = "master weights in one flat tensor, and a loss scale of its own"


def both(tmp_path: Path, loop: str, **options: Any) -> tuple[Ran, dict[str, Any]]:
    """The loop under the guard with the bad batch, and plain without it."""
    source = HEAD + textwrap.dedent(loop)
    return guarded(tmp_path, source, **options), plain(tmp_path, source, "--without")


@pytest.mark.parametrize("name", LOOPS)
def test_the_bad_batch_never_happened(name: str, tmp_path: Path) -> None:
    ran, never_saw = both(tmp_path, LOOPS[name])
    assert ran.outcome.exit_code == 0
    assert different(ran.main["end"], never_saw["end"]) == []
    assert is_finite(ran.main["end"][0]) or "mask" in name
    found = ran.incidents
    assert len(found) == (2 if "shuffled" in name else 1)
    assert {(i["verdict"]["kind"], i["action"]["kind"]) for i in found} == {("nonfinite", "skip")}
    assert ran.outcome.not_guarded == {}


@pytest.mark.parametrize("name", LOOPS)
def test_bare_the_same_loops_die(name: str, tmp_path: Path) -> None:
    end = plain(tmp_path, HEAD + textwrap.dedent(LOOPS[name]))["end"]
    weights = {k: v for k, v in end[0].items() if k != "mask"} if isinstance(end[0], dict) else end[0]
    assert not is_finite(weights)


def test_a_healthy_run_is_bit_equal_to_a_plain_one(tmp_path: Path) -> None:
    source = (
        HEAD.replace('float("nan")', "0.5")
        + """
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
for i, a, b in batches():
    optimizer.zero_grad()
    mse(model(a), b).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
end = state(optimizer, scheduler)
"""
    )
    ran = guarded(tmp_path, source)
    assert different(ran.main["end"], plain(tmp_path, source)["end"]) == []
    assert ran.incidents == []


SEARCH = """
class Search(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            first = closure()
        params = [p for g in self.param_groups for p in g["params"]]
        moves = [p.grad * 0.1 for p in params]
        for _ in range(3):
            for p, move in zip(params, moves):
                p.sub_(move)
            with torch.enable_grad():
                loss = closure()
            if loss < first:
                break
            for p, move in zip(params, moves):
                p.add_(move)
                move.mul_(0.5)
        return first
optimizer = Search(model.parameters())
for i, a, b in batches():
    evaluations = []
    def closure():
        evaluations.append(i)
        optimizer.zero_grad()
        loss = mse(model(a), b)
        if i == BAD and len(evaluations) == 2:
            loss = loss + float("VALUE")
        loss.backward()
        return loss
    optimizer.step(closure)
end = state(optimizer)
"""


def test_a_search_comes_back_from_an_infinite_loss_as_without_the_guard(tmp_path: Path) -> None:
    source = HEAD.replace('float("nan")', "0.5") + SEARCH.replace("VALUE", "inf")
    ran = guarded(tmp_path, source)
    assert different(ran.main["end"], plain(tmp_path, source)["end"]) == []
    assert ran.outcome.guarded[0]["updates"] == 12
    assert ran.incidents == []


def test_a_bad_point_that_is_not_seen_again_is_told_all_the_same(tmp_path: Path) -> None:
    source = HEAD.replace('float("nan")', "0.5") + SEARCH.replace("VALUE", "nan")
    ran = guarded(tmp_path, source)
    assert different(ran.main["end"], plain(tmp_path, source, "--without")["end"]) == []
    assert (ran.outcome.guarded[0]["steps"], ran.outcome.guarded[0]["updates"]) == (12, 11)
    (incident,) = ran.incidents
    assert "Search came to a point that was not finite" in incident["verdict"]["names"][0]


def test_data_that_the_loop_draws_is_not_drawn_twice(tmp_path: Path) -> None:
    """As in nanoGPT: the next batch is drawn from torch's own generator between forward and backward."""
    source = """
        import torch
        from torch import nn
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        seen = []
        def draw():
            seen.append(int(torch.randint(0, 10**9, ())))
            return torch.randn(4, 4)
        batch = draw()
        for i in range(40):
            if i % 10 == 5:
                batch = batch * float("nan")
            loss = model(batch).square().mean()
            batch = draw()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    """
    ran = guarded(tmp_path, source)
    assert len(ran.incidents) == 4
    assert len(set(ran.main["seen"])) == len(ran.main["seen"])


def test_a_loss_that_was_not_read_is_not_logged_as_nan(tmp_path: Path) -> None:
    ran, _ = both(tmp_path, LOOPS["gradients without a loss"])
    assert {line["loss"] for line in ran.log} == {None}
    assert [line["step"] for line in ran.log if line["grad_norm"] == "NaN"] == [8]
    assert trailing(read(ran.run_dir / "training_log.jsonl")) is None, "nothing says that the run has died"


def test_a_window_is_blamed_on_its_bad_micro_batch(tmp_path: Path) -> None:
    ran, _ = both(tmp_path, LOOPS["accumulation from a loader"])
    (incident,) = ran.incidents
    assert incident["notes"] == ["DataLoader batch 7 (dataset indices 56–63)"]
    assert incident["location"]["leaf"].startswith("batch 0")
    assert [t["first_bad"] for t in incident["tensors"] if t["name"] == "batch 0"] == [[5, 3]]
    losses = [line["loss"] for line in ran.log]
    assert losses[1] == "NaN"
    assert 1 < losses[0] < 100  # the loss as the script would print it, not a quarter of it


@pytest.mark.parametrize("drop", [0.0, 0.2], ids=["the same each time", "dropout"])
def test_a_window_whose_losses_are_finite_is_blamed_on_the_micro_batch_with_the_bad_gradient(
    drop: float, tmp_path: Path
) -> None:
    source = HEAD + textwrap.dedent(f"""
        class Length(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.outer = nn.Linear(8, 16, bias=False), nn.Linear(16, 1)
            def forward(self, x):
                x = nn.functional.dropout(x, {drop})
                return self.outer(self.inner(x).relu()) * self.inner(x).pow(2).sum(1, keepdim=True).sqrt()
        model = Length()
        x[8 * BAD + 5] = 0.0
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        micro = 0
        for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
            if WITHOUT and micro // 4 == BAD // 4:
                micro += 1
                continue
            (mse(model(a), b) / 4).backward()
            micro += 1
            if micro % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
        end = state(optimizer)[:2]
    """)
    ran, never_saw = guarded(tmp_path, source), plain(tmp_path, source, "--without")
    if not drop:  # the script draws its dropout in a different order without the window
        assert different(ran.main["end"], never_saw["end"]) == []
    (incident,) = ran.incidents
    assert incident["verdict"]["level"] == "gradient"
    assert incident["notes"] == ["DataLoader batch 7 (dataset indices 56–63)"]
    assert incident["location"]["phase"] == "backward"
    assert incident["location"]["verified"]
    assert ".sqrt()" in "".join(incident["location"]["code"])


def test_a_gan_is_judged_by_parts(tmp_path: Path) -> None:
    """One network's bad step leaves the other's alone, and each has its own range of normal losses."""
    source = """
        import torch
        from torch import nn
        torch.manual_seed(0)
        g, d = nn.Linear(2, 4), nn.Linear(4, 1)
        og, od = torch.optim.SGD(g.parameters(), lr=1e-5), torch.optim.SGD(d.parameters(), lr=1e-5)
        for i in range(60):
            od.zero_grad()
            d_loss = d(g(torch.randn(8, 2))).square().mean() * (float("nan") if i == 50 else 1)
            d_loss.backward()
            od.step()
            og.zero_grad()
            g_loss = d(g(torch.randn(8, 2))).sub(3).square().mean() * 100
            g_loss.backward()
            og.step()
    """
    ran = guarded(tmp_path, source, policy_changes={"spike_window": 16})
    (incident,) = ran.incidents
    assert incident["verdict"]["names"] == ["loss d"] or incident["verdict"]["level"] == "loss"
    assert {k for line in ran.log for k in line if k.startswith("loss ")} == {"loss g", "loss d"}
    assert is_finite(ran.main["g"].state_dict())
    assert is_finite(ran.main["d"].state_dict())


def test_spikes_are_skipped_after_the_warm_up(tmp_path: Path) -> None:
    source = """
        import torch
        from torch import nn
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for i in range(40):
            optimizer.zero_grad()
            (model(torch.randn(8, 4)).square().mean() * (1e6 if i == 30 else 1)).backward()
            optimizer.step()
    """
    ran = guarded(tmp_path, source, policy_changes={"spike_window": 16})
    assert [(i["step"], i["verdict"]["kind"], i["action"]["kind"]) for i in ran.incidents] == [(31, "spike", "skip")]


def test_max_norm_clips_what_the_script_does_not(tmp_path: Path) -> None:
    source = """
        import torch
        model = torch.nn.Linear(4, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        (model(torch.full((1, 4), 100.0)) * 10).sum().backward()
        optimizer.step()
        moved = float(model.weight.detach().norm())
    """
    assert guarded(tmp_path, source, guard={"max_norm": 0.5}).main["moved"] == pytest.approx(0.5, rel=1e-4)


def test_a_second_training_gets_a_folder_of_its_own_and_the_first_is_let_go(tmp_path: Path) -> None:
    source = """
        import gc, weakref
        import torch
        from torch import nn
        gone = []
        for fold in range(3):
            model = nn.Linear(4, 1)
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
            for i in range(6):
                optimizer.zero_grad()
                (model(torch.randn(8, 4)).square().mean() * (float("nan") if i == fold else 1)).backward()
                optimizer.step()
            alive = weakref.ref(model)
            gone.append(alive)
        gc.collect()
        held = [r() is not None for r in gone]
    """
    ran = guarded(tmp_path, source)
    assert ran.main["held"] == [False, False, True]
    folders = [Path(str(g["folder"])).name for g in ran.outcome.guarded]
    assert folders == ["script.run", "part-2", "part-3"]
    assert [g["actions"]["skip"] for g in ran.outcome.guarded] == [1, 1, 1]


def test_a_guard_of_the_scripts_own_is_the_only_one(tmp_path: Path) -> None:
    source = """
        import torch
        from nanproof import Guard
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.Adam(model.parameters())
        guard = Guard(model, optimizer)
        kinds = [guard.step(lambda: model(torch.randn(2, 4)).sum() * v).kind for v in (1.0, float("nan"), 1.0)]
    """
    ran = guarded(tmp_path, source)
    assert ran.main["kinds"] == ["ok", "nonfinite", "ok"]
    assert ran.outcome.guarded == ()
    assert ran.outcome.not_guarded == {}


def test_everything_is_put_back_at_the_end(tmp_path: Path) -> None:
    def things() -> list[Any]:
        s, o = torch.optim.lr_scheduler, torch.optim
        loader = torch.utils.data.dataloader._BaseDataLoaderIter
        return [
            torch.autograd.backward,
            nn.utils.clip_grad_norm_,
            nn.utils.clip_grad.clip_grad_norm_,
            nn.utils.clip_grads_with_norm_,
            o.Optimizer.__init__,
            o.Adam.step,
            s.LRScheduler.step,
            s.StepLR.__init__,
            s.SequentialLR.step,
            torch.amp.GradScaler.step,
            torch.amp.GradScaler.scale,
            torch.save,
            torch.compile,
            torch.serialization.save,
            loader.__next__,
            o.swa_utils.AveragedModel.update_parameters,
            os._exit,
            multiprocessing.process.BaseProcess.__init__,
            list(sys.meta_path),
            "__init_subclass__" in vars(s.LRScheduler),
        ]

    torch.optim.Adam([torch.zeros(1, requires_grad=True)])  # torch hooks a class when its first optimizer is made
    before = things()
    ran = guarded(tmp_path, HEAD + "\noptimizer = torch.optim.Adam(model.parameters())\n" + _loop())
    assert all(a is b or a == b for a, b in zip(before, things(), strict=True))
    model = ran.main["model"]
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def _loop() -> str:
    return """
for i, a, b in batches():
    optimizer.zero_grad()
    mse(model(a), b).backward()
    optimizer.step()
"""


def test_nothing_is_kept_alive_by_the_session() -> None:
    session = Session(Options(run_dir=Path("unused")))
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.meet_optimizer(optimizer)
    session.registry.drop_triggers()
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("keep", [False, True], ids=["one after the other", "both alive"])
def test_a_second_optimizer_over_the_same_model(keep: bool, tmp_path: Path) -> None:
    """Two-stage fine-tuning: the second optimizer comes when the first has made its steps."""
    source = """
        import torch
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        kept = []
        for stage in range(3):
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 / (stage + 1))
            kept = [*kept, optimizer] if {keep} else []
            for i in range(4):
                x = torch.randn(8, 4)
                if i == 2 and {without}:
                    continue
                if i == 2:
                    x[3, 1] = float("nan")
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
    """
    ran = guarded(tmp_path, source.format(keep=keep, without=False))
    without = plain(tmp_path, source.format(keep=keep, without=True))
    assert ran.outcome.exit_code == 0
    assert different(ran.main["model"].state_dict(), without["model"].state_dict()) == []
    assert different(ran.main["optimizer"].state_dict(), without["optimizer"].state_dict()) == []


def test_training_in_evaluation_mode_is_located(tmp_path: Path) -> None:
    ran = guarded(tmp_path, HEAD + textwrap.dedent(LOOPS["a model in evaluation mode"]))
    (incident,) = incidents(ran.run_dir)
    assert incident["verdict"]["level"] == "input"
    assert incident["location"]["leaf"].startswith("batch")


def test_the_loss_is_logged_without_a_loss_scale_of_the_scripts_own(tmp_path: Path) -> None:
    ran = guarded(tmp_path, HEAD + textwrap.dedent(LOOPS[MASTER]))
    scaled = [line["loss"] for line in ran.log if line["verdict"] == "ok"]
    assert len(scaled) == 11
    assert max(scaled) < 100  # and not 2**20 times as much


def test_steps_that_the_script_skips_itself_are_no_part_of_the_next_one(tmp_path: Path) -> None:
    """After its own look at the gradients a script goes on with the next batch: that one is good."""
    source = """
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for i, a, b in batches():
            optimizer.zero_grad()
            mse(model(a), b).backward()
            if all(bool(p.grad.isfinite().all()) for p in model.parameters()):
                optimizer.step()
        end = state(optimizer)
    """
    whole = HEAD.replace("nn.BatchNorm1d(16), ", "") + textwrap.dedent(source)
    ran, bare = guarded(tmp_path, whole), plain(tmp_path, whole)
    assert different(ran.main["end"], bare["end"]) == []
    (account,) = ran.outcome.guarded
    assert (account["steps"], account["updates"], account["discarded"]) == (11, 11, 1)
    assert "1 not finite and left out by the script" in account["summary"]
    assert "nothing went wrong" not in account["summary"]


OWN_AVERAGES = {
    "ema_pytorch": ("ema_pytorch.EMA(model, beta=0.9, update_after_step=0, update_every=1)", "update()"),
    "timm.utils": ("timm.utils.ModelEmaV3(model, decay=0.9)", "update(model)"),
    "diffusers.training_utils": ("diffusers.training_utils.EMAModel(model.parameters())", "step(model.parameters())"),
    "torch_ema": ("torch_ema.ExponentialMovingAverage(model.parameters(), decay=0.9)", "update()"),
}
AVERAGE = """
    import {library}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average = {make}
    for i, a, b in batches():
        optimizer.zero_grad()
        mse(model(a), b).backward()
        optimizer.step()
        average.{update}
    end = state(optimizer, average)
"""
TIMM_SCHEDULE = """
    from timm.scheduler import CosineLRScheduler
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = CosineLRScheduler(optimizer, t_initial=12, t_in_epochs=False)
    done = 0
    for i, a, b in batches():
        optimizer.zero_grad()
        mse(model(a), b).backward()
        optimizer.step()
        done += 1
        schedule.step_update(num_updates=done)
    end = state(optimizer)
"""


@pytest.mark.parametrize("library", OWN_AVERAGES)
def test_averages_of_other_libraries_are_held(library: str, tmp_path: Path) -> None:
    pytest.importorskip(library)
    make, update = OWN_AVERAGES[library]
    ran, never_saw = both(tmp_path, AVERAGE.format(library=library, make=make, update=update))
    assert different(ran.main["end"], never_saw["end"]) == []
    assert ran.outcome.guarded[0]["actions"]["skip"] == 1


def test_a_schedule_of_timm_counts_updates_that_were_made(tmp_path: Path) -> None:
    pytest.importorskip("timm.scheduler")
    ran, never_saw = both(tmp_path, TIMM_SCHEDULE)
    assert different(ran.main["end"], never_saw["end"]) == []
    assert ran.outcome.not_held == {}


def test_a_rate_that_the_script_sets_is_told_only_if_a_step_was_skipped(tmp_path: Path) -> None:
    loop = """
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for i, a, b in batches():
            optimizer.param_groups[0]["lr"] = 1e-2 / (i + 1)
            optimizer.zero_grad()
            mse(model(a if "--bad" in sys.argv else a.nan_to_num()), b).backward()
            optimizer.step()
    """
    source = HEAD + textwrap.dedent(loop)
    good, bad = (guarded(tmp_path, source, *words, name=f"s{len(words)}") for words in ((), ("--bad",)))
    assert list(good.outcome.not_held) == list(bad.outcome.not_held) == ["the learning rate of AdamW"]
    assert "the learning rate" not in "\n".join(hand_over(good.outcome))
    assert "moved on in skipped steps: the learning rate of AdamW" in "\n".join(hand_over(bad.outcome))
