#!/usr/bin/env bash
# Library: torch 2.15.0 with Triton 3.9.0, which it requires on Linux, and TensorFlow 2.21.0. This build of
#   torch is several GB with CUDA.
# Behaviour: the first step of an optimizer of torch, and torch.compile, import Triton. In a process that
#   has imported TensorFlow, this aborts the process: "Option 'bitcode-mdindex-threshold' registered
#   more than once". The other order, Triton before TensorFlow, works.
# Expected: both work in one process, as with the CPU build of torch, which has no Triton.
# Seen in: libtriton.so and libtensorflow_framework.so.2: both contain LLVM and export llvm::cl.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet tensorflow-cpu==2.21.0 torch==2.15.0 numpy==2.4.6

step="import torch
weight = torch.nn.Parameter(torch.ones(1))
torch.optim.SGD([weight], 0.1).zero_grad()"
export CUDA_VISIBLE_DEVICES="" TF_CPP_MIN_LOG_LEVEL=3
cd "$folder"
if "$folder/venv/bin/python" -c "import tensorflow
$step" 2>"$folder/errors"; then
    echo "Changed: a step of torch works after the import of TensorFlow." >&2
    exit 1
fi
grep "registered more than once" "$folder/errors"
"$folder/venv/bin/python" -c "import triton, tensorflow
$step
print('Triton before TensorFlow: works')"
