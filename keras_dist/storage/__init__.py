"""What the root keeps in a directory, for all ranks. Knows no framework, and needs no Keras."""
