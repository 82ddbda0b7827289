"""Processes that write backups or parts of checkpoints, without a framework, are killed."""

import os
import random
import shutil
import signal
import time
import traceback
from pathlib import Path

import numpy as np
from faults import die_at_call, fault, run

from keras_dist.checkpoints.writer import Writer
from keras_dist.storage import generations, versioned_backups
from keras_dist.storage.tensor_file import Tensor, read_header, read_into

folder, RANKS, NBYTES = Path(os.environ["FOLDER"]), 2, 200_000


def write_backups(acknowledge: int) -> None:
    whole, number = next(iter(versioned_backups.newest_first(folder)), None), 0
    while True:
        number += 1
        values = np.full(100_000, number)
        whole = versioned_backups.add(folder, lambda file: np.savez(file, values), whole)  # noqa: B023
        os.write(acknowledge, number.to_bytes(4, "little"))


def backups() -> None:
    draw, within = random.Random(7), []
    fault()
    for _ in range(40):
        shutil.rmtree(folder, ignore_errors=True)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            write_backups(write)
        os.close(write)
        last = int.from_bytes(os.read(read, 4), "little")
        time.sleep(draw.uniform(0.0, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while told := os.read(read, 4):
            last = int.from_bytes(told, "little")
        os.close(read)
        within.append(any(path.name.startswith(".") for path in folder.iterdir()))
        found = versioned_backups.newest_first(folder)
        assert all(versioned_backups.is_intact(path) for path in found), found
        with np.load(found[0], allow_pickle=False) as file:
            [number] = map(int, set(file["arr_0"]))
        assert number in (last, last + 1), (number, last)
        # What was left of it goes when the next one is written.
        whole = versioned_backups.add(folder, lambda file: np.savez(file), found[0])
        assert {path.name for path in folder.iterdir()} == {whole.name, found[0].name}
    print("killed within a write:", sum(within))
    assert sum(within) > 10


def write_parts(rank: int, read: int, write: int) -> None:
    """Writes generations as a rank does; the root tells the others the number of each."""
    writer = Writer(folder, keep=2)
    while True:
        if rank == 0:
            number = generations.begin(folder)
            os.write(write, number.to_bytes(4, "little") * (RANKS - 1))
        else:
            number = int.from_bytes(os.read(read, 4), "little")
        data = memoryview(number.to_bytes(4, "little") * (NBYTES // 4))
        about = {"number": number} if rank == 0 else None
        writer.start(number, (rank, RANKS), [Tensor("0:0", "int32", data)], about)
        assert writer.wait_for_part() is None
        assert writer.finish(are_whole=True) is None


def check() -> int:
    """Returns the number of the newest generation, which is whole."""
    read = [generations.read(path) for path in generations.newest_first(folder)]
    found = [generation for generation in read if generation is not None]
    assert found and len(found) == len(read)
    for generation in found:
        assert generations.find_damage(generation, range(RANKS)) == []
        for path in generation.parts:
            content = bytearray(NBYTES)
            read_into(path, read_header(path)["0:0"].offset, memoryview(content))
            assert content == generation.about["number"].to_bytes(4, "little") * (NBYTES // 4)
    return int(found[0].about["number"])


def parts() -> None:
    draw, before, within = random.Random(11), 0, 0
    fault()
    for turn in range(40):
        # After 30 calls the root has committed two generations, and another rank has written three.
        pipe, children, first, last = os.pipe(), [], turn % RANKS, draw.randrange(30, 60)
        for rank in range(RANKS):
            child = os.fork()
            if child == 0:
                try:
                    if rank == first:
                        die_at_call(last)
                    write_parts(rank, *pipe)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
            children.append(child)
        assert os.waitpid(children[first], 0)[1] == signal.SIGKILL
        time.sleep(draw.uniform(0.0, 0.005))
        for child in children[:first] + children[first + 1 :]:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        for end in pipe:
            os.close(end)
        newest = check()
        assert newest > before
        before = newest
        within += len([*folder.glob("0*")]) > 2 * len(generations.newest_first(folder))
    print("killed within a write:", within)
    assert within


run(globals())
