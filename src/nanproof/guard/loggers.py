"""Writing what the guard sees into the logger that the user already has; nothing is imported for it.

>>> told = []
>>> loggers = Loggers([lambda step, values: told.append((step, values))])
>>> loggers.tell(3, {"loss": 0.5, "scale": None})
>>> told
[(3, {'nanproof/loss': 0.5})]
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import UsageError
from ..records import Action, Incident, Reading, Verdict
from .observers import Observer

log = logging.getLogger("nanproof")
Tell = Callable[[int, Mapping[str, float]], None]
Say = Callable[[int, str], None]


class Loggers(Observer):
    """Some loggers. One that raises is left out from then on, with one error message; training goes on."""

    def __init__(self, loggers: Sequence[Any]) -> None:
        self._known = [(logger, *_adapt(logger)) for logger in loggers]

    def step_ended(self, reading: Reading, verdict: Verdict, action: Action, update: int) -> None:
        if verdict.kind == "forecast":  # a stop after a good step, whose values were told before
            return
        self.tell(
            reading.step,
            {
                "loss": reading.loss,
                **reading.components,
                "grad_norm": reading.grad_norm,
                "lr": reading.lr,
                "scale": reading.scale,
                "risk": reading.risk,
                **reading.watched,
                "skipped": float(action.kind != "commit"),
            },
        )

    def tell(self, step: int, values: Mapping[str, float | None]) -> None:
        """Some scalars."""
        given = {f"nanproof/{k}": float(v) for k, v in values.items() if v is not None}
        self._each(lambda tell, say: tell(step, given))

    def incident(self, incident: Incident) -> None:
        """An incident, as text."""
        at = incident.location
        where = f" at {at.place}, {at.mechanism}" if at is not None and at.file else ""
        text = f"{incident.verdict} → {incident.action.kind}{where}"
        self._each(lambda tell, say: say(incident.step, text))

    def _each(self, do: Callable[[Tell, Say], None]) -> None:
        for known in list(self._known):
            logger, tell, say = known
            try:
                do(tell, say)
            except Exception as error:  # whatever a logger does, it must not end a training
                self._known.remove(known)
                log.error("nanproof: %s failed and is left out: %s", type(logger).__name__, error)


def _adapt(logger: Any) -> tuple[Tell, Say]:
    """How to talk to a logger, known by what it can do."""
    if hasattr(logger, "add_scalar"):  # TensorBoard's SummaryWriter
        return _tensorboard(logger)
    if hasattr(logger, "log_metrics"):  # MLflow, and the loggers of Lightning
        return _metrics(logger)
    if hasattr(logger, "log"):  # Weights & Biases, Trackio: the module or a run
        return (lambda step, values: logger.log(dict(values), step=step)), (
            lambda step, text: logger.log({"nanproof/incident": text}, step=step)
        )
    if callable(logger):
        return logger, (lambda step, text: None)
    raise UsageError(
        f"loggers holds a {type(logger).__name__}, which has no add_scalar, log_metrics or log",
        hint="give a SummaryWriter, an MLflow client, a W&B or Trackio run, or a function of (step, values)",
    )


def _tensorboard(logger: Any) -> tuple[Tell, Say]:
    def tell(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            logger.add_scalar(name, value, step)

    return tell, lambda step, text: logger.add_text("nanproof/incident", text, step)


def _metrics(logger: Any) -> tuple[Tell, Say]:
    def say(step: int, text: str) -> None:
        if hasattr(logger, "log_text"):
            logger.log_text(text, f"nanproof/incident-{step}.txt")

    return (lambda step, values: logger.log_metrics(dict(values), step=step)), say
