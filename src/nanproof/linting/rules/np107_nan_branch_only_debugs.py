"""NP107: NaN is noticed, printed, and used all the same."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..nonfinite import subject_of
from ..paths import Way, all_ways
from ..reaction import arms, debuggers, only_reports
from ..rule import Found, Rule
from ..source import Module
from ..training import detects_anomalies, in_tests


def check(node: ast.Module, module: Module) -> Iterator[Found]:
    if in_tests(module) or detects_anomalies(module):
        return  # anomaly detection raises in backward, before the step
    told: set[ast.AST] = set()
    for way in all_ways(module):
        losses = frozenset(n for e in way if e.kind in ("backward", "scaled") for n in e.names)
        for at, event in enumerate(way):
            branch, test = event.node, event.test
            if event.kind != "test" or not event.bad or test is None or branch in told:
                continue
            if "flag" in test.kinds:
                continue  # something was done where the flag was set
            if not isinstance(branch, ast.If) or subject_of(module, test, losses) not in ("loss", "gradient"):
                continue
            bad, good = arms(branch, test)
            if not test.bad and any(isinstance(s, ast.Assign | ast.AugAssign) for s in good):
                continue  # `if isfinite(part): total += part`: what is not finite is left out
            if not only_reports(module, bad) or not _used(way, at, bool(debuggers(module, bad))):
                continue
            told.add(branch)
            how = "a debugger is opened" if debuggers(module, bad) else "a message is written"
            yield Found(
                node=branch,
                message=f"`{module.source(branch.test)}`: {how}, and the step is done with it all the same",
                help="leave the step out: raise, or skip this batch on all ranks",
            )


def _used(way: Way, at: int, debugger: bool) -> bool:
    """Whether the bad value goes into a step after this, with nothing else in between that could stop it."""
    later = way[at + 1 :]
    step = next((i for i, e in enumerate(later) if e.kind == "step" or (debugger and e.kind == "scaler-step")), None)
    if step is None or any(e.kind in ("test", "scaler-step") and not debugger for e in later[: step + 1]):
        return False
    if any(e.kind == "test" for e in later[:step]):
        return False
    if way[at].site is not None and way[at].site is later[step].site:
        return False  # both in the function that is called: found there
    return any(e.kind in ("backward", "scaled") for e in way[: at + 1 + step])


RULE = Rule(
    code="NP107",
    name="nan-branch-only-debugs",
    what="Finds a test of the loss or the gradients for NaN before the step whose branch only prints, logs, counts "
    "or opens a debugger, after which backward and step happen with the bad value.",
    why="One step with a NaN gradient makes the weight NaN for good (see NP101), so the message is the last thing "
    "of worth that the run writes: one post-mortem counts 98,000 dead steps after the first such message. A "
    "debugger in an unattended job waits for a keyboard until the time limit, or dies of it.",
    bad="""import torch

def train(model, loader, optimizer, criterion):
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        if not torch.isfinite(loss):
            print("WARNING: loss is", loss.item())
        loss.backward()
        optimizer.step()
""",
    good="""import torch

def train(model, loader, optimizer, criterion):
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        if not torch.isfinite(loss):
            raise RuntimeError(f"loss is {loss.item()}")
        loss.backward()
        optimizer.step()
""",
    miss="""import torch

def forward(self, x):
    h = self.block(x)
    if torch.isnan(h).any():
        print("NaN in block")  # no step in sight
    return self.head(h)
""",
    false_alarm="Something outside of this function looks at the same value before the step, for example a wrapped "
    "optimizer. Steps through a GradScaler are not reported for messages: it leaves out bad steps by itself.",
    nodes=(ast.Module,),
    words=("backward(",),
    check=check,
)
