"""What a trained network says of images, gathered from all ranks, and how often it is right."""

import numpy as np
import pandas as pd
import tensorflow as tf
from pipeline import PARALLEL, decode
from sklearn.metrics import classification_report

import keras_dist


def predict(model, frame, image_size, batch_size=64):
    """Returns the rows with `dog`, how likely that is, and `predicted`; on every rank all rows.

    Each rank looks at every n-th file. Collective: every rank must call it, with the same rows.
    """
    mine = frame.iloc[keras_dist.rank() :: keras_dist.size()]
    images = tf.data.Dataset.from_tensor_slices(list(mine.file))
    images = images.map(lambda file: decode(file, image_size), PARALLEL).batch(batch_size)
    dog = model.predict(images.prefetch(PARALLEL), verbose=0).ravel()
    mine = mine.assign(dog=dog, predicted=np.where(dog > 0.5, "dog", "cat"))
    return pd.concat(keras_dist.allgather_object(mine)).sort_index()


def summary(predictions):
    """Returns precision and recall of both categories, as text."""
    return classification_report(
        predictions.category, predictions.predicted, digits=3, zero_division=0
    )
