"""Saved models and `load_model`: state, iteration and reduction options are restored."""

import json
import zipfile

import keras
import numpy as np
import pytest
from small_training import CLASSES, FEATURES, compiled, make_data

import keras_dist
from keras_dist import errors
from keras_dist.training import distributed, model_state, saved_options

# The code of keras_dist is the same on every backend, but for what the marks name.
pytestmark = pytest.mark.jobs("torch-2")
on_each_backend = pytest.mark.jobs("tensorflow-2", "jax-2")

BACKEND = keras.backend.backend()


def make(optimizer=None, **options):
    """Returns a model with fixed names; automatic names differ from model to model."""
    keras.utils.set_random_seed(1)
    layers = [
        keras.Input((FEATURES,)),
        keras.layers.Dense(4, activation="relu", name="hidden"),
        keras.layers.Dense(CLASSES, activation="softmax", name="output"),
    ]
    model = keras.Sequential(layers, name="model")
    optimizer = optimizer or keras_dist.DistributedOptimizer(sgd(), **options)
    return compiled(model, optimizer)


def sgd(**options):
    return keras.optimizers.SGD(0.1, momentum=0.9, **options)


def saved(model, directory, suffix=".keras"):
    """Saves a model on each rank and returns the path."""
    path = directory / f"{keras_dist.rank()}{suffix}"
    model.save(path)
    return path


def built(model):
    model.optimizer.build(model.trainable_variables)
    return model


def rewrite(path, change):
    """Changes the files in a saved model: `change` takes and returns contents by name."""
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in change(contents).items():
            archive.writestr(name, content)


def options_of(model):
    options = model.optimizer._keras_dist.options
    paths = options.groups
    if not isinstance(paths, int):
        paths = [[model_state.variable_name(variable) for variable in group] for group in paths]
    others = {name: value for name, value in vars(options).items() if name != "groups"}
    return {**others, "groups": paths}


def everything_of(model):
    return [keras.ops.convert_to_numpy(variable) for variable in model_state.state(model)]


def assert_same_state(model, other):
    for value, wanted in zip(everything_of(model), everything_of(other), strict=True):
        np.testing.assert_array_equal(value, wanted)


def fit(model, epochs=1):
    x, y = make_data(8, seed=keras_dist.rank())
    callbacks = keras_dist.callbacks()
    model.fit(x, y, batch_size=4, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)
    keras_dist.verify_replicas(model)
    return model


# --- Options


@on_each_backend
@pytest.mark.parity("`load_model` restores the reduction options")
@pytest.mark.parametrize(
    "options",
    [
        {"op": "Sum", "compression": "fp16", "groups": 2, "sparse_as_dense": True},
        {"gradient_predivide_factor": 2.0, "scale_local_gradients": False},
        {"backward_passes_per_step": 2},
        {"backward_passes_per_step": 2, "average_aggregated_gradients": True},
        {"compression": keras_dist.Compression.powersgd(3, start_step=5, min_compression_rate=1.5)},
    ],
)
def test_reduction_options_are_restored(options, shared_tmp_path):
    model = built(make(**options))
    loaded = keras_dist.load_model(saved(model, shared_tmp_path), legacy_opts=False)
    assert distributed.is_distributed(loaded.optimizer)
    assert options_of(loaded) == options_of(model)
    assert loaded.optimizer.get_config() == model.optimizer.get_config()


