"""The story of one log (`nanproof.logs.timeline`) in the words of the vocabulary."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from ...floats import format_of
from ...logs import Column, Series
from ...logs.moments.moment import Moment as Told
from ...logs.moments.moment import MomentKind
from ...logs.series import Floats
from ...logs.timeline import Timeline, reward_of, stops
from ..evidence import Fact
from ..wording import read_text
from .messages import read_messages


def read_story(series: Series, story: Timeline, name: str, *, each_step: bool = True) -> Iterator[Fact]:
    """The facts in one log. ``each_step``: its count is one of steps, so that 1 means the first."""

    def fact(flag: str, moment: Told | None = None, words: str = "") -> Fact:
        return Fact(name=flag, where=name, words=words or (moment.text if moment is not None else ""))

    yield from read_messages(series, name)
    yield from (fact(f, m) for f, m in _broken(series, story, each_step))
    yield from (fact(f, m) for f, m in _before(series, story))
    yield from (fact(f, m) for f, m in _spikes(series, story))
    yield from (fact(f, m) for f, m in _scale(series, story))
    if scaled := _loss_scale(series):
        yield Fact(name="precision", value="fp16", where=name, words=scaled)
    yield from (fact(f, words=w) for f, w in _resumes(series, story))
    yield from (fact("level-shift", words=w) for w in _dips(series))
    yield from (fact(f, words=w) for f, w in _norms(series))
    grown = list(_activations(series))
    yield from (fact("activation-explosion", words=w) for w in grown)
    yield from (fact("activation-norm-drift", words=w) for w in _drifting(series) if not grown)
    yield from (fact("activation-near-fp16-max", words=w) for w in _near_the_end_of_fp16(series))
    if _sudden(series, story) and not grown:
        words = "loss and gradient norm keep their level up to the break"
        yield Fact(name="loss-explodes-before-nan", value=False, where=name, words=words)
        if learned := _learned_first(series):
            yield fact("learned-first", words=learned)
    onset = _onset(series, story, each_step)
    if onset is not None:
        yield Fact(name="onset", value=onset[0], where=name, words=onset[1])
    if ill := _ill(series, story):
        yield fact("not-healthy", words=ill)
    elif _healthy(series, story):
        yield fact("run-healthy", words="the log shows a run that is finite and learns")
    if story.outcome in ("healthy", "useless") and series.loss is not None and len(series.loss) >= ENOUGH:
        yield fact("loss-finite", words=f"all {series.loss.total:,} losses are finite")
    for column in series.columns:
        for found in read_text(column.replace("_", " ").replace("/", " "), where=name):
            if found.value in _KINDS:  # the name of a column is no prose
                yield Fact(name="about", value=found.value, where=name, words=f"column {column}")
    yield from (fact(f, m) for f, m in _more(series, story))
    yield from (fact(f, words=w) for f, w in _bounds(series))


ENOUGH = 8
"""Points that show a course, where training and evaluation fall together; twenty where only one of them is known."""


def is_fine(series: Series, story: Timeline, least: int = 0) -> bool:
    """Whether every loss of a log falls, to its end, at a rate that kept its course: each has ``least`` points."""
    losses = (series.loss,) if series.loss is not None else series.components
    if (reward := reward_of(series)) is not None and len(reward) >= least:
        first, last = _ends(reward.values[~reward.bad])
        return story.outcome == "healthy" and last >= first and float(np.ptp(reward.values)) > 0
    if story.outcome != "healthy" or not losses or any(len(c) < least or not _learns(c) for c in losses):
        return False
    return not (
        story.of("growth") or any(_dips(series)) or any(n == "lr-discontinuity" for n, _ in _resumes(series, story))
    )


def _healthy(series: Series, story: Timeline) -> bool:
    """Whether the log is that of a run which learned."""
    judged = any(len(c) >= ENOUGH and "loss" in c.name.lower() and _learns(c) for c in series.evals)
    return is_fine(series, story, ENOUGH if judged else 20)


def _ill(series: Series, story: Timeline) -> str:
    """What forbids to call a run healthy, whatever other evidence there is."""
    if any(stops(series, m) for m in story.moments):
        return "something stopped it"
    if series.loss is None and not series.components and (said := story.of("message")):
        return said[0].text
    whole = [*story.of(*_ILL), *(m for m in story.of("skipped") if not m.benign)]
    whole += [m for m in story.of("nonfinite") if _never_was(series, m)]
    norms = {c.name for c in series.of("grad_norm")}
    parts = [m for m in story.of("growth", "spike") if not m.benign and m.column not in norms]
    if whole or parts:
        return (*whole, *parts)[0].text
    told = [words for name, words in _bounds(series) if name == "negative-loss"]
    if told := [*told, *_activations(series), *_grown_weights(series), *_judged_away(series)]:
        return told[0]
    loss = series.loss
    if loss is not None and _alternates(loss.values[~loss.bad]):
        return f"{loss.name} leaps up and down by orders of magnitude"
    return f"{loss.name} climbs at the end" if loss is not None and _climbs(loss.values[~loss.bad]) else ""


_ILL: tuple[MomentKind, ...] = (
    *("chance", "masked-loss", "missing-loss", "zero-loss", "frozen-loss", "zero-grad"),
    *("divergence", "lr-negative", "lr-grown", "scale-collapse"),
)
_JUDGES = re.compile(
    r"(?i)(?:^|[^a-z])(?:val|valid|validation|validate|eval|test|dev|m?ap(?:50)?|m?iou|acc(?:uracy)?|f1|auc|dice|psnr|ssim|wer"
    r"|cer|bleu|rouge\w*|score|recall|precision|r2|rmse|mae)(?:[^a-z]|$)"
)


def _never_was(series: Series, bad: Told) -> bool:
    """Whether a metric was NaN whenever it was measured: whatever the loss says, nobody knows how good the run is."""
    points = bad.numbers["points"]
    return bad.numbers["count"] == points >= 2 and _JUDGES.search(series.columns[bad.column].name) is not None


AWAY = 20.0


def _judged_away(series: Series) -> Iterator[str]:
    """Losses of an evaluation that end far above their lowest: more than a run that overfits."""
    for column in series.evals:
        values = column.values[~column.bad]
        known = "loss" in column.name.lower() and len(values) >= 4
        if known and values[-1] > AWAY * values.min() > 0 and values[-1] > 5 * values[0]:
            yield f"{column.name} rises from {values.min():.4g} to {values[-1]:.4g}"


def _alternates(values: Floats) -> bool:
    """Whether a fifth of the neighbors of a loss differ by a factor of 50."""
    if len(values) < 20 or values.min() <= 0:
        return False
    ratio = np.abs(np.diff(np.log(values)))
    return bool((ratio > np.log(50)).mean() > 0.2)


def _learns(loss: Column) -> bool:
    """Whether the loss is no higher at the end than it was; below zero it is a likelihood or a reward."""
    values = loss.values[~loss.bad]
    if len(values) < 2 or _swings(values) or _climbs(values):
        return False
    first, last = _ends(values)
    return last <= first or ((first - last) < 0.02 * abs(first) and loss.steps[0] > 1_000 and last <= 1.02 * first)


def _ends(values: Floats) -> tuple[float, float]:
    """The medians of the first and the last quarter."""
    quarter = max(2, len(values) // 4)
    return float(np.median(values[:quarter])), float(np.median(values[-quarter:]))


def _climbs(values: Floats) -> bool:
    """Whether a loss ends with a climb: five points in a row, by a quarter, to where it had left long before."""
    last = values[-5:]
    return len(last) == 5 and bool((np.diff(last) > 0).all()) and float(last[-1]) > 1.25 * abs(float(last[0]))


DIP = 0.65
"""A loss that falls at once below this part of its level, and comes back, saw other data meanwhile."""


def _dips(series: Series) -> Iterator[str]:
    """Stretches far below the level of the loss, entered at once and left again, at a rate that did not change."""
    loss = series.loss
    if loss is None or len(loss) < 24 or bool(loss.bad.any()) or float(loss.values.min()) <= 0:
        return
    values = loss.values
    entered = np.flatnonzero(values[16:-3] < 0.75 * values[15:-4]) + 16  # at once
    for start in entered[:200].tolist():
        before, level = values[start - 16 : start], float(np.median(values[start - 16 : start]))
        back = np.flatnonzero(values[start:] > 0.8 * level)
        if before.min() < 0.8 * level or not (values[start : start + 3] < DIP * level).all() or not len(back):
            continue
        end = start + int(back[0])
        if (values[end:] > 0.7 * level).all():
            low = f"{loss.name} is at {float(np.median(values[start:end])):.4g}"
            stretch = f"{series.unit} {loss.steps[start]:,} to {loss.steps[end]:,}"
            yield f"{low} from {stretch}, and at {level:.4g} around it"
            return


def _more(series: Series, story: Timeline) -> Iterator[tuple[str, Told]]:
    """Infinity before NaN, a CTC term that broke, NaN from the first row on, a rate below zero."""
    bad = [m for m in story.of("nonfinite") if series.columns[m.column].role in _LOSS]
    if bad:
        first = min(m.row for m in bad)
        if any(m.row == first and m.value is not None and math.isinf(m.value) for m in bad):
            yield "loss-infinite-first", next(m for m in bad if m.row == first)
        for moment in bad:
            if "ctc" in moment.column.lower() and moment.row == first and not _all_bad(series, first):
                yield "ctc-term-bad", moment
                break
        if all("last_finite" not in m.numbers for m in bad) and not story.of("resume"):
            yield "nan-from-first-row", bad[0]
    for moment in story.of("lr-negative"):
        yield "lr-negative", moment


def _all_bad(series: Series, row: int) -> bool:
    """Whether the loss has terms without CTC, and all of them are bad in a row."""
    others = [c for c in series.components if c.role == "component" and "ctc" not in c.name.lower()]
    return bool(others) and all(bool(c.bad[c.rows == row].any()) for c in others)


_BOUNDED = re.compile(r"(?i)(?:^|[^a-z])(?:dice|iou|jaccard|acc|accuracy|f1|precision|recall)(?:[^a-z]|$)(?!.*loss)")
_CANNOT = re.compile(r"(?i)dice|bce|iou|jaccard|cross|\bce\b|focal|seg|tversky")


def _bounds(series: Series) -> Iterator[tuple[str, str]]:
    """Metrics beyond their bound, and losses below zero that cannot be.

    Metrics in percent exceed 1 rightly, so a value above 1 counts only beside another sign: a negative metric, or a
    loss below zero.
    """
    lowest = {c.name: float(c.values[~c.bad].min()) for c in series.columns.values() if (~c.bad).any()}
    losses = [c.name for c in series.columns.values() if c.role in (*_LOSS, "eval") and "loss" in c.name.lower()]
    below = [n for n in losses if lowest.get(n, 0.0) < -0.5]
    for column in series.columns.values():
        values = column.values[~column.bad]
        if not len(values) or not _BOUNDED.search(column.name):
            continue
        high, low = float(values.max()), float(values.min())
        if low < -1e-3 or (below and 1.001 < high < 20):
            yield "metric-above-bound", f"{column.name} is {low if low < -1e-3 else high:.4g}, outside of 0 to 1"
            if below:
                yield "negative-loss", f"{below[0]} is {lowest[below[0]]:.4g}"
            return
    for name in below:
        if _CANNOT.search(name):
            yield "negative-loss", f"{name} is {lowest[name]:.4g}, and cannot be below 0"
            return


NEAR = 1 / 16  # sums inside of a convolution or a matrix product are larger than what is logged
GROWTH = 1000.0  # healthy activations settle; what grows a thousandfold goes on growing
_INSIDE = re.compile(r"(?i)activation|logit|hidden|residual|stream|attention.?score")
_KINDS = ("ctc", "detection", "box-loss", "variational", "adversarial", "experts", "rlhf")
_LOSS, _NORM = ("loss", "component"), "grad_norm"


def _broken(series: Series, story: Timeline, each_step: bool) -> Iterator[tuple[str, Told]]:
    """What became non-finite, and what that says."""
    bad = {m.column: m for m in story.of("nonfinite")}
    roles = {name: series.columns[name].role for name in bad}
    losses = [m for name, m in bad.items() if roles[name] in _LOSS]
    main = bad.get(series.loss.name) if series.loss is not None else None
    for moment in losses[:1]:
        yield "loss-nan", moment
        if moment.until is not None and moment.until < (story.last_step or 0) and moment.numbers["stretches"] >= 1:
            yield "keeps-training", moment
            if moment.numbers["count"] < 0.5 * moment.numbers["points"]:
                yield "intermittent-nan", moment
        if "last_finite" not in moment.numbers and any(m.row <= moment.row for m in story.of("resume")):
            yield "nan-since-load", moment
        if each_step and "last_finite" not in moment.numbers and moment.step <= 1 and not story.of("resume"):
            yield "nan-before-first-update", moment
        if moment.numbers.get("last_finite_step", math.inf) <= 1 and moment.step <= 2:
            yield "loss-first-step-finite", moment
            yield "nan-after-first-step", moment
        if moment.numbers.get("lr") == 0.0:
            yield "nan-at-lr-0", moment
    parts = [m for m in losses if roles[m.column] == "component"]
    if parts and (_others_finite(series, parts[0].row) or (main is not None and parts[0].row < main.row)):
        yield "one-component-nan", parts[0]
    for moment in (m for name, m in bad.items() if roles[name] == _NORM):
        if not losses and _skipped(series, moment):
            yield "grad-nan-skipped", moment
        else:
            yield from _bad_norm(moment, main, story)
    for moment in [m for name, m in bad.items() if roles[name] == "eval"][:1]:
        yield ("val-also-nan" if losses or story.of("hidden-nan", "zero-loss") else "eval-only-nan"), moment
    kinds: tuple[tuple[MomentKind, str], ...] = (
        ("hidden-nan", "loss-zero-grad-nan"),
        ("masked-loss", "loss-zero-grad-zero"),
        ("zero-loss", "loss-turned-zero"),
    )
    for kind, flag in kinds:
        for moment in story.of(kind)[:1]:
            yield ("loss-zero" if moment.numbers.get("whole") else flag), moment


def _others_finite(series: Series, row: int) -> bool:
    """Whether a component of the loss is finite in the row in which another one broke, or never breaks."""
    parts = [c for c in series.components if c.role == "component"]
    there = [c for c in parts if bool(((c.rows == row) & ~c.bad & (c.values != 0.0)).any())]
    return bool(there) or any(len(c) and not c.bad.any() for c in parts)


def _skipped(series: Series, norm: Told) -> bool:
    """Whether bad norms are isolated and the loss goes on falling: whoever made the step left these updates out."""
    column, loss = series.columns[norm.column], series.loss
    if loss is None or len(loss) < 6 or bool(loss.bad.any()) or column.bad.mean() > 1 / 3:
        return False
    first, last = _ends(loss.values)
    return last < first and not bool(column.bad[-3:].all())


def _bad_norm(norm: Told, loss: Told | None, story: Timeline) -> Iterator[tuple[str, Told]]:
    hidden = bool(story.of("hidden-nan"))
    if norm.value is not None and math.isinf(norm.value) and norm.step <= 50 and norm.until != story.last_step:
        yield "grad-inf-early", norm
    elif hidden:
        return
    elif loss is None:
        yield "grad-nan-loss-finite", norm
    elif norm.row < loss.row:
        yield "grad-nan-loss-finite-first", norm


def _before(series: Series, story: Timeline) -> Iterator[tuple[str, Told]]:
    """How it went before it broke."""
    for moment in story.of("growth"):
        if _rises(series, moment):
            yield "diverges-as-lr-rises", moment
        if "norm" in moment.column:
            yield "grad-explosion", moment
        elif moment.numbers["end"]:
            yield "loss-ran-away", moment
        else:
            yield ("loss-explodes-before-nan" if moment.numbers["points"] >= 3 else "loss-jump-before"), moment
    for moment in story.of("divergence")[:1]:
        yield "slow-divergence", moment
    for moment in story.of("flat", "chance", "zero-grad")[:1]:
        yield "no-learning", moment
    for moment in story.of("negative-loss")[:1]:
        if moment.numbers["lowest"] < -0.5 and not _SIGNED.search(moment.column):
            yield "negative-loss", moment


_SIGNED = re.compile(
    r"(?i)(?:loss|err)[_/. ]?[dg]\b|\b[dg][_/. ]?(?:loss|err)|critic|discr|generator|wasserstein|adv"
    r"|actor|policy|surrogate|nll|elbo|likelihood|log_?prob|energy"
)
"""Losses that may be below zero: of adversaries, policies and densities."""


def _rises(series: Series, growth: Told) -> bool:
    """Whether the learning rate went up while something grew."""
    if series.lr is None:
        return False
    rate = series.lr.values[(series.lr.rows >= growth.row) & (series.lr.steps <= (growth.until or 0)) & ~series.lr.bad]
    return len(rate) >= 2 and bool((np.diff(rate) >= 0).all()) and float(rate[-1]) > 1.2 * float(rate[0]) > 0


def _swings(values: Floats) -> bool:
    """Whether a smooth loss leaps up and comes down again so often that no single spike explains it."""
    if len(values) < 20 or values.min() <= 0:
        return False
    around = np.median(np.lib.stride_tricks.sliding_window_view(np.pad(values, 2, mode="edge"), 5), axis=1)
    high = values > 1.3 * around
    smooth = np.abs(values / around - 1)[~high]
    return bool(high.sum() >= 4 and high.mean() > 0.1 and np.median(smooth) < 0.02)


def _spikes(series: Series, story: Timeline) -> Iterator[tuple[str, Told]]:
    """Which course the spikes of the loss took."""
    spikes = [m for m in story.of("spike") if "norm" not in m.column]
    if not spikes:
        return
    lost = [m for m in spikes if not m.benign]
    broke = story.outcome in ("dead", "intermittent", "stopped")
    if lost and len(spikes) - len(lost) >= 2:
        yield "spikes-that-stop-recovering", lost[0]
    elif lost and not broke:
        yield "spike-then-plateau", lost[0]
    elif not lost and series.loss is not None and _swings(series.loss.values[~series.loss.bad]):
        yield "irregular-spikes", spikes[-1]
    elif not lost and not broke:
        yield "recovers", spikes[-1]
        if any("lead" in m.numbers for m in spikes):
            yield "grad-norm-leads", next(m for m in spikes if "lead" in m.numbers)
        if len(spikes) >= 6:
            yield "irregular-spikes", spikes[-1]


def _scale(series: Series, story: Timeline) -> Iterator[tuple[str, Told]]:
    """What the loss scale did; a loss that is NaN by itself brings every scale down, and none cures it."""
    kinds = {"scale-collapse": "loss-scale-collapse", "scale-search": "loss-scale-halving-at-start"}
    broken = [m for m in story.of("nonfinite") if series.loss is not None and m.column == series.loss.name]
    stays = bool(broken) and series.loss is not None and bool(series.loss.bad[-2:].all())
    for moment in story.of("scale-collapse", "scale-search"):
        if moment.kind == "scale-search" and stays:
            yield "scale-fell-after-nan", broken[0]
            continue
        yield kinds[moment.kind], moment
        if moment.kind == "scale-collapse" and broken and broken[0].row <= moment.row and moment.numbers["before"] > 1:
            yield "scale-fell-after-nan", broken[0]
    for moment in story.of("scale-fall") if not story.of("scale-collapse") else ():
        span = max(1, (story.last_step or 0) - (story.first_step or 0))
        if moment.numbers["falls"] <= max(3, span / 300):
            yield "loss-scale-halving-sparse", moment


def _loss_scale(series: Series) -> str:
    """bf16 and fp32 need no loss scale, and trainers that log one nevertheless log 1."""
    for column in series.columns.values():
        values = column.values[~column.bad]
        if column.role == "loss_scale" and len(values) and float(values.max()) > 1:
            return f"a loss scale of {float(values.max()):g} is logged, which only fp16 needs"
    return ""


def _resumes(series: Series, story: Timeline) -> Iterator[tuple[str, str]]:
    """Resumes, what the rate did there, and whether the loss leapt at each of them."""
    jumps = [m for m in story.of("lr-jump") if not m.benign and m.numbers["before"] > 0]
    jumps = [m for m in jumps if m.row > 2 or story.of("resume")]
    for moment in jumps[:1]:
        yield "lr-discontinuity", moment.text
    found = story.of("resume")
    if not jumps and (late := _late_warm_up(series)):
        yield "resumed", late
        yield "lr-discontinuity", late
    if not found:
        # trackers do not record a resume: a rate that leaves its schedule may be one
        if not jumps and story.unit == "step" and story.first_step is not None and story.first_step <= 1:
            yield "never-resumed", "the log goes from its first step on without a resume"
        return
    yield "resumed", f"resumed at {story.unit} {found[-1].step:,}"
    both = [m.numbers for m in found if {"lr_before", "lr_after"} <= set(m.numbers)]
    lost = next((words for m in found if (words := _loses_place(series, m))), "")
    if lost and not jumps:
        yield "lr-discontinuity", lost
    elif not jumps and both and all(_near(n["lr_before"], n["lr_after"], 1.25) for n in both):
        yield "lr-continuous", f"lr {both[-1]['lr_before']:.3g} before the resume, {both[-1]['lr_after']:.3g} after"
    losses = [m for m in found if {"loss_before", "loss_after"} <= set(m.numbers)]
    if losses and all(m.numbers["loss_after"] > 1.3 * abs(m.numbers["loss_before"]) for m in losses):
        last = losses[-1].numbers
        yield (
            "spike-at-each-resume",
            f"loss {last['loss_before']:.4g} before the resume, {last['loss_after']:.4g} after",
        )


def _late_warm_up(series: Series) -> str:
    """A log that begins far into a run, with a learning rate that warms up from nothing: the schedule began again."""
    rate = series.lr
    if rate is None or series.unit != "step" or len(rate) < 6 or bool(rate.bad.any()):
        return ""
    first, gap, warm = int(rate.steps[0]), float(np.median(np.diff(rate.steps))), rate.values[:6]
    if first < max(100, 10 * gap) or not (np.diff(warm) > 0).all() or warm[0] > 0.2 * warm[-1]:
        return ""
    return f"the log begins at step {first:,}, and lr warms up from {warm[0]:.3g} there"


def _loses_place(series: Series, resume: Told) -> str:
    """How the schedule lost its place at a resume: it starts again from above, warms up again, or stands still."""
    if series.lr is None or not {"lr_before", "lr_after"} <= set(resume.numbers):
        return ""
    old, new = resume.numbers["lr_before"], resume.numbers["lr_after"]
    before = series.lr.values[(series.lr.rows < resume.row) & ~series.lr.bad][-20:]
    after = series.lr.values[(series.lr.rows >= resume.row) & ~series.lr.bad][:20]
    fell = len(before) >= 5 and bool((np.diff(before) <= 0).all()) and before[-1] < before[0]
    if fell and new > 1.05 * old:
        return f"lr fell to {old:.3g} before the resume and starts again at {new:.3g}"
    if len(after) >= 3 and new < 0.6 * old and bool((np.diff(after[:5]) > 0).all()):
        return f"lr was {old:.3g} before the resume and warms up again from {new:.3g}"
    moved = len(before) >= 5 and bool((np.diff(before) != 0).all())
    if moved and len(after) >= 5 and len(set(after.tolist())) == 1 and old > 0:
        return f"lr moved at every point before the resume and stands at {new:.3g} since"
    return ""


def _near(a: float, b: float, factor: float) -> bool:
    return min(a, b) > 0 and max(a, b) <= factor * min(a, b)


def _norms(series: Series) -> Iterator[tuple[str, str]]:
    """A gradient norm that never changes, is tiny, or drifts upwards."""
    norm = series.grad_norm
    if norm is None:
        return
    values = norm.values[~norm.bad]
    exact = len(repr(float(values[0]))) > 8 if len(values) else False  # many digits: no chance
    if len(values) >= (4 if exact else 12) and values.min() == values.max() and values[0] > 0:
        yield "constant-grad-norm", f"{norm.name} is {values[0]:.6g} at all {len(values):,} points"
        return
    if len(values) < 12:
        return
    if 0 < np.median(values) < 1e-4:
        yield "grad-norm-tiny", f"the median of {norm.name} is {np.median(values):.2g}"
    quarters = [float(np.median(q)) for q in np.array_split(values, 4)]
    if quarters[0] > 0 and all(b > 1.3 * a for a, b in pairwise(quarters)):
        shown = ", ".join(f"{q:.3g}" for q in quarters)
        yield "grad-norm-drift", f"the median of {norm.name} by quarter of the run: {shown}"


def _inside(series: Series) -> Iterator[tuple[str, float, float]]:
    """Logged activations, logits or streams: name, first value, and what it was about at the end."""
    for column in series.columns.values():
        values = column.values[~column.bad]
        if column.role == "other" and _INSIDE.search(column.name) and len(values) >= 4:
            yield column.name, abs(float(values[0])), float(np.median(np.abs(values[-len(values) // 4 :])))


def _activations(series: Series) -> Iterator[str]:
    """Those that grew by orders of magnitude."""
    for name, first, last in _inside(series):
        if 0 < GROWTH * first < last:
            yield f"{name} grew from {first:.3g} to about {last:.3g} while it was finite"


_WEIGHTS = re.compile(r"(?i)(?:^|[^a-z])(?:param|parameter|weight)s?[_ ./-]?norm")


def _grown_weights(series: Series) -> Iterator[str]:
    """The norm of the weights, if it grew by orders of magnitude."""
    for column in series.columns.values():
        values = column.values[~column.bad]
        if _WEIGHTS.search(column.name) and len(values) >= 4 and 0 < GROWTH * values[0] < values[-1]:
            yield f"{column.name} grew from {values[0]:.3g} to {values[-1]:.3g}"


_LAYER = re.compile(
    r"(?i)(?:^|[^a-z])(?:[qkv]|qk|attn|act|param|weight)s?[_ ./-]?(?:norm|max|absmax|logits?)|activation|logit"
)


def _drifting(series: Series) -> Iterator[str]:
    """The norm of a layer that rises from quarter to quarter."""
    for column in series.columns.values():
        values = column.values[~column.bad]
        if column.role == "other" and _LAYER.search(column.name) and len(values) >= 12:
            quarters = [float(np.median(q)) for q in np.array_split(values, 4)]
            if quarters[0] > 0 and quarters[-1] > 2 * quarters[0] and all(b > a for a, b in pairwise(quarters)):
                yield f"the median of {column.name} by quarter of the run: {', '.join(f'{q:.3g}' for q in quarters)}"
                return


def _near_the_end_of_fp16(series: Series) -> Iterator[str]:
    """Those that would need only a few doublings more to leave fp16's range."""
    largest = format_of("float16").max
    for name, _, last in _inside(series):
        if NEAR * largest < last <= largest:
            yield f"{name} was about {last:,.0f} while it was finite; fp16 ends at {largest:,.0f}"


