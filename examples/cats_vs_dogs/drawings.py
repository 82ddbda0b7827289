"""Cats and dogs drawn by Pillow, for machines that have no photographs of them.

These are drawings, not photographs. They are made so that no colour and no place tells which animal
it is: coats, sizes, poses and backgrounds are drawn from the same sets for both. What tells are
ears, muzzle, pupils, whiskers and tail, and each of them misleads now and then.
"""

import io
import math
import os
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

CATEGORIES = ("cat", "dog")
SIZE = 96  # pixels of the longer side
CANVAS = 256  # an animal is drawn in these units, then made smaller: that smooths its edges
COATS = ("#2e2a28", "#5b4636", "#8a6a4a", "#b88a58", "#d8b98a", "#ece2d0", "#8d8d8d", "#c4733a")


def draw_files(folder, count, share=slice(None)):
    """Draws files `cat.0.jpg`, `dog.0.jpg`, `cat.1.jpg`, ... and returns the names of all.

    Drawing number i is the same on every machine. Files that are there are kept; each is written
    in one go, so that several processes may draw into one folder.

    Args:
        folder: where to write.
        count: drawings in all, half of them cats.
        share: slice of those that this process draws; all by default.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [(CATEGORIES[i % 2], i // 2) for i in range(count)]
    files = [folder / f"{category}.{number}.jpg" for category, number in wanted]
    for (category, number), file in list(zip(wanted, files, strict=True))[share]:
        if not file.exists():
            unfinished = file.with_suffix(f".{os.getpid()}")
            unfinished.write_bytes(draw(category, number))
            unfinished.replace(file)
    return files


def draw(category, number):
    """Returns drawing `number` of a category, as the bytes of a JPEG file."""
    rng = np.random.default_rng([CATEGORIES.index(category), number])
    animal = Image.new("RGBA", (CANVAS, CANVAS))
    pen = Pen(animal, rng)
    _sitting(pen, category) if rng.random() < 0.5 else _head(pen, category, 128, 132, 78)
    animal = animal.rotate(rng.uniform(-25, 25), Image.Resampling.BILINEAR)
    if rng.random() < 0.5:
        animal = animal.transpose(Image.Transpose.FLIP_LEFT_RIGHT)

    picture = _background(rng)
    side = int(CANVAS * rng.uniform(0.7, 1.05))
    room = [length - side for length in picture.size]
    place = [int(rng.uniform(min(0, free), max(1, free))) for free in room]
    animal = animal.resize((side, side), Image.Resampling.BILINEAR)
    picture.paste(animal, place, animal)
    return _photographed(picture, rng)


class Pen:
    """Draws shapes into an image, in the colours of one animal."""

    def __init__(self, image, rng):
        self._draw = ImageDraw.Draw(image)
        self.rng = rng
        coats = [_rgb(coat) for coat in rng.permutation(COATS)[:2]]
        self.coat, self.patch = (_varied(coat, rng, 14) for coat in coats)
        self.light = _mixed(self.coat, (255, 245, 230), 0.45)
        self.dark = _mixed(self.coat, (0, 0, 0), 0.35)

    def often(self, probability):
        """Tells whether something with that probability is so in this drawing."""
        return self.rng.random() < probability

    def oval(self, x, y, width, height, colour):
        """An ellipse around (x, y)."""
        self._draw.ellipse((x - width, y - height, x + width, y + height), colour)

    def shape(self, points, colour):
        """A polygon."""
        self._draw.polygon(points, colour)

    def line(self, points, colour, width):
        """A line with round joints and ends."""
        self._draw.line(points, colour, round(width), joint="curve")
        for x, y in (points[0], points[-1]):
            self.oval(x, y, width / 2, width / 2, colour)


# --- The parts of an animal; r is the radius of its head


def _sitting(pen, category):
    x, y = 128 + pen.rng.uniform(-12, 12), 178
    cat_like = (category == "cat") != pen.often(0.15)
    _tail(pen, x, cat_like)
    width = pen.rng.uniform(38, 52)
    pen.oval(x, y, width, 58, pen.coat)
    if pen.often(0.5):
        pen.oval(x, y + 8, width * 0.55, 40, pen.light)
    for side in (-1, 1):
        pen.line([(x + side * 17, y), (x + side * 19, 232)], pen.dark, 15)
        pen.oval(x + side * 20, 234, 13, 8, pen.light)
    _head(pen, category, x + pen.rng.uniform(-10, 10), 92, pen.rng.uniform(42, 52))


def _tail(pen, x, cat_like):
    side, bend = pen.rng.choice([-1, 1]), pen.rng.uniform(0.7, 1.2)
    if cat_like:  # long, thin, in a curve
        angles = np.linspace(0, 4.2, 14)
        points = [(x + side * (46 + 9 * a * bend), 222 - 26 * a + 14 * math.sin(a)) for a in angles]
        pen.line(points, pen.coat, 10)
    else:  # short and thick
        pen.line([(x + side * 36, 214), (x + side * 74, 214 - 36 * bend)], pen.coat, 16)


def _head(pen, category, x, y, r):
    cat_like = category == "cat"
    _ears(pen, x, y, r, pointed=cat_like != pen.often(0.12))
    pen.oval(x, y, r * pen.rng.uniform(0.92, 1.08), r * pen.rng.uniform(0.85, 1.0), pen.coat)
    if pen.often(0.35):
        pen.oval(x + r * pen.rng.choice([-0.4, 0.4]), y - r * 0.25, r * 0.38, r * 0.42, pen.patch)
    if pen.often(0.45 if cat_like else 0.2):
        for slant in (-0.25, 0, 0.25):
            top = (x + r * slant * 1.3, y - r * 0.8)
            pen.line([top, (x + r * slant, y - r * 0.45)], pen.dark, r * 0.08)
    _muzzle(pen, x, y, r, long=cat_like == pen.often(0.07))
    _eyes(pen, x, y, r, slit=cat_like != pen.often(0.2))
    if pen.often(0.75 if cat_like else 0.1):
        for side in (-1, 1):
            for rise in (-0.14, 0.02, 0.18):
                end = (x + side * r * 1.15, y + r * (0.35 + 1.4 * rise))
                pen.line([(x + side * r * 0.3, y + r * 0.38), end], pen.light, 2)


def _ears(pen, x, y, r, pointed):
    for side in (-1, 1):
        if pointed:
            tip = (x + side * r * pen.rng.uniform(0.7, 0.95), y - r * pen.rng.uniform(1.3, 1.55))
            foot = [(x + side * r * 0.2, y - r * 0.75), (x + side * r * 0.95, y - r * 0.3)]
            pen.shape([foot[0], tip, foot[1]], pen.coat)
            inner = [_mixed(corner, (x + side * r * 0.65, y - r * 0.7), 0.4) for corner in foot]
            pen.shape([inner[0], _mixed(tip, foot[0], 0.25), inner[1]], pen.patch)
        else:
            hang = pen.rng.uniform(-0.35, 0.35)
            pen.oval(x + side * r * 0.98, y + r * hang, r * 0.27, r * 0.62, pen.dark)


def _muzzle(pen, x, y, r, long):
    if long:
        pen.oval(x, y + r * 0.48, r * 0.48, r * 0.46, pen.light)
        pen.oval(x, y + r * 0.28, r * 0.2, r * 0.14, (35, 28, 28))
        if pen.often(0.4):
            pen.oval(x, y + r * 0.88, r * 0.14, r * 0.2, (216, 110, 120))
        pen.line([(x, y + r * 0.4), (x, y + r * 0.68)], (35, 28, 28), r * 0.05)
    else:
        for side in (-1, 1):
            pen.oval(x + side * r * 0.17, y + r * 0.46, r * 0.22, r * 0.17, pen.light)
        nose = (216, 130, 130) if pen.often(0.6) else (60, 45, 45)
        corners = [(x - r * 0.12, y + r * 0.24), (x + r * 0.12, y + r * 0.24), (x, y + r * 0.38)]
        pen.shape(corners, nose)


def _eyes(pen, x, y, r, slit):
    iris = _varied(_rgb(pen.rng.choice(["#7fae3f", "#d9a62e", "#6d4a2a", "#6fa7c9"])), pen.rng, 20)
    for side in (-1, 1):
        eye = (x + side * r * 0.42, y - r * 0.1)
        pen.oval(*eye, r * 0.2, r * 0.17, iris)
        pen.oval(*eye, r * (0.06 if slit else 0.13), r * (0.16 if slit else 0.13), (15, 12, 12))


# --- What is around it, and what a camera makes of it


def _background(rng):
    height = int(CANVAS * rng.uniform(0.7, 1)) if rng.random() < 0.5 else CANVAS
    top, bottom = (_muted(rng) for _ in range(2))
    column = np.linspace(top, bottom, height)[:, np.newaxis]
    picture = Image.fromarray(np.broadcast_to(column, (height, CANVAS, 3)).astype("uint8"))
    clutter = ImageDraw.Draw(picture)
    for _ in range(rng.integers(2, 9)):
        x, y, width, length = rng.uniform(0, CANVAS, 4)
        box = (x, y, x + width / 2, y + length / 2)
        [clutter.ellipse, clutter.rectangle][rng.integers(2)](box, _muted(rng))
        if rng.random() < 0.4:
            clutter.polygon(rng.uniform(0, CANVAS, 6).tolist(), _muted(rng))
    return picture


def _muted(rng):
    return _varied((rng.uniform(50, 220),) * 3, rng, 60)


def _photographed(picture, rng):
    """Scales, lights and compresses a picture, and adds noise, as the bytes of a JPEG file."""
    picture.thumbnail((SIZE, SIZE))
    values = np.asarray(picture, float) * rng.uniform(0.6, 1.25) + rng.uniform(-15, 25)
    values += rng.normal(0, rng.uniform(2, 14), values.shape)
    bytes_ = io.BytesIO()
    Image.fromarray(values.clip(0, 255).astype("uint8")).save(
        bytes_, "JPEG", quality=int(rng.integers(40, 95))
    )
    return bytes_.getvalue()


def _rgb(text):
    return tuple(bytes.fromhex(text.removeprefix("#")))


def _varied(colour, rng, spread):
    """Returns a colour that is a little lighter or darker, and of a slightly other tint."""
    change = rng.normal(0, spread) + rng.normal(0, spread / 4, 3)
    return tuple(np.clip(colour + change, 0, 255).astype(int).tolist())


def _mixed(one, other, share):
    """Returns what lies between two colours or points, `share` of the way."""
    mixed = [a + (b - a) * share for a, b in zip(one, other, strict=True)]
    return tuple(round(value) for value in mixed)
