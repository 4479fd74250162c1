"""A bad batch never happened: all state equals, bit for bit, that of a run that never saw it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from nanproof import Guard, Policy
from nanproof.errors import UsageError
from support.runs import Batch, digest, loss_of, make_batches, make_run, seed_everything, with_faults
from support.runs import Net as SmallNet

pytestmark = pytest.mark.slow

o = torch.optim
OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], Any]] = {
    "Adadelta": lambda p: o.Adadelta(p),
    "Adafactor": lambda p: o.Adafactor(p),
    "Adagrad": lambda p: o.Adagrad(p, lr=1e-2),
    "Adagrad-fused": lambda p: o.Adagrad(p, lr=1e-2, fused=True),
    "Adam": lambda p: o.Adam(p, lr=1e-2, amsgrad=True),
    "Adam-foreach": lambda p: o.Adam(p, lr=1e-2, foreach=True),
    "Adam-fused": lambda p: o.Adam(p, lr=1e-2, fused=True),
    "AdamW": lambda p: o.AdamW(p, lr=1e-2, weight_decay=0.1),
    "AdamW-for-loop": lambda p: o.AdamW(p, lr=1e-2, foreach=False),
    "AdamW-fused": lambda p: o.AdamW(p, lr=1e-2, fused=True),
    "Adamax": lambda p: o.Adamax(p),
    "ASGD": lambda p: o.ASGD(p),
    "Muon": lambda p: o.Muon([q for q in p if q.ndim == 2], lr=1e-3),
    "NAdam": lambda p: o.NAdam(p),
    "RAdam": lambda p: o.RAdam(p),
    "RMSprop": lambda p: o.RMSprop(p, lr=1e-3, momentum=0.9),
    "Rprop": lambda p: o.Rprop(p),
    "SGD": lambda p: o.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "SGD-fused": lambda p: o.SGD(p, lr=1e-2, momentum=0.9, fused=True),
}
if not hasattr(o, "Muon"):  # since torch 2.9
    del OPTIMIZERS["Muon"]
# a third-party optimizer that only follows the protocol


class Lion(torch.optim.Optimizer):
    def __init__(self, params: Iterable[Tensor], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "beta": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"], state["n"] = torch.zeros_like(p), 0
                state["n"] += 1
                p.add_((state["m"] * group["beta"] + p.grad * (1 - group["beta"])).sign(), alpha=-group["lr"])
                state["m"].lerp_(p.grad, 0.01)


OPTIMIZERS["Lion (third party)"] = Lion
KINDS = ["nan", "+inf", "-inf", "spike", "grad:nan", "grad:+inf", "grad:-inf", "grad:spike"]


def kinds(name: str) -> list[str]:
    """Every fault with one optimizer; with the others one in the loss and one in the gradients alone."""
    return KINDS if name == "AdamW" else ["nan", "grad:spike"]


N, WHERE = 20, 14


def test_every_optimizer_class_of_torch_is_here() -> None:
    classes = {n for n in dir(o) if isinstance(getattr(o, n), type) and issubclass(getattr(o, n), o.Optimizer)}
    assert classes - {"Optimizer", "LBFGS", "SparseAdam"} <= {name.partition("-")[0] for name in OPTIMIZERS}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_skip_is_bit_exact(name: str) -> None:
    clean = make_batches(N)
    reference = make_run(OPTIMIZERS[name])
    assert set(reference.feed(clean)) == {"ok"}
    for kind in kinds(name):
        run = make_run(OPTIMIZERS[name])
        verdicts = run.feed(with_faults(clean, {WHERE: kind}))
        assert verdicts[WHERE] == ("spike" if "spike" in kind else "nonfinite"), kind
        assert verdicts.count("ok") == N, kind
        assert run.digest() == reference.digest(), f"{name} {kind}"


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_guard_every_fault_does_harm(kind: str) -> None:
    """The suite's own check: a fault that does no harm unguarded would prove nothing above."""

    def plain(batches: list[Batch]) -> str:
        seed_everything()
        model = SmallNet()
        optimizer = o.AdamW(model.parameters(), lr=1e-2)
        for batch in batches:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return digest(model, [optimizer])

    clean = make_batches(N)
    assert plain(with_faults(clean, {WHERE: kind})) != plain(clean)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_dropped_microbatch_was_never_there(name: str) -> None:
    """Accumulating four with one bad equals accumulating the three good ones."""
    clean = make_batches(40)
    reference = make_run(OPTIMIZERS[name], accumulate=4, on_bad_microbatch="microbatch")
    reference.feed(clean[:36])
    reference.feed(clean[36:39])
    reference.guard.flush()
    for kind in kinds(name):
        run = make_run(OPTIMIZERS[name], accumulate=4, on_bad_microbatch="microbatch")
        run.feed(clean[:36])
        bad = with_faults(clean, {37: kind})[37]
        verdicts = run.feed([clean[36], bad, clean[37], clean[38]])
        assert [v == "ok" for v in verdicts] == [True, False, True, True], kind
        assert run.digest() == reference.digest(), kind