def _onset(series: Series, story: Timeline, each_step: bool) -> tuple[str, str] | None:
    """When the first thing that counts went wrong, in the vocabulary's words."""
    first = next((m for m in story.moments if m.kind in ("hidden-nan", "nonfinite") and _counts(series, m)), None)
    if first is None or story.last_step is None:
        return None
    last = max(series.max_steps or 0, story.last_step)
    whole = series.max_steps is not None or first.step < 0.8 * last  # a log that ends at the break tells no length
    words = f"first bad at {story.unit} {first.step:,} of {last:,}"
    resumed = [m for m in story.of("resume") if m.row <= first.row]
    if (
        first.kind == "nonfinite"
        and first.until != story.last_step
        and first.numbers["count"] < 0.5 * first.numbers["points"]
    ):
        return "intermittent", words
    if resumed and 0 <= first.step - resumed[-1].step <= max(200, last // 20):
        return "after-resume", f"{words}, {first.step - resumed[-1].step:,} after a resume"
    if not resumed and (peak := _at_peak(series, first)):
        return "at-lr-peak", f"{words}, {peak}"
    if each_step and first.step <= 2 and (series.logging_steps or 1) == 1 and not resumed:
        return ("step1" if first.step <= 1 else "step2"), words
    if "last_finite" not in first.numbers and not resumed and first.kind == "nonfinite":
        return "early", words
    few = {"step": 500, "epoch": 0, "row": 3}[story.unit]
    if not whole:
        return ("early" if first.step <= few else "mid" if first.step < 20 * max(few, 5) else "late"), words
    if first.step <= max(last // 20, min(few, last // 4)):
        return "early", words
    return ("late" if first.step > 0.6 * last else "mid"), words


def _at_peak(series: Series, first: Told) -> str:
    """Whether it broke where the warm-up had just ended: the rate rose up to the break and rises no more."""
    rate = series.lr
    if rate is None or "last_finite" not in first.numbers:
        return ""
    before, after = rate.values[rate.rows < first.row], rate.values[rate.rows >= first.row]
    if not len(before) or not len(after) or bool(rate.bad.any()):
        return ""
    top, near = float(max(before.max(), after.max())), before[-3:]
    rose = before[0] < 0.7 * top and bool((np.diff(before) >= 0).all()) and bool((near < 0.999 * top).any())
    ended = len(after) >= 2 and bool((np.diff(after) <= 0).all())
    return f"as the learning rate reached {top:.3g}" if rose and ended and after[0] >= 0.9 * top else ""


def _sudden(series: Series, story: Timeline) -> bool:
    """Whether it broke out of a level course: ten good points before, and nothing that grew, leapt or drifted."""
    first = next((m for m in story.of("nonfinite", "hidden-nan") if _counts(series, m)), None)
    if first is None:
        return False
    loss = series.loss if series.loss is not None else series.columns[first.column]
    if int((loss.rows < first.row).sum()) < 10:
        return False
    return not story.of("growth", "divergence") and not [m for m in story.of("spike") if not m.benign]


def _learned_first(series: Series) -> str:
    """How far the loss fell, over ten points or more, before it broke."""
    loss = series.loss
    good = loss.values[: int(np.argmax(loss.bad))] if loss is not None and loss.bad.any() else np.array([])
    if loss is None or len(good) < 10:
        return ""
    first, last = _ends(good)
    return f"{loss.name} fell from {first:.4g} to {last:.4g} over {len(good)} points" if last < 0.85 * first else ""


def _counts(series: Series, moment: Told) -> bool:
    return series.columns[moment.column].role in ("loss", "component", "grad_norm")
