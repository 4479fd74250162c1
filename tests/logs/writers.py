"""Logs written by the libraries that write them in real life, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

# Every writer logs steps 0, 10 … 90 of the same run: the loss is NaN at step 40, the norm Inf at step 30.
RUN = """
    import math, os, sys
    from pathlib import Path

    root = Path(sys.argv[1])

    def run():
        for step in range(0, 100, 10):
            yield step, {
                "train/loss": math.nan if step == 40 else 2.0 / (1 + step),
                "grad_norm": math.inf if step == 30 else 1.0 + step,
                "learning_rate": 1e-4,
            }
"""

TRACKERS = """
    import wandb

    offline = wandb.init(project="p", name="only", dir=root, mode="offline", config={"lr": 1e-4})
    for step, row in run():
        offline.log({**row, "train/global_step": step, "nested": {"low": -math.inf}})
        if step == 50:
            offline.log({"eval/loss": 1.5})
    print("Loss is nan, stopping training")
    offline.finish(exit_code=3)

    import trackio

    for name in ("first", "second"):
        trackio.init(project="p", name=name, embed=False)
        for step, row in run():
            trackio.log({**row, "nested": {"low": -math.inf}}, step=step)
        trackio.finish()

    import mlflow

    for store in (f"sqlite:///{root}/mlflow.db", f"file://{root}/mlruns"):
        mlflow.set_tracking_uri(store)
        mlflow.set_experiment("e")
        for name in ("first", "second"):
            with mlflow.start_run(run_name=name):
                for step, row in run():
                    mlflow.log_metrics({**row, "low": -math.inf}, step=step)
"""

TRAINERS = """
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(root / "tb")
    for step, row in run():
        for tag, value in row.items():
            writer.add_scalar(tag, value, step)
        writer.add_scalar("val/loss", 1.0, step // 50)
        writer.add_text("note", "words", step)
    writer.close()

    for name, first in (("1", 0), ("2", 5)):  # the second process went on from step 5
        with SummaryWriter(root / "resumed", filename_suffix=name) as writer:
            for step in range(first, first + 8):
                writer.add_scalar("loss", step, step)
                writer.add_scalar("lr", 0.1, step)

    import torch
    from torch import nn
    from transformers import Trainer, TrainingArguments

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, i):
            return {"x": torch.full((4,), float(i % 3)), "y": torch.tensor(1.0), "bad": torch.tensor(i == 40)}

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, x, y, bad):
            out = self.linear(x).squeeze(-1)
            loss = (out - y).square().mean()
            return {"loss": loss * math.nan if bad.any() else loss, "logits": out}

    class InOrder(Trainer):
        def _get_train_sampler(self, *args, **kwargs):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    for name, hide in (("hf", False), ("hf-filtered", True)):
        arguments = TrainingArguments(
            str(root / name), per_device_train_batch_size=4, num_train_epochs=2, logging_steps=2, save_steps=8,
            eval_strategy="steps", eval_steps=8, report_to=[], use_cpu=True, logging_nan_inf_filter=hide,
            label_names=["y"], remove_unused_columns=False,
        )
        print(f"=== {name}", flush=True)
        InOrder(Model(), arguments, train_dataset=Data(), eval_dataset=Data()).train()

    print("=== end", flush=True)

    from lightning.pytorch import LightningModule
    from lightning.pytorch import Trainer as Lightning
    from lightning.pytorch.callbacks import LearningRateMonitor
    from lightning.pytorch.loggers import CSVLogger

    class Lit(LightningModule):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def training_step(self, batch, index):
            loss = self.linear(batch["x"]).mean() * (math.nan if index == 5 else 1.0)
            self.log("train_loss", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch, index):
            self.log("val_loss", self.linear(batch["x"]).square().mean())

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    loader = torch.utils.data.DataLoader(Data(), batch_size=8)
    Lightning(
        max_epochs=2, accelerator="cpu", logger=CSVLogger(root / "csv"), callbacks=[LearningRateMonitor()],
        log_every_n_steps=1, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    ).fit(Lit(), loader, loader)

    from nanproof import Guard

    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.01), run_dir=root / "guarded")
    for step in range(40):
        x = torch.randn(8, 4) * (math.nan if step == 25 else 1.0)
        guard.step(lambda: {"near": model(x).square().mean(), "far": model(x).abs().mean()})
    guard.close()
"""


def write_with(program: str, root: Path) -> str:
    """Run a program that writes logs below ``root``; returns what it printed, both streams together."""
    script = root / "write.py"
    script.write_text(textwrap.dedent(RUN) + textwrap.dedent(program))
    environment = {
        **os.environ,
        "WANDB_SILENT": "true",
        "WANDB_CONSOLE": "wrap",
        "TRACKIO_DIR": str(root / "trackio"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "TQDM_MININTERVAL": "0",
        "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "false",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(root)],
        cwd=root,
        env=environment,
        timeout=600,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    text = done.stdout.decode("utf-8", "replace")
    assert done.returncode == 0, text[-3000:]
    return text
