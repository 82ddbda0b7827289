"""Files that the root writes for all ranks. Uses no framework and no Keras."""
