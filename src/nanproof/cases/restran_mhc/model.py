"""ResTran with mHC: residual blocks under manifold-constrained hyper-connections, a transformer, CTC; as it died.

Every block gets its input from n copies of the feature map (read-out), and its output is added to the copies
(write-in), which are mixed by a matrix that Sinkhorn's iterations make doubly stochastic. Three gates, ``alpha``, say
how much of this depends on the image.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...guard import tap
from .data import CLASSES, HEIGHT, WIDTH


def sinkhorn(logits: Tensor) -> Tensor:
    """Rows and columns of the result sum to 1."""
    matrix = torch.exp(logits)
    for _ in range(5):
        matrix = matrix / matrix.sum(-1, keepdim=True)
        matrix = matrix / matrix.sum(-2, keepdim=True)
    return matrix


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class BasicBlock(nn.Module):
    """The block of a ResNet, with its own shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h)) + x)


class HyperConnection(nn.Module):
    """mHC around one block."""

    def __init__(self, block: nn.Module, channels: int, n: int, eps: float) -> None:
        super().__init__()
        self.block, self.n = block, n
        self.norm = RMSNorm(n * channels, eps)
        self.phi = nn.Linear(n * channels, 2 * n + n * n)
        self.alpha_pre = nn.Parameter(torch.full((1,), 0.01))
        self.alpha_post = nn.Parameter(torch.full((1,), 0.01))
        self.alpha_res = nn.Parameter(torch.full((1,), 0.01))

    def logits(self, pooled: Tensor) -> Tensor:
        found: Tensor = self.phi(self.norm(pooled))
        return found

    def sinkhorn(self, logits: Tensor) -> Tensor:
        return sinkhorn(logits)

    def forward(self, x: Tensor) -> Tensor:
        n = self.n
        streams = x.unsqueeze(1).repeat(1, n, 1, 1, 1)
        pooled = tap("mhc.pooled", streams.mean((3, 4)).flatten(1))
        pre, post, res = torch.split(self.logits(pooled), [n, n, n * n], -1)
        read = torch.sigmoid(self.alpha_pre * pre)
        write = 2 * torch.sigmoid(self.alpha_post * post)
        mixing = self.sinkhorn(self.alpha_res * res.view(-1, n, n))
        h = tap("mhc.read_out", torch.einsum("bn,bnchw->bchw", read, streams), alpha_pre=self.alpha_pre)
        out = tap("mhc.sublayer", self.block(h))
        written = tap("mhc.write_in", torch.einsum("bn,bchw->bnchw", write, out), alpha_post=self.alpha_post)
        mixed = torch.einsum("bnn,bnchw->bnchw", mixing, streams)
        return tap("mhc.final", (mixed + written).mean(1), alpha_res=self.alpha_res)


class ResTran(nn.Module):
    """Log-probabilities of the letters along the width of a plate, and the largest value of the feature map."""

    def __init__(self, *, channels: int, blocks: int, n: int, width: int, eps: float) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, channels, 3, stride=(2, 1), padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.stages = nn.Sequential(*(self.connect(channels, n, eps) for _ in range(blocks)))
        features = channels * HEIGHT // 4
        self.project = nn.Sequential(nn.LayerNorm(features), nn.Linear(features, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, WIDTH // 2, width))
        self.encoder = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, CLASSES)

    def connect(self, channels: int, n: int, eps: float) -> nn.Module:
        return HyperConnection(BasicBlock(channels), channels, n, eps)

    def features(self, images: Tensor) -> Tensor:
        found: Tensor = self.stages(self.stem(images))
        return found

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        x = self.features(images)
        columns = x.permute(0, 3, 1, 2).flatten(2).float()
        h = self.encoder(self.project(columns) + self.positions)
        return self.head(h).float().log_softmax(-1), x.detach().abs().amax()

    def alphas(self) -> dict[str, float]:
        """The largest gate of each kind."""
        kinds = ("alpha_pre", "alpha_post", "alpha_res")
        named = [(name.rpartition(".")[2], p) for name, p in self.named_parameters()]
        return {kind: max(p.detach().abs().max().item() for name, p in named if name == kind) for kind in kinds}
