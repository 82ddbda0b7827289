"""Ranks in the pods of Kubernetes, which need no ssh, and their progress for Kubeflow Trainer.

`python -m keras_dist.kubernetes --token-file FILE train.py` starts the ranks of a pod. The names
are those of `__init__.pyi`; they are imported when they are used, so that the command imports no
framework.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
