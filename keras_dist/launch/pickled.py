"""Functions as bytes, with the names of their files, which tracebacks show."""

import collections
import io
import types
from typing import Any

import cloudpickle


def pickled(value: Any) -> bytes:
    """Returns `cloudpickle.dumps(value)`, from which code is loaded with its file name.

    cloudpickle 3.1.3 and later replace it by `"<dynamic-code>"`: a traceback of another process
    would show no line of a cell or of a script.
    """
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def with_file(name: str, make: Any, arguments: tuple[Any, ...]) -> types.CodeType:
    """Returns code with a file name, from what cloudpickle reduces it to."""
    code: types.CodeType = make(*arguments)
    return code.replace(co_filename=name)


def _reduced(code: types.CodeType) -> tuple[Any, ...]:
    make, arguments = _of_cloudpickle[types.CodeType](code)
    return with_file, (code.co_filename, make, arguments)


_of_cloudpickle: Any = cloudpickle.Pickler.dispatch_table
_with_files = collections.ChainMap({types.CodeType: _reduced}, _of_cloudpickle)


class _Pickler(cloudpickle.Pickler):
    dispatch_table = _with_files
