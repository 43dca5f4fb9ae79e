#!/bin/sh
# install.sh PYTHON VENV: what `make sglang-cpu` runs. $TORCH_INDEX_URL names another index for torch.
set -eu
here=$(dirname "$0")
rm -rf "$2"
"$1" -m venv "$2"
python=$2/bin/python
"$python" -m pip --disable-pip-version-check -qq install ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} torch==2.13.0
"$python" -m pip --disable-pip-version-check -qq install --no-deps -r "$here/requirements.txt"
touch "$2/.installed"
