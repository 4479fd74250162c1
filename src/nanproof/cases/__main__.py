"""``python -m nanproof.cases MODULE OPTION...``: the program of a case, which Ctrl-C ends with one line."""

import runpy
import sys

if __name__ == "__main__":
    del sys.argv[0]
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:  # also while torch is being imported
        sys.stderr.write("error: interrupted\n")
        sys.exit(130)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        sys.stderr.write("error: the cases need torch\n  hint: pip install 'nanproof[torch]'\n")
        sys.exit(2)
