"""What is told about steps while they happen: the log, user loggers and the smoke test subscribe to it."""

from __future__ import annotations

from ..records import Action, Incident, Reading, Verdict


class Observer:
    """Override what you want to hear; a call that raises is recorded as the guard's failure, and training goes on."""

    def step_ended(self, reading: Reading, verdict: Verdict, action: Action, update: int) -> None:
        """A step is over; ``update`` is the number of updates in force."""

    def examining(self, on: bool) -> None:
        """The guard begins (or ends) to replay a bad step: what the model runs now is not the loop's."""

    def incident(self, incident: Incident) -> None:
        """A bad step was recorded."""

    def event(self, **fields: object) -> None:
        """Something that is not a step: a resume, a save that was refused."""

    def closed(self) -> None:
        """The guard has ended."""
