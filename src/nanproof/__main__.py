"""``python -m nanproof`` is the command line."""

import os
import sys

if not sys.flags.safe_path:
    # -m puts the current folder first, where a glob.py or a queue.py of the user would be imported as Python's own
    sys.path[0] = __file__.rsplit(os.sep, 2)[0]

from .cli import program

program()
