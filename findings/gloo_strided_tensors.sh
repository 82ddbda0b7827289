#!/usr/bin/env bash
# Library: torch 2.13.0, torch.distributed with Gloo. The default build of torch for Linux is several
#   GB with CUDA.
# Behaviour: `broadcast` and `all_reduce` of tensors of one shape but other strides, such as a
#   transposed one on one rank, exchange memory without regard to the strides: elements of
#   different places are added up, and a broadcast tensor has the root's elements in other places.
# Expected: the elements of the tensor, or an error. Ranks whose convolutions have kernels in
#   `channels_last`, or of whom one has loaded weights that were saved transposed, train on
#   others than the root.
# Seen in: dist.broadcast and dist.all_reduce of two ranks on CPUs.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6

cd "$folder"
cat >ranks.py <<'EOF'
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
tensors = []
for collective in (lambda x: dist.broadcast(x, 0), dist.all_reduce):
    tensor = torch.arange(6.0).reshape(2, 3)
    if rank == 0:
        tensor = tensor.t().contiguous().t()  # the same elements, by columns
    collective(tensor)
    tensors.append(tensor.tolist())
every = [None, None]
dist.all_gather_object(every, tensors)
if rank == 0:
    for name, seen in zip(("broadcast", "sum"), zip(*every, strict=True), strict=True):
        print(f"{name} of [[0, 1, 2], [3, 4, 5]]: rank 0 {seen[0]}, rank 1 {seen[1]}")
dist.destroy_process_group()
whole, mixed = [[0, 1, 2], [3, 4, 5]], [[0, 3, 1], [4, 2, 5]]
sums = [[0, 3, 6], [4, 7, 10]], [[0, 4, 3], [7, 6, 10]]
if every != [[whole, sums[0]], [mixed, sums[1]]]:
    sys.exit(f"The behaviour has changed; seen before: {whole}, {mixed}, {sums}")
EOF
CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 ranks.py
