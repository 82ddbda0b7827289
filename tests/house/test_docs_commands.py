"""Commands on the pages: their options, files, scripts and extras exist.

`keras-dist run` prints the command that it would start. Other commands of keras-dist only parse
their options, and other programs are not started.
"""

import argparse
import configparser
import re
import shlex
import subprocess

import pages
import pytest

from keras_dist.launch.cli import main

ROOT = pages.ROOT
SHELL = ("sh", "bash")
OURS = re.compile(r"(\./)?(scripts|examples|benchmarks|tests)/")
# Options of launchers, with their number of arguments.
LAUNCHERS = {"mpiexec", "mpirun", "srun"}
OPTIONS = {"-n": 1, "-np": 1, "--ppn": 1, "--map-by": 1, "--with-ft": 1, "--mpi=pmix": 0}
# Commands of the shell and of clusters.
OTHERS = "[ cd curl export module scontrol scp sha256sum ssh ssh-keygen trap wait".split()


def commands():
    """Yields file, line and words of each command."""
    for path in pages.pages():
        text, name = path.read_text(), path.relative_to(ROOT)
        for first, code in pages.blocks(text, *SHELL):
            for number, line in enumerate(code.replace("\\\n", " ").splitlines(), first):
                yield from ((f"{name}:{number}", words) for words in split(line))
        for number, code in pages.new_lines(text):
            if pages.is_command(code):
                yield f"{name}:{number}", shlex.split(code)


def split(line):
    """Returns the commands of a line, without variable assignments."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;")
    lexer.whitespace_split = True
    found = [[]]
    for word in lexer:
        if set(word) <= set("&|;"):
            found.append([])
        elif found[-1] or not re.match(r"[A-Z_]+=", word):
            found[-1].append(word)
    return [words for words in found if words]


def check(words):
    program, rest = words[0], words[1:]
    name = program.rpartition("/")[2]
    if name == "keras-dist":
        check_ours(rest)
    elif name in LAUNCHERS:
        while rest and rest[0].startswith("-"):
            rest = rest[1 + OPTIONS[rest[0]] :]
        if rest:
            check(rest)
    elif name == "ssh" and "keras-dist" in rest:
        check(rest[rest.index("keras-dist") :])
    elif name == "python":
        check_python(*rest)
    elif name == "pip":
        check_extras(rest[-1])
    elif OURS.match(program):
        assert (ROOT / program).exists()
    else:
        assert name in OTHERS, f"{name}: is it right, and is it known to everybody?"


def check_ours(words):
    try:
        code = main(["run", "--dry-run", *words[1:]] if words[0] == "run" else words)
    except SystemExit as end:  # from argparse
        code = end.code
    assert code == 0


def check_python(script, *rest):
    if script == "-m":
        assert rest[0] in ("keras_dist.kubernetes", "pytest", "ruff", "venv")
    elif OURS.match(script):
        source = (ROOT / script).read_text()
        assert all(f'"{word}"' in source for word in rest if word.startswith("--"))
    else:
        assert script == "train.py"


def check_extras(wanted):
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = re.fullmatch(r"keras_dist\[(.*)\]", wanted)[1].split(",")
    assert set(extras) <= set(setup["options.extras_require"])


@pytest.fixture
def there(tmp_path, monkeypatch):
    """Checks the names in commands; commands other than `run` only parse their options."""
    (tmp_path / "train.py").touch()
    (tmp_path / "hosts.sh").write_text("#!/bin/sh\necho node1:4\necho node2:4\n")
    (tmp_path / "hosts.sh").chmod(0o700)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    parse = argparse.ArgumentParser.parse_args

    def parse_and_end(self, words, *others):
        options = parse(self, words, *others)
        if words[0] != "run":
            raise SystemExit(0)
        return options

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_end)


def test_commands_on_the_pages_are_right(there):
    found = list(commands())
    assert len(found) > 40
    for place, words in found:
        try:
            check(words)
        except (AssertionError, KeyError) as error:
            raise AssertionError(f"{place}: {shlex.join(words)}: {error!r}") from error


def test_commands_that_are_wrong_are_found(there):
    for line in (
        "keras-dist run -np 2 --restarts 3 python train.py",
        "keras-dist doctors",
        "mpirun -c 2 python train.py",
        "python examples/mnist/train.py --epoch 3",
        "pip install 'keras_dist[tensorflow,mpi]'",
        "scripts/tests",
        "kerasdist run -np 2 python train.py",
    ):
        [words] = split(line)
        with pytest.raises((AssertionError, KeyError)):
            check(words)


def test_scripts_on_the_pages_can_be_read_by_bash():
    for path in pages.pages():
        for line, code in pages.blocks(path.read_text(), *SHELL):
            ended = subprocess.run(["bash", "-n"], input=code, capture_output=True, text=True)
            assert ended.returncode == 0, f"{path}:{line}: {ended.stderr}"
