#!/bin/bash
# Creates the virtual environment and installs the pinned dependencies; says what is missing if it cannot.
set -eu
python=$1 venv=$2 extras=$3

if ! command -v "$python" >/dev/null; then
  echo "error: $python is not installed. Next: install Python 3.11 or newer, or run make PYTHON=/path/to/python3" >&2
  exit 2
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "error: $("$python" --version) is too old. Next: run make PYTHON=python3.11 (3.11 or newer is needed)" >&2
  exit 2
fi
if ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
  echo "error: $python cannot create virtual environments. Next: install the package python3-venv" >&2
  exit 2
fi

echo "setting up $venv with $("$python" --version): pinned dependencies, CPU torch; takes a minute or two the first time"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
install=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt)
# a Python's own pip can be years old, and takes twice as long
if ! { "${install[@]}" "pip>=25" && "${install[@]}" -e ".[$extras]"; } 2>"$venv/setup.log"; then
  tail -5 "$venv/setup.log" >&2
  echo "error: the dependencies did not install. Next: check the network or the package index, then run make again; all output is in $venv/setup.log" >&2
  exit 2
fi
if ! command -v chromium >/dev/null || ! command -v chromedriver >/dev/null; then
  echo "installing Chromium for the browser tests"
  if ! { command -v apt-get && apt-get update -qq && timeout 600 apt-get install -y -qq chromium chromium-driver; } >"$venv/apt.log" 2>&1; then
    echo "note: Chromium could not be installed, so the browser tests will be skipped; see $venv/apt.log" >&2
  fi
fi
echo "ready"
