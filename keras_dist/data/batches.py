"""Batches of a rank in the form that suits the backend of Keras."""

from typing import Any

from keras_dist.data.rank_batches import RankBatches

__all__ = ["for_keras"]


def for_keras(batches: RankBatches, ahead: bool = True) -> Any:
    """Returns batches as data for `fit`.

    A `keras.utils.PyDataset` serves all backends, but on TensorFlow Keras turns it into
    `Dataset.from_generator`. That sets malloc's trim threshold for the whole process:
    from then on memory goes back to the kernel between any two steps and is faulted in
    again, which took 1.7 times the processor time of a small dense model.

    Args:
        batches: those of this rank.
        ahead: whether batches may be made before training asks for them.
    """
    import keras

    if keras.config.backend() == "tensorflow" and batches.example is not None:
        from keras_dist.data.tf_arrays import pipeline_of

        return pipeline_of(batches, ahead)
    from keras_dist.data.array_dataset import ArrayDataset

    return ArrayDataset(batches)
