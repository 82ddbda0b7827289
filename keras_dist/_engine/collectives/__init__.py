"""The operations in which every rank takes part, one a file.

Each begins with `meet`, where the ranks wait for each other and compare what they are about
to do; only then does data move. With one rank nothing is called in MPI at all.
"""
