"""What only the files of a folder together can show: missing shards, keys in the wrong place, copies that differ."""

from __future__ import annotations

import re
from typing import Any

from .flaws import Flaw, Health
from .layout import Checkpoint
from .part import Part, PartResult, open_part
from .report import TensorReport
from .settings import Gatherer
from .store import read_head, read_json

Findings = list[tuple[Health, str]]
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.\w+)")
_RANK = re.compile(r"(?i)(.*?[_.-]?rank[_-]?)(\d+)(.*)")
_SHARDED_BY_RANK = re.compile(r"(?i)zero|mp_rank|optim_states|shard|tp_rank|pp_rank|local_state|rng|random")
_HEADS = ("lm_head.weight", "output.weight", "embed_out.weight")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "tok_embeddings.weight", "shared.weight")


def check_folder(checkpoint: Checkpoint, results: list[PartResult], gatherer: Gatherer) -> Findings:
    """All findings about a folder as a whole; also takes the settings out of its JSON files."""
    found: Findings = []
    config: dict[str, Any] = {}
    for item in checkpoint.items:
        name = item.name.rpartition("/")[2]
        if not name.endswith(".json") or not (
            name.endswith(".index.json") or name in ("trainer_state.json", "config.json")
        ):
            continue
        try:
            if name == "trainer_state.json":
                gatherer.take_trainer_state(read_head(checkpoint.store, item.path, ("global_step", "epoch")))
                continue
            data = read_json(checkpoint.store, item.path)
        except Flaw as flaw:
            found.append((flaw.health, f"{item.name}: {flaw.why}"))
            continue
        if name == "config.json" and isinstance(data, dict):
            config = data
        elif name.endswith(".index.json"):
            found += _check_index(item.name, data, results)
    found += _check_numbering(results)
    if config.get("tie_word_embeddings") is True:
        found += _check_ties(checkpoint, results)
    return found + _check_replicas(checkpoint, results)


def _check_index(name: str, data: Any, results: list[PartResult]) -> Findings:
    weights = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(v, str) for v in weights.values()):
        return [("damaged", f"{name}: has no weight_map")]
    prefix = name.removesuffix(name.rpartition("/")[2])
    there = {r.file: r for r in results}
    names = {r.file: {t.name for t in r.tensors} for r in results if r.file.startswith(prefix)}
    for file in sorted(set(weights.values())):
        if file.startswith("/") or "\\" in file or ".." in file.split("/"):
            return [("refused", f"{name}: points out of the folder, at {file[:80]!r}")]
        if prefix + file not in there:
            return [("damaged", f"{name}: {file[:80]} is missing")]
    for key, file in weights.items():
        result = there[prefix + file]
        if result.flaw is None and key not in names[prefix + file]:
            return [("damaged", f"{name}: {key[:80]} is not in {file[:80]}")]
    return []


def _check_numbering(results: list[PartResult]) -> Findings:
    """``model-00002-of-00003`` tells how many there should be."""
    groups: dict[tuple[str, str, str], set[int]] = {}
    for result in results:
        found = _SHARD.fullmatch(result.file)
        if found:
            groups.setdefault((found[1], found[3], found[4]), set()).add(int(found[2]))
    return [
        ("damaged", f"{stem}-{missing[0]:05}-of-{total}{end} is missing")
        for (stem, total, end), numbers in groups.items()
        if (missing := sorted(set(range(1, min(int(total), 10_000) + 1)) - numbers))
    ]


def _check_ties(checkpoint: Checkpoint, results: list[PartResult]) -> Findings:
    heads = [(r, t) for r in results for t in r.tensors if t.name.endswith(_HEADS) and t.role == "parameter"]
    embeddings = [(r, t) for r in results for t in r.tensors if t.name.endswith(_EMBEDDINGS) and t.role == "parameter"]
    if not heads or not embeddings:
        return []
    (a, head), (b, embedding) = heads[0], embeddings[0]
    if head.shape == embedding.shape and not _same(checkpoint, (a, head), (b, embedding)):
        return [("suspect", f"{head.name} and {embedding.name} are tied in config.json and differ here")]
    return []


def _check_replicas(checkpoint: Checkpoint, results: list[PartResult]) -> Findings:
    """Files that differ only in the number of their rank and hold the same tensors should hold the same numbers."""
    groups: dict[tuple[str, str], list[PartResult]] = {}
    for result in results:
        found = _RANK.fullmatch(result.file)
        if found and result.flaw is None and not _SHARDED_BY_RANK.search(result.file):
            groups.setdefault((found[1], found[3]), []).append(result)
    findings: Findings = []
    for copies in groups.values():
        first = copies[0]
        layout = [(t.name, t.shape, t.dtype) for t in first.tensors]
        for other in copies[1:]:
            if [(t.name, t.shape, t.dtype) for t in other.tensors] != layout:
                continue
            pairs = zip(first.tensors, other.tensors, strict=True)
            odd = [t.name for t, u in pairs if t.role != "other" and not _same(checkpoint, (first, t), (other, u))]
            if odd:
                which = f"1 tensor ({odd[0]})" if len(odd) == 1 else f"{len(odd)} tensors ({odd[0]} …)"
                findings.append(("suspect", f"{first.file} and {other.file} differ in {which}"))
    return findings


def _same(
    checkpoint: Checkpoint, left: tuple[PartResult, TensorReport], right: tuple[PartResult, TensorReport]
) -> bool:
    """Whether two tensors of the folder hold the same bytes."""
    from .detail import chunks

    found = []
    sources = []
    try:
        for result, tensor in (left, right):
            source = checkpoint.store.open(result.path)
            sources.append(source)
            contents = open_part(source, Part(file=result.file, path=result.path, size=result.size), check=False)
            found.append((source, next(t for t in contents.tensors if t.name == tensor.name)))
        (s, a), (t, b) = found
        if (a.nbytes, a.stride) != (b.nbytes, b.stride):
            return True  # other layouts of the same numbers are not compared
        return all(x.tobytes() == y.tobytes() for (_, x), (_, y) in zip(chunks(s, a), chunks(t, b), strict=True))
    except (Flaw, StopIteration):
        return True  # reported elsewhere
    finally:
        for source in sources:
            source.close()
