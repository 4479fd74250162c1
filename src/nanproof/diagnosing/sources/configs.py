"""What configs and launch scripts say: rates, optimizer, the precision in force, and the checks NP701 to NP710."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ...config.calls import OPTIMIZERS
from ...config.check import check_settings, is_training, python_settings
from ...config.code import Code
from ...config.loading import SHELL, SUFFIXES, load_quietly
from ...config.meaning import Meaning
from ...config.precision_table import PrecisionTable, precision
from ...config.project import Project
from ...config.value import Settings, Value
from ...errors import NanproofError
from ..diagnosis import Looked
from ..evidence import Fact
from .part import Part, name_in, shorten

MAX_CONFIGS = 400
FEW = 2
_SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp32", "float8": "fp8"}
# fact: the concept of nanproof.config.meaning that it is read from
_NUMBERS = {
    "lr": "lr",
    "eps": "eps",
    "beta2": "beta2",
    "clip": "clip_norm",
    "warmup": "warmup_steps",
    "batch": "batch_size",
    "accum": "accumulation",
    "wd": "weight_decay",
}


_OVERLAPS = ("overlap_comm", "overlap_param_gather")
_RESUMES = ("resume", "resume_from", "resume_from_checkpoint", "resume_path", "resume_state", "resume_training")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A config that speaks of training, and the name it is shown by."""

    path: Path
    name: str
    settings: Settings

    @property
    def meaning(self) -> Meaning:
        return Meaning.of(self.settings)

    @property
    def kind(self) -> str:
        """Whose config it is: a tool's, a script's, or the project's own."""
        tools = [v.origin for v in self.settings if v.origin in ("accelerate", "deepspeed")]
        suffix = self.path.suffix
        return tools[0] if tools else "shell" if suffix in SHELL else "python" if suffix == ".py" else "own"

    @property
    def lr(self) -> Value | None:
        value = self.meaning.get("lr")
        return value if value is not None and value.number is not None else None


def find_configs(paths: Sequence[Path], root: Path, runs: Sequence[Path] = ()) -> list[Config]:
    """The files that set something about training; the others are passed over.

    A project may keep a config for each of its experiments: of more than two of a kind (the project's own, Python,
    accelerate's, DeepSpeed's, launch scripts) those that lie in ``runs``, the folders of the logs, are taken, for they
    were written down with the run; without such a one, only the newest.
    """
    found: list[Config] = []
    for path in sorted(paths, key=lambda p: (len(p.parts), str(p)))[:MAX_CONFIGS]:
        settings = _settings(path)
        if settings is not None and is_training(settings):
            name = name_in(root, path)
            found.append(Config(path=path, name=name, settings=settings))
    kinds: dict[str, list[Config]] = {}
    for config in found:
        kinds.setdefault(config.kind, []).append(config)
    taken = [c for group in kinds.values() for c in _of_the_run(group, runs)]
    return [c for c in found if c in taken]


def _of_the_run(group: list[Config], runs: Sequence[Path]) -> list[Config]:
    if len(group) <= FEW:
        return group
    own = [c for c in group if c.path.parent in runs]
    return own[:FEW] or sorted(group, key=lambda c: c.path.stat().st_mtime)[-1:]


def _settings(path: Path) -> Settings | None:
    if path.suffix == ".py":
        try:
            return python_settings(Code.read(path))
        except NanproofError:
            return None
    settings = load_quietly(path) if path.suffix in SUFFIXES else None
    if settings is None or not {"wandb_version", "_wandb.value.python_version"} & set(settings.values):
        return settings
    plain = {k.removesuffix(".value"): v for k, v in settings.values.items() if k.endswith(".value")}  # beside a desc
    return Settings(values={k: replace(v, key=k) for k, v in plain.items()})


def read_configs(
    configs: Sequence[Config],
    code: Project,
    root: Path,
    *,
    gpu: str,
    parameters: int | None,
    facts: Mapping[str, object],
) -> Part:
    """Facts from all configs, the precision table of them together, and the findings of the checks."""
    if not configs:
        return Part()
    project = code.with_facts({**facts, **({"gpu": gpu} if gpu else {})})
    found: list[Fact] = []
    looked: list[Looked] = []
    for config in configs:
        checks = list(_checks(config, project, root))
        found += [*_values(config, root), *checks]
        words = "".join(f"; {f.said} ({f.where})" for f in checks[:3])
        mark: Literal["!", "✓"] = "!" if checks else "✓"
        looked.append(
            Looked(mark=mark, what="config", found=f"{config.name}: {len(config.settings):,} settings{words}")
        )
    main = next((c for c in configs if c.kind in ("own", "python") and c.lr is not None), configs[0])
    found.append(Fact(name="config", value=main.name, where=main.name))
    settings = load_quietly(*(c.path for c in configs if c.path.suffix != ".py"), *(c.path for c in code.codes[:50]))
    settings = settings if len(settings) else configs[0].settings
    table = precision(settings, hardware=gpu or None, parameters=parameters, project=project)
    found += _precision(table, root, complete=bool(project.called("Trainer", *OPTIMIZERS)))
    marks = [Looked(mark="!", what="precision", found=shorten(p, root)) for p in table.problems]
    looked += marks or [Looked(mark="✓", what="precision", found=table.verdict)]
    shown = "\n".join(_rows(table, root))
    return Part(facts=tuple(found), looked=tuple(looked), tables={"Precision": shown} if table.problems else {})


