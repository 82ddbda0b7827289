"""Starting jobs: the command line, functions on ranks (`keras_dist.run`), and notebooks."""
