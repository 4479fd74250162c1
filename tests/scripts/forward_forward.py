"""Forward-forward: every layer has an optimizer and a loss of its own, and nothing is passed back between layers."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--without", type=int, default=-1, help="leave this batch out")
args = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(0)
inputs = torch.randn(96, 8)
inputs[61, 5] = float("nan")


class Layer(nn.Module):
    def __init__(self, width, size):
        super().__init__()
        self.linear = nn.Linear(width, size)
        self.optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)

    def forward(self, x):
        return torch.relu(self.linear(x / (x.norm(dim=1, keepdim=True) + 1e-4)))

    def train_on(self, positive, negative):
        self.optimizer.zero_grad()
        goods = self(positive).square().mean(1), self(negative).square().mean(1)
        nn.functional.softplus(torch.cat([2.0 - goods[0], goods[1] - 2.0])).mean().backward()
        self.optimizer.step()
        return self(positive).detach(), self(negative).detach()


layers = [Layer(8, 16), Layer(16, 16)]
for i, (batch,) in enumerate(DataLoader(TensorDataset(inputs), batch_size=8)):
    if i == args.without:
        continue
    pair = batch, batch.flip(1)
    for layer in layers:
        pair = layer.train_on(*pair)

torch.save([{"layer": layer.state_dict(), "optimizer": layer.optimizer.state_dict()} for layer in layers], args.out)
