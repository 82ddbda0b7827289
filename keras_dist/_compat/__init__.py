"""The private names of frameworks that keras_dist uses, each in a `CONTRACT`; see `contract`."""
