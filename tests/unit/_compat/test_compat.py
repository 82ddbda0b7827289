"""The private names of frameworks that keras_dist uses: present, and reported when missing."""

import dataclasses
import importlib
import re
import subprocess
import sys
import types

import pytest
from renaming import rename
from start_jobs import lean

from keras_dist import errors
from keras_dist._compat import contract
from keras_dist._version import __version__

MODULES = ("python", "keras", "tensorflow", "tf_data", "torch", "jax")


def entries():
    for framework in MODULES:
        if framework in ("torch", "jax") and importlib.util.find_spec(framework) is None:
            continue
        module = importlib.import_module(f"keras_dist._compat.{framework}")
        for number, entry in enumerate(module.CONTRACT):
            if entry.applies():
                yield pytest.param(framework, entry, id=f"{framework}-{number}-{entry.name}")


ENTRIES = list(entries())
WITH_PARAMETERS = [entry for entry in ENTRIES if entry.values[1].parameters is not None]


@pytest.mark.parametrize("backend", ["tensorflow", "torch", "jax"])
def test_the_contract_holds_on_each_backend_and_imports_no_other_framework(backend):
    pytest.importorskip(backend)
    parts = ["python", "keras", backend, *["tf_data"] * (backend == "tensorflow")]
    code = (
        "import sys, keras; from keras_dist._compat import contract; "
        f"[contract.check(name) for name in {parts}]; "
        f"print(*sorted({{'tensorflow', 'torch', 'jax'}} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=lean(KERAS_BACKEND=backend),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [backend]  # no other framework is imported


def test_a_second_check_looks_at_nothing(monkeypatch):
    contract.check("keras")
    monkeypatch.setattr(contract.Name, "fault", None)
    contract.check("keras")


@pytest.mark.parametrize(("framework", "entry"), ENTRIES)
def test_a_renamed_name_is_reported(monkeypatch, framework, entry):
    try:
        rename(monkeypatch, entry.resolve(), entry.name)
    except TypeError:  # a class in C is immutable
        entry = dataclasses.replace(entry, owner=lambda: types.ModuleType("another"))
    [(found, fault)] = contract.missing([entry])
    assert found is entry
    assert fault.startswith("none")
    text = contract.explain_missing("Keras 4.0", entry, fault)
    assert f"the name {entry.name}" in text
    assert entry.purpose in text
    assert "Received: none" in text
    assert f"keras_dist {__version__}" in text
    assert "with Keras 4.0]" in text
    assert "Install a version" in text


@pytest.mark.parametrize(("framework", "entry"), WITH_PARAMETERS)
def test_changed_parameters_are_reported(monkeypatch, framework, entry):
    def changed(self, other, *, required):
        raise NotImplementedError

    try:
        monkeypatch.setattr(entry.resolve(), entry.name, changed)
    except TypeError:
        pytest.skip("a class in C is immutable")
    [(_, fault)] = contract.missing([entry])
    assert fault.startswith("changed(")


def test_an_added_parameter_must_be_optional():
    class Owner:
        def method(self, grads, more=None):
            pass

        def other(self, grads, more):
            pass

    def name(method):
        return contract.Name(lambda: Owner, method, "for this", "it fails", ("grads",))

    assert not contract.missing([name("method")])
    [(_, fault)] = contract.missing([name("other")])
    assert fault == "other(grads, more)"


def test_a_name_in_a_missing_module_is_reported():
    def owner():
        return importlib.import_module("keras.src.gone")

    [(_, fault)] = contract.missing([contract.Name(owner, "any", "for this", "it fails")])
    assert "No module named 'keras.src.gone'" in fault


# Scripts that do not need the hidden private module.
IMPORT = "import keras_dist; print('done')"
TRAIN = """
import numpy as np, keras_dist
keras_dist.init()
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile(keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
model.fit(np.ones((8, 2)), np.ones((8, 1)), verbose=0)
print("done")
"""

TORCH = """
import keras_dist.torch as keras_dist
keras_dist.init()
assert keras_dist.allreduce(torch.ones(1)).item() == 1
sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
print("done")
"""

ALLREDUCE = "import keras_dist.tensorflow as hvd; hvd.allreduce(tensorflow.constant(1.0))"
SEEDS = "from keras_dist.training import random_generators as r; r.restore(r.states())"

# For each module: the backend, a script that does not need it, one that does, and the name used.
HIDDEN = {
    "tensorflow.python.eager.record": ("tensorflow", TRAIN, ALLREDUCE, "could_possibly_record()"),
    "keras.src.random.seed_generator": ("tensorflow", TRAIN, SEEDS, "global_seed_generator"),
    "jax._src.xla_bridge": ("jax", IMPORT, "keras_dist.init()", "backends_are_initialized()"),
    "torch.utils.weak": ("torch", TORCH, "keras_dist.DistributedOptimizer(sgd)", "WeakTensorKey"),
}


@pytest.mark.parametrize("module", HIDDEN)
def test_a_module_that_has_moved_is_an_error_where_it_is_first_needed(tmp_path, module):
    backend, script, use, name = HIDDEN[module]
    pytest.importorskip(backend)
    # Hidden from later imports only, so the framework itself still works.
    imports = f"import sys, keras, {backend}, {module}" + ", jax.extend" * (backend == "jax")
    done = subprocess.run(
        [sys.executable, "-c", f"{imports}; sys.modules[{module!r}] = None\n{script}\n{use}"],
        env=lean(KERAS_BACKEND=backend),
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.stdout.split() == ["done"], done.stderr
    assert done.returncode == 1
    error = done.stderr[done.stderr.index("errors.BackendError:") :]
    framework = {"tensorflow": "TensorFlow", "keras": "Keras", "jax": "JAX", "torch": "torch"}[
        module.split(".")[0]
    ]
    assert re.search(rf"\[keras_dist {__version__} with {framework} \d+\.\d+", error)
    assert f"the name {name}".lower() in error.lower()
    assert f"import of {module} halted" in error
    assert "Install a version of the framework" in error


def test_distributed_optimizer_raises_if_the_contract_is_broken(monkeypatch):
    import keras

    import keras_dist

    contract.check.cache_clear()
    rename(monkeypatch, keras.optimizers.SGD, "_clip_gradients")
    with pytest.raises(errors.BackendError, match="the name _clip_gradients") as raised:
        keras_dist.DistributedOptimizer(keras.optimizers.SGD())
    assert f"Keras {keras.__version__} on {keras.backend.backend()}" in str(raised.value)
    assert "each rank would train by its own gradients" in str(raised.value)
