"""Every private name of a framework that keras_dist uses: one module a framework, and a contract.

No other package of keras_dist touches one. Each module lists its names in `CONTRACT`, with the
purpose of each and what would happen without it; `contract` checks that they exist.
"""
