"""The user's own line: code without a file, plain numbers, other threads."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanproof
from nanproof import Guard, Incident
from nanproof.tensors import tensors_in


def line_of(marker: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(i for i, text in enumerate(lines, 1) if f"# {marker}" in text)


GENERATED = """
def scaled(x):
    return torch.log(x * 0 - 1)
"""


def test_code_without_a_file_is_shown_from_the_line_that_calls_it() -> None:
    names: dict[str, Any] = {"torch": torch}
    exec(GENERATED, names)

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        return names["scaled"](model(batch)).mean()  # calls generated code  # type: ignore[no-any-return]

    def evaluated(model: nn.Module, batch: Tensor) -> Tensor:
        names = {"torch": torch, "h": model(batch)}
        return eval("torch.log(h * 0 - 1).mean()", names)  # calls eval  # type: ignore[no-any-return]

    for run, words in ((step, "calls generated code"), (evaluated, "calls eval")):
        found = nanproof.locate(run, model=nn.Linear(3, 3), batch=torch.randn(2, 3))
        assert (found.op, found.verified) == ("log", True)
        assert (Path(found.file), found.line) == (Path(__file__), line_of(words))
        assert "<string>" in found.stack[-1]


def test_generated_modules_are_shown_from_the_line_that_calls_them() -> None:
    class Logs(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.log(x * 0 - 1).mean()

    model = torch.fx.symbolic_trace(Logs())
    linear = nn.Linear(3, 3)

    def step() -> Tensor:
        return model(linear(torch.ones(1, 3)))  # calls a graph  # type: ignore[no-any-return]

    found = nanproof.locate(step, model=nn.ModuleList([model, linear]))
    assert (found.op, Path(found.file), found.line) == ("log", Path(__file__), line_of("calls a graph"))


def test_a_plain_number_is_followed_to_the_tensor_that_it_was_taken_from() -> None:
    def factor(model: nn.Module, batch: Tensor) -> Tensor:
        h = model(batch)
        weight = torch.log(h.mean() * 0 - 1).item()  # its number is a factor
        return h.square().mean() * weight  # type: ignore[no-any-return]

    def added(model: nn.Module, batch: Tensor) -> Tensor:
        h = model(batch)
        scale = float(torch.log(h.mean() * 0 - 1))  # its number is made a tensor
        return h.mean() + torch.tensor(scale)  # type: ignore[no-any-return]

    for step, words in ((factor, "its number is a factor"), (added, "its number is made a tensor")):
        found = nanproof.locate(step, model=nn.Linear(3, 3), batch=torch.randn(2, 3))
        assert (found.op, found.line, found.verified) == ("log", line_of(words), True)


class Thread(nn.Module):
    def __init__(self, broken: nn.Module) -> None:
        super().__init__()
        self.linear, self.broken = nn.Linear(3, 3), broken

    def forward(self, x: Tensor) -> Tensor:
        return self.broken(self.linear(x))  # type: ignore[no-any-return]


class LogOfMinusOne(nn.Module):
    def forward(self, x: Tensor) -> Tensor:  # a module in a thread
        return torch.log(x * 0 - 1)


class RootOfZero(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.detach()).square().sum().sqrt()


@pytest.mark.parametrize("backward_too", [False, True])
@pytest.mark.parametrize("broken", [LogOfMinusOne, RootOfZero])
def test_a_model_in_another_thread_is_told_as_such(broken: type[nn.Module], backward_too: bool) -> None:
    """No dispatch mode is in force in another thread, and autograd counts operations of each thread for itself."""
    model, x = Thread(broken()), torch.randn(2, 3)
    for _ in range(20):  # so that the numbers of both threads overlap
        (x * 1).requires_grad_().sum()

    with ThreadPoolExecutor(1) as pool:

        def step() -> Tensor:
            loss: Tensor = pool.submit(model, x).result().sum()
            if backward_too:
                pool.submit(loss.backward).result()
            return loss

        found = nanproof.locate(step, model=model)
    assert found.reproduced
    assert found.verified is not True
    assert any("other threads (ThreadPoolExecutor" in note for note in found.notes)
    if broken is LogOfMinusOne:
        assert (found.module, found.line) == ("broken", line_of("a module in a thread"))


def test_a_step_after_a_model_in_another_thread_is_located_in_this_one() -> None:
    model, x = nn.Linear(3, 3), torch.randn(2, 3)
    with ThreadPoolExecutor(1) as pool:

        def step() -> Tensor:
            h: Tensor = pool.submit(model, x).result()
            return torch.log(h.mean() * 0 - 1)  # in this thread

        found = nanproof.locate(step, model=model)
    assert (found.op, found.line, found.verified) == ("log", line_of("in this thread"), None)
    assert "other threads" in found.doubt


def test_a_whole_step_in_another_thread_is_located() -> None:
    model, x = nn.Linear(3, 3), torch.randn(2, 3)

    def step() -> Tensor:
        return torch.log(model(x) * 0 - 1).mean()  # all in one thread

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(lambda: nanproof.locate(step, model=model)).result()
    assert (found.op, found.line, found.verified) == ("log", line_of("all in one thread"), True)


class BreaksOnNines(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:  # a guarded module
        h: Tensor = self.linear(x)
        return torch.log(h * 0 - 1) if bool((x > 5).any()) else h  # in a guarded module


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("closure", [True, False])
def test_a_guarded_loop_with_threads_is_located(tmp_path: Path, closure: bool, whole: bool) -> None:
    """The whole step runs in a thread, or only the forward pass does; either way the run goes on."""
    model = BreaksOnNines()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    verdicts = []
    with ThreadPoolExecutor(1) as pool, Guard(model, optimizer, run_dir=tmp_path / "run") as guard:

        def loss_of(x: Tensor) -> Tensor:
            return (model(x) if whole else pool.submit(model, x).result()).square().mean()  # type: ignore[no-any-return]

        def step(x: Tensor) -> Any:
            if closure:
                return guard.step(lambda: loss_of(x))
            guard.backward(loss_of(x))
            return guard.step()

        for i in range(5):
            x = torch.full((2, 3), 9.0 if i == 2 else 1.0)
            verdicts.append(pool.submit(step, x).result() if whole else step(x))
    assert [v.ok for v in verdicts] == [True, True, False, True, True]
    (record,) = (tmp_path / "run" / "incidents").glob("*/incident.json")
    found = Incident.from_json(json.loads(record.read_text())).location
    assert found is not None
    seen = whole or not closure  # without a closure the model is called again in the guard's own thread
    assert found.line == line_of("in a guarded module" if seen else "a guarded module")
    assert found.verified is (True if seen else None)


@pytest.mark.slow
def test_locating_does_not_import_sympy() -> None:
    code = """
    import sys, torch, nanproof
    model = torch.nn.Linear(2, 2)
    def step():
        h = model(torch.ones(1, 2))
        return (h - h.detach()).square().sum().sqrt() * (h * 0).log().mean()
    nanproof.locate(step, model=model)
    print("sympy" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=600, capture_output=True)
    assert done.stdout.strip() == b"False"


def test_modules_in_the_variables_of_a_step_are_not_walked_through() -> None:
    """Namespaces of exec hold them, and one leads to sys.modules, which changes while others import."""
    seen = list(tensors_in({"torch": torch, "sys": sys, "x": torch.ones(1)}))
    assert [name for name, _ in seen] == ["x"]
