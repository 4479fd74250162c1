"""What the checkpoints hold: which are healthy, what they would restore, and in which dtype the weights are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...checkpoint.formats import may_be_checkpoint
from ...checkpoint.layout import Checkpoint, discover
from ...checkpoint.report import ScanReport
from ...checkpoint.scan import scan_checkpoint
from ...checkpoint.series import bisect, is_bad
from ...errors import NanproofError
from ...files import open_file
from ..diagnosis import Looked, Moment
from ..evidence import Fact
from .part import Part

MAX_READ = 12
_NAMES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Began:
    """How the run began, by its log."""

    finite: bool
    """Its first losses are finite, and a later one is not."""
    loaded: str
    """What it says it loaded."""


def restored_rate(report: ScanReport) -> float | None:
    """The rate that a resume would train at: the peak of its schedule, or the rate that the schedule starts from."""
    told = report.settings
    return next((r for r in (told.max_lr, told.base_lr, told.initial_lr, told.lr) if r is not None), None)


def find_checkpoints(paths: list[Path]) -> list[Checkpoint]:
    """All checkpoints; what holds none is no finding here, nor is a file that the user gave for another reason."""
    try:
        found = discover([p for p in paths if not p.is_file() or _may_be_checkpoint(p)])
    except NanproofError:
        return []
    return [c for c in found if c.items and not _is_other(Path(c.path))]


_DATA = frozenset({"data", "dataset", "datasets", "incidents", "cache"})
_OTHER = frozenset({"training_args.bin", "meta.pkl", "rng_state.pth", "vocab.pkl", "tokenizer.pkl"})


def _is_other(path: Path) -> bool:
    """Datasets, arrays and the guard's own records are no checkpoints."""
    if path.name in _OTHER or path.suffix in (".npy", ".npz") or _DATA & {p.lower() for p in path.parts[-4:-1]}:
        return True
    if path.suffix in (".bin", ".pkl") and path.is_file():
        with open_file(path) as file:
            return file.read(2) not in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"\x1f\x8b")
    return False


def _may_be_checkpoint(file: Path) -> bool:
    try:
        with open_file(file) as opened:
            return may_be_checkpoint(file.name, opened.read(9), file.stat().st_size)
    except OSError:
        return True  # the scan will say why it cannot be read


def read_checkpoints(
    found: list[Checkpoint], broke_at: int | None, began: Began | None = None
) -> tuple[Part, tuple[ScanReport, ...]]:
    """Each series is bisected, so that few are read. ``broke_at``: the step at which the log shows the break.

    A bad checkpoint that was written after the break, or after a healthy one of its series, is a consequence; only one
    that training began from can be the cause.
    """
    families: dict[tuple[str, str], list[Checkpoint]] = {}
    for checkpoint in found:
        families.setdefault(checkpoint.family, []).append(checkpoint)
    reports: list[ScanReport] = []
    facts: list[Fact] = []
    moments: list[Moment] = []
    looked: list[Looked] = []
    for series in families.values():
        if len(reports) >= MAX_READ:
            looked.append(Looked(mark="✗", what="checkpoint", found=f"{series[0].name} and others were not read"))
            break
        own = _read(series)
        reports += own
        moments += _turn(series, own)
        healthy = [i for i, r in enumerate(own) if r.ok]
        for i, report in enumerate(own):
            step = _step(report)
            late = (healthy and healthy[0] < i) or (broke_at is not None and step is not None and step >= broke_at)
            # a run that was finite at first did not begin from bad weights: it wrote them, unless it says otherwise
            loaded = began is not None and Path(report.name).name in began.loaded
            late = (late or (began is not None and began.finite)) and not loaded
            facts += _facts(report, late=bool(late))
    for report in reports:
        words = report.reasons[0] if report.reasons else f"{len(report):,} tensors"
        looked.append(
            Looked(mark="✓" if report.ok else "!", what="checkpoint", found=f"{report.name}: {report.health}, {words}")
        )
    return Part(facts=tuple(facts), looked=tuple(looked), moments=tuple(moments)), tuple(reports)


def _read(series: list[Checkpoint]) -> list[ScanReport]:
    if len(series) <= 2:
        return [scan_checkpoint(c, fast=True) for c in series]
    found = bisect(series, lambda c: scan_checkpoint(c, fast=True))
    known = {r.path: r for r in found.reports}
    if series[-1].path not in known:  # the newest is what a resume would take
        known[series[-1].path] = scan_checkpoint(series[-1], fast=True)
    return [known[c.path] for c in series if c.path in known]


def _turn(series: list[Checkpoint], reports: list[ScanReport]) -> Iterator[Moment]:
    healthy = next((r for r in reversed(reports) if r.ok), None)
    bad = next((r for r in reports if is_bad(r)), None)
    if healthy is not None and len(series) > 1:
        yield Moment(when=_when(healthy), what=f"last healthy checkpoint: {healthy.name}")
    if bad is not None:
        yield Moment(
            when=_when(bad), what=f"first bad checkpoint: {bad.name} ({bad.reasons[0] if bad.reasons else bad.health})"
        )


def _step(report: ScanReport) -> int | None:
    return report.settings.step if report.settings.step is not None else report.step


def _when(report: ScanReport) -> str:
    step = _step(report)
    return f"step {step:,}" if step is not None else "?"


def _facts(report: ScanReport, *, late: bool) -> Iterator[Fact]:
    where = f"checkpoint {report.name}"
    reason = report.reasons[0] if report.reasons else report.health
    if report.health == "corrupt" and late:
        yield Fact(name="nan-was-saved", where=where, words=reason)
    elif report.health == "corrupt":
        yield Fact(name="checkpoint-nonfinite", where=where, words=reason)
        if any(t.role == "parameter" for t in report.bad):
            yield Fact(name="nan-weights", where=where, words=reason)
        elif report.bad and all(t.role in ("buffer", "ema") for t in report.bad):
            words = f"{len(report.bad)} buffers are not finite, parameters are"
            yield Fact(name="eval-only-nan", where=where, words=words)
    elif report.health in ("damaged", "unreadable", "refused"):
        yield Fact(name="checkpoint-damaged", where=where, words=reason)
    elif report.health == "healthy":
        yield Fact(name="checkpoint-healthy", where=where, words=f"{report.name} is healthy")
    if report.settings.scale is not None and report.settings.scale <= 1.0:
        yield Fact(name="loss-scale-collapse", where=where, words=f"loss scale {report.settings.scale:g}")
    yield from _dtypes(report, where)
    yield Fact(name="checkpoint", value=report.name, where=where)


def _dtypes(report: ScanReport, where: str) -> Iterator[Fact]:
    """The dtype of most parameters, where an optimizer trained them: moments show that."""
    sizes: Counter[str] = Counter()
    for tensor in report:
        if tensor.role == "parameter":
            count = 1
            for n in tensor.shape:
                count *= n
            sizes[tensor.dtype] += count
    trained = any(t.role == "moment" for t in report) or report.settings.lr is not None
    if sizes and trained:
        dtype = sizes.most_common(1)[0][0]
        if dtype in _NAMES:
            yield Fact(name="weights", value=_NAMES[dtype], where=where)
