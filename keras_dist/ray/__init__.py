"""Ranks in the workers of Ray: a trainer of Ray Train, and the executor of Horovod.

The names are those of `__init__.pyi`. They are imported when they are used: the processes of Ray
that only watch workers import no Keras.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
