"""`scripts/matrix`: installed versions, and the claims that passed tests allow."""

import re
import tomllib

import matrix
import pytest
from matrix import BACKENDS, ROOT, Environment, Run
from packaging.version import Version

SETUP = """
[options]
install_requires =
    Keras>=3.8
    numpy>=1.26
    rich

[options.extras_require]
# A comment.
jax =
    jax>=0.8
    keras>=3.12
tensorflow =
    tensorflow>=2.16.1
tensorflow-cpu =
    tensorflow-cpu>=2.16.1; python_version >= "3"
    tensorflow>=2.16.1; python_version < "3"
dev =
    ruff
"""
CLAIMS = {
    "": {"keras": Version("3.8"), "numpy": Version("1.26"), "rich": None},
    "jax": {"jax": Version("0.8"), "keras": Version("3.12")},
    "tensorflow": {"tensorflow": Version("2.16.1")},
    "tensorflow-cpu": {"tensorflow-cpu": Version("2.16.1")},
}
PAGE = """
| tested with | TensorFlow | JAX |
|---|---|---|
| the backend | 2.16 to 2.21 | 0.8 |
| Keras | 3.8 to 3.15 | - |
"""


def ran(backend, extra, outcome="passed", **versions):
    environment = Environment("one", backend, [extra])
    return Run(environment, {name: Version(text) for name, text in versions.items()}, outcome)


def with_tensorflow(tensorflow, **versions):
    return ran("tensorflow", "tensorflow-cpu", tensorflow=tensorflow, **versions)


ON_TENSORFLOW = [
    with_tensorflow("2.16.1", keras="3.8.0", numpy="1.26.0", rich="13"),
    with_tensorflow("2.21.0", keras="3.15.1", numpy="2.4.6", rich="15"),
]
ON_JAX = ran("jax", "jax", keras="3.12.0", numpy="2.0.0", rich="13", jax="0.8.0")


def test_lower_bounds_are_read_by_extra():
    assert matrix.claims_of(SETUP) == CLAIMS


@pytest.mark.parametrize(
    ("oldest", "requirements", "expected"),
    [
        ("all", [], ["keras==3.12", "numpy==1.26", "jax==0.8"]),
        ("all", ["numpy==2.0.0"], ["keras==3.12", "jax==0.8", "numpy==2.0.0"]),
        (["keras"], [], ["keras==3.12"]),
        ([], [], []),
    ],
)
def test_the_oldest_are_the_lower_bounds(oldest, requirements, expected):
    environment = Environment("one", "jax", ["jax"], oldest, requirements)
    assert matrix.pins(environment, CLAIMS) == expected


def test_bounds_that_have_passed_are_no_fault():
    [fault] = matrix.overclaimed(CLAIMS, [*ON_TENSORFLOW, ON_JAX])
    assert fault == "setup.cfg: rich has no lower bound; the oldest that passed is 13"


def test_bounds_that_have_not_passed_are_named():
    # Keras 3.8 passed, but not with the extra of JAX.
    failed = ran("jax", "jax", "FAILED", jax="0.8.0", keras="3.12.0")
    assert matrix.overclaimed(CLAIMS, [ON_TENSORFLOW[1], failed]) == [
        "setup.cfg: keras is admitted from 3.8; the oldest that passed is 3.15.1",
        "setup.cfg: numpy is admitted from 1.26; the oldest that passed is 2.4.6",
        "setup.cfg: rich has no lower bound; the oldest that passed is 15",
        "setup.cfg [jax]: jax has passed in no environment",
        "setup.cfg [jax]: keras has passed in no environment",
        "setup.cfg [tensorflow]: tensorflow is admitted from 2.16.1; the oldest that passed is "
        "2.21.0",
        "setup.cfg [tensorflow-cpu]: tensorflow-cpu is admitted from 2.16.1; the oldest that "
        "passed is 2.21.0",
    ]


def test_the_table_of_versions_is_what_passed():
    assert matrix.overclaimed_by_table(PAGE, [*ON_TENSORFLOW, ON_JAX]) == []
    wider = PAGE.replace("3.15", "3.16").replace("2.16", "2.15")
    assert matrix.overclaimed_by_table(wider, ON_TENSORFLOW) == [
        "features.md: the backend 2.15 to 2.21 with TensorFlow: the oldest that passed is 2.16.1",
        "features.md: the backend 0.8 with JAX: has passed in no environment",
        "features.md: Keras 3.8 to 3.16 with TensorFlow: the newest that passed is 3.15.1",
    ]


# --- The files of this repository


def description():
    return tomllib.loads(matrix.TABLE.read_text())


def test_the_table_and_setup_cfg_agree_on_the_oldest_versions():
    claims = matrix.claims_of((ROOT / "setup.cfg").read_text())
    exceptions = {("numpy", "JAX"): "2.0"}  # required by JAX
    for package, column, cell in matrix.versions_table(matrix.PAGE.read_text()):
        backend = BACKENDS[column]
        name = backend if package == "the backend" else package.lower()
        bounds = [
            claims[part][name] for part in ("", backend, name) if name in claims.get(part, {})
        ]
        oldest = Version(cell.split(" to ")[0]).release
        expected = Version(exceptions.get((package, column), str(max(bounds))))
        assert oldest == expected.release[: len(oldest)], (package, column)


def test_environments_are_made_of_what_setup_cfg_has():
    claims = matrix.claims_of((ROOT / "setup.cfg").read_text())
    for name, row in description()["environments"].items():
        environment = Environment(name, **row)
        assert environment.backend in BACKENDS.values()
        pinned = {text.partition("==")[0] for text in matrix.pins(environment, claims)}
        wanted = ["keras", "numpy"] if environment.oldest == "all" else environment.oldest
        assert pinned >= set(wanted), name


def test_the_tests_that_are_chosen_are_there():
    parts = description()
    tests = [test for part in ("ranks", "alone") for each in parts[part].values() for test in each]
    for test in tests:
        file, _, name = test.partition("::")
        source = (ROOT / file).read_text()
        wanted = rf"^def {name}\(" if name else "^def test_"
        assert re.search(wanted, source, re.MULTILINE), test
