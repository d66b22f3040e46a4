#!/usr/bin/env bash
# Prints the path of a Python 3.12, else of a 3.11, whether or not it is the default one.
set -euo pipefail

works() { "$1" -c "import sys, venv, ensurepip; raise SystemExit('%d.%d' % sys.version_info[:2] != '$2')" 2>/dev/null; }

for version in 3.12 3.11; do
  for candidate in "$(command -v "python$version" || true)" "$(command -v python3 || true)" "$(command -v python || true)" \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/$version.*/bin/python \
    "$HOME"/.local/share/uv/python/cpython-$version.*/bin/python \
    /usr/bin/python$version /usr/local/bin/python$version /opt/*/bin/python$version; do
    if [ -n "$candidate" ] && [ -x "$candidate" ] && works "$candidate" "$version"; then
      "$candidate" -c 'import os, sys; print(os.path.realpath(sys.executable))'
      exit 0
    fi
  done
done
echo "verl_fn needs Python 3.12 or 3.11 with venv; neither is on PATH nor below ~/.pyenv/versions. Install one and run make again." >&2
exit 1
