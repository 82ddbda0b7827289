"""Made data: potentials on a line, and the energy of an electron's ground state in each."""

import h5py
import numpy as np

GRID = 1024  # points of a potential, so a row has 4 KiB
COARSE = 64  # points on which the energy is computed
AT_ONCE = 4096  # rows that are made and written together


def make_file(path, gigabytes):
    """Writes potentials and energies, in the layout that is read fastest: contiguous.

    Args:
        path: of the HDF5 file; it appears when it is whole.
        gigabytes: its size, about.
    """
    rows = max(64, round(gigabytes * 1e9 / (4 * GRID)))
    random = np.random.default_rng(0)
    unfinished = path.with_suffix(".unfinished")
    potentials, energies = sample(random, min(rows, AT_ONCE))
    with h5py.File(unfinished, "w") as file:
        inputs = file.create_dataset("potential", (rows, GRID), "f4")
        targets = file.create_dataset("energy", (rows, 1), "f4")
        for first in range(0, rows, AT_ONCE):
            count = min(AT_ONCE, rows - first)
            # To solve each anew would take minutes: mirrored and shifted in energy they are new.
            lift = random.uniform(-1, 1, (count, 1)).astype("f4")
            mirror = 1 if (first // AT_ONCE) % 2 else -1
            inputs[first : first + count] = potentials[:count, ::mirror] + lift
            targets[first : first + count] = energies[:count] + lift
    unfinished.rename(path)


def sample(random, count):
    """Returns potentials of a few random wells, and the lowest energy in each."""
    place = np.linspace(-1, 1, GRID, dtype="f4")
    potentials = np.zeros((count, GRID), "f4")
    for _ in range(3):
        depth, middle = random.uniform(0, 4, (count, 1)), random.uniform(-0.6, 0.6, (count, 1))
        width = random.uniform(0.1, 0.4, (count, 1))
        potentials -= (depth * np.exp(-(((place - middle) / width) ** 2))).astype("f4")
    step = 2 / (COARSE - 1)
    kinetic = (2 * np.eye(COARSE) - np.eye(COARSE, k=1) - np.eye(COARSE, k=-1)) / (2 * step**2)
    coarse = potentials[:, :: GRID // COARSE]
    hamiltonians = kinetic + coarse[:, :, None] * np.eye(COARSE)
    return potentials, np.linalg.eigvalsh(hamiltonians)[:, :1].astype("f4")
