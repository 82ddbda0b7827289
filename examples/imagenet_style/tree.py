"""A tree of JPEG files and XML boxes as ImageNet's: read, or drawn where there is none."""

import pathlib
import xml.etree.ElementTree

import numpy as np
import tensorflow as tf
from PIL import Image, ImageDraw

WHOLE = (0.0, 0.0, 1.0, 1.0)


def images_in(directory):
    """Returns the paths of all images of a tree `<class>/<name>.JPEG`, and its classes."""
    paths = sorted(str(path) for path in pathlib.Path(directory).glob("*/*.JPEG"))
    return paths, sorted({pathlib.Path(path).parent.name for path in paths})


def box_of(path, boxes):
    """Returns top, left, bottom and right of the first object, as parts of height and width.

    Args:
        path: that of the image, as bytes.
        boxes: the directory of `<class>/<name>.xml`; None where there is none.
    """
    if boxes is None:
        return np.array(WHOLE, "float32")
    path = pathlib.Path(path.decode())
    file = pathlib.Path(boxes) / path.parent.name / f"{path.stem}.xml"
    if not file.exists():  # not every image has one
        return np.array(WHOLE, "float32")
    tree = xml.etree.ElementTree.parse(file).getroot()
    width, height = (float(tree.findtext(f"size/{name}")) for name in ("width", "height"))
    edges = {name: float(tree.findtext(f"object/bndbox/{name}")) for name in EDGES}
    box = [edges["ymin"] / height, edges["xmin"] / width]
    box += [edges["ymax"] / height, edges["xmax"] / width]
    box = np.clip(np.array(box, "float32"), 0, 1)
    return box if box[0] < box[2] and box[1] < box[3] else np.array(WHOLE, "float32")


EDGES = ("ymin", "xmin", "ymax", "xmax")


def draw(directory, boxes, classes=4, images=16, side=96, seed=0):
    """Draws a tree: each class has a shape of its own colour somewhere on noise, and its box."""
    random = np.random.default_rng(seed)
    for number in range(classes):
        name = f"n{number:08}"
        (directory / name).mkdir(parents=True)
        (boxes / name).mkdir(parents=True)
        colour = tuple(int(255 * part) for part in np.eye(3)[number % 3] * 0.8 + 0.1)
        for image in range(images):
            pixels = random.integers(0, 255, (side, side, 3), "uint8")
            canvas = Image.fromarray(pixels)
            size = int(random.integers(side // 3, 2 * side // 3))
            x, y = (int(place) for place in random.integers(0, side - size, 2))
            shape = ImageDraw.Draw(canvas)
            draw_one = shape.ellipse if number // 3 % 2 else shape.rectangle
            draw_one((x, y, x + size, y + size), fill=colour)
            canvas.save(directory / name / f"{name}_{image}.JPEG", "JPEG")
            (boxes / name / f"{name}_{image}.xml").write_text(
                f"<annotation><size><width>{side}</width><height>{side}</height></size>"
                f"<object><name>{name}</name><bndbox><xmin>{x}</xmin><ymin>{y}</ymin>"
                f"<xmax>{x + size}</xmax><ymax>{y + size}</ymax></bndbox></object></annotation>"
            )


def reader(classes, boxes, side, training, seed=0):
    """Returns what `shard` wants: a function from paths to a tf.data pipeline of samples.

    Args:
        classes: the classes in the order of their numbers.
        boxes: the directory of the boxes; None where there is none.
        side: height and width of what comes out, in pixels.
        training: whether to shuffle, crop and flip, else the middle is taken.
        seed: for the order. Defaults to 0.
    """
    number_of = {name: number for number, name in enumerate(classes)}

    def read(paths):
        labels = [number_of[pathlib.Path(path).parent.name] for path in paths]
        samples = tf.data.Dataset.from_tensor_slices((paths, np.array(labels, "int32")))
        if training:  # names are shuffled, which are small, and all of them
            samples = samples.shuffle(len(paths), seed, reshuffle_each_iteration=True)
        return samples.map(decoder(boxes, side, training), tf.data.AUTOTUNE, deterministic=True)

    return read


def decoder(boxes, side, training):
    """Returns the function that makes an image of a path, for `Dataset.map`."""

    def decode(path, label):
        jpeg = tf.io.read_file(path)
        shape = tf.io.extract_jpeg_shape(jpeg)
        if training:
            box = tf.numpy_function(lambda name: box_of(name, boxes), [path], tf.float32)
            # A crop that holds a part of the object, of 8 to 100 % of the image.
            begin, size, _ = tf.image.sample_distorted_bounding_box(
                shape,
                tf.reshape(box, (1, 1, 4)),
                min_object_covered=0.1,
                area_range=(0.08, 1.0),
                aspect_ratio_range=(3 / 4, 4 / 3),
                use_image_if_no_bounding_boxes=True,
            )
        else:
            edge = tf.cast(0.875 * tf.cast(tf.minimum(shape[0], shape[1]), tf.float32), tf.int32)
            begin = tf.stack([(shape[0] - edge) // 2, (shape[1] - edge) // 2, 0])
            size = tf.stack([edge, edge, -1])
        window = tf.concat([begin[:2], size[:2]], 0)
        # Only that part of the file is decoded.
        image = tf.image.decode_and_crop_jpeg(jpeg, window, channels=3)
        image = tf.image.resize(image, (side, side))
        if training:
            image = tf.image.random_flip_left_right(image)
        return tf.ensure_shape(image / 127.5 - 1.0, (side, side, 3)), label

    return decode
