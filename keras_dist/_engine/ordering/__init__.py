"""The order in which collectives run on this rank."""
