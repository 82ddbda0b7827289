"""The timeline of one rank: what it does and when, written to a file while it works."""
