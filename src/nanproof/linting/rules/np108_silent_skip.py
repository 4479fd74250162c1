"""NP108: bad batches are skipped without a trace."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..names import key_of
from ..nonfinite import subject_of
from ..paths import all_ways
from ..reaction import arms, is_silent, leaves
from ..rule import Found, Rule
from ..source import Module
from ..training import in_tests


def check(node: ast.Module, module: Module) -> Iterator[Found]:
    if in_tests(module):
        return
    told: set[ast.AST] = set()
    for way in all_ways(module):
        losses = frozenset(n for e in way if e.kind in ("backward", "scaled") for n in e.names)
        for at, event in enumerate(way):
            branch, test = event.node, event.test
            if event.kind != "test" or event.bad or test is None or branch in told or not isinstance(branch, ast.If):
                continue
            if "flag" in test.kinds:
                continue  # the place where the flag is set may say something
            if event.site is not None or subject_of(module, test, losses) not in ("loss", "gradient"):
                continue
            bad = arms(branch, test)[0]
            if leaves(module, bad) not in ("continue", "return") or not is_silent(module, bad):
                continue
            if not any(e.kind in ("step", "scaler-step") for e in way[at:]):
                continue  # a validation loop
            if any(isinstance(n, ast.Attribute) and "scale" in key_of(n.value) for s in bad for n in ast.walk(s)):
                continue  # a loss scaler of its own learns of the overflow
            told.add(branch)
            yield Found(
                node=branch,
                message=f"batches with `{module.source(branch.test)}` are skipped: no message, no count, no limit",
                help="count the skips, log the step, and stop after a few in a row",
            )


RULE = Rule(
    code="NP108",
    name="silent-skip",
    what="Finds a training loop that skips a batch with a bad loss or gradient (`continue`, `return`) and leaves "
    "no trace: no message, no counter, no limit.",
    why="Skipping helps against a bad batch and does nothing against bad weights: once they are NaN every batch is "
    "skipped, the loop runs to its end at full speed, and the progress bar looks well. One real run spent steps "
    "92,261 to 190,163 that way. A counter with a limit of ten in a row ends it after ten.",
    bad="""import torch

def train(model, loader, optimizer, criterion):
    for x, y in loader:
        loss = criterion(model(x), y)
        if not torch.isfinite(loss):
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
""",
    good="""import torch

def train(model, loader, optimizer, criterion, log, most=10):
    skipped = 0
    for i, (x, y) in enumerate(loader):
        loss = criterion(model(x), y)
        if not torch.isfinite(loss):
            skipped += 1
            log.warning("step %d skipped: loss %s (%d in a row)", i, loss.item(), skipped)
            if skipped == most:
                raise RuntimeError("the loss stays non-finite")
            continue
        skipped = 0
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
""",
    false_alarm="The skips are counted elsewhere, for example by comparing the number of steps with the number of "
    "batches.",
    nodes=(ast.Module,),
    words=("backward(",),
    check=check,
)