def test_automatically_named_layers_are_found_by_index(shared_tmp_path):
    @keras.saving.register_keras_serializable("test_saving")
    class Two(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.second = keras.layers.Dense(4), keras.layers.Dense(CLASSES)

        def build(self, shape):
            self.first.build(shape)
            self.second.build((None, 4))
            self.built = True

        def call(self, x):
            return self.second(self.first(x))

        def get_config(self):
            return {}

    model = Two()
    model.build((None, FEATURES))
    optimizer = keras_dist.PartialDistributedOptimizer(
        sgd(), local_layers=model.second, groups=[[model.first.kernel]]
    )
    loaded = keras_dist.load_model(saved(built(compiled(model, optimizer)), shared_tmp_path))
    mine = loaded.optimizer._keras_dist
    assert loaded.first.path != model.first.path
    assert mine.local_layers == (loaded.second,)
    assert mine.options.groups[0][0] is loaded.first.kernel


def test_a_process_set_is_found_by_its_ranks(shared_tmp_path):
    last = keras_dist.size() - 1
    if last == 0:
        pytest.skip("one rank has no other process set")
    one = keras_dist.add_process_set([last])
    path = saved(make(process_set=one), shared_tmp_path)
    assert keras_dist.load_model(path).optimizer._keras_dist.options.process_set is one
    keras_dist.remove_process_set(one)
    with pytest.raises(errors.ArgumentError, match=f"a process set of rank {last}.*None for all"):
        keras_dist.load_model(path)
    everybody = keras_dist.load_model(path, process_set=None)
    assert everybody.optimizer._keras_dist.options.process_set is None


class Half(keras_dist.Compressor):
    """A compression whose name keras_dist does not know."""

    def compress(self, array):
        return array.astype("float16")

    def decompress(self, array, dtype):
        return array.astype(dtype)


def test_a_custom_compression_must_be_passed(shared_tmp_path):
    path = saved(make(compression=Half()), shared_tmp_path)
    with pytest.raises(errors.ArgumentError, match=r"the compression Half\(\).*Pass an instance"):
        keras_dist.load_model(path)
    mine = Half()
    loaded = keras_dist.load_model(path, compression=mine, op="sum")
    assert loaded.optimizer._keras_dist.options.compression is mine
    assert loaded.optimizer._keras_dist.options.op is keras_dist.Sum


# --- State


@on_each_backend
@pytest.mark.parity("`load_model` restores state and iteration")
@pytest.mark.parametrize("loader", ["plain", "by Keras", "by keras_dist"])
def test_state_and_iteration_are_restored(loader, shared_tmp_path):
    model = make(sgd() if loader == "plain" else None)
    model.optimizer.build(model.trainable_variables)
    for number, variable in enumerate(model_state.state(model)):
        variable.assign(np.full(variable.shape, number))
    path = saved(model, shared_tmp_path)
    if loader == "by Keras":
        loaded = keras.saving.load_model(path)
        keras_dist.DistributedOptimizer(loaded.optimizer)
    else:
        loaded = keras_dist.load_model(path)
    assert_same_state(loaded, model)
    assert int(loaded.optimizer.iterations) == int(model.optimizer.iterations) > 0
    assert distributed.is_distributed(loaded.optimizer)


def test_state_loaded_on_the_root_only_reaches_all_ranks(shared_tmp_path):
    """Other ranks build a new model, whose optimizer has no state."""
    root = keras_dist.rank() == 0
    path = shared_tmp_path / "model.keras"
    model = fit(make())
    if root:
        model.save(path)
    fit(model)
    continued = keras_dist.load_model(path) if root else make()
    assert continued.optimizer.built == root
    fit(continued)
    assert_same_state(continued, model)
    assert int(continued.optimizer.iterations) == 4


@pytest.mark.jobs("tensorflow-2")
@pytest.mark.skipif(BACKEND != "tensorflow", reason="float16 is the same on every backend")
def test_a_loss_scale_stays_inside(shared_tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = make(op="sum")
        for step in range(2):  # the first step moves the reduction outwards
            loaded = keras_dist.load_model(saved(model, shared_tmp_path))
            assert distributed.is_distributed(loaded.optimizer)
            assert not distributed.is_distributed(loaded.optimizer.inner_optimizer)
            assert loaded.optimizer._keras_dist.options.op is keras_dist.Sum
            if step == 0:
                fit(model)
        assert_same_state(loaded, model)
        fit(loaded)
    finally:
        keras.config.set_dtype_policy("float32")


@keras.saving.register_keras_serializable("test_saving")
class Registered(type(keras.optimizers.SGD())):
    """An optimizer that is registered under another name than its class."""


def test_custom_optimizers_are_loaded(shared_tmp_path):
    class Unknown(type(keras.optimizers.SGD())):
        """An optimizer that Keras cannot import."""

    path = saved(make(keras_dist.DistributedOptimizer(Registered(0.1), op="sum")), shared_tmp_path)
    assert isinstance(keras.saving.load_model(path).optimizer, Registered)
    assert isinstance(keras_dist.load_model(path).optimizer, Registered)
    path = saved(make(keras_dist.DistributedOptimizer(Unknown(0.1), op="sum")), shared_tmp_path)
    with pytest.raises(errors.CheckpointError, match=r"Unknown.*as custom_optimizers"):
        keras_dist.load_model(path)
    for given in ({"custom_optimizers": [Unknown]}, {"custom_objects": {"Unknown": Unknown}}):
        loaded = keras_dist.load_model(path, **given)
        assert isinstance(loaded.optimizer, Unknown)
        assert loaded.optimizer._keras_dist.options.op is keras_dist.Sum


@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
def test_a_legacy_file_holds_no_options(shared_tmp_path):
    model = built(make(op="sum"))
    path = saved(model, shared_tmp_path, ".h5")
    loaded = keras_dist.load_model(path, groups=2)
    assert options_of(loaded)["op"] is keras_dist.Average
    assert options_of(loaded)["groups"] == 2
    assert_same_state(loaded, model)
    fit(loaded)


# --- Invalid files and arguments


def wrong(path, kind=errors.CheckpointError, **options):
    with pytest.raises(kind) as caught:
        keras_dist.load_model(path, **options)
    message = str(caught.value)
    assert message.startswith(f"[rank {keras_dist.rank()} of {keras_dist.size()}] Expected ")
    return message


def test_files_that_are_damaged_or_do_not_fit_are_rejected(shared_tmp_path):
    missing = shared_tmp_path / "missing.keras"
    assert str(missing) in wrong(missing)
    path = saved(built(make()), shared_tmp_path)
    content = path.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 16
    for damaged in (content[: len(content) // 2], content[:-30], flipped):
        path.write_bytes(damaged)
        message = wrong(path)
        assert str(path) in message and "The file is damaged: load a copy" in message
    path.write_bytes(content)
    name = f"assets/optimizer/{saved_options.FILE}"
    for text in ("{half", "[]", '{"version": 2}', '{"version": 1}'):
        rewrite(path, lambda contents, text=text: {**contents, name: text})
        assert f"a model with the state of its optimizer in {path}" in wrong(path)

    def without_momentum(contents):
        config = json.loads(contents["config.json"])
        config["compile_config"]["optimizer"]["config"]["momentum"] = 0.0
        return {**contents, "config.json": json.dumps(config)}

    path.write_bytes(content)
    rewrite(path, without_momentum)
    message = wrong(path)
    assert str(path) in message
    assert "it has 2 variables whereas the saved optimizer has 6" in message


def test_variables_missing_in_the_model_are_rejected(shared_tmp_path):
    stranger = keras.Variable(np.zeros(3), name="stranger")
    path = saved(built(make(groups=[[stranger]])), shared_tmp_path)
    assert "the variable 'stranger' in the loaded model" in wrong(path)
    keras_dist.load_model(path, groups=None)
    model = make(
        keras_dist.PartialDistributedOptimizer(sgd(), local_layers=keras.layers.Dense(1, name="no"))
    )
    assert "the layer 'no' in the loaded model" in wrong(saved(model, shared_tmp_path))


def test_arguments_and_code_in_a_file(shared_tmp_path):
    path = saved(make(), shared_tmp_path)
    assert getattr(keras_dist.load_model(path, compile=False), "optimizer", None) is None
    with pytest.raises(TypeError, match="grops"):
        keras_dist.load_model(path, grops=2)
    with pytest.raises(TypeError, match="positional"):  # Horovod's position of compression
        keras_dist.load_model(path, None, None, keras_dist.Compression.fp16)
    assert "op to be" in wrong(path, errors.ArgumentError, op="mean")
    unsafe = keras.Sequential([keras.Input((3,)), keras.layers.Lambda(lambda x: x + 1)])
    assert "safe_mode" in wrong(saved(unsafe, shared_tmp_path))
