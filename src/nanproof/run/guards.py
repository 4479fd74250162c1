"""The guards of one run: made with its options, each in a folder of its own, and accounted for when they close."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from traceback import extract_tb, format_exception_only
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ..errors import GuardStop, LockedError
from ..guard import Guard
from ..guard.data import DataSource
from ..guard.external import ExternalLoop, attach
from ..guard.rundir import RunDir
from ..launch import rank_and_world
from .attachment import FirstStep, describe
from .options import Options

MESSAGE = 500  # characters of an exception that are logged
OURS = str(Path(__file__).parents[1]) + os.sep

if TYPE_CHECKING:
    from ..integrations.deepspeed import EngineGuard


@dataclass(eq=False)
class Record:
    """What is kept of a guard: its folder and counts. The guard itself goes when the script lets its model go."""

    guard: weakref.ref[Guard] | weakref.ref[EngineGuard]
    run: RunDir
    rank: int

    def account(self) -> dict[str, Any]:
        counts = {k: v for k, v in self.run.tally.state_dict().items() if v}
        return {"folder": str(self.run.path), "rank": self.rank, **counts, "summary": self.run.summary()}


class Guards:
    """Open guards, those of trainers' callbacks among them, and summaries of closed ones."""

    def __init__(self, options: Options, data: DataSource) -> None:
        self._options, self._data = options, data
        self.policy = options.make_policy()
        self._records: list[Record] = []
        self.accounts: list[dict[str, Any]] = []
        """Counts of those that are closed; the models that they were for may be gone."""
        self.tell: Callable[[str], None] = lambda _: None
        """Hears of every guard that has judged its first step."""

    @property
    def open(self) -> list[Guard]:
        return [g for g in self._all if isinstance(g, Guard)]

    @property
    def _all(self) -> list[Guard | EngineGuard]:
        found = [r.guard() for r in self._records]
        return [g for g in found if g is not None and g.open]

    def make(self, model: Any, optimizer: Any, *, after: RunDir | None = None, **options: Any) -> ExternalLoop:
        """A guarded loop in the run's folder, or below it for whatever is trained after the first.

        ``after`` is the run of a closed guard of the same model, to which other optimizers have come: its counts go on.
        """
        self.retire()
        given = {**self._options.guard_options(), "policy": self.policy, "data": self._data, **options}
        if after is not None and after.path is not None:
            self.accounts = [a for a in self.accounts if a["folder"] != str(after.path)]
            folder, given["continues"] = after.path, after.tally
        else:
            folder = self._folder()
        try:
            loop = attach(model, optimizer, run_dir=folder, **given)
        except LockedError:  # another process of this run was first; no lock may end a training
            loop = attach(model, optimizer, run_dir=self._options.run_dir / f"pid-{os.getpid()}", **given)
        guard = loop.guard
        self._keep(Record(weakref.ref(guard), guard._context.run, guard.rank), describe(guard))
        return loop

    def make_for_engine(self, engine: Any) -> None:
        """Guard a DeepSpeed engine."""
        from ..integrations.deepspeed import guard_engine

        self.retire()
        guard = guard_engine(engine, run_dir=self._folder(), policy=self.policy, data=self._data)
        where = f"guarding DeepSpeed's engine; records in {guard.run_dir}"
        self._keep(Record(weakref.ref(guard), guard.run, guard.rank), where)

    def _keep(self, record: Record, line: str) -> None:
        record.run.says_summary = False  # the end of the run says it
        record.run.observers.append(FirstStep(lambda: self.tell(line if record.rank == 0 else "")))
        self._records.append(record)

    def _folder(self) -> Path:
        folder = self._options.run_dir
        if _several_ranks():
            if not self._options.run_dir_given:
                folder = Path(_agree("run_dir", str(folder)))
        elif self._options.child and not (self._options.started and not (folder / "training_log.jsonl").exists()):
            folder = folder / f"pid-{os.getpid()}"
        elif rank := rank_and_world()[0]:  # of MPI, say, which torch knows nothing about
            folder = folder / f"rank-{rank}"
        earlier = len(self._records) + len(self.accounts)
        return folder / f"part-{earlier + 1}" if earlier else folder

    def retire(self) -> None:
        """Keep the accounts of guards that are closed or gone, and nothing else of them."""
        for record in list(self._records):
            guard = record.guard()
            if guard is None or not guard.open:
                if guard is None and not record.run.closed:
                    for observer in record.run.observers:
                        observer.closed()
                    record.run.close()
                self._records.remove(record)
                account = record.account()
                if isinstance(guard, Guard) and guard.repairs:
                    account["repairs"] = [r.to_json() for r in guard.repairs]
                self.accounts.append(account)

    def died(self, error: BaseException) -> None:
        """Log the exception that ends the script."""
        if isinstance(error, GuardStop) or (isinstance(error, SystemExit) and not isinstance(error.code, str)):
            return  # the stop is logged already, and a number says nothing
        lines = "".join(format_exception_only(error)).strip().splitlines()
        message = lines[-1 if any("Traceback (most recent" in line for line in lines) else 0]  # a worker's own error
        frames = [f for f in extract_tb(error.__traceback__) if not f.filename.startswith(OURS)]
        where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        for record in self._records:
            for observer in record.run.observers:
                observer.event(event="exception", message=message[:MESSAGE], where=where)

    def accounted(self) -> list[dict[str, Any]]:
        """The accounts of all, those that are still open among them."""
        return [*self.accounts, *(r.account() for r in self._records)]

    def forked(self, options: Options) -> None:
        """In a forked process: the guards are the parent's."""
        for record in self._records:
            record.run.closed = True
        self._options, self._records, self.accounts = options, [], []

    def close(self) -> None:
        for guard in self._all:
            guard.close()
        self.retire()


def _several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _agree(key: str, value: str) -> str:
    """What the first rank to come says, through the store that all ranks have met at: nobody waits for anybody."""
    store = dist.distributed_c10d._get_default_store()
    return bytes(store.compare_set(f"nanproof/{key}", "", value)).decode()
