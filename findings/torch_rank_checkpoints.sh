#!/usr/bin/env bash
# Library: torch 2.13.0, torch.distributed.checkpoint with Gloo. The default build of torch for Linux
#   is several GB with CUDA.
# Behaviour: `save` of a plain tensor whose value differs between ranks keeps the value of one rank,
#   and of several such tensors each may be that of another rank: `load` gives all ranks a state
#   that no rank had. There is neither an error nor a warning.
# Expected: the state of each rank, or at least that of one rank as a whole. The states of random
#   generators, or of data, that differ between ranks come back mixed.
# Seen in: torch/distributed/checkpoint/_dedup_save_plans.py: an entry that several ranks have is
#   kept by the rank with the fewest bytes so far.
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
import torch.distributed.checkpoint

dist.init_process_group("gloo")
rank = dist.get_rank()
names = "epoch", "position"
saved = {name: torch.tensor([10 * number + rank]) for number, name in enumerate(names)}
dist.checkpoint.save(saved, checkpoint_id="checkpoint")
loaded = {name: torch.tensor([-1]) for name in names}
dist.checkpoint.load(loaded, checkpoint_id="checkpoint")
every = [None, None]
dist.all_gather_object(every, [int(loaded[name]) for name in names])
if rank == 0:
    print("saved (epoch, position): rank 0 (0, 10), rank 1 (1, 11)")
    print(f"loaded: rank 0 {every[0]}, rank 1 {every[1]}")
dist.destroy_process_group()
if every != [[0, 11], [0, 11]]:
    sys.exit("The behaviour has changed; seen before: [0, 11] on both ranks")
EOF
CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 ranks.py
