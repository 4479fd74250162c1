"""Finding the operation that broke a step, by playing it again."""

from .find import locate
from .location import Location

__all__ = ["Location", "locate"]
