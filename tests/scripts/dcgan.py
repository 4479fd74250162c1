"""DCGAN as in torch's examples: two backward passes for one step of the discriminator, and one image of 48 is NaN."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--without", type=int, default=-1, help="leave the discriminator's part of this batch out")
args = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(0)
images = torch.rand(48, 1, 8, 8) * 2 - 1
images[29, 0, 3] = float("nan")  # a line that a decoder has lost

generator = nn.Sequential(
    nn.ConvTranspose2d(4, 8, 4, 1, 0, bias=False),
    nn.BatchNorm2d(8),
    nn.ReLU(True),
    nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False),
    nn.Tanh(),
)
discriminator = nn.Sequential(
    nn.Conv2d(1, 8, 4, 2, 1, bias=False),
    nn.BatchNorm2d(8),
    nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(8, 1, 4, 1, 0, bias=False),
    nn.Flatten(0),
)
for module in (*generator.modules(), *discriminator.modules()):
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, 0.0, 0.02)
criterion = nn.BCEWithLogitsLoss()
of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
of_generator = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))

for i, (real,) in enumerate(DataLoader(TensorDataset(images), batch_size=8)):
    noise = torch.randn(8, 4, 1, 1)
    if i == args.without:
        fake = generator(noise)
    else:
        discriminator.zero_grad()
        criterion(discriminator(real), torch.ones(8)).backward()
        fake = generator(noise)
        criterion(discriminator(fake.detach()), torch.zeros(8)).backward()
        of_discriminator.step()
    generator.zero_grad()
    criterion(discriminator(fake), torch.ones(8)).backward()
    of_generator.step()

state = {"generator": generator.state_dict(), "discriminator": discriminator.state_dict()}
state |= {"g_optimizer": of_generator.state_dict(), "d_optimizer": of_discriminator.state_dict()}
torch.save({**state, "random": torch.get_rng_state()}, args.out)
