"""What other training loops make of the same faults: `make peers` runs them with the real libraries.

Each cell is a run of its own: the loop, one fault, with or without nanproof. It is scored by its final weights and
buffers: are they finite, and are they those of the same loop, without nanproof, that never saw the bad batch? The table
goes to docs/peers.md. `python scripts/peers.py "NaN loss" "plain loop"` prints one row or one column only.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, SequentialSampler
from written import write_table

from nanproof import Guard, Policy
from nanproof.errors import GuardStop, NanproofError

BATCH, BATCHES, WHERE = 4, 24, 16
SCALE = 4096.0
"""Small enough that no healthy step overflows; large enough that dividing the loss by four loses no bit."""
GUARD: dict[str, Any] = {"policy": Policy(spike_window=16)}
"""The one option that is not the default: runs of 24 steps are over before the usual window is full."""
HEALTHY, NAN_LOSS, NAN_GRAD, INF_GRAD, SPIKE, HUGE, NAN_INPUT = range(7)
FAULTS = {
    "NaN loss": NAN_LOSS,
    "NaN gradient": NAN_GRAD,
    "Inf gradient": INF_GRAD,
    "finite spike": SPIKE,
    "huge finite gradient": HUGE,
    "bad micro-batch": NAN_LOSS,
    "fault on one rank": NAN_LOSS,
    "BatchNorm poison": NAN_INPUT,
    "NaN for 200 steps": NAN_LOSS,
    "bad checkpoint on resume": HEALTHY,
}
Samples = list[tuple[Tensor, int, int]]
State = dict[str, Tensor]


class _Break(torch.autograd.Function):
    """Passes values on; one element of the gradient on its way back becomes ``value``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: float) -> Tensor:
        ctx.value = value
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        broken = grads[0].clone()
        broken.view(-1)[0] = ctx.value
        return broken, None


class Net(nn.Module):
    """A classifier that meets the fault which its batch carries."""

    newest: Net | None = None
    """The last one made; what is left when a run is stopped."""

    def __init__(self) -> None:
        super().__init__()
        Net.newest = self
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: Tensor, labels: Tensor, fault: Tensor) -> dict[str, Tensor]:
        code = int(fault[0])
        if code == NAN_INPUT:
            x = x.index_fill(1, torch.tensor([0]), float("nan"))
        out = self.net(x)
        broken = {NAN_GRAD: float("nan"), INF_GRAD: float("inf"), HUGE: 1e30}
        if code in broken:
            out = _Break.apply(out, broken[code])
        loss = nn.functional.cross_entropy(out.float(), labels)
        if code in (NAN_LOSS, SPIKE):
            loss = loss * (float("nan") if code == NAN_LOSS else 1e6)
        return {"loss": loss, "logits": out}


class Data(Dataset):  # type: ignore[type-arg]
    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> dict[str, Any]:
        x, y, fault = self.samples[i]
        return {"x": x, "labels": y, "fault": fault}


def samples_of(fault: str, *, shown: bool) -> Samples:
    """All samples in order; with ``shown`` the bad ones among them."""
    g = torch.Generator().manual_seed(0)
    windows = {"bad micro-batch": 4, "fault on one rank": 2}.get(fault, 1)
    count = BATCHES * windows * BATCH
    xs, ys = torch.randn(count, 8, generator=g), torch.randint(0, 4, (count,), generator=g)
    found: Samples = [(xs[i], int(ys[i]), HEALTHY) for i in range(count)]
    if not shown or fault == "bad checkpoint on resume":
        return found
    times = 200 if fault == "NaN for 200 steps" else 1
    # a window of micro-batches, or one batch for each rank, of which only the last is bad
    bad = [
        (x.flip(0), y, FAULTS[fault] if i >= (windows - 1) * BATCH else HEALTHY)
        for i, (x, y, _) in enumerate(found[: windows * BATCH])
    ]
    at = WHERE * windows * BATCH
    return found[:at] + bad * times + found[at:]


