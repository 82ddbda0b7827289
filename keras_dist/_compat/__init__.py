"""The private names of frameworks that keras_dist uses; no other package uses one.

Each module lists its names in `CONTRACT`, each with its purpose and the consequence of its absence.
`contract` checks that the names exist.
"""
