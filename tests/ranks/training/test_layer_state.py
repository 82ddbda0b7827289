"""What layers compute with besides their variables follows wherever variables are set."""

import json
import pathlib

import keras
import numpy as np
import pytest
from small_training import EAGER, agreed

import keras_dist
from keras_dist import errors
from keras_dist._compat.keras.models import layers_of
from keras_dist.training import layer_state, replicas

# The code is the same everywhere: on other backends run rows of docs/backends.md, and traced steps.
pytestmark = pytest.mark.jobs("torch-2")
on_each_backend = pytest.mark.jobs("tensorflow-2", "jax-2")

layers, BACKEND = keras.layers, keras.backend.backend()
DATA = np.arange(8, dtype="float32")[:, None] ** 2
NORMAL = ((DATA - DATA.mean()) / DATA.std()).ravel()


class Scaled(layers.Layer):
    """Divides by a constant that follows from a variable, and adds numbers that are saved."""

    def build(self, input_shape):
        self.scale = self.add_weight(shape=(), initializer="ones", trainable=False)
        self.divisor, self.offset, self.names = 1.0, np.zeros(1, "float32"), []

    def set(self, scale, offset, names):
        self.scale.assign(scale)
        self.offset, self.names = np.full(1, offset, "float32"), names
        self.finalize_state()

    def finalize_state(self):
        self.divisor = float(keras.ops.convert_to_numpy(self.scale)) * 2

    def call(self, inputs):
        return inputs / self.divisor + keras.ops.convert_to_tensor(self.offset)

    def save_own_variables(self, store):
        super().save_own_variables(store)
        store["offset"] = self.offset

    def load_own_variables(self, store):
        super().load_own_variables({"0": store["0"]})
        self.offset = np.array(store["offset"])

    def save_assets(self, dir_path):
        pathlib.Path(dir_path, "names.json").write_text(json.dumps(self.names))

    def load_assets(self, dir_path):
        self.names = json.loads(pathlib.Path(dir_path, "names.json").read_text())


def compiled(*inner, **options):
    dense = layers.Dense(1, kernel_initializer="ones")
    model = keras.Sequential([keras.Input((1,)), *inner, dense])
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.0))
    model.compile(optimizer, "mse", **{**EAGER, **options})
    return model


def normalizing(adapts_on=None, **options):
    layer = layers.Normalization()
    if adapts_on is None or adapts_on == keras_dist.rank():
        layer.adapt(DATA)
    return compiled(keras.Sequential([keras.Sequential([layer])]), **options)


def fit(model, *callbacks, epochs=1):
    share = DATA[keras_dist.rank() :: keras_dist.size()]
    model.fit(share, share, epochs=epochs, verbose=0, callbacks=keras_dist.callbacks(*callbacks))


def outputs(model):
    found = model.predict(DATA, verbose=0)
    assert agreed(found.tobytes())
    return found.ravel()


on_several = pytest.mark.skipif(keras_dist.size() == 1, reason="a single rank cannot differ")


def normalization_in(model):
    return next(layer for layer in layers_of(model) if isinstance(layer, layers.Normalization))


@on_each_backend
@pytest.mark.parity("constants that layers derive from variables follow the broadcast")
def test_constants_follow_the_broadcast_into_steps_that_were_traced():
    model = normalizing(adapts_on=0, run_eagerly=False)
    model.predict(DATA, verbose=0)
    for _ in range(2):
        fit(model)
        np.testing.assert_allclose(outputs(model), NORMAL, atol=1e-4)
    if keras_dist.rank() == 0:
        normalization_in(model).adapt(DATA * 2)
    expected = (DATA / 2 - DATA.mean()) / DATA.std()
    share = slice(keras_dist.rank(), None, keras_dist.size())
    history = model.fit(DATA[share], expected[share], verbose=0, callbacks=keras_dist.callbacks())
    if keras_dist.size() > 1:  # one process keeps its step, as without keras_dist
        assert history.history["loss"][0] < 1e-6
        np.testing.assert_allclose(outputs(model), expected.ravel(), atol=1e-4)
        assert model.evaluate(DATA, expected, verbose=0) < 1e-6


@on_each_backend
@on_several
def test_a_model_that_fit_builds_gets_the_constants_of_the_root():
    class Normalizing(keras.Model):
        def __init__(self):
            super().__init__()
            self.normal, self.dense = layers.Normalization(), layers.Dense(1)

        def call(self, inputs):
            return self.dense(self.normal(inputs))

    model = Normalizing()
    model.compile(keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.0)), "mse")
    if keras_dist.rank() == 0:
        model.normal.adapt(DATA)
    fit(model)
    outputs(model)
    mean = keras.ops.convert_to_numpy(model.normal.mean)
    np.testing.assert_allclose(np.ravel(mean), DATA.mean(), rtol=1e-6)


class Marked(keras.Model):
    """Says that it is built, as models that train their parts do."""

    def __init__(self):
        super().__init__()
        self.scale = layers.Normalization()
        self.part = keras.Sequential([keras.Input((1,)), layers.Dense(1)])
        self.built = True

    def call(self, inputs):
        return self.part(self.scale(inputs))


