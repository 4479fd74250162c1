"""Decoupled diffusion with a constant SDE: x(t) = x0 + C·t + √t·noise with C = −x0, so that x(1) is pure noise.

The model predicts C and the noise; from both, x0 follows at any time.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from . import advice as advised
from .maps import BLOCK, Maps
from .model import CHANNELS, Denoiser, FrozenEncoder

# What the original's torch.cuda.amp.autocast(enabled=amp) runs in by default: float16. autocast's default on
# a CPU would be bfloat16; the miniature takes what a GPU takes.
AUTOCAST_DEFAULT = torch.get_autocast_dtype("cuda")

EARLIEST = 1e-4


class LatentDiffusion(nn.Module):
    """``model(maps)`` gives the losses of a batch at random times; ``model.sample`` draws maps."""

    def __init__(self, denoiser: Denoiser, *, scale: float, amp: bool, advice: Collection[str]) -> None:
        super().__init__()
        self.denoiser = denoiser
        self.encoder = FrozenEncoder()
        self.scale = scale
        self.amp = amp
        self.advice = advice

    def own_precision(self, device: torch.device) -> AbstractContextManager[object]:
        """The trainer's own mixed precision. It stands inside that of accelerate, and the inner one wins."""
        return torch.autocast(device.type, dtype=AUTOCAST_DEFAULT) if self.amp else nullcontext()

    def forward(self, maps: Maps) -> dict[str, Tensor]:
        with self.own_precision(maps.gain.device):
            return self.p_losses(self.encoder.encode(maps.gain) * self.scale, maps.known)

    def p_losses(self, x0: Tensor, known: Tensor) -> dict[str, Tensor]:
        """``loss_simple``: C and noise against the truth; ``loss_vlb``: the latent rebuilt from both."""
        time = torch.rand(len(x0), device=x0.device) * (1 - EARLIEST) + EARLIEST
        noise = torch.randn_like(x0)
        t = time.view(-1, 1, 1, 1)
        x = x0 - x0 * t + t.sqrt() * noise
        c_found, noise_found = self.denoiser(x, time, known)
        weight_c, weight_noise = 2 * torch.exp(1 - time), torch.exp(time.sqrt())
        if "replace_bad_predictions" in self.advice:
            c_found, noise_found = map(advised.replace_bad_predictions, (c_found, noise_found))
        if "clamp_weights" in self.advice:
            weight_c, weight_noise = map(advised.clamp_weights, (weight_c, weight_noise))
        simple = weight_c * _distance(c_found, -x0) + weight_noise * _distance(noise_found, noise)
        vlb = (1 - time) * (x - c_found * t - t.sqrt() * noise_found - x0).abs().mean((1, 2, 3))
        losses = {"loss_simple": simple.mean(), "loss_vlb": vlb.mean()}
        if "replace_bad_loss" in self.advice:
            return {name: advised.replace_bad_loss(loss) for name, loss in losses.items()}
        return losses

    @torch.no_grad()
    def sample(self, known: Tensor, generator: torch.Generator, steps: int = 8) -> Tensor:
        """Maps of towns where nothing was measured: from noise back to time 0, in equal steps."""
        side = known.shape[-1] // BLOCK
        x = torch.randn(len(known), CHANNELS, side, side, generator=generator).to(known.device)
        for i in range(steps, 0, -1):
            now, later = i / steps, (i - 1) / steps
            with self.own_precision(known.device):
                c, noise = self.denoiser(x, torch.full((len(known),), now, device=known.device), known)
            x0 = x - c.float() * now - now**0.5 * noise.float()
            x = (1 - later) * x0 + later**0.5 * noise.float()
        return self.encoder.decode(x / self.scale)


def _distance(found: Tensor, true: Tensor) -> Tensor:
    error = found - true
    return (error.square().mean((1, 2, 3)) + error.abs().mean((1, 2, 3))) / 2