def loader_of(samples: Samples) -> DataLoader[Any]:
    """In order; of several ranks, each has every second batch."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    mine = [s for i, s in enumerate(samples) if i // BATCH % world == rank]
    return DataLoader(Data(mine), batch_size=BATCH, shuffle=False)


# --- the loops ------------------------------------------------------------------------------------------------------


def train_loop(samples: Samples, guarded: bool, accumulate: int, folder: Path, *, scaled: bool, resume: bool) -> State:
    """A loop as tutorials write it: with accumulation and clipping, with GradScaler or without."""
    net = Net()
    model: nn.Module = DDP(net) if "RANK" in os.environ else net
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE) if scaled else None
    guard = Guard(model, optimizer, scaler=scaler, max_norm=1.0, accumulate=accumulate, **GUARD) if guarded else None
    start = 0
    if resume and guard is not None:
        start = guard.resume(folder).update
    elif resume:
        newest = max(folder.glob("*.pt"), key=lambda p: int(p.stem))
        state = torch.load(newest, weights_only=True)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizers"][0])
        start = int(newest.stem)
        if scaler is not None:
            scaler.load_state_dict(state["scaler"])

    def loss_of(batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.float16, enabled=scaled):
            loss: Tensor = model(**batch)["loss"]
        return loss

    for i, batch in enumerate(loader_of(samples)):
        if i < start:
            continue
        if guard is not None:
            guard.step(lambda b=batch: loss_of(b), batch=batch)
            continue
        loss = loss_of(batch) / accumulate
        (loss if scaler is None else scaler.scale(loss)).backward()
        if (i + 1) % accumulate:
            continue
        if scaler is not None:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    if guard is not None:
        guard.close()
    return net.state_dict()


def train_plain(samples: Samples, guarded: bool, accumulate: int, folder: Path, resume: bool) -> State:
    return train_loop(samples, guarded, accumulate, folder, scaled=False, resume=resume)


def train_scaled(samples: Samples, guarded: bool, accumulate: int, folder: Path, resume: bool) -> State:
    return train_loop(samples, guarded, accumulate, folder, scaled=True, resume=resume)


def train_hf(samples: Samples, guarded: bool, accumulate: int, folder: Path, resume: bool) -> State:
    from transformers import Trainer, TrainingArguments

    from nanproof.integrations.transformers import GuardCallback

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    model = Net()
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH,
        num_train_epochs=1,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        gradient_accumulation_steps=accumulate,
        max_grad_norm=1.0,
        use_cpu=True,
        seed=0,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        remove_unused_columns=False,
        save_strategy="steps",
        save_steps=10 if folder.name == "checkpoints" else 10_000,
        weight_decay=0.0,
        label_names=["labels"],
    )
    trainer = InOrder(
        model=model, args=arguments, train_dataset=Data(samples), callbacks=[GuardCallback(**GUARD)] if guarded else []
    )
    trainer.train(resume_from_checkpoint=resume or None)
    return model.state_dict()


def train_lightning(samples: Samples, guarded: bool, accumulate: int, folder: Path, resume: bool) -> State:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from nanproof.integrations.lightning import GuardCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Net()

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            loss: Tensor = self.model(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    module = Module()
    saving = folder.name == "checkpoints"
    callbacks: list[Any] = [GuardCallback(**GUARD)] if guarded else []
    if saving:
        callbacks.append(ModelCheckpoint(folder, "{step}", every_n_train_steps=10, save_top_k=-1))
    several = "RANK" in os.environ
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=2 if several else 1,
        strategy="ddp" if several else "auto",
        accumulate_grad_batches=accumulate,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=saving,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=callbacks,
    )
    newest = max(folder.glob("*.ckpt"), key=lambda p: p.stat().st_mtime) if resume else None
    trainer.fit(module, loader_of(samples), ckpt_path=newest, weights_only=False)
    return module.model.state_dict()


Train = Callable[[Samples, bool, int, Path, bool], State]
LOOPS: dict[str, Train] = {
    "plain loop": train_plain,
    "GradScaler loop": train_scaled,
    "HF Trainer": train_hf,
    "Lightning": train_lightning,
}


# --- the score ------------------------------------------------------------------------------------------------------


def is_finite(state: State) -> bool:
    return all(bool(torch.isfinite(v).all()) for v in state.values())


def score(train: Callable[[], State], clean: State) -> str:
    """One cell: how a run ended."""
    try:
        state = train()
    except GuardStop:
        assert Net.newest is not None
        return "stopped" if is_finite(Net.newest.state_dict()) else "NaN"
    except NanproofError:
        return "refused"
    except Exception as error:
        return f"{type(error).__name__}"
    if not is_finite(state):
        return "NaN"
    return "**equal**" if all(torch.equal(v, clean[k]) for k, v in state.items()) else "finite"


def cells(loop: str, fault: str, folder: Path) -> list[str]:
    """Without nanproof and with it, after a check that the loop repeats itself."""
    train = LOOPS[loop]
    accumulate = 4 if fault == "bad micro-batch" else 1
    clean = train(samples_of(fault, shown=False), False, accumulate, folder / "clean", False)
    again = train(samples_of(fault, shown=False), False, accumulate, folder / "again", False)
    assert all(torch.equal(v, again[k]) for k, v in clean.items()), f"{loop} does not repeat itself"
    if fault == "bad checkpoint on resume":
        found = []
        for guarded in (False, True):
            place = folder / str(guarded) / "checkpoints"
            save_and_poison(loop, place)
            found.append(score(lambda g=guarded, p=place: train(samples_of(fault, shown=False), g, 1, p, True), clean))
        return found
    bad = samples_of(fault, shown=True)
    return [
        score(lambda g=guarded: train(bad, g, accumulate, folder / f"bad-{g}", False), clean)
        for guarded in (False, True)
    ]


def save_and_poison(loop: str, folder: Path) -> None:
    """Checkpoints at step 10 and 20 of the clean run; in the newer one a weight has become NaN."""
    samples = samples_of("bad checkpoint on resume", shown=False)
    if loop in ("plain loop", "GradScaler loop"):
        for step in (10, 20):
            net, optimizer = Net(), None
            optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
            scaler = torch.amp.GradScaler("cpu", init_scale=SCALE) if loop == "GradScaler loop" else None
            with Guard(net, optimizer, scaler=scaler, max_norm=1.0, **GUARD) as guard:
                for batch in list(loader_of(samples))[:step]:
                    with torch.autocast("cpu", torch.float16, enabled=scaler is not None):
                        guard.step(lambda b=batch, n=net: n(**b)["loss"])
                guard.save(folder / f"{step}.pt")
        state = torch.load(folder / "20.pt", weights_only=True)
        state["model"]["net.0.weight"][0, 0] = float("nan")
        torch.save(state, folder / "20.pt")
        return
    LOOPS[loop](samples, False, 1, folder, False)
    if loop == "HF Trainer":
        from safetensors.torch import load_file, save_file

        newest = max(folder.glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))
        if newest.name != "checkpoint-20":
            shutil.rmtree(newest)  # the one that the end of the run writes
            newest = folder / "checkpoint-20"
        weights = load_file(newest / "model.safetensors")
        weights["net.0.weight"][0, 0] = float("nan")
        save_file(weights, newest / "model.safetensors", metadata={"format": "pt"})
    else:
        newest = folder / "step=20.ckpt"
        state = torch.load(newest, weights_only=False)
        state["state_dict"]["model.net.0.weight"][0, 0] = float("nan")
        torch.save(state, newest)


def on_two_ranks(loop: str, fault: str) -> list[str]:
    """The same under torchrun; both ranks must come to the same score."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            __file__,
            "--rank",
            loop,
            fault,
            folder,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        told = [json.loads(p.read_text()) for p in sorted(Path(folder).glob("*.json"))]
    assert len(told) == 2, done.stderr[-3000:]
    return [a if a == b else f"{a} / {b}" for a, b in zip(*told, strict=True)]


