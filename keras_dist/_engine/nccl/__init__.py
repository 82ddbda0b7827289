"""NCCL among ranks: where it is used, and how its operations are watched. See decision 56."""
