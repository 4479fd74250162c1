"""What the usual remedies make of one bad sample; writes the table in docs/peers.md. ``make peers`` runs it.

One training script, one sample that becomes NaN in a division, and BatchNorm after it. Each remedy is applied as its
documentation says, in a process of its own; what is measured is the state that is left, and whether the output names
the line of the division and the sample. OLMo-core is measured where it is installed (``pip install ai2-olmo-core``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from written import write_table

SCRIPT = """
import hashlib, json, sys
import torch
from torch import nn

REMEDY, BAD = sys.argv[1], sys.argv[2] == "bad"

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x):
        x = (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)  # the division
        return self.head(self.norm(x))

torch.manual_seed(0)
x, y = torch.randn(1024, 8), torch.randn(1024, 1)
x[997] = 0.5  # no variance: 0 / 0
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
model = Net()
steps = 0
scaler = torch.amp.GradScaler("cpu", enabled=REMEDY == "GradScaler")
if REMEDY == "OLMo SkipStep":
    from olmo_core.optim import SkipStepAdamW
    optimizer = SkipStepAdamW(model.parameters(), lr=1e-3)
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.autograd.set_detect_anomaly(REMEDY == "detect_anomaly")
batches = list(enumerate(loader))
if not BAD:
    del batches[997 // 8]  # the run that never saw the batch
if REMEDY == "Lightning":
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model

        def training_step(self, batch, index):
            return nn.functional.mse_loss(model(batch[0]), batch[1])

        def configure_optimizers(self):
            return optimizer

    lightning.Trainer(
        max_epochs=1, accelerator="cpu", gradient_clip_val=1.0, logger=False, enable_checkpointing=False,
    ).fit(Module(), torch.utils.data.DataLoader([batch for _, batch in batches], batch_size=None))
    number, batches = batches[-1][0], []

for number, (inputs, targets) in batches:
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16, enabled=REMEDY == "GradScaler"):
        loss = nn.functional.mse_loss(model(inputs).float(), targets)
    try:
        scaler.scale(loss).backward()
    except RuntimeError as error:
        import traceback
        traceback.print_exc()
        break
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if REMEDY == "clip + isnan" and (torch.isnan(loss) or torch.isnan(norm)):
        print("skipping a NaN step")
        continue
    if REMEDY == "OLMo SkipStep":
        optimizer.latest_loss, optimizer.latest_grad_norm = loss.detach(), norm.detach()
    scaler.step(optimizer)
    scaler.update()
    steps += 1

tensors = [t.detach() for t in model.state_dict().values()]
state = [t for p in optimizer.state.values() for t in p.values() if isinstance(t, torch.Tensor)]
digest = hashlib.sha256(b"".join(t.cpu().numpy().tobytes() for t in [*tensors, *state])).hexdigest()
print("RESULT", json.dumps({
    "weights": all(bool(p.isfinite().all()) for p in model.parameters()),
    "buffers": all(bool(b.isfinite().all()) for b in model.buffers()),
    "digest": digest,
    "ended": number == len(loader) - 1,
}))
"""
LINE = next(n for n, line in enumerate(SCRIPT.splitlines(), 1) if "# the division" in line)
REMEDIES = (
    "clipping alone",
    "detect_anomaly",
    "GradScaler",
    "clip + isnan",
    "Lightning",
    "OLMo SkipStep",
    "nanproof run",
)


def measure(remedy: str, folder: Path) -> dict[str, str] | None:
    """The row of one remedy; None where its library is not installed."""
    told: dict[str, object] = {}
    output = ""
    for batch in ("bad", "without"):
        prefix = ["-m", "nanproof", "run", "--run-dir", str(folder / "runs")] if remedy == "nanproof run" else []
        done = subprocess.run(
            [sys.executable, *(prefix if batch == "bad" else []), "train.py", remedy, batch],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        if "No module named 'olmo_core'" in done.stderr:
            return None
        found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if not found:
            raise SystemExit(f"{remedy}: {done.stderr[-2000:]}")
        told[batch] = json.loads(found[0].removeprefix("RESULT "))
        output = output or done.stdout + done.stderr
    bad, without = told["bad"], told["without"]
    assert isinstance(bad, dict)
    assert isinstance(without, dict)
    return {
        "run": "to the end" if bad["ended"] else "ended",
        "weights": "finite" if bad["weights"] else "NaN",
        "BatchNorm statistics": "finite" if bad["buffers"] else "NaN",
        "bit-equal to a run without the batch": "yes" if bad["digest"] == without["digest"] else "no",
        "names the line": "yes" if f'train.py", line {LINE}' in output or f"train.py:{LINE}" in output else "no",
        "names the samples": "yes" if "992–999" in output else "no",
    }


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "train.py").write_text(SCRIPT)
        rows = {remedy: measure(remedy, Path(name)) for remedy in REMEDIES}
    columns = list(rows["nanproof run"] or {})
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for remedy, row in rows.items():
        cells = ["not installed"] * len(columns) if row is None else list(row.values())
        lines.append(f"| {remedy} | " + " | ".join(cells) + " |")
    print("\n".join(lines))
    if "--write" in sys.argv:
        write_table("peers.md", "remedies", "\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
