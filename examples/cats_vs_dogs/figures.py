"""The figures of this example; each function returns one of matplotlib."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from drawings import CATEGORIES
from PIL import Image
from sklearn.metrics import confusion_matrix

COLOURS = {"cat": "#d98032", "dog": "#3f72af"}
WRONG = "#c0392b"

sns.set_theme(style="whitegrid", rc={"axes.titleweight": "bold", "figure.dpi": 90})


def counts(parts):
    """Shows how many cats and dogs are in each part, given as a dict of DataFrames."""
    figure, axes = plt.subplots(figsize=(5, 2.6), layout="constrained")
    left = np.zeros(len(parts))
    for category in CATEGORIES:
        numbers = [(part.category == category).sum() for part in parts.values()]
        bars = axes.barh(list(parts), numbers, left=left, color=COLOURS[category], label=category)
        axes.bar_label(bars, [f"{n:,}" for n in numbers], label_type="center", color="white")
        left += numbers
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set(xlabel="images", title="Cats and dogs in each part")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return figure


def samples(frame, rows=3, columns=8, seed=0):
    """Shows images drawn by lot, with their category."""
    shown = frame.sample(min(rows * columns, len(frame)), random_state=seed)
    figure = _grid(shown, columns, lambda row: (row.category, COLOURS[row.category]))
    figure.suptitle("Some of the images", weight="bold")
    return figure


def learning_curves(history):
    """Shows accuracy and loss by epoch; `history` has a row for each epoch."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    epochs = np.arange(1, len(history) + 1)
    for axes, name in zip(panels, ("accuracy", "loss"), strict=True):
        axes.plot(epochs, history[name], "o-", ms=4, color="#8a8a8a", label="training")
        axes.plot(epochs, history[f"val_{name}"], "o-", ms=4, color="#2a7f62", label="validation")
        axes.set(xlabel="epoch", ylabel=name, title=name.capitalize())
        axes.xaxis.get_major_locator().set_params(integer=True)
    panels[0].yaxis.set_major_formatter("{x:.0%}")
    panels[0].legend(loc="lower right")
    return figure


def confusion(predictions):
    """Shows how many cats were taken for dogs, and the other way round."""
    table = confusion_matrix(predictions.category, predictions.predicted, labels=CATEGORIES)
    share = table / table.sum(axis=1, keepdims=True).clip(1)
    texts = [
        [f"{n:,}\n{part:.1%}" for n, part in zip(*row, strict=True)]
        for row in zip(table, share, strict=True)
    ]
    figure, axes = plt.subplots(figsize=(4, 3.6), layout="constrained")
    sns.heatmap(
        share,
        annot=np.array(texts),
        fmt="",
        ax=axes,
        cmap="Blues",
        vmin=0,
        vmax=1,
        cbar=False,
        square=True,
        linewidths=2,
        xticklabels=CATEGORIES,
        yticklabels=CATEGORIES,
    )
    axes.set(xlabel="predicted", ylabel="what it is", title="Confusion matrix")
    return figure


def prediction_grid(predictions, rows=3, columns=8, seed=0):
    """Shows images with what the network says; wrong ones come last, framed and marked."""
    is_wrong = predictions.predicted != predictions.category
    wrong = predictions[is_wrong]
    wrong = wrong.sample(min(columns, len(wrong)), random_state=seed)
    right = predictions[~is_wrong]
    right = right.sample(min(rows * columns - len(wrong), len(right)), random_state=seed)

    def title(row):
        sure = row.dog if row.predicted == "dog" else 1 - row.dog
        is_right = row.predicted == row.category
        mark = "" if is_right else "✗ "
        return f"{mark}{row.predicted} {sure:.0%}", "#222222" if is_right else WRONG

    figure = _grid(pd.concat([right, wrong]), columns, title)
    figure.suptitle("Predictions on images not learnt from; ✗ marks wrong ones", weight="bold")
    return figure


def scaling(measured):
    """Shows how images per second grow with the ranks; `measured` is the table of scaling.py."""
    figure, axes = plt.subplots(figsize=(5.4, 3.6), layout="constrained")
    ranks, speed = measured.ranks, measured.images_per_second
    axes.plot(ranks, ranks * speed[0], "--", color="#9a9a9a", label="n times one rank")
    if "apart" in measured:  # tables of earlier versions lack it
        style = {"color": "#d98032", "label": "n processes that never meet"}
        axes.plot(ranks, measured.apart, "s:", **style)
    axes.plot(ranks, speed, "o-", color="#2a7f62", label="measured")
    for n, images in zip(ranks, speed, strict=True):
        below = {"xytext": (0, -16), "textcoords": "offset points", "ha": "center"}
        axes.annotate(f"{images:,.0f}", (n, images), **below)
    axes.set(xlabel="ranks", ylabel="images per second", xticks=ranks, ylim=(0, None))
    axes.margins(x=0.1)
    axes.set_title(f"Training on {measured.cores[0]} cores, {measured.threads[0]} for each rank")
    axes.legend(loc="upper left")
    return figure


def _grid(frame, columns, title):
    """Shows the images of a frame in rows; `title` returns text and colour for a row of it."""
    rows = -(-len(frame) // columns)
    figure, panels = plt.subplots(
        rows, columns, figsize=(1.25 * columns, 1.45 * rows), layout="constrained", squeeze=False
    )
    for axes in panels.flat:
        axes.axis("off")
    for axes, row in zip(panels.flat, frame.itertuples(), strict=False):
        axes.imshow(Image.open(row.file).convert("RGB"))
        text, colour = title(row)
        axes.set_title(text, color=colour, fontsize=9, weight="normal")
        if colour == WRONG:
            axes.axis("on")
            axes.set(xticks=[], yticks=[])
            plt.setp(axes.spines.values(), color=WRONG, linewidth=2.5)
    return figure
