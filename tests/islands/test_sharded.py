"""Islands in models that are sharded with FSDP2: the weights are narrow only while the module runs."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from nanproof import islands
from support.hot import Net
from support.ranks import on_ranks


def sharded(rank: int) -> list[tuple[str, bool, bool, str]]:
    """For each kind of sharding and island: bad without it, finite with it, and where it is open."""
    found = []
    for narrow in (False, True):
        for path in ("blocks.1", ""):
            torch.manual_seed(0)
            model = Net()
            policy = MixedPrecisionPolicy(param_dtype=torch.float16) if narrow else MixedPrecisionPolicy()
            for block in model.blocks:
                fully_shard(block, mp_policy=policy)
            fully_shard(model, mp_policy=policy)

            def good(model: torch.nn.Module = model, narrow: bool = narrow) -> bool:
                model.zero_grad()
                with torch.autocast("cpu", torch.float16, enabled=not narrow):
                    out = model(torch.ones(2, 8) * (1 + rank))
                out.float().pow(2).mean().backward()
                local = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
                return bool(torch.isfinite(out).all()) and all(bool(torch.isfinite(g).all()) for g in local)

            without = good()
            islands.open(model, path)
            found.append((path, without, good(), islands.list(model)[0].path))
    return found


def test_an_island_in_a_sharded_model_heals_it() -> None:
    first, second = on_ranks(sharded)
    assert first == second
    for path, without, healed, where in first:
        assert not without
        assert healed, path
        assert where == path
