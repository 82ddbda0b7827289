"""NCCL among the ranks of a communicator: where it is used, and how its operations are watched.

NCCL hangs where ranks differ and where one has died. So the ranks compare what they are about to do
before it is called (`collectives.on_device`), and a thread watches what it has launched.
"""
