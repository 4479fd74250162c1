"""What to change in a config, each remedy only on evidence from this run.

A remedy is a function from a `Case` to proposals and refusals. None of them is folklore: where nothing in the log,
the checkpoint, the code or the config speaks for a change, none is proposed.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..records import Finding
from .case import Case
from .effective import HALF
from .hardware import find_hardware
from .meaning import is_on
from .memory import WAYS, bytes_of, show_bytes
from .optimizers import highest_rate, optimizer_of, scales_rate
from .proposals import Answer, Proposal, Refusal, nice, propose, whole
from .sources import dtype_of
from .value import Plain, Value

_RANGE_CAUSES = {"fp16-overflow", "double-fp16", "loss-scale-collapse", "amp-misuse", "eps-underflow"}


def remedies(case: Case) -> Iterator[Answer]:
    """Everything that the evidence asks for."""
    for remedy in (
        _numbers,
        _rate,
        _restored_rate,
        _precision,
        _weights,
        _scale,
        _eps,
        _warmup,
        _clip,
        _checkpoints,
        _log,
    ):
        yield from remedy(case)


def _found(case: Case, code: str) -> list[Finding]:
    return [f for f in case.findings if f.code == code]


def _evidence(finding: Finding) -> str:
    return f"{finding.code} {finding.path}:{finding.line}: {finding.message}"


def _numbers(case: Case) -> Iterator[Answer]:
    """NP708: write the number as a number."""
    for finding in _found(case, "NP708"):
        value = _at(case, finding)
        if value is not None and value.number is not None:
            yield Proposal(
                key=value.key, after=value.number, why="PyYAML reads it as a string", evidence=(_evidence(finding),)
            )


def _rate(case: Case) -> Iterator[Answer]:
    lr = case.number("lr")
    if lr is None:
        return
    if high := _found(case, "NP703"):
        after = 1e-3 if lr > 1e-3 else None
        if after is not None:
            yield propose(case, "lr", after, "far above what Adam can use; 1e-3 is its own default", _evidence(high[0]))
        return
    if "lr-too-high" in case.facts.causes():
        optimizer = optimizer_of(case.settings, case.meaning)
        limit = highest_rate(optimizer)
        after, why = lr / 2, "the rate is named as the cause: halve it"
        if optimizer and after > limit and not scales_rate(case.meaning.word("scheduler") or ""):
            after, why = limit, f"the rate is named as the cause; {optimizer} rarely trains above {limit:g}"
        yield propose(case, "lr", nice(after), why, case.facts.tell("cause"))
        yield from scaled_minimum(case, lr, after)


def scaled_minimum(case: Case, before: float, after: float) -> Iterator[Answer]:
    """The final rate of a schedule keeps its ratio to the peak."""
    held, low = case.value("min_lr"), case.meaning.number("min_lr")
    if held is not None and low and before > 0 and "ratio" not in held.name:
        yield Proposal(
            key=held.key, after=nice(low * after / before), why=f"keeps its ratio to the rate ({before:g} before)"
        )


def _restored_rate(case: Case) -> Iterator[Answer]:
    lr = case.number("lr")
    for name in ("lr_in_force", "checkpoint_lr"):
        actual = case.facts.number(name)
        if lr is None or actual is None or abs(actual - lr) <= 1e-6 * max(abs(actual), abs(lr)):
            continue
        held = case.value("lr")
        yield Refusal(
            what=held.label if held else "lr",
            mark="inert",
            why=f"the config already says {lr:g}, but {actual:g} is in force ({case.facts.found[name].source}): the "
            "restored scheduler overrides it. Start a fresh scheduler, or set base_lrs after loading",
        )
        return


def _precision(case: Case) -> Iterator[Answer]:
    causes = _RANGE_CAUSES & case.facts.causes()
    problems = [p for p in case.problems if p.code == "NP701"]
    named = case.value("train_dtype")
    by_key = named is not None and dtype_of(named.value) == "float16"  # autocast takes its dtype from a key
    computes = "float16" if by_key and causes else case.effective.compute
    if computes not in HALF or not (problems or (causes and computes == "float16")):
        return
    evidence = [f"NP701 {p.where}: {p.message}" for p in problems] or [case.facts.tell("cause")]
    machine = find_hardware(case.facts.says("gpu"))
    by = case.effective.by
    if by is not None and by.what == "autocast" and not by_key:
        yield from _switch_off(case, evidence)
        return
    if machine is None:
        yield Refusal(what="precision", why=f"{evidence[0]}; which format is right depends on the GPU: --fact gpu=A100")
        return
    target = "bf16" if machine.bf16 and computes == "float16" else "fp32"
    reason = f"{machine.name} has bfloat16, which has the range of float32"
    if target == "bf16" and not _can_switch(case):
        how = "autocast(device, dtype=torch.bfloat16) in the code is better"
        target, reason = "fp32", f"float32: {machine.name} has bfloat16, but no key turns it on here: {how}"
    elif target == "fp32":
        reason = f"float32: {machine.name} has no bfloat16" if not machine.bf16 else "float32 always works"
    yield from set_precision(case, target, f"{reason}{_cost(case, target)}", evidence)


def _can_switch(case: Case) -> bool:
    """Whether bfloat16 can be asked for here: by a key that is there, or one that the reader of the config knows."""
    known = case.dialect in ("transformers", "deepspeed", "accelerate") or case.effective.stack == "transformers"
    return (
        known or any(case.value(k) is not None for k in ("bf16", "train_dtype", "mixed_precision")) or _twin(case) != ""
    )


def _twin(case: Case) -> str:
    """The key that turns on bfloat16 where only fp16 is set: bf16 beside it, unless the code does not read that."""
    held, project = case.value("fp16"), case.project
    if held is None or "fp16" not in held.name:
        return ""
    twin = held.key.removesuffix(held.name) + held.name.replace("fp16", "bf16")
    if project.codes and project.complete:
        return twin if project.reads.may_read(twin) else ""
    return twin if held.origin in ("yaml", "json", "toml") else ""


def _switch_off(case: Case, evidence: list[str]) -> Iterator[Answer]:
    """float16 without a scaler, decided in code: the config can only switch it off."""
    by = case.effective.by
    flag = by.value if by is not None else None
    if flag is not None and is_on(flag):
        why = f"float32 until autocast at {by.where if by else ''} names dtype=torch.bfloat16 or a GradScaler is added"
        yield Proposal(key=flag.key, after=False, why=why + _cost(case, "fp32"), evidence=tuple(evidence))
    else:
        yield Refusal(what="precision", why=f"{evidence[0]}; that is decided in the code: nanproof lint")


def set_precision(case: Case, target: str, why: str, evidence: list[str]) -> Iterator[Answer]:
    """Every key that must change for training in bf16 or fp32."""
    keys: dict[str, Plain] = {}
    deepspeed = [k for k in ("fp16", "bf16", "bfloat16") if f"deepspeed.{k}.enabled" in case.settings]
    for name in deepspeed:
        keys[f"deepspeed.{name}.enabled"] = target == "bf16" and name != "fp16"
    if deepspeed == ["fp16"] and target == "bf16":
        keys["deepspeed.bf16.enabled"] = True
    if "accelerate.mixed_precision" in case.settings:
        keys["accelerate.mixed_precision"] = "bf16" if target == "bf16" else "no"
    named_by = [v for v in (case.value("train_dtype"), case.value("mixed_precision")) if v is not None]
    # a key that names the dtype needs no flag beside it, which another script of the project may take
    takes_flags = case.dialect == "transformers" or (case.effective.stack == "transformers" and not named_by)
    for concept in ("fp16", "bf16"):
        wanted = concept == target
        held = case.value(concept)
        if held is not None and not held.key.startswith("deepspeed.") and is_on(held) != wanted:
            keys[held.key] = wanted
        elif held is None and wanted and takes_flags:
            keys[case.key(concept) or concept] = True
        elif held is None and wanted and not deepspeed and (twin := _twin(case)):
            keys[twin] = True
    for named in named_by:  # autocast takes its dtype from this key
        if dtype_of(named.value) == "float16" and str(named.value).endswith("float16"):
            keys[named.key] = str(named.value).replace("float16", "bfloat16" if target == "bf16" else "float32")
    loaded = case.value("load_dtype")
    if loaded is not None and case.effective.lora and dtype_of(loaded.value) == "float16":  # frozen, and computes
        keys[loaded.key] = "bfloat16" if target == "bf16" else "float32"
    word = case.value("mixed_precision")
    if word is not None and word.key not in keys:
        full = "fp32" if word.name.endswith("dtype") else "no"
        names = (
            {"bf16": "bf16-mixed", "fp32": "32-true"} if word.name == "precision" else {"bf16": "bf16", "fp32": full}
        )
        keys[word.key] = names[target]
    changed = {k: v for k, v in keys.items() if (held := case.settings.get(k)) is None or held.value != v}
    if not changed:
        yield Refusal(what="precision", why=f"{why}, but no key of this config decides it")
    for key, after in changed.items():
        yield Proposal(key=key, after=after, why=why, evidence=tuple(evidence))


def _cost(case: Case, target: str) -> str:
    count = case.facts.number("parameters")
    if count is None:
        return ""
    way = WAYS["fp32" if target == "fp32" else "bf16 autocast"]
    trainable = case.facts.number("trainable")
    total = bytes_of(way, int(count), int(trainable) if trainable is not None else None)
    return f" ({show_bytes(total)} for weights, gradients and Adam)"


def _weights(case: Case) -> Iterator[Answer]:
    """fp16 weights that are trained: load them in float32."""
    for problem in case.problems:
        if problem.code != "NP702":
            continue
        value = problem.value
        if value is not None and value.path != case.path:
            yield Refusal(what=value.label, why=f"{problem.message}; that is written in {problem.where}")
        elif value is None or value.name in ("precision",):
            yield from set_precision(case, "fp32", "the trained weights must not be float16", [problem.message])
        else:
            yield Proposal(
                key=value.key,
                after="float32",
                why=f"trained weights need float32{_cost(case, 'fp32')}",
                evidence=(f"NP702 {problem.where}: {problem.message}",),
            )


def _scale(case: Case) -> Iterator[Answer]:
    defaults: dict[str, Plain] = {"initial_scale_power": 16, "loss_scale_window": 1000, "growth_interval": 2000}
    for finding in _found(case, "NP707"):
        value = _at(case, finding)
        if value is not None:
            after = defaults.get(value.name, 0)
            yield Proposal(key=value.key, after=after, why="let the scale find itself", evidence=(_evidence(finding),))


def _at(case: Case, finding: Finding) -> Value | None:
    """The setting that a finding points at."""
    here = (finding.path, finding.line, finding.column)
    return next((v for v in case.settings if (v.path, v.line, v.column) == here), None)


def _eps(case: Case) -> Iterator[Answer]:
    for finding in _found(case, "NP709"):
        value = _at(case, finding)
        if value is None or "float16" in finding.message:
            continue
        after = 1e-6 if "norm" in value.name else 1e-8
        yield Proposal(key=value.key, after=after, why="the smallest eps that protects", evidence=(_evidence(finding),))


def _warmup(case: Case) -> Iterator[Answer]:
    found = _found(case, "NP706")
    if not found and "warmup" not in case.facts.causes():
        return
    evidence = _evidence(found[0]) if found else case.facts.tell("cause")
    steps, total = case.number("warmup_steps"), case.number("max_steps")
    after = whole(steps * 2) if steps and steps >= 1 else whole(min(2000, 0.02 * total)) if total else 2000
    yield propose(case, "warmup_steps", after, "long enough for Adam's second moment to settle", evidence)


def _clip(case: Case) -> Iterator[Answer]:
    usual, peak = case.facts.number("grad_norm"), case.facts.number("grad_norm_peak")
    if found := _found(case, "NP705"):
        norm = case.number("clip_norm")
        if norm is not None and norm >= 100:
            after = nice(max(1.0, 2 * usual)) if usual else 1.0
            yield propose(case, "clip_norm", after, "so that it can bind", _evidence(found[0]))
        return
    if usual and peak and peak > 10 * usual and not case.number("clip_norm"):
        evidence = f"{case.facts.tell('grad_norm')}, {case.facts.tell('grad_norm_peak')}"
        yield propose(case, "clip_norm", nice(max(1.0, 2 * usual)), "spikes reach the optimizer unclipped", evidence)


def _checkpoints(case: Case) -> Iterator[Answer]:
    bad, good, every = case.facts.number("nan_step"), case.facts.number("last_healthy_step"), case.number("save_every")
    if bad is not None and good is not None and every is not None and bad > good and every > (bad - good) / 4:
        why = f"{bad - good:,.0f} steps were lost between the last healthy checkpoint and the failure"
        evidence = (case.facts.tell("nan_step"), case.facts.tell("last_healthy_step"))
        yield propose(case, "save_every", whole((bad - good) / 4), why, *evidence)
    name, held = case.facts.says("last_healthy"), case.value("resume_from")
    if name and held is not None and isinstance(held.value, str) and held.value != name:
        yield Proposal(
            key=held.key, after=name, why="resume from before the failure", evidence=(case.facts.tell("last_healthy"),)
        )


def _log(case: Case) -> Iterator[Answer]:
    hidden = case.facts.holds("nan_hidden") or "logger-masks-nan" in case.facts.causes()
    if hidden and case.dialect == "transformers":
        held = case.value("nan_filter")
        if held is None or is_on(held):
            evidence = case.facts.tell("nan_hidden" if case.facts.holds("nan_hidden") else "cause")
            yield propose(case, "nan_filter", False, "so that the log shows NaN as NaN", evidence)
