"""Retries of operations among the ranks that are left after a rank has died."""
