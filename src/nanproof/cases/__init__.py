"""Four real training systems in miniature: each dies of its own numerics, and is healed for the right reason.

>>> from nanproof.cases import find
>>> find("radiodiff").name
'radiodiff'
"""

from .catalogue import Case, find, find_all

__all__ = ["Case", "find", "find_all"]
