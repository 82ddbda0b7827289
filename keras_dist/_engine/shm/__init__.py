"""Shared memory of the ranks on a node. Linux; knows no MPI."""
