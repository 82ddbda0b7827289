"""NCCL among the ranks of a communicator: where it is used, and how its operations are watched."""
