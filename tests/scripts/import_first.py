"""Imports another package before torch, then trains three steps, of which the second is bad.

python import_first.py datasets
"""

import argparse
import importlib
import warnings

parser = argparse.ArgumentParser()
parser.add_argument("package")
package = parser.parse_args().package
warnings.simplefilter("ignore")
importlib.import_module(package)

import torch  # noqa: E402

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for scale in (1.0, float("nan"), 1.0):
    optimizer.zero_grad()
    (model(torch.ones(2, 4)).square().mean() * scale).backward()
    optimizer.step()
print("finite" if all(bool(p.isfinite().all()) for p in model.parameters()) else "not finite")
