"""Ray Train: guard the workers of a TorchTrainer, and hear of their incidents in the driver.

    from nanproof.integrations.ray import GuardCallback, guard_loop

    TorchTrainer(
        guard_loop(train_loop, run_dir="/shared/runs/a"),
        run_config=RunConfig(callbacks=[GuardCallback("/shared/runs/a")], failure_config=FailureConfig(max_failures=3)),
    ).fit()

The train loop stays as it is. A state that is not finite is neither saved nor reported, so the checkpoint that Ray
restarts from when a worker has died is a healthy one.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..files import file_text
from .object_patches import ObjectPatches

if TYPE_CHECKING:
    from ..run.launcher import Stage

try:
    from ray.train import UserCallback
except ImportError:  # the driver has Ray; whoever only reads incidents does not need it
    UserCallback = object

log = logging.getLogger("nanproof")


def guard_loop(
    train_loop: Callable[..., Any], *, run_dir: str | Path, policy: str = "default", settings: Iterable[str] = ()
) -> Callable[..., Any]:
    """The train loop of a `TorchTrainer` under the guard, as `nanproof run` does it for a script.

    ``run_dir`` is a folder that all workers can write to; ``settings`` are those of ``nanproof run --set``.
    """
    folder, given = str(run_dir), list(settings)

    @functools.wraps(train_loop)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        from ..run.launcher import guarding
        from ..run.options import Options, read_settings

        changes, options = read_settings(given)
        chosen = Options(run_dir=Path(folder), run_dir_given=True, policy=policy, policy_changes=changes, guard=options)
        with guarding(chosen) as stage:
            patches = _withhold_checkpoints(stage)
            try:
                return train_loop(*args, **kwargs)
            finally:
                patches.undo()

    return guarded


def _withhold_checkpoints(stage: Stage) -> ObjectPatches:
    """Report metrics without the checkpoint when its save was blocked: Ray would restart from an empty folder."""
    try:
        from ray.train.v2._internal.execution.train_fn_utils import get_train_fn_utils

        worker = get_train_fn_utils()
    except (ImportError, RuntimeError) as error:
        raise UsageError(
            "guard_loop needs a worker of Ray Train V2", hint="set RAY_TRAIN_V2_ENABLED=1 and update ray[train]"
        ) from error
    seen = stage.blocked_saves

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def report(metrics: Any, checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            if checkpoint is not None and stage.blocked_saves > seen:
                log.error("nanproof: checkpoint not reported to Ray: its save was blocked, the state is not finite")
                checkpoint, kwargs = None, {**kwargs, "validation": False}
            seen = stage.blocked_saves
            return original(metrics, checkpoint, *args, **kwargs)

        return report

    patches = ObjectPatches()
    patches.put(worker, "report", make)
    return patches


class GuardCallback(UserCallback):  # type: ignore[misc]
    """Tells the driver about the incidents of all workers, when they report and when one of them fails."""

    def __init__(self, run_dir: str | Path) -> None:
        self._folder = Path(run_dir)
        self._seen: set[str] = set()

    def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None:
        self.gather()

    def after_exception(self, run_context: Any, worker_exceptions: Any) -> None:
        self.gather()
        ranks = ", ".join(map(str, sorted(worker_exceptions)))
        log.error("nanproof: worker %s failed; Ray restarts from the last checkpoint that was reported", ranks)

    def gather(self) -> list[dict[str, Any]]:
        """The incidents since the last time, one for each bad step, each told in one line."""
        found = []
        for path in sorted(self._folder.rglob("incidents/*/incident.json")):
            if str(path) in self._seen:
                continue
            self._seen.add(str(path))
            try:
                record: dict[str, Any] = json.loads(file_text(path))
            except (OSError, ValueError):
                continue  # it is being written, or belongs to somebody else
            found.append(record)
            verdict = record["verdict"]
            if verdict["rank"] in (None, record["rank"]):
                notes = "; ".join(record["notes"])
                log.warning(
                    "nanproof: worker %d, step %d: %s %s → %s; %s; %s",
                    record["rank"],
                    record["step"],
                    verdict["kind"],
                    verdict["level"] or "",
                    record["action"]["kind"],
                    notes,
                    path.parent,
                )
        return found
