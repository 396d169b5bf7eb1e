#!/bin/sh
# Says in one sentence what is missing before anything is installed. $1 is the Python to use.
set -eu
fail() { echo "rkserve: $1" >&2; exit 1; }

command -v "$1" >/dev/null 2>&1 ||
    fail "$1 was not found; install Python 3.10, 3.11, 3.12 or 3.13, or name it: make PYTHON=/path/to/python3.12"
# A shim of pyenv (or asdf, or mise) stands for every version, also for those that are not there.
said=$("$1" -c '' 2>&1) || case $(command -v "$1") in
    */shims/*) fail "$(command -v "$1") is only a shim, and it says: $(echo "$said" | head -n 1). Choose a version that is installed, such as PYENV_VERSION=3.12 make, or name the interpreter: make PYTHON=/path/to/python3.12" ;;
    *) fail "$1 does not run: $(echo "$said" | head -n 1)" ;;
esac
"$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' ||
    fail "$1 is $("$1" -V 2>&1), but rkserve needs Python 3.10, 3.11, 3.12 or 3.13; name another one: make PYTHON=python3.12"
"$1" -c 'import venv, ensurepip' 2>/dev/null ||
    fail "$1 has no venv module; on Debian and Ubuntu: apt install python3-venv"
# The build itself says which compiler it would take, so the two cannot disagree.
PYTHONPATH="${0%/*}/.." "$1" -B -m rkserve.native.sim.build --compiler >/dev/null
