"""Checkpoints: never a corrupt one written, never the last good one deleted, no silent drift on resume."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import DriftError, FormatError, NonFiniteError, UsageError
from ..files import atomic_file, file_text, make_folder, remove, write_atomic
from ..rng import random_states, set_random_states
from ..tensors import facts_of, is_finite
from .audit import Audit, compare_counters, find_drifts, saved_lr
from .plain_checkpoints import read_plain
from .ranks import Ranks
from .rundir import RunDir
from .training import Training

log = logging.getLogger("nanproof")
LAST_GOOD = "last_good.json"


class Checkpoints:
    """Writes, keeps, prunes and loads checkpoints."""

    def __init__(self, training: Training, ranks: Ranks, run: RunDir, keep: int) -> None:
        self._training = training
        self._ranks = ranks
        self._run = run
        self._keep = keep
        self.last_good: Path | None = None
        self.pin_next = False
        """Whether the next checkpoint is kept for good: a warning says that it may be the last good one."""

    # --- writing ----------------------------------------------------------------------------------------------

    def save(self, path: Path, guard: dict[str, Any], extra: dict[str, Any], *, trusted: bool) -> Path:
        """Write the whole state; ``trusted`` says that no bad step came just before."""
        bad = self._training.nonfinite()
        if self._ranks.any(bool(bad)):
            what = f"{bad[0][0]} {bad[0][1]}" if bad else "a tensor on another rank"
            raise NonFiniteError(
                f"refused to write {path}: {what}{f' and {len(bad) - 1} more' if len(bad) > 1 else ''}",
                hint=f"the last good checkpoint is {self.last_good}" if self.last_good else "roll back first",
            )
        make_folder(path.parent)
        state = self._collect(guard, extra)
        if self._training.sharded:
            from .sharded import save_sharded

            save_sharded(self._training, self._ranks, path, state)
        elif self._ranks.rank == 0:
            with atomic_file(path) as file:
                torch.save(state, file)
        if trusted:
            self.last_good = path
        if self._ranks.rank == 0:
            self._note(path, guard["tally"]["updates"], trusted)
        return path

    def _collect(self, guard: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        t = self._training
        sharded = t.sharded  # then model and optimizers travel as shards
        return {
            "nanproof": 1,
            "model": {} if sharded else t.model.state_dict(),
            "optimizers": [] if sharded else [o.state_dict() for o in t.optimizers],
            "schedulers": [s.state_dict() for s in t.schedulers],
            "scaler": t.scaler.state_dict() if t.scaler is not None else None,
            "ema": t.ema.state_dict() if hasattr(t.ema, "state_dict") else None,
            "guard": guard,
            "random": _plain(random_states()),
            "extra": extra,
        }

    def _note(self, path: Path, update: int, trusted: bool) -> None:
        """Remember what was written, then delete what is too old, but never the last good one."""
        index = path.parent / LAST_GOOD
        known: dict[str, Any] = _read_index(index)
        entries = [e for e in known.get("saved", []) if e["name"] != path.name and (path.parent / e["name"]).exists()]
        pinned, self.pin_next = self.pin_next and trusted, self.pin_next and not trusted
        entries.append({"name": path.name, "update": update, "trusted": trusted, "pinned": pinned})
        last = path.name if trusted else known.get("last_good")
        kept = entries[-self._keep :]
        kept += [e for e in entries[: -self._keep] if e["name"] == last or e.get("pinned")]
        # the record first: a kill in between leaves a file too many, never one too few
        write_atomic(
            index, json.dumps({"last_good": last, "saved": [e for e in entries if e in kept]}, indent=1) + "\n"
        )
        for entry in entries:
            if entry not in kept:
                remove(path.parent / entry["name"])

    # --- reading ----------------------------------------------------------------------------------------------

    def resume(self, path: Path, *, accept_drift: bool, fresh_schedule: bool) -> tuple[Audit, dict[str, Any]]:
        """Audit, then load; returns the audit and the guard's own state."""
        target, skipped = self._choose(path)
        state = self._read(target)
        facts = [f"passed over {name}: {why}" for name, why in skipped]
        facts += ["parameters, buffers and moments are finite"]
        drifts = [] if fresh_schedule else find_drifts(self._training, state)
        agreed, apart = compare_counters(state)
        facts += agreed
        drifts += apart
        audit = Audit(
            path=str(target),
            update=state["guard"]["tally"]["updates"],
            facts=tuple(facts),
            drifts=tuple(drifts),
            learning_rate=self._training.learning_rate() if fresh_schedule else saved_lr(state, self._training),
        )
        log.warning("nanproof: %s", audit)
        if drifts and not accept_drift:
            raise DriftError(
                f"{target} would change the configuration: {drifts[0]}"
                + (f" and {len(drifts) - 1} more" if len(drifts) > 1 else ""),
                hint="fresh_schedule=True keeps the configured values, accept_drift=True takes the checkpoint's",
            )
        self._apply(target, state, fresh_schedule=fresh_schedule)
        self.last_good = target
        for observer in self._run.observers:
            observer.event(event="resume", path=str(target), update=audit.update, drifts=list(drifts))
        return audit, state["guard"]

    def reload(self) -> int:
        """Go back to the last good checkpoint of this run; returns its update."""
        assert self.last_good is not None
        state = self._read(self.last_good)
        self._apply(self.last_good, state, fresh_schedule=False)
        return int(state["guard"]["tally"]["updates"])

    def _choose(self, path: Path) -> tuple[Path, list[tuple[str, str]]]:
        """The file itself, or the newest healthy one of a folder, with those passed over and why."""
        if path.is_file() or (path / ".metadata").is_file():
            return path, []
        if not path.is_dir():
            raise UsageError(f"there is no checkpoint {path}", hint="give a checkpoint, or a folder of checkpoints")
        entries = _read_index(path / LAST_GOOD).get("saved", [])
        named = [path / e["name"] for e in reversed(entries) if (path / e["name"]).exists()]
        listed = set(named)
        named += sorted(
            (p for p in path.glob("*.pt") if p not in listed), key=lambda p: p.stat().st_mtime, reverse=True
        )
        skipped: list[tuple[str, str]] = []
        for candidate in named:
            try:
                self._read(candidate)
            except (FormatError, NonFiniteError) as error:
                skipped.append((candidate.name, error.message))
            else:
                return candidate, skipped
        reasons = "; ".join(f"{n}: {why}" for n, why in skipped) or "it holds no checkpoints of this kind"
        raise UsageError(
            f"no healthy checkpoint in {path} ({reasons})", hint="nanproof scan shows what can be repaired"
        )

    def _read(self, path: Path) -> dict[str, Any]:
        """Load a checkpoint without executing anything in it, and refuse one that is not finite."""
        if path.is_dir():
            from .sharded import read_sharded

            state = read_sharded(path)
        else:
            try:
                state = torch.load(path, map_location="cpu", weights_only=True)
            except Exception as error:
                raise FormatError(f"{path.name} cannot be read: {type(error).__name__}: {error}") from error
        if not isinstance(state, dict) or state.get("nanproof") != 1:
            state = read_plain(state, path.name)
        for name, tensor in _tensors(state):
            if not is_finite(tensor) and not self._training.is_intentional(name.removeprefix("model.")):
                raise NonFiniteError(f"{path.name} is corrupt: {facts_of(name, tensor)}")
        return state

    def _apply(self, path: Path, state: dict[str, Any], *, fresh_schedule: bool) -> None:
        t = self._training
        # not only lr: OneCycleLR keeps max_lr and min_lr in the groups, and loading would bring the old ones back
        configured = [{k: v for k, v in g.items() if k != "params"} for o in t.optimizers for g in o.param_groups]
        if path.is_dir():
            from .sharded import load_sharded

            load_sharded(t, path)
        else:
            t.model.load_state_dict(state["model"])
            for optimizer, saved in zip(t.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
        if fresh_schedule:
            for group, options in zip((g for o in t.optimizers for g in o.param_groups), configured, strict=True):
                group.update(options)
        else:
            for scheduler, saved in zip(t.schedulers, state["schedulers"], strict=True):
                scheduler.load_state_dict(saved)
        if t.scaler is not None and state["scaler"]:
            t.scaler.load_state_dict(state["scaler"])
        if t.ema is not None and state["ema"] is not None:
            t.ema.load_state_dict(state["ema"])
        if state["random"] is not None:
            set_random_states(_unplain(state["random"]))


def _read_index(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(file_text(path))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _tensors(value: Any, path: str = "") -> list[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        return [(path, value)]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    return [found for k, v in items for found in _tensors(v, f"{path}.{k}".lstrip("."))]


def _plain(states: dict[str, Any]) -> dict[str, Any]:
    """Random states in types that a weights-only load accepts."""
    plain = dict(states)
    if "numpy" in plain:
        name, keys, *rest = plain["numpy"]
        plain["numpy"] = (name, torch.tensor(keys.astype("int64")), *rest)
    return plain


def _unplain(states: dict[str, Any]) -> dict[str, Any]:
    states = dict(states)
    if "numpy" in states:
        name, keys, *rest = states["numpy"]
        states["numpy"] = (name, keys.numpy().astype("uint32"), *rest)
    return states
