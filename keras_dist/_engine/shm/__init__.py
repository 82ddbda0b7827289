"""Shared memory of the ranks on a node. Linux; independent of MPI."""