@on_several
def test_adapt_may_have_built_the_last_layer_on_the_root_alone():
    model = Marked()
    model.compile(keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", **EAGER)
    if keras_dist.rank() == 0:
        model.scale.adapt(DATA)
    fit(model)
    keras_dist.verify_replicas(model)
    found = keras.ops.convert_to_numpy(model.scale(DATA)).ravel()
    np.testing.assert_allclose(found, NORMAL, rtol=1e-5)


@on_several
@on_each_backend
@pytest.mark.parity("`verify_replicas` compares what layers compute with")
def test_constants_that_differ_are_named_and_repaired():
    model = normalizing(adapts_on=0)
    layer = normalization_in(model)
    for weight in model.weights:
        weight.assign(keras_dist.broadcast(weight))
    if BACKEND == "torch":  # constants are views of the variables
        layer.mean = layer.mean + keras_dist.rank()
    with pytest.raises(errors.MismatchError, match=f"what {layer.path} computes with") as caught:
        keras_dist.verify_replicas(model)
    assert "keras_dist.adapt" in str(caught.value)
    replicas.broadcast_state(model)
    keras_dist.verify_replicas(model)
    np.testing.assert_allclose(outputs(model), NORMAL, atol=1e-4)


@on_several
def test_constants_of_the_constructor_that_differ_are_an_error():
    layer = layers.Normalization(mean=float(keras_dist.rank()), variance=1.0)
    with pytest.raises(errors.MismatchError, match=rf"{layer.name} .*\(ranks 1"):
        fit(compiled(layer))


@on_each_backend
def test_the_state_of_a_users_layer_follows_the_broadcast():
    layer = Scaled()
    model = compiled(layer, run_eagerly=False)
    if keras_dist.rank() == 0:
        layer.set(2.0, 5.0, ["a", "\n"])
    model.predict(DATA, verbose=0)
    fit(model)
    np.testing.assert_allclose(outputs(model), DATA.ravel() / 4 + 5)
    assert (layer.divisor, layer.names) == (4.0, ["a", "\n"])


def test_layers_with_local_variables_keep_their_state():
    layer = Scaled()
    model = compiled(layer)
    layer.set(1.0 + keras_dist.rank(), float(keras_dist.rank()), [])
    model.optimizer.register_local_var(layer.scale)
    fit(model)
    keras_dist.verify_replicas(model)
    assert layer.offset[0] == keras_dist.rank()
    assert layer.divisor == 2 * float(keras.ops.convert_to_numpy(layer.scale))


@on_several
def test_a_users_layer_that_fails_is_an_error_on_every_rank():

    class Failing(Scaled):
        def load_assets(self, dir_path):
            raise KeyError("names.json")

    with pytest.raises(errors.MismatchError, match="cannot take the state: KeyError"):
        fit(compiled(Failing()))
    keras_dist.barrier()


def test_a_users_layer_that_can_be_saved_on_the_root_only():
    class Late(Scaled):
        def build(self, input_shape):
            super().build(input_shape)
            del self.offset

        def call(self, inputs):
            return super().call(inputs) if hasattr(self, "offset") else inputs

    layer = Late()
    model = compiled(layer)
    if keras_dist.rank() == 0:
        layer.set(2.0, 5.0, ["a"])
    fit(model)
    np.testing.assert_allclose(outputs(model), DATA.ravel() / 4 + 5)


def test_a_users_layer_that_cannot_be_saved_trains_as_before(shared_tmp_path):
    class Unsaved(Scaled):
        def save_own_variables(self, store):
            raise NotImplementedError

    layer = Unsaved()
    fit(compiled(layer), keras_dist.callbacks.ShardedCheckpoint(shared_tmp_path))
    assert layer.divisor == 2.0


def test_merged_adapters_of_a_users_layer_keep_their_values():
    class Merging(layers.Dense):
        def save_own_variables(self, store):
            super().save_own_variables(store)

        def load_own_variables(self, store):
            super().load_own_variables(store)

    layer = Merging(1)
    model = compiled(layer)
    layer.enable_lora(1)
    layer.lora_kernel_b.assign([[0.5 + keras_dist.rank()]])
    before = keras_dist.broadcast(np.concatenate([w.ravel() for w in layer.get_weights()]))
    replicas.broadcast_state(model)
    after = np.concatenate([w.ravel() for w in layer.get_weights()])
    assert after.tobytes() == before.tobytes()


def bins_and_words(adapted):
    """Layers that keep tables; not all of them run in a step of every backend."""
    pytest.importorskip("tensorflow")
    made = [
        layers.Discretization(num_bins=3),
        layers.StringLookup(),
        layers.IntegerLookup(output_mode="tf_idf", max_tokens=9, pad_to_max_tokens=True),
        layers.TextVectorization(),
        layers.StringLookup(vocabulary=["a", "b"] if adapted else ["b", "a"]),
        Scaled(),
    ]
    if adapted:
        made[0].adapt(DATA)
        made[1].adapt(["b", "b", "\r", "\n x", "ü"])
        made[2].adapt([[3, 4], [3, 5]])
        made[3].adapt(["to be or not to be"])
    return made


class Keeping(keras.Model):
    """A model of layers that it does not call."""

    def __init__(self, adapted):
        super().__init__()
        self.kept, self.dense = bins_and_words(adapted), layers.Dense(1)
        self.kept[-1].build(None)
        if adapted:
            self.kept[-1].set(3.0, 7.0, ["x"])

    def build(self, input_shape):
        self.dense.build(input_shape)

    def call(self, inputs):
        return self.dense(inputs)

    def state(self):
        bins, *lookups, scaled = self.kept
        weights = {}
        lookups[1].save_own_variables(weights)
        return [
            None if bins.bin_boundaries is None else list(bins.bin_boundaries),
            [list(map(str, lookup.get_vocabulary())) for lookup in lookups],
            lookups[3].input_vocabulary[-2:],
            np.asarray(weights["idf_weights"]).tolist(),
            [scaled.divisor, scaled.offset.tolist(), scaled.names],
        ]


def keeping(adapted):
    model = Keeping(adapted)
    model.compile(keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.0)), "mse", **EAGER)
    model.build((None, 1))
    return model


