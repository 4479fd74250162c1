"""The labeled set is what it says: failing programs fail, healthy ones do not, and each failing one is marked."""

from __future__ import annotations

import inspect
from collections import Counter

import pytest
import torch
from torch import Tensor

from support.programs import MECHANISMS, PHASES, Outcome, Program, controls, failing, load, module_of, run

torch.set_num_threads(1)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def test_names_are_given_once() -> None:
    assert [name for name, count in Counter(p.name for p in load()).items() if count > 1] == []


def run_twice(program: Program) -> Outcome:
    """What a program gives, the same each time."""
    first, second = run(program), run(program)
    assert same(first.loss, second.loss)
    assert first.grads.keys() == second.grads.keys()
    assert all(same(first.grads[name], second.grads[name]) for name in first.grads)
    return first


@pytest.mark.parametrize("program", failing(), ids=lambda p: p.name)
def test_a_failing_program_fails_as_labeled(program: Program) -> None:
    assert set(program.phase) <= set(PHASES)
    assert set(program.mechanism) <= set(MECHANISMS)
    assert program.mechanism
    assert program.bad, "no line is marked"
    assert not program.bad & program.also
    assert bool(program.leaf) == ("leaf" in program.phase)
    outcome = run_twice(program)
    assert outcome.bad_grads or not outcome.loss_finite
    if program.phase == ("forward",):
        assert not outcome.loss_finite
    own_backward = "create_graph=True" in inspect.getsource(program.make)  # forces: a gradient is part of the loss
    if program.phase[0] == "backward" and not own_backward:
        assert outcome.loss_finite
    module_of(program)  # raises when the marked line alone does not tell the module


@pytest.mark.parametrize("program", controls(), ids=lambda p: p.name)
def test_a_healthy_program_is_healthy(program: Program) -> None:
    outcome = run_twice(program)
    assert outcome.grads
    assert outcome.loss_finite
    assert outcome.bad_grads == []
