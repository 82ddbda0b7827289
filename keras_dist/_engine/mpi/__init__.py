"""MPI: the library, communicators of some ranks, transfers of any size, and files."""
