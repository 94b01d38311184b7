#!/usr/bin/env bash
# Builds the peers' environment at VENV, of pinned versions, and runs their tests against this working tree.
# usage: tests/peers/run.sh VENV [PYTEST_ARGUMENTS]
set -euo pipefail
venv=${1:?usage: tests/peers/run.sh VENV [PYTEST_ARGUMENTS]}
shift
cd "$(dirname "$0")/../.."

python=${PYTHON:-python3} # 3.11, as constraints.txt
pinned=(install -q --disable-pip-version-check -c tests/peers/constraints.txt)
"$python" -m venv "$venv"
"$venv/bin/pip" "${pinned[@]}" torch # alone and first, so that nothing after it chooses another build
"$venv/bin/pip" "${pinned[@]}" -r tests/peers/requirements.txt
"$venv/bin/pip" "${pinned[@]}" --no-deps nemo-automodel
"$venv/bin/pip" "${pinned[@]}" .
# the libraries warn about themselves: here that is no error
exec "$venv/bin/python" -m pytest -o filterwarnings=default tests/peers "$@"
