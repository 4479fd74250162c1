"""Replay an incident in a new process, with the user's own code."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ..errors import UsageError
from ..location import Location
from .bundle import Bundle, read_bundle
from .find import locate
from .precision import in_precision
from .replay import run_step
from .sandbox import Sandbox
from .values import kind_of


def load_function(spec: str, what: str) -> Callable[..., Any]:
    """``train.py:make_step`` or ``package.train:make_step`` as a function; ``what`` says what it must do.

    >>> load_function("math:sqrt", "a function of a number")(9)
    3.0
    """
    file, _, name = spec.rpartition(":")
    hint = f"write FILE:FUNCTION or MODULE:FUNCTION, {what}"
    if not file or not name:
        raise UsageError(f"{spec!r} names no function", hint=hint)
    with clean_arguments(file):
        function = getattr(_module(file, hint), name, None)
    if not callable(function):
        raise UsageError(f"{file} has no function {name!r}", hint=hint)
    found: Callable[..., Any] = function
    return found


@contextmanager
def clean_arguments(script: str) -> Iterator[None]:
    """A block in which ``sys.argv`` is that of the script alone: argparse must not read ours."""
    before, sys.argv = sys.argv, [script]
    try:
        yield
    except SystemExit as error:
        raise UsageError(
            f"{script} ended while it was loaded (exit code {error.code})",
            hint='give every argument a default, and keep the training below if __name__ == "__main__"',
        ) from error
    finally:
        sys.argv = before


def _module(name: str, hint: str) -> ModuleType:
    path = Path(name)
    if path.suffix != ".py":
        sys.path.insert(0, str(Path.cwd()))
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise UsageError(f"{name!r} cannot be imported: {error}", hint=hint) from None
    if not path.is_file():
        raise UsageError(f"there is no file {name!r}", hint=hint)
    # a script imports the modules beside it, and reads its own arguments only
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module


def load_factory(spec: str) -> Callable[[Any], tuple[nn.Module, Callable[[], Any]]]:
    """``train.py:make_step`` as a function: it takes the batch and returns the model and a step function."""
    return load_function(spec, "which takes the batch and returns (model, step_fn)")


def play_again(
    folder: str | Path,
    factory: Callable[[Any], tuple[nn.Module, Callable[[], Any]]],
    precision: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Location:
    """Replay an incident from disk: where it fails, or what differs if it does not.

    ``factory(batch)`` returns the model and a function that computes the loss from it. With ``precision``
    ("float32" or "float64") the step is played in that format, to learn whether precision alone explains it.
    """
    bundle = read_bundle(Path(folder))
    with clean_arguments(getattr(factory, "__module__", "")):
        model, step = _made(factory, bundle.batch)
    bundle.set_up(model)
    if precision is not None:
        return _in_other_precision(model, step, bundle, precision)
    before = bundle.incident.location
    try:
        found = locate(
            step, model=model, batch=bundle.batch, progress=progress, loss=before.loss if before is not None else None
        )
    except UsageError as error:
        raise UsageError(
            error.message, hint=f"{error.hint}; the batch that the incident kept: {_outline(bundle.batch)}"
        ) from error
    if found.reproduced:
        return found
    return dataclasses.replace(found, notes=(*found.notes, *differences(bundle)))


def _made(factory: Callable[..., Any], batch: Any) -> tuple[nn.Module, Callable[[], Any]]:
    made = factory(batch)
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], nn.Module) or not callable(made[1]):
        raise UsageError(
            f"{getattr(factory, '__name__', 'the factory')} returned {type(made).__name__}, not (model, step_fn)",
            hint="return the model and a function that computes the loss from it",
        )
    return made


def _outline(batch: Any) -> str:
    """The form of a batch in a few words.

    >>> _outline({"x": torch.zeros(2, 3), "n": 4})
    '{x: tensor [2, 3], n: int}'
    """
    if isinstance(batch, torch.Tensor):
        return f"tensor {list(batch.shape)}"
    if isinstance(batch, dict):
        return f"{{{', '.join(f'{k}: {_outline(v)}' for k, v in list(batch.items())[:8])}}}"
    if isinstance(batch, tuple | list):
        return f"({', '.join(map(_outline, batch[:8]))})"
    return type(batch).__name__


def differences(bundle: Bundle) -> tuple[str, ...]:
    """What of this process is not as it was at the incident."""
    then = bundle.incident.environment
    now = {
        "torch": str(torch.__version__),
        "python": sys.version.split()[0],
        "threads": str(torch.get_num_threads()),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
    found = [f"{k} was {then[k]}, is {v}" for k, v in now.items() if k in then and then[k] != v]
    for name, part in (("batch", bundle.batch), ("weights", bundle.weights), ("random states", bundle.random)):
        if not part:
            found.append(f"the incident kept no {name}")
    return tuple(found)


def _in_other_precision(model: nn.Module, step: Callable[[], Any], bundle: Bundle, precision: str) -> Location:
    sandbox = Sandbox(model, bundle.batch)
    with sandbox.kept(), in_precision(model, getattr(torch, precision)) as mode:
        loss = run_step(step)
        loss.backward()  # type: ignore[no-untyped-call]
        bad = kind_of(loss) or any(map(kind_of, mode.gradients()))
    told = f"in {precision} the step {'fails too: precision alone does not explain it' if bad else 'is finite'}"
    return Location(reproduced=bool(bad), notes=(told,))
