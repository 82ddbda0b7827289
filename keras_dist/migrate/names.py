"""Tables of Horovod's modules and names, with their replacements."""

# All modules; modules of Horovod that re-export another module map to that module.
MODULES = {
    "horovod": "keras_dist",
    "horovod.keras": "keras_dist",
    "horovod.tensorflow.keras": "keras_dist",
    "horovod.tensorflow": "keras_dist.tensorflow",
    "horovod.torch": "keras_dist.torch",
    "horovod.common.exceptions": "keras_dist.elastic",
    "horovod.common.process_sets": "keras_dist",
    "horovod.runner": "keras_dist",
    "horovod.keras.callbacks": "keras_dist.callbacks",
    "horovod.tensorflow.keras.callbacks": "keras_dist.callbacks",
    "horovod.tensorflow.compression": "keras_dist.tensorflow",
    "horovod.tensorflow.functions": "keras_dist.tensorflow",
    "horovod.tensorflow.mpi_ops": "keras_dist.tensorflow",
    "horovod.tensorflow.sync_batch_norm": "keras_dist.tensorflow",
    "horovod.torch.compression": "keras_dist.torch",
    "horovod.torch.functions": "keras_dist.torch",
    "horovod.torch.mpi_ops": "keras_dist.torch",
    "horovod.torch.optimizer": "keras_dist.torch",
    "horovod.torch.sync_batch_norm": "keras_dist.torch",
    "horovod.keras.elastic": "keras_dist.elastic",
    "horovod.tensorflow.keras.elastic": "keras_dist.elastic",
    "horovod.tensorflow.elastic": "keras_dist.elastic",
    "horovod.torch.elastic": "keras_dist.elastic",
}

UNKNOWN = "keras_dist has no such module or name: see docs/migrate-from-horovod.md"

GONE_MODULES = {
    "horovod.data": "keras_dist has no such loaders: shard data with keras_dist.data.shard",
    "horovod.mxnet": "keras_dist does not support MXNet",
    "horovod.spark": "keras_dist.spark has run, and no estimators: see docs/other-systems.md",
    "horovod.tensorflow.data": "keras_dist has no tf.data service: share data out by "
    "keras_dist.data.shard",
    "horovod.ray": "keras_dist.ray has RayExecutor: see docs/other-systems.md",
}

# Modules of which keras_dist has only these names and their submodules.
HELD = {
    "horovod": {"run", "__version__"},
    "horovod.common.process_sets": {
        "ProcessSet",
        "add_process_set",
        "global_process_set",
        "remove_process_set",
    },
    "horovod.runner": {"run"},
    "horovod.tensorflow.sync_batch_norm": {"SyncBatchNormalization"},
    "horovod.torch.optimizer": {"DistributedOptimizer"},
    "horovod.torch.sync_batch_norm": {"SyncBatchNorm"},
}

# Names without a replacement; most were for graphs and sessions of TensorFlow 1.
GONE = {
    "BroadcastGlobalVariablesHook": "TensorFlow 1 only: pass "
    "callbacks.BroadcastGlobalVariablesCallback(0) to fit, or call broadcast_variables",
    "broadcast_global_variables": "TensorFlow 1 only: call broadcast_variables with the variables",
    "broadcast_object_fn": "TensorFlow 1 only: call broadcast_object",
    "gpu_available": "an internal name of Horovod: use the framework",
    "HorovodVersionMismatchError": "nothing is compiled for a version of a framework",
    "handle_average_backwards_compatibility": "an internal name of Horovod",
    "LocalGradientAggregationHelper": "an internal name of Horovod: pass "
    "backward_passes_per_step to DistributedOptimizer",
}

# Calls and assignment targets by which a script selects the GPU of its local rank.
GPU_PINNING = ("set_visible_devices", "set_device", "visible_device_list")

# Functions that take the name of a module as text.
IMPORTERS = {"__import__", "find_spec", "import_module", "importorskip"}

REMOVED_ARGUMENTS = {"compile": "experimental_run_tf_function"}
