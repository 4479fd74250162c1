"""Runs that broke, as files: logs as the tools write them, configs, code, checkpoints saved by torch."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch


def save(
    path: Path, *, lr: float = 5e-4, steps: int = 200, total: int = 400, bad: str = "", schedule: bool = True
) -> None:
    """A checkpoint of a small trained model with its optimizer and its OneCycle schedule."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=lr, total_steps=total)
    for _ in range(steps):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    if bad == "buffer":
        model[1].running_mean[0] = math.nan  # type: ignore[index,union-attr]
    if bad == "parameter":
        model[0].weight.data[0, 0] = math.nan  # type: ignore[index,union-attr]
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": steps}
    torch.save(state | ({"scheduler": scheduler.state_dict()} if schedule else {}), path)


def loop_log(path: Path, *, steps: int, broke: int | None = None, lr: float = 1e-4, grow: bool = False) -> None:
    """A plain loop's log of a loss that falls, and is NaN from a step on."""
    lines = []
    for step in range(1, steps + 1):
        loss = 0.2 + 3 * math.exp(-step / 60)
        if grow and broke is not None and broke - 20 <= step < broke:
            loss *= 1.25 ** (step - broke + 21)
        loss = math.nan if broke is not None and step >= broke else loss
        lines.append(
            f"step {step}: loss {loss:.4f}, grad_norm {0.5 if math.isfinite(loss) else math.nan:.3f}, lr {lr:.3e}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def scheduler_run(folder: Path) -> None:
    """Config lowered to 1e-4 after a failure; the checkpoint's OneCycle brings its own 5e-4 back."""
    save(folder / "ckpt" / "epoch_28.pth")
    lines = [f"step {s}: loss {0.2 + 3 * math.exp(-s / 60):.4f}, lr {3e-4 + s * 9e-7:.3e}" for s in range(1, 201)]
    lines.append("Resuming from checkpoint ckpt/epoch_28.pth at step 200")
    for step in range(201, 300):
        loss = 0.31 * 1.03 ** (step - 200) if step < 280 else math.nan
        lines.append(f"step {step}: loss {loss:.4f}, lr {4.92e-4:.3e}")
    (folder / "train.log").write_text("\n".join(lines) + "\n")
    (folder / "configs").mkdir()
    (folder / "configs" / "config.py").write_text(
        "# settings\n" + "\n" * 29 + "lr = 1e-4\nbatch_size = 64\nepochs = 60\n"
    )


def double_fp16_run(folder: Path) -> None:
    (folder / "train.py").write_text(
        "import torch\n"
        "from transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n\n"
        'model = AutoModelForCausalLM.from_pretrained("tiny", torch_dtype=torch.float16)\n'
        'args = TrainingArguments("out", fp16=True, learning_rate=2e-4, logging_steps=1)\n'
        "Trainer(model=model, args=args).train()\n"
    )
    rows = ["{'loss': 2.9012, 'grad_norm': 3.1, 'learning_rate': 0.0002, 'epoch': 0.01}"]
    rows += [
        f"{{'loss': 0.0, 'grad_norm': nan, 'learning_rate': 0.0002, 'epoch': {0.01 * i:.2f}}}" for i in range(2, 12)
    ]
    (folder / "train.log").write_text("\n".join(rows) + "\n")


def autocast_run(folder: Path) -> None:
    """The flag amp reaches an autocast that is fp16 by default, without a scaler, over accelerate's bf16."""
    (folder / "train.py").write_text(
        "import torch\n\n\n"
        "def train(cfg, model, opt, loader):\n"
        "    for x, y in loader:\n"
        '        with torch.autocast("cuda", enabled=cfg.trainer.amp):\n'
        "            loss = model(x, y)\n"
        "        loss.backward()\n"
        "        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.trainer.clip)\n"
        "        opt.step()\n"
    )
    (folder / "config.yaml").write_text("trainer:\n  amp: true\n  fp16: false\n  lr: 5.0e-5\n  clip: 1.0\n")
    (folder / "accelerate.yaml").write_text(
        'compute_environment: LOCAL_MACHINE\ndistributed_type: "NO"\nmixed_precision: bf16\nnum_machines: 1\n'
    )
    loop_log(folder / "train.log", steps=400, broke=260, lr=5e-5)


def incident(folder: Path, *, mechanism: str = "masked-row", origin: str | None = None) -> None:
    """An incident as the guard and locate write it."""
    from nanproof.records import Action, Incident, Verdict

    verdict = Verdict(kind="nonfinite", step=412, level="loss", value=math.nan, origin=origin)  # type: ignore[arg-type]
    location = {
        "reproduced": True,
        "mechanism": mechanism,
        "op": "_softmax",
        "file": "model.py",
        "line": 31,
        "why": "every entry of a row is −inf",
        "leaf": "",
    }
    record = Incident(
        id="412",
        step=412,
        time="2026-01-02T03:04:05.000Z",
        rank=0,
        world_size=1,
        verdict=verdict,
        action=Action(kind="skip"),
        location=location,
        environment={"torch": "2.13.0", "device": "cpu"},
    )
    place = folder / "incidents" / "412"
    place.mkdir(parents=True)
    (place / "incident.json").write_text(json.dumps(record.to_json()))
