"""Lightning's Trainer: accumulation, clipping, a schedule per step, its own checkpoints."""

import argparse
import logging
import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
import lightning  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--without", type=int, default=-1, help="leave this window of two batches out")
args = parser.parse_args()
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

torch.manual_seed(0)
torch.set_num_threads(1)
x = torch.randn(128, 8)
y = x.sum(1, keepdim=True)
x[61, 3] = float("nan")
if args.without >= 0:
    keep = [i for i in range(128) if i // 16 != args.without]
    x, y = x[keep], y[keep]


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))

    def training_step(self, batch, index):
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 16)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


net = Net()
trainer = lightning.Trainer(
    max_epochs=1,
    accelerator="cpu",
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
torch.manual_seed(1)
trainer.fit(net, DataLoader(TensorDataset(x, y), batch_size=8))
state = {"model": net.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}
schedule = trainer.lr_scheduler_configs[0].scheduler.last_epoch
torch.save({**state, "schedule": schedule, "random": torch.get_rng_state()}, args.out)