def test_a_bad_window_is_dropped_whole() -> None:
    clean = make_batches(40)
    reference = make_run(accumulate=4)
    reference.feed(clean[:32])
    reference.feed(clean[36:])
    run = make_run(accumulate=4)
    run.feed(clean[:32])
    bad = with_faults(clean, {33: "nan"})
    verdicts = run.feed(bad[32:36])
    assert verdicts[-1] == "nonfinite"
    run.feed(clean[36:])
    assert run.digest() == reference.digest()


def test_accumulation_equals_the_mean_over_all_samples() -> None:
    """Users do not divide the loss: four micro-batches accumulated are one batch of all their samples."""
    batches = make_batches(4)
    torch.manual_seed(0)
    whole, parts = (nn.Linear(8, 4) for _ in range(2))
    parts.load_state_dict(whole.state_dict())
    for model, accumulate in ((whole, 1), (parts, 4)):
        guard = Guard(model, o.SGD(model.parameters(), lr=0.1), accumulate=accumulate)
        if accumulate == 1:
            x, y = torch.cat([b.x for b in batches]), torch.cat([b.y for b in batches])
            guard.step(lambda x=x, y=y, m=model: nn.functional.cross_entropy(m(x), y))
        else:
            for b in batches:
                guard.step(lambda b=b, m=model: nn.functional.cross_entropy(m(b.x), b.y))
    torch.testing.assert_close(whole.weight, parts.weight)


def test_a_healthy_guarded_run_equals_the_plain_loop() -> None:
    """The guard only watches: same losses, same bits, as the loop it replaces."""
    clean = make_batches(N)
    seed_everything()
    model = SmallNet()
    optimizer = o.AdamW(model.parameters(), lr=1e-2)
    scheduler = o.lr_scheduler.ExponentialLR(optimizer, 0.99)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    for batch in clean:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        ema.update_parameters(model)
    guarded = make_run()
    guarded.feed(clean)
    assert guarded.digest() == digest(model, [optimizer], scheduler, ema)


def test_backward_and_step_protect_a_loop_without_closure() -> None:
    clean = make_batches(N)
    reference = make_run()
    reference.feed(clean)
    for kind in KINDS:
        run = make_run()
        for batch in with_faults(clean, {WHERE: kind}):
            run.guard.backward(loss_of(run.model, batch), batch=batch)
            run.guard.step()
        assert run.digest() == reference.digest(), kind


def test_sparse_gradients_are_judged_and_clipped() -> None:
    def run(faulty: bool) -> tuple[str, list[str]]:
        seed_everything()
        model = nn.Embedding(10, 3, sparse=True)
        optimizer = o.SparseAdam(model.parameters(), lr=0.1)
        guard = Guard(model, optimizer, max_norm=0.01)
        verdicts = []
        for i in range(8):
            scale = float("nan") if faulty and i == 5 else 1.0
            if i != 5 or faulty:
                ids = torch.tensor([i, i, 1])
                verdicts.append(guard.step(lambda ids=ids, scale=scale: model(ids).square().sum() * scale).kind)
        return digest(model, [optimizer]), verdicts

    clean, faulty = run(False), run(True)
    assert faulty[1][5] == "nonfinite"
    assert clean[0] == faulty[0]


def test_lbfgs_is_refused_with_a_reason() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"LBFGS evaluates its closure.*Next: run your own loop under `nanproof run`"):
        Guard(model, o.LBFGS(model.parameters()))


def test_spikes_can_be_let_through() -> None:
    run = make_run(policy=Policy(spikes="observe"))
    assert set(run.feed(with_faults(make_batches(N), {WHERE: "spike"}))) == {"ok"}
