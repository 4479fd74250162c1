"""Heal a run while it trains: the smallest module that must compute otherwise, found and proved by replay.

    locate → open an island at the located module → locate again → grow it, or add another → until the step is finite

What is wrong decides how the module computes from then on: in float32, eagerly, or with the math attention kernel. A
repair is used only after it was proved: the bad step is finite with it, forward and backward, and the last good
batches give the loss and the gradients that they give without it, within the rounding of the dtype.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
import weakref
from collections import deque
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from .. import islands
from ..captured import CapturedState
from ..errors import UsageError
from ..islands.island import island_of
from ..locating import Location
from ..records import Repair
from ..tensors import bytes_of, tensors_in
from .heal_replay import GoodBatch, Replay, moved
from .heal_search import Search, repairable
from .heal_text import Healing, in_words, told
from .heal_update import repaired_eps, set_eps
from .ranks import PeerFailed, Ranks
from .step import OpenStep
from .training import Training

log = logging.getLogger("nanproof")

Heal = Literal["off", "offer", "open"]
RECENT = 20
"""How many losses say what is usual."""
LOOK_EVERY, JUDGED_AFTER = 25, 100
"""Updates between two looks at the values in an island, and before its use is judged."""
GOOD_BATCHES = 2
"""How many good batches are kept to prove a repair on."""
KEPT_BYTES = 64 << 20
"""Larger batches are not kept: the device's memory is the run's."""
FALSE_ALARMS = 2
"""Bad outputs that no repair was found for; some models have infinite outputs on purpose."""
DIVERGED_AFTER, BEYOND = 3, 1
"""An island only keeps a run finite: so many losses in a row that are above all recent ones, by so many times their
range, and above what was usual before the island was opened, and the run has diverged."""
STEEP = 3
"""An island does not end the growth: a gradient norm above all recent ones, and by so many times above their median, is
how a run leaves them; its update is made with a lower learning rate."""
QUIET = 5
"""After such a loss, so many usual ones before a state is one to come back to."""
LARGE_SHARE = 0.25
MAX_SPREADS = 3
_CURE = "islands keep it finite, they do not make it learn: look for the cause with nanproof cure"
FAILURES = 3
"""After that many searches in a row that found nothing, no more are made."""
LOSS_ROUNDINGS = 64
"""By how many roundings of the narrow dtype a good batch may differ; more where the model itself amplifies them."""
AMPLIFIED = 4
"""By how many times what one rounding of the weights changes in a good batch a repair may change it."""


class Healer:
    """Searches, proves, opens and remembers repairs of one run."""

    def __init__(self, training: Training, ranks: Ranks, *, mode: Heal, seconds: float) -> None:
        self._training, self._ranks, self.mode, self._left = training, ranks, mode, seconds
        self.repairs: list[Repair] = []
        """Repairs in force."""
        self._good: deque[GoodBatch] = deque(maxlen=GOOD_BATCHES)
        self._failures = 0
        self._said: set[str] = set()
        self._checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Optimizers whose eps was looked at."""
        self._spread = 0
        """How often islands were opened."""
        self._armed = training.device.type == "cpu"
        """Whether outputs are looked at during the forward pass: elsewhere that is a wait, so only after a bad step."""
        self._false_alarms = 0
        self.before_pass = CapturedState(training.slots)
        self._losses: deque[float] = deque(maxlen=RECENT)
        self._norms: deque[float] = deque(maxlen=RECENT)
        """The gradient norms of the last updates."""
        self._before: float | None = None
        """The usual loss before the last island was opened."""
        self._since = 0
        """Updates since then."""
        self._beyond = 0
        """Losses in a row that the run did not come near before."""
        self._quiet = QUIET
        """Losses in a row that were none of those."""
        self.calm = True
        """Whether the state in which the last island was opened is one to come back to, on every rank."""
        self.last_loss = math.nan
        self.diverged = False
        self._grown: dict[str, tuple[int, float]] = {}
        """Of each island the last look at it: the step, and the largest value that left it."""

    @property
    def wanted(self) -> bool:
        return self.mode != "off" and self._failures < FAILURES and self._left > 0

    @property
    def live(self) -> bool:
        """Whether a bad output is answered at once, before the loop goes on with it."""
        wanted = self.wanted and self._false_alarms < FALSE_ALARMS and self._ranks.alone
        return wanted and self._armed and (self.mode == "open" or self._blind)

    _blind = False
    """Whether a bad step could not be replayed after its end."""

    def arm(self, *, blind: bool) -> None:
        """A step was bad: look at the outputs of the next ones; ``blind`` when this one could not be replayed."""
        self._armed, self._blind, self._false_alarms = True, self._blind or blind, 0

    def allow(self) -> None:
        """Open islands from now on, at the first output that leaves the range: a warning says that one will."""
        self.mode, self._failures = "open", 0
        self.arm(blind=False)

    def remember(self, step: OpenStep) -> None:
        """Keep a good step's last pass, so that a repair can be proved on it."""
        if self.mode == "off" or not step.passes:
            return
        one = step.passes[-1]
        given = [t for _, t in tensors_in(one.batch if one.inputs is None else one.inputs)]
        if sum(bytes_of(t) for t in given) > KEPT_BYTES / GOOD_BATCHES or not step.before.taken:
            return
        if one.closure is not None and not one.closure.remember():
            return
        self._good.append(GoodBatch(one, one.random or step.before.random))

    def heal(self, number: int, replay: Replay | None, location: Location | None) -> Healing | None:
        """Search for a repair of a bad step, prove it, and open it if that is wanted; on all ranks the same."""
        lockstep = self._ranks.sharded and not self._ranks.alone
        ready = self.wanted and (replay is not None or not lockstep)
        if self._ranks.any(not ready) if lockstep else not self._ranks.any(ready and replay is not None):
            return None
        start = time.monotonic()
        search = Search(self._training, self._ranks, replay, lockstep=lockstep)
        try:
            healing = self._proved(search, number, location)
        except BaseException:
            search.close()
            self._left -= time.monotonic() - start
            raise
        if healing is None:
            search.close()
            self._failures += 1
            self._left -= time.monotonic() - start  # time that has found a repair was well spent
            if self._left <= 0:
                self._say_once("time", "no more repairs are searched for: policy.heal_seconds are used up")
            return None
        if healing.opened:
            self._take(healing.repairs)
            self._failures = 0
            self.calm = not self._ranks.any(self._quiet < QUIET)  # losses differ, but all ranks go back to one state
        else:
            search.close()
            self._failures = FAILURES  # one offer is enough
        if self._ranks.rank == 0:
            for line in told(healing, number):
                log.warning("%s", line)
            self._warn(healing)
        return healing

    # --- an optimizer whose eps is 0 ---------------------------------------------------------------------------

    def check_update(self, optimizer: Optimizer, number: int) -> Healing | None:
        """Before the first update of an optimizer whose eps is 0 in its dtype: find one that repairs it."""
        if self.mode == "off" or optimizer in self._checked:
            return None
        self._checked.add(optimizer)
        shards = self._ranks.sharded and not self._ranks.alone
        if shards and self._ranks.uneven:  # not all of them make this update
            return None
        try:
            repair = repaired_eps(optimizer, number, self._ranks.largest if shards else int)
        except PeerFailed:
            raise
        except Exception:
            if shards:
                self._ranks.fail()  # the others wait for this rank's shard
            raise
        if repair is None:
            return None
        healing = Healing(repairs=(repair,), opened=self.mode == "open", committed=False)
        if healing.opened:
            set_eps([optimizer], repair)
            self._take(healing.repairs)
        if self._ranks.rank == 0:
            for line in told(healing, number):
                log.warning("%s", line)
        return healing

    def decline(self, location: Location) -> None:
        """Say, once, that float32 is not wide enough for a located overflow."""
        if self.wanted and location.mechanism == "range-overflow" and location.outputs:
            where = f" at {location.file}:{location.line}" if location.line else ""
            self._say_once(
                "float32",
                f"{location.op}{where} left the range of {location.outputs[0].dtype}: no float32 island can heal that;"
                " look for the cause with nanproof cure",
            )

    def heal_pass(self, number: int, replay: Replay) -> Healing | None:
        """Search for a repair of a forward pass that has just given a bad output."""
        failures = self._failures
        healing = self.heal(number, replay, None)
        if healing is None:  # a masked output is infinite on purpose; the verdict on the step is still to come
            self._failures = failures
            self._false_alarms += 1
        return healing

    def _warn(self, healing: Healing) -> None:
        """Say when islands are not the cure."""
        self._spread += healing.opened
        share = sum(i.share for i in islands.list(self._training.model) if i.kind == "float32")
        if healing.opened and share > LARGE_SHARE:
            self._say_once("share", f"{share:.0%} of the parameters are in float32 islands now; {_CURE}")
        if self._spread > MAX_SPREADS:
            self._say_once("spread", f"islands had to be opened {self._spread} times; {_CURE}")

    def _proved(self, search: Search, number: int, location: Location | None) -> Healing | None:
        if not search.find(location):
            if search.given_up:
                self._say_once("no-island", search.given_up)
            return None
        differs = self._compare(search)
        eps = torch.finfo(getattr(torch, search.dtype)).eps
        if differs is not None and differs > LOSS_ROUNDINGS * eps:
            rounded = min(self._compare(search, rounding=eps) or 0.0, 1.0)
            if differs > AMPLIFIED * rounded:
                self._say_once(
                    "differs",
                    f"the step is finite if {in_words(search.repairs(number, ''))}, but good batches change by"
                    f" {differs:.2g}, more than {search.dtype} rounds (its rounding of the weights: {rounded:.2g});"
                    " not opened",
                )
                return None
        if self.mode == "open":
            islands.forget_compiled()
        if not search.run():
            self._say_once(
                "unreal",
                f"if {in_words(search.repairs(number, ''))} a traced replay is finite, but the real step is not",
            )
            return None
        compared = (
            "there is no good batch yet to compare with"
            if not self._good
            else f"none of the last {len(self._good)} good batches is finite without it any more"
            if differs is None
            else "good batches are bit-equal"
            if differs == 0
            else f"good batches differ by {differs:.1g}"
        )
        repairs = tuple(search.repairs(number, f"the step is finite, forward and backward; {compared}"))
        opened = self.mode == "open"
        return Healing(
            repairs=repairs, opened=opened, committed=opened and search.commits, location=search.first or location
        )

    def _compare(self, search: Search, *, rounding: float | None = None) -> float | None:
        """By how much good batches differ with the repair, at most; None when there is nothing to compare.

        With ``rounding``, by how much they differ without it when every weight is moved by that share.
        """
        count = GOOD_BATCHES - self._ranks.largest(GOOD_BATCHES - len(self._good))  # the fewest
        found = []
        for good in list(self._good)[len(self._good) - count :]:
            with search.suspended():
                without = good.measure(self._training, lockstep=search.lockstep)
            if self._ranks.any(without is None):
                continue
            with nullcontext() if rounding is None else search.suspended(), moved(self._training, rounding or 0.0):
                measured = good.measure(self._training, lockstep=search.lockstep)
            if self._ranks.any(measured is None):
                return float("inf")
            assert without is not None
            assert measured is not None
            found.append(without.differs(measured))
        if not found:
            return None
        # every rank must come to the same answer: the largest, in steps of a millionth
        return self._ranks.largest(min(int(max(found) * 1e6 + 0.999), 10**9)) / 1e6

    # --- what becomes of it --------------------------------------------------------------------------------

    def is_steep(self, norm: float) -> bool:
        """Whether an update with this gradient norm would take a run away from where its islands keep it."""
        # the same on every rank: this norm is; where ranks share no gradients, each has its own
        same = self._ranks.alone or self._ranks.reduced
        island = any(r.kind == "float32" for r in self.repairs) and self._since < JUDGED_AFTER
        if not (same and island and self.mode == "open" and len(self._norms) == RECENT):
            return False
        return norm > max(*self._norms, STEEP * statistics.median(self._norms))

    def follow(self, number: int, loss: float, norm: float) -> bool:
        """An update was made: look how the run goes on with its islands; whether it has just diverged."""
        self.last_loss = loss
        self._norms.append(norm)
        if self._since or not self.repairs:  # the batch that opened an island says nothing about what comes after it
            self._beyond = self._beyond + 1 if loss > self.loss_limit else 0
            self._quiet = 0 if self._beyond else self._quiet + 1
            if not self._beyond:
                self._losses.append(loss)
        if not self.repairs:
            return False
        self._since += 1
        if self._since % LOOK_EVERY == 0:
            self._probe(True)
        elif self._since % LOOK_EVERY == 1 and self._since > 1:
            self._probe(False, number)
        if self._since == JUDGED_AFTER:
            self._judge()
        self.diverged = self.diverged or self._beyond == DIVERGED_AFTER
        return self._beyond == DIVERGED_AFTER

    @property
    def loss_limit(self) -> float:
        """What the losses of a run that has an island may be: not far above all the last ones."""
        if not self.repairs or self._since >= JUDGED_AFTER or len(self._losses) < RECENT:
            return math.inf
        highest = max(self._losses)
        limit = highest + BEYOND * (highest - min(self._losses))
        return max(limit, self._before or 0.0)  # a run that has learned since may lose a little of it

    def settle(self, undone: int) -> None:
        """The run has gone back over so many updates; far back, or not at all, other losses are usual."""
        self.diverged, self._beyond, self._quiet = False, 0, QUIET
        if not 0 < undone <= RECENT:
            self._losses.clear()
            self._norms.clear()

    def _probe(self, on: bool, number: int = 0) -> None:
        model = self._training.model
        for repair in [r for r in self.repairs if r.kind == "float32" and islands.place_in(r.path) is None]:
            island = island_of(islands.find_module(model, repair.path))
            if island is None:
                continue
            if not on and island.largest:
                self._grown[repair.path] = (number, island.largest)
            island.probing, island.largest = on, 0.0

    def _judge(self) -> None:
        """Whether the loss has improved since the last island was opened."""
        if self._before is not None and len(self._losses) == RECENT:
            now = statistics.median(self._losses)
            if not now < self._before:
                self._say_once(
                    "course",
                    f"{self._since} updates after the last island the loss is {now:.4g}, not better than before it"
                    f" ({self._before:.4g}); {_CURE}",
                )

    def account(self) -> list[str]:
        """The repairs in force, and how the values in them have grown."""
        lines = []
        for repair in self.repairs:
            step, largest = self._grown.get(repair.path, (repair.step, repair.largest))
            grown = ""
            if step > repair.step and repair.largest and largest:
                factor = (largest / repair.largest) ** (100 / (step - repair.step))
                grown = (
                    f"; the largest value that leaves it went from {repair.largest:.3g} to {largest:.3g}"
                    f" (× {factor:.2g} per 100 steps)"
                )
            lines.append(f"{repair.name} {repair.does} since step {repair.step:,}{grown}")
        return lines

    def _take(self, repairs: tuple[Repair, ...]) -> None:
        open_now = {(i.kind, i.path) for i in islands.list(self._training.model)} - {(r.kind, r.path) for r in repairs}
        self.repairs = [*(r for r in self.repairs if r.kind == "eps" or (r.kind, r.path) in open_now), *repairs]
        self._before, self._since = statistics.median(self._losses) if self._losses else None, 0

    def _say_once(self, key: str, text: str) -> None:
        if key not in self._said:
            self._said.add(key)
            if self._ranks.rank == 0:
                log.warning("nanproof: heal: %s", text)

    # --- memory ----------------------------------------------------------------------------------------------

    def state_dict(self) -> list[dict[str, Any]]:
        return [r.to_json() for r in self.repairs]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Open what was open when the state was saved."""
        self.reopen([Repair.from_json(r) for r in state])

    def reopen(self, repairs: list[Repair]) -> None:
        known = {(r.kind, r.path) for r in self.repairs}
        for repair in [r for r in repairs if (r.kind, r.path) not in known]:
            if self.mode != "open":
                log.warning(
                    'nanproof: in this run %s from step %s on; not now: pass heal="open" (nanproof run --heal)',
                    in_words([repair]),
                    f"{repair.step:,}",
                )
                continue
            try:
                if repair.kind == "eps":
                    set_eps(self._training.optimizers, repair)
                else:
                    islands.open_one(self._training.model, repair.path, heavy=repair.heavy, kind=repair.kind)
            except UsageError as error:
                log.warning("nanproof: a repair of an earlier run was not made: %s", error)
                continue
            self.repairs.append(repair)
            log.warning("nanproof: %s, as before", in_words([repair]))
        islands.forget_compiled()


__all__ = ["DIVERGED_AFTER", "Heal", "Healer", "Healing", "repairable"]
