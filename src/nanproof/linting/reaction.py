"""What a program does when a test has found NaN or Inf: leaves, reports, stops to look, or nothing."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from .names import called_last, last_name, written
from .nonfinite import NanTest
from .training import calls_in, is_exit

if TYPE_CHECKING:
    from .source import Module

_REPORT = re.compile(
    r"^(print\w*|p?print|pp|log\w*|debug|info|warn\w*|error|critical|exception|write|display|print_exc|echo|secho|"
    r"colou?red|cprint|print_rank_?0?|rprint|tqdm_write|report\w*|log_\w+|add_scalar|breakpoint|set_trace|embed|"
    r"post_mortem|named_parameters|parameters|format\w*|item|max|min|mean|sum|any|all|isnan|isinf|isfinite|str|repr|len|"
    r"norm|abs|numpy|cpu|detach|tolist|shape|size|items|values|keys|join|list|enumerate|range|float|int|zip|get|nonzero|"
    r"flush|unique|strip|std|view|flatten|stats|summary|get_lr|get_last_lr|state_dict|named_modules|modules|children)$"
)
_COUNTER = re.compile(r"count|num|nan|inf|bad|skip|invalid|total|(^|_)n(_|$)|fail|warn")
_DEBUGGERS = {"breakpoint", "set_trace", "embed", "post_mortem", "interact"}
_QUIET = {"zero_grad", "empty_cache", "collect", "synchronize", "step", "update"}


def is_report(call: ast.Call) -> bool:
    """Whether a call tells somebody: prints, logs, writes."""
    return last_name(call) in ("print", "info", "warning", "warn", "error", "debug", "log", "write", "critical")


def arms(node: ast.If, test: NanTest) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """The statements for the bad value, and those for the good one."""
    return (node.body, node.orelse) if test.bad else (node.orelse, node.body)


def leaves(module: Module, block: list[ast.stmt]) -> str:
    """How a block leaves for good: "continue", "break", "return", "raise", "exit", or "" when it goes on."""
    for statement in block:
        kind = {ast.Continue: "continue", ast.Break: "break", ast.Return: "return", ast.Raise: "raise"}.get(
            type(statement)
        )
        if kind:
            return kind
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            if is_exit(module, statement.value):
                return "exit"
        elif isinstance(statement, ast.If) and statement.orelse:
            first, second = leaves(module, statement.body), leaves(module, statement.orelse)
            if first and second:
                return first if first == second else "return"
        elif isinstance(statement, ast.With):
            inner = leaves(module, statement.body)
            if inner:
                return inner
    return ""


def may_leave(module: Module, block: list[ast.stmt]) -> bool:
    """Whether some way through a block leaves it."""
    ends = (ast.Continue, ast.Break, ast.Return, ast.Raise)
    return any(
        isinstance(node, ends) or (isinstance(node, ast.Call) and is_exit(module, node))
        for statement in block
        for node in ast.walk(statement)
    )


def debuggers(module: Module, block: list[ast.stmt]) -> list[ast.Call]:
    """The calls in a block that open a debugger."""
    found = (c for s in block for c in calls_in(s))
    return [c for c in found if called_last(c, module) in _DEBUGGERS or last_name(c) in _DEBUGGERS]


def only_reports(module: Module, block: list[ast.stmt]) -> bool:
    """Whether a block does nothing but print, log, count, or open a debugger."""
    return bool(block) and all(_reports(module, s) for s in block)


def _reports(module: Module, statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Pass | ast.Import | ast.ImportFrom | ast.Global):
        return True
    if isinstance(statement, ast.Expr):
        if isinstance(statement.value, ast.Constant):
            return True
        return isinstance(statement.value, ast.Call) and _calls_report(statement.value)
    if isinstance(statement, ast.AugAssign):
        return isinstance(statement.value, ast.Constant) and bool(_COUNTER.search(written(statement.target).lower()))
    if isinstance(statement, ast.If):
        return all(_reports(module, s) for s in (*statement.body, *statement.orelse))
    if isinstance(statement, ast.For | ast.With):
        return all(_reports(module, s) for s in statement.body)
    return False


def _calls_report(call: ast.Call) -> bool:
    return all(
        _REPORT.match(last_name(c)) or written(c.func).startswith(("torch.save", "logger", "logging"))
        for c in calls_in(call)
    )


def is_silent(module: Module, block: list[ast.stmt]) -> bool:
    """Whether a block leaves without a trace: no message, no count, no exception."""
    for statement in block:
        if isinstance(statement, ast.Continue | ast.Pass):
            continue
        if isinstance(statement, ast.Return):
            if statement.value is not None and not isinstance(statement.value, ast.Constant):
                return False
            continue
        if isinstance(statement, ast.Delete):
            continue
        call = statement.value if isinstance(statement, ast.Expr) else None
        if not isinstance(call, ast.Call) or last_name(call) not in _QUIET:
            return False
    return True