def _checks(config: Config, project: Project, root: Path) -> Iterator[Fact]:
    """The findings on one config; NP701 and NP702 come with the precision table, which is of all files together."""
    for finding in check_settings(config.settings, project):
        if finding.code not in ("NP701", "NP702"):
            where = f"{name_in(root, finding.path)}:{finding.line}" if finding.path else config.name
            words = shorten(f"{finding.code}: {finding.message}", root)
            yield Fact(name="config-check", value=finding.code, where=where, words=words)


def _where(value: Value, root: Path) -> str:
    """The place of a value, below the folder that was given."""
    return shorten(value.where, root) if value.path else value.where


def _values(config: Config, root: Path) -> Iterator[Fact]:
    meaning = config.meaning
    for name, concept in _NUMBERS.items():
        value, number = meaning.get(concept), meaning.number(concept)
        if value is not None and number is not None:
            yield Fact(name=name, value=number, where=_where(value, root), words=f"{name} {number:g}")
    optimizer = meaning.get("optimizer")
    if optimizer is not None and meaning.word("optimizer"):
        word = meaning.word("optimizer").rpartition(".")[2]
        yield Fact(name="optimizer", value="adamw" if "adamw" in word else word, where=_where(optimizer, root))
        if "fused" in word:
            yield Fact(name="fused-optimizer", where=_where(optimizer, root), words=f"optimizer {word}")
    for value in config.settings:
        yield from _single(value, _where(value, root))


def _single(value: Value, where: str) -> Iterator[Fact]:
    """Settings that are facts by themselves."""
    name, text = value.name.lower(), str(value.value).lower()
    if name in _OVERLAPS and value.value is True:
        yield Fact(name="overlap-comm", where=where, words=f"{name}: true")
    if name in ("attn_implementation", "_attn_implementation", "flash_attn") and value.known:
        kind = "flash" if "flash" in text or text in ("fa2", "true") else text
        if kind in ("flash", "sdpa", "eager", "xformers"):
            yield Fact(name="attention", value=kind, where=where)
    if name in ("torch_compile", "compile") and value.value is True:
        yield Fact(name="compiled", where=where, words=f"{name}: true")
    if name == "logging_nan_inf_filter" and value.value is True:
        yield Fact(name="nan-filter-on", where=where, words="logging_nan_inf_filter: true")
    if name in _RESUMES and value.value is not None and text not in ("false", "none", "null", "", "0", "no", "never"):
        yield Fact(name="resumed", where=where, words=f"{name}: {value.text}")
    if name == "fused" and value.value is True:
        yield Fact(name="fused-optimizer", where=where, words="fused: true")


def _precision(table: PrecisionTable, root: Path, *, complete: bool) -> Iterator[Fact]:
    """What training computes in. ``complete``: the training code was read, so that silence means fp32."""
    for problem in table.problems:  # each ends in the code of its check
        code = problem.rpartition("(")[2].rstrip(")")
        yield Fact(name="config-check", value=code, where="config and code", words=shorten(problem, root))
    if not table.sure and not table.problems:
        return
    deciding = next((r for r in table.rows if r.effective and r.what == "compute"), None)
    where = shorten(deciding.where, root) if deciding is not None else "config"
    asked = any(r.effective and r.what not in ("compute",) for r in table.rows)
    if asked and table.compute in _SHORT:
        short = _SHORT[table.compute]
        yield Fact(name="precision", value=short, where=where, words=f"computing in {short}")
        if table.scaler is False and short == "fp16":
            yield Fact(name="no-scaler", where=where, words="fp16 without a GradScaler")
    elif complete and table.compute == "float32":
        yield Fact(name="precision", value="fp32", where=where, words="nothing asks for another precision than fp32")
    if table.states == "float16":
        yield Fact(name="weights", value="fp16", where=where, words="the trained weights are fp16")


def _rows(table: PrecisionTable, root: Path) -> Iterator[str]:
    for row in table.rows:
        mark = "→" if row.effective else " "
        cells = f"{row.what:<17} {row.setting:<28} {row.says:<16} {row.dtype or '?':<9}"
        yield shorten(f"{mark} {cells} {row.where} {row.note}".rstrip(), root)
    for way in table.ways:
        state = "" if way.possible else " (not on this hardware)"
        yield f"  way out {way.name}{state}: {way.how}; memory {way.memory}; {way.speed}"
