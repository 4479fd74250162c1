"""A script under `nanproof run`: what it trains is found while it runs, and one guard is put beside it."""

from __future__ import annotations

import gc
import logging
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle

from ..errors import LockedError, NonFiniteError, UsageError
from ..guard import Guard
from ..guard.ears import Ear, taken_off
from ..guard.escort import Escort
from ..guard.guard import guard_of
from .deliveries import Deliveries
from .options import Options
from .owners import Loose, find_owners, name_owners, parameters_of
from .saves import find_poison

log = logging.getLogger("nanproof")
Call = Callable[..., Any]


class Session:
    """Hears what the patched functions of torch are called with, and answers for the guard."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.guards: list[Guard] = []
        """The guards at work, those of trainers' callbacks among them."""
        self.accounts: list[dict[str, Any]] = []
        """What became of those that are closed; the models that they were for may be gone."""
        self.unhooked: dict[str, str] = {}
        """What could not be guarded, by name, and why."""
        self.deliveries = Deliveries()
        self._policy = options.make_policy()
        self._escort: Escort | None = None
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """Those that are alive, numbered in the order of their making."""
        self._schedulers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._scalers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._passed_over: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._triggers: list[RemovableHandle] = []
        self._known: set[int] = set()
        """Parameters whose owner has a trigger."""
        self._in_backward = self._stepping = self._scheduling = False
        self._process, self._over = os.getpid(), False
        self._rates: weakref.WeakKeyDictionary[Optimizer, float] = weakref.WeakKeyDictionary()

    @property
    def here(self) -> bool:
        """Whether the session goes on, in the process that it belongs to; a forked one is left alone."""
        return not self._over and os.getpid() == self._process

    # --- who is there -----------------------------------------------------------------------------------------

    def meet_optimizer(self, optimizer: Optimizer) -> None:
        """An optimizer was made: the next training pass of its model makes a guard."""
        self._optimizers.setdefault(optimizer, len(self._optimizers))
        parameters = parameters_of([optimizer])
        if all(id(p) in self._known for p in parameters):
            return
        for owner in find_owners(parameters):
            self._known |= {id(p) for p in owner.parameters()}
            self.meet_module(owner)

    def meet_module(self, module: nn.Module) -> None:
        # first of all hooks: FSDP's own would have exchanged the parameters
        hook = Ear(self._on_forward)
        self._triggers.append(module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True))

    def meet_scheduler(self, scheduler: Any) -> None:
        self._schedulers.add(scheduler)

    def meet_scaler(self, scaler: Any) -> None:
        self._scalers.add(scaler)

    def _on_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not module.training or not torch.is_grad_enabled() or not self.here:
            return
        self._drop_triggers()
        escort = self._guard_all() if self._fresh() else None
        if escort is not None:
            if module not in escort.guard.training.roots:
                escort.listen(module)
            escort.before_forward(module, args, kwargs)  # hooks that are added during a call wait for the next one

    def forward(self, module: nn.Module, call: Call, args: Any, kwargs: Any) -> Any:
        """A forward pass whose hooks are compiled away: begin and end it from outside."""
        known = self._escort
        self._on_forward(module, args, kwargs)
        escort = self._escort
        if escort is None or torch.compiler.is_compiling():
            return call(*args, **kwargs)
        if escort is known:
            escort.before_forward(module, args, kwargs)
        output = None
        try:
            output = call(*args, **kwargs)
        finally:
            escort.after_forward(module, args, output)
        return output

    def stay_out_of_graphs(self) -> None:
        """The script compiles: what is called from compiled code must run beside the graph, not in it."""
        for name in ("backward", "clip", "step", "scaler_step", "scaler_update", "follow", "save"):
            if name not in vars(self):
                setattr(self, name, torch._dynamo.disable(getattr(self, name)))  # type: ignore[no-untyped-call]

    def _drop_triggers(self) -> None:
        for trigger in self._triggers:
            trigger.remove()
        self._triggers.clear()
        self._known.clear()

    def _fresh(self) -> list[Optimizer]:
        """Optimizers that no guard has."""
        owned = self._escort
        return [
            o
            for o in self._optimizers
            if not isinstance(o, LBFGS) and not (owned is not None and owned.owns(o)) and guard_of(o) is None
        ]

    def _guard_all(self) -> Escort | None:
        """One guard for all optimizers that are alive and not under a guard of somebody else."""
        if self._escort is not None:  # a new optimizer has come; what is gone must not be held on to
            self._escort.close()
            self._escort = None
            self._retire()
            gc.collect()
        self._drop_triggers()
        optimizers = sorted(self._fresh(), key=lambda o: self._optimizers[o])
        parameters = parameters_of(optimizers)
        owners = find_owners(parameters)
        held = {id(p) for m in owners for p in m.parameters()}
        loose = [p for p in parameters if id(p) not in held]
        if loose:
            owners.append(Loose(loose))
        model = owners[0] if len(owners) == 1 else nn.ModuleDict(name_owners(owners))
        scalers = [s for s in self._scalers if s.is_enabled()]
        mine = [s for s in self._schedulers if any(getattr(s, "optimizer", None) is o for o in optimizers)]
        try:
            guard = self.make(model, optimizers, scheduler=mine, scaler=scalers[0] if len(scalers) == 1 else None)
        except Exception as error:
            if isinstance(error, NonFiniteError | LockedError) and self._policy.mode != "observe":
                raise
            self._optimizers.clear()  # what cannot be guarded runs as it would without us, and that is said
            self._passed_over.update(optimizers)
            self.miss(" and ".join(type(o).__name__ for o in optimizers), f"{type(error).__name__}: {error}")
            return None
        self._escort = Escort(guard, divided=None, scaled=False)
        return self._escort

    def make(self, model: Any, optimizers: Any, **options: Any) -> Guard:
        """A guard in a folder of its own: the run's, or below it for whatever is trained after that."""
        self._retire()
        given = {**self._options.guard, "policy": self._policy, **options}
        roots = list(model.children()) if isinstance(model, nn.ModuleDict | nn.ModuleList) else [model]
        folder = self._folder()
        if _several_ranks() and not all(_reduces(m) for m in roots):
            # nobody knows whether these ranks keep step with each other: no guard of one may wait for another
            given["share"] = "nothing"
            folder = folder.with_name(f"{folder.name}-r{dist.get_rank()}") if dist.get_rank() else folder
        guard = Guard(model, optimizers, run_dir=folder, **given)
        guard._post.feed.delivered = self.deliveries.recent
        self.guards.append(guard)
        return guard

    def _folder(self) -> Path:
        base = self._options.run_dir
        if _several_ranks() and not self._options.run_dir_given:
            base = Path(_agree("run_dir", str(base)))
        earlier = len(self.guards) + len(self.accounts)
        return base / f"part-{earlier + 1}" if earlier else base

    def _retire(self) -> None:
        """Keep the accounts of guards that are closed, and nothing else of them."""
        for guard in [g for g in self.guards if not g.open]:
            self.guards.remove(guard)
            counts = {k: v for k, v in guard.tally.state_dict().items() if v}
            saves = {"not_saved": guard.tally.blocked} if guard.tally.blocked else {}
            self.accounts.append({"folder": str(guard.run_dir), "rank": guard.rank, **counts, **saves})

    def miss(self, what: str, why: str) -> None:
        """Something cannot be guarded: said at once, and again at the end."""
        if what not in self.unhooked:
            self.unhooked[what] = why
            log.warning("nanproof: not guarded: %s: %s", what, why)

    # --- what the script does ---------------------------------------------------------------------------------

    def backward(self, call: Call, losses: Any, scaled_by: Any, raw: Tensor | None) -> Any:
        """A backward pass; those within a backward pass (activation checkpointing) are part of it."""
        if self._in_backward or not self.here:
            return call()
        self._in_backward = True
        escort = self._escort
        if escort is not None:
            escort.meet(losses, raw, scaler=scaled_by)
        try:
            return call()
        finally:
            self._in_backward = False
            if escort is not None:
                escort.passed()

    def clip(self, call: Call, parameters: list[Tensor]) -> Any:
        """Clipping: the verdict comes before it, and a vetoed step keeps its gradients as they are."""
        escort = self._escort
        if escort is None or not self.here or self._in_backward:
            return call()
        wanted = {id(p) for p in parameters}
        owner = next(
            (o for o in escort.guard.training.optimizers if wanted & {id(p) for p in parameters_of([o])}), None
        )
        if owner is None or escort.judge(owner):
            return call()
        return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])

    def step(self, optimizer: Optimizer, call: Call, closure: Call | None) -> Any:
        """A step of an optimizer; those within it, of optimizers inside others, are part of it."""
        escort = self._escort_for(optimizer) if self.here and not self._stepping else None
        if escort is None:
            return call(*([closure] if closure is not None else []))

        def carry_out(*closures: Call) -> Any:
            with self._inside("_stepping"):
                return call(*closures)

        self._notice_rate(optimizer)
        return escort.step(optimizer, carry_out, closure)

    def _escort_for(self, optimizer: Optimizer) -> Escort | None:
        if self._in_backward and guard_of(optimizer) in (None, self._escort and self._escort.guard):
            self.miss(type(optimizer).__name__, "it steps inside the backward pass, before a verdict is possible")
            return None
        if self._escort is not None and self._escort.owns(optimizer):
            return self._escort
        if guard_of(optimizer) is not None or optimizer in self._passed_over:
            return None  # a trainer's callback has it, or the script's own guard, or nobody can
        if isinstance(optimizer, LBFGS):
            self._refuse(optimizer)
            return None
        self._optimizers.setdefault(optimizer, len(self._optimizers))
        return self._guard_all()

    def _refuse(self, optimizer: Optimizer) -> None:
        why = "it evaluates its closure many times within one step, so a step cannot be vetoed whole"
        others = [o for o in self._optimizers if not isinstance(o, LBFGS)]
        if not self.guards and not self.accounts and not others and self._policy.mode != "observe":
            raise UsageError(
                f"this script trains with LBFGS only: {why}",
                hint="use a first-order optimizer, or run it unguarded with --policy observe",
            )
        self.miss(type(optimizer).__name__, why)

    def _notice_rate(self, optimizer: Optimizer) -> None:
        """A learning rate that changes by itself is set by the script, and a skipped step does not hold it."""
        rate = float(optimizer.param_groups[0]["lr"])
        if self._rates.get(optimizer, rate) != rate and not any(
            getattr(s, "optimizer", None) is optimizer for s in self._schedulers
        ):
            self.miss(
                f"the learning rate of {type(optimizer).__name__}",
                "the script sets it itself, so a skipped step does not hold it",
            )
        self._rates[optimizer] = rate

    def scaler_step(self, optimizer: Optimizer, call: Call) -> Any:
        escort = self._escort_for(optimizer) if self.here else None
        if escort is None or escort.judge(optimizer):
            return call()
        escort.left(optimizer)
        return None

    def scaler_update(self, scaler: Any, call: Call) -> Any:
        held = self._escort.held_scale(scaler) if self._escort is not None and self.here else None
        return call(held) if held is not None else call()

    def follow(self, follower: Any, optimizer: Any, call: Call) -> Any:
        """A schedule or an average moves on, if an update was carried out since it last did."""
        escort = self._escort
        if (
            escort is None
            or self._scheduling
            or not self.here
            or (optimizer is not None and not escort.owns(optimizer))
        ):
            return call()
        if not escort.advances(follower, optimizer):
            return None
        with self._inside("_scheduling"):
            return call()

    def save(self, call: Call, value: Any, target: Any, *, agree: bool = False) -> Any:
        """A save: carried out unless it is a training state that is not finite. With ``agree`` all ranks save."""
        if not self.here:
            return call()
        for guard in self.guards if self._policy.mode != "observe" else ():
            post, found = guard._post, find_poison(value, guard.training)
            if not (post.ranks.any(found is not None) if agree else found is not None):
                continue
            what = str(found) if found is not None else "a tensor on another rank"
            post.block(target, what, suspect=(agree or post.ranks.alone) and bool(guard.training.sick()))
            if hasattr(target, "write"):
                # an open file is empty by now, and the script may put it in the place of a good one
                raise NonFiniteError(f"refused to save into an open file: {what}", hint="the last save is still good")
            return None
        with taken_off([*self._triggers, *(self._escort.hooks if self._escort is not None else [])]):
            return call()

    # --- the end ----------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Close every guard; what was found is in ``accounts`` and ``unhooked``."""
        if not self.here:
            return
        self._over = True
        self._drop_triggers()
        if self._escort is not None:
            self._escort.close()
        for guard in self.guards:
            guard.close()
        self._retire()

    @contextmanager
    def _inside(self, flag: str) -> Iterator[None]:
        setattr(self, flag, True)
        try:
            yield
        finally:
            setattr(self, flag, False)


def _several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _reduces(module: nn.Module) -> bool:
    """Whether gradients of this module are brought together over ranks by torch itself."""
    if isinstance(module, nn.parallel.DistributedDataParallel) or any(
        hasattr(p, "_local_tensor") for p in module.parameters()
    ):
        return True
    return type(module).__name__ == "FullyShardedDataParallel"


def _agree(key: str, value: str) -> str:
    """What the first rank says, through the store that all ranks have met at; needs no device."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.set(f"nanproof/{key}", value)
    return str(store.get(f"nanproof/{key}").decode())
