"""Conversion of the batches of a rank to data for the Keras backend."""

from typing import Any

from keras_dist.data.rank_batches import RankBatches


def for_keras(batches: RankBatches, ahead: bool = True) -> Any:
    """Returns the batches of this rank as data for `fit`.

    A `keras.utils.PyDataset` works on all backends, but on TensorFlow Keras turns it into
    `Dataset.from_generator`, which sets malloc's trim threshold for the whole process: memory is
    returned to the kernel after every step and faulted in again. A small dense model took 1.7 times
    the processor time.
    """
    import keras

    if keras.config.backend() == "tensorflow" and batches.example is not None:
        from keras_dist.data.tf_arrays import pipeline_of

        return pipeline_of(batches, ahead)
    from keras_dist.data.array_dataset import ArrayDataset

    return ArrayDataset(batches)
