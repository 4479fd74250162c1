"""Hogwild: processes that step the same shared weights, each with an optimizer of its own; one meets a bad sample."""

import argparse

import torch
import torch.multiprocessing as mp
from torch import nn


def train(number, model):
    torch.set_num_threads(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(number)
    for i in range(8):
        inputs = torch.randn(8, 8, generator=data)
        targets = inputs.sum(1, keepdim=True)
        if (i, number) == (5, 1):
            inputs[3, 2] = float("nan")
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    out = parser.parse_args().out
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).share_memory()
    context = mp.get_context("spawn")
    processes = [context.Process(target=train, args=(number, model)) for number in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [p.exitcode for p in processes] == [0, 0]
    torch.save(model.state_dict(), out)
