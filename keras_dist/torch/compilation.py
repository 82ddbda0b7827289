"""Functions that `torch.compile` calls instead of tracing them: it cannot trace MPI."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from keras_dist._compat.torch import has_compiler, mark_untraced, skip_frames
from keras_dist.ops.face import face

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Makes `torch.compile` call a function where it would trace it."""
    # `torch.compiler.disable` alone imports the compiler, which takes as long as torch; so here it
    # is called only when something else has imported the compiler, and thus might compile.
    disabled: Callable[P, R] | None = None

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal disabled
        if disabled is None:
            if not has_compiler():
                return function(*args, **kwargs)
            skip_frames(called)
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    return mark_untraced(called)


def untraced_face(operation: Callable[..., Any]) -> Callable[[F], F]:
    """Decorates torch's form of an operation; see `face` and `untraced`."""

    def declare(function: F) -> F:
        declared: Any = untraced(face(operation)(function))
        return declared

    return declare