def as_rank(loop: str, fault: str, folder: Path) -> None:
    rank = os.environ["RANK"]
    if loop in ("plain loop", "GradScaler loop"):
        torch.distributed.init_process_group("gloo")
    found = cells(loop, fault, folder / rank)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


# --- the command ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def quietly() -> Any:
    logging.disable(logging.CRITICAL)
    with (
        tempfile.TemporaryDirectory() as folder,
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stderr(nowhere),
        contextlib.redirect_stdout(nowhere),
    ):
        yield Path(folder)


def main(chosen: list[str]) -> int:
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if chosen[:1] == ["--rank"]:
        logging.disable(logging.CRITICAL)
        as_rank(chosen[1], chosen[2], Path(chosen[3]))
        return 0
    unknown = [c for c in chosen if c not in FAULTS and c not in LOOPS]
    if unknown:
        print(f"no fault or loop {unknown[0]!r}. Next: one of {', '.join([*FAULTS, *LOOPS])}", file=sys.stderr)
        return 2
    faults = [f for f in FAULTS if f in chosen] or list(FAULTS)
    loops = [p for p in LOOPS if p in chosen] or list(LOOPS)
    rows = [f"| | {' | '.join(f'{p} | + nanproof' for p in loops)} |", "|---|" + "---|---|" * len(loops)]
    lost = 0
    for fault in faults:
        found: list[str] = []
        for loop in loops:
            with quietly() as folder:
                two = fault == "fault on one rank"
                found += on_two_ranks(loop, fault) if two else cells(loop, fault, folder)
        lost += sum(cell == "NaN" for cell in found[1::2])
        rows.append(f"| {fault} | {' | '.join(found)} |")
        print(rows[-1], flush=True)
    if not chosen:
        write_table("peers.md", "peers", "\n".join(rows), ("torch", "transformers", "accelerate", "lightning"))
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
