"""The private names of frameworks that keras_dist relies on: all there, and missed when gone."""

import dataclasses
import importlib
import subprocess
import sys
import time
import types

import pytest
from jobs import lean
from renaming import rename

from keras_dist import errors
from keras_dist._compat import contract

MODULES = ("python", "keras", "tensorflow", "torch", "jax")


def entries():
    for framework in MODULES:
        if framework in ("torch", "jax") and importlib.util.find_spec(framework) is None:
            continue
        module = importlib.import_module(f"keras_dist._compat.{framework}")
        for number, entry in enumerate(module.CONTRACT):
            if entry.applies():
                yield pytest.param(framework, entry, id=f"{framework}-{number}-{entry.name}")


ENTRIES = list(entries())
WITH_PARAMETERS = [one for one in ENTRIES if one.values[1].parameters is not None]


@pytest.mark.parametrize("framework", MODULES)
def test_the_frameworks_of_this_environment_keep_the_contract(framework):
    if framework in ("torch", "jax"):
        pytest.importorskip(framework)
    contract.check(framework)


@pytest.mark.parametrize("backend", ["tensorflow", "torch", "jax"])
def test_the_contract_holds_on_each_backend_and_costs_nothing_again(backend):
    pytest.importorskip(backend)
    code = (
        "import sys, keras; from keras_dist._compat import contract; "
        f"[contract.check(one) for one in ('python', 'keras', {backend!r})]; "
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


def test_a_second_check_takes_no_time():
    contract.check("keras")
    began = time.perf_counter()
    contract.check("keras")
    assert time.perf_counter() - began < 1e-3


@pytest.mark.parametrize(("framework", "entry"), ENTRIES)
def test_each_name_is_missed_when_it_is_renamed(monkeypatch, framework, entry):
    try:
        rename(monkeypatch, entry.owner(), entry.name)
    except TypeError:  # a class in C, which cannot be changed
        entry = dataclasses.replace(entry, owner=lambda: types.ModuleType("another"))
    [(found, fault)] = contract.missing([entry])
    assert found is entry
    assert fault.startswith("none")
    text = contract.explain_missing("Keras 4.0", entry, fault)
    assert f"the name {entry.name}" in text
    assert entry.purpose in text
    assert "Received: none" in text
    assert "keras_dist 0." in text
    assert "with Keras 4.0]" in text
    assert "Install a version" in text


@pytest.mark.parametrize(("framework", "entry"), WITH_PARAMETERS)
def test_other_parameters_are_noticed(monkeypatch, framework, entry):
    def changed(self, other, *, required):
        raise NotImplementedError

    try:
        monkeypatch.setattr(entry.owner(), entry.name, changed)
    except TypeError:
        pytest.skip("a class in C, which cannot be changed")
    [(_, fault)] = contract.missing([entry])
    assert fault.startswith("changed(")


def test_a_parameter_may_be_added_if_it_is_optional():
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


def test_a_name_in_a_module_that_is_gone_is_missed():
    def owner():
        return importlib.import_module("keras.src.gone")

    [(_, fault)] = contract.missing([contract.Name(owner, "any", "for this", "it fails")])
    assert "No module named 'keras.src.gone'" in fault


def test_a_distributed_optimizer_is_refused_where_the_contract_is_broken(monkeypatch):
    import keras

    import keras_dist

    contract.check.cache_clear()
    rename(monkeypatch, keras.optimizers.SGD, "_clip_gradients")
    with pytest.raises(errors.BackendError, match="the name _clip_gradients") as raised:
        keras_dist.DistributedOptimizer(keras.optimizers.SGD())
    assert f"Keras {keras.__version__} on {keras.backend.backend()}" in str(raised.value)
    assert "each rank would train by its own gradients" in str(raised.value)
