"""A YAML file with options of `keras-dist run`, named without leading dashes."""

from pathlib import Path

from keras_dist import errors
from keras_dist.launch.cli.options import OPTIONS


def arguments_of_file(path: str) -> list[str]:
    """Returns the options of a YAML file as command-line arguments."""
    import yaml

    try:
        found = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        text = " ".join(str(error).split())
        raise _bad_file("a YAML file with options", f"{path}: {text}") from None
    if not isinstance(found, dict):
        raise _bad_file(f"{path} to hold lines like 'max-restarts: 3'", repr(found))
    known = {
        name.lstrip("-"): (name, option)
        for option in OPTIONS
        for name in f"{option.names} {option.horovod}".split()
        if option.field != "config_file"
    }
    words = []
    for key, value in found.items():
        name, option = known.get(str(key).replace("_", "-"), (None, None))
        if name is None or option is None:
            raise _bad_file(f"options in {path} that keras-dist run has", repr(key))
        if isinstance(value, bool) != (not option.metavar):
            expected = "a value" if option.metavar else "true or false"
            raise _bad_file(f"{key} in {path} to have {expected}", repr(value))
        if isinstance(value, bool):
            words += [name] if value else []
        elif isinstance(value, list) and option.repeated:
            words += [f"{name}={item}" for item in value]
        elif isinstance(value, str | int | float):
            words += [f"{name}={value}"]
        else:
            raise _bad_file(f"{key} in {path} to have one value", repr(value))
    return words


def _bad_file(expected: str, received: str) -> errors.ArgumentError:
    remedy = "The names are the long options without leading dashes; see keras-dist run -h."
    return errors.ArgumentError("[keras-dist run]", expected, received, remedy)
