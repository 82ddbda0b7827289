"""Failures of ranks: stalls, deaths, and operations that are retried without the dead ranks."""