@on_each_backend
@pytest.mark.parity("vocabularies and bins follow the broadcast")
def test_vocabularies_and_bins_follow_the_broadcast():
    model = keeping(keras_dist.rank() == 0)
    if keras_dist.size() > 1:
        with pytest.raises(errors.MismatchError, match=r"the vocabulary of string_lookup"):
            keras_dist.verify_replicas(model)
    fit(model)
    assert model.state() == keeping(True).state()
    keras_dist.verify_replicas(model)


@on_several
def test_a_vocabulary_of_a_size_that_does_not_fit_is_named():
    pytest.importorskip("tensorflow")
    lookup = layers.IntegerLookup(output_mode="multi_hot")
    lookup.adapt(list(range(3 + keras_dist.rank())))
    model = keras.Sequential([keras.Input((1,), dtype="int64"), lookup, layers.Dense(1)])
    with pytest.raises(errors.MismatchError, match="vocabulary size cannot be changed"):
        replicas.broadcast_state(model)
    keras_dist.barrier()


SAVED = ("ShardedCheckpoint", "checkpoints.load")


@on_each_backend
@pytest.mark.parity("a model that was not adapted restores what layers compute with")
@pytest.mark.parametrize("way", [*SAVED, "BackupAndRestore", "elastic"])
def test_a_model_that_was_not_adapted_restores_what_layers_compute_with(way, shared_tmp_path):
    def callback():
        if way in SAVED:
            return keras_dist.callbacks.ShardedCheckpoint(shared_tmp_path)
        options = {"delete_checkpoint": False, "memory": True}
        return keras_dist.callbacks.BackupAndRestore(shared_tmp_path, **options)

    before, restored = keeping(True), keeping(False)
    if way == "elastic":
        keras_dist.elastic.KerasState(before, directory=shared_tmp_path).commit()
        keras_dist.elastic.KerasState(restored, directory=shared_tmp_path).sync()
    else:
        fit(before, callback())
        if way == "checkpoints.load":
            keras_dist.checkpoints.load(restored, shared_tmp_path)
        else:
            fit(restored, callback(), epochs=2)
    assert restored.state() == before.state()


def test_an_elastic_state_restores_what_layers_computed_with():
    model = normalizing()
    state = keras_dist.elastic.KerasState(model)
    normalization_in(model).adapt(DATA * 3)
    state.restore()
    np.testing.assert_allclose(outputs(model), NORMAL, atol=1e-4)


def test_a_file_without_layers_derives_constants(shared_tmp_path, monkeypatch):
    model = normalizing()
    monkeypatch.setattr("keras_dist.resume.variables.write_layers", lambda model: {})
    fit(model, keras_dist.callbacks.ShardedCheckpoint(shared_tmp_path))
    restored = normalizing(adapts_on=-1)
    keras_dist.checkpoints.load(restored, shared_tmp_path)
    np.testing.assert_allclose(outputs(restored), NORMAL, atol=1e-4)


def test_averages_of_variables_reach_what_is_derived_from_them():
    model = normalizing()
    layer = normalization_in(model)
    layer.adapt_mean.assign(layer.adapt_mean + keras_dist.rank())
    layer.finalize_state()
    replicas.average_statistics(model)
    keras_dist.verify_replicas(model)
    assert agreed(np.array(keras.ops.convert_to_numpy(layer.mean)).tobytes())


def test_assets_stay_in_their_directory():
    layer = Scaled()
    model = compiled(layer)
    [kept] = layer_state.read(model)
    kept["asset/../names.json"] = kept["asset/names.json"]
    [again] = layer_state.unpack(layer_state.pack([kept]))
    with pytest.raises(ValueError, match="outside of its directory"):
        layer_state.write(model, [again])
