"""Measures how far a linear model gets on the pixels: how hard the pictures are.

python examples/cats_vs_dogs/linear.py --data drawings
"""

import argparse

import numpy as np
from images import find_images
from pipeline import decode, prediction_map, split
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import keras_dist


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="drawings")
    parser.add_argument("--drawings", type=int, default=3000)
    parser.add_argument("--image-size", type=int, default=32, help="pixels of both sides (32)")
    args = parser.parse_args()

    keras_dist.init()
    files, source = find_images(args.data, args.drawings)
    train, test = split(prediction_map(files))
    for weakening in (1e-5, 1e-4, 1e-3, 1e-2):
        model = make_pipeline(StandardScaler(), LogisticRegression(C=weakening, max_iter=300))
        model.fit(pixels(train, args.image_size), train.label)
        accuracy = model.score(pixels(test, args.image_size), test.label)
        print(f"C={weakening}: accuracy {accuracy:.1%} on {source} not learnt from")


def pixels(frame, image_size):
    return np.stack([decode(file, image_size).numpy().ravel() for file in frame.file])


if __name__ == "__main__":
    main()
