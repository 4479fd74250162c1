"""The guards of one run: made with its options, each in a folder of its own, and accounted for when they close."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from ..guard import Guard
from ..integrations.deliveries import Deliveries
from .options import Options


class Guards:
    """Those at work, those of trainers' callbacks among them, and what became of the others."""

    def __init__(self, options: Options, deliveries: Deliveries) -> None:
        self._options, self._deliveries = options, deliveries
        self.policy = options.make_policy()
        self.open: list[Guard] = []
        self.accounts: list[dict[str, Any]] = []
        """Counts of those that are closed; the models that they were for may be gone."""

    def make(self, model: Any, optimizer: Any, **options: Any) -> Guard:
        """A guard in the run's folder, or below it for whatever is trained after the first."""
        self.retire()
        given = {**self._options.guard, "policy": self.policy, **options}
        roots = list(model.children()) if isinstance(model, nn.ModuleDict | nn.ModuleList) else [model]
        folder = self._options.run_dir
        if _several_ranks():
            if all(_reduces(m) for m in roots):
                folder = folder if self._options.run_dir_given else Path(_agree("run_dir", str(folder)))
            else:
                # nobody knows whether these ranks keep step with each other: no guard of one may wait for another
                given["share"] = "nothing"
                folder = folder.with_name(f"{folder.name}-r{dist.get_rank()}") if dist.get_rank() else folder
        earlier = len(self.open) + len(self.accounts)
        guard = Guard(model, optimizer, run_dir=folder / f"part-{earlier + 1}" if earlier else folder, **given)
        guard._post.feed.delivered = self._deliveries.recent
        self.open.append(guard)
        return guard

    def retire(self) -> None:
        """Keep the accounts of guards that are closed, and nothing else of them."""
        for guard in [g for g in self.open if not g.open]:
            self.open.remove(guard)
            counts = {k: v for k, v in guard.tally.state_dict().items() if v}
            saves = {"not_saved": guard.tally.blocked} if guard.tally.blocked else {}
            self.accounts.append({"folder": str(guard.run_dir), "rank": guard.rank, **counts, **saves})

    def close(self) -> None:
        for guard in self.open:
            guard.close()
        self.retire()


def _several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _reduces(module: nn.Module) -> bool:
    """Whether gradients of this module are brought together over ranks by torch itself."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return True
    sharded = any(hasattr(p, "_local_tensor") for p in module.parameters())
    return sharded or type(module).__name__ == "FullyShardedDataParallel"


def _agree(key: str, value: str) -> str:
    """What the first rank says, through the store that all ranks have met at; needs no device."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.set(f"nanproof/{key}", value)
    return str(store.get(f"nanproof/{key}").decode())
