"""Two networks with an optimizer each, taking turns: one bad real sample concerns the discriminator alone."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--without", type=int, default=-1, help="leave the discriminator's part of this batch out")
args = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)
x = torch.randn(96, 4) * 0.5 + 1.0
x[61, 3] = float("inf")

generator = nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
discriminator = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(16, 1))
g_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
loss_of = nn.functional.binary_cross_entropy_with_logits
ones, zeros = torch.ones(8, 1), torch.zeros(8, 1)

for i, (real,) in enumerate(DataLoader(TensorDataset(x), batch_size=8)):
    noise = torch.randn(8, 2)
    if i != args.without:
        d_optimizer.zero_grad()
        fake = generator(noise).detach()
        d_loss = loss_of(discriminator(real), ones) + loss_of(discriminator(fake), zeros)
        d_loss.backward()
        d_optimizer.step()
    g_optimizer.zero_grad()
    g_loss = loss_of(discriminator(generator(noise)), ones)
    g_loss.backward()
    g_optimizer.step()

state = {"generator": generator.state_dict(), "discriminator": discriminator.state_dict()}
state |= {"g_optimizer": g_optimizer.state_dict(), "d_optimizer": d_optimizer.state_dict()}
torch.save({**state, "random": torch.get_rng_state()}, args.out)
