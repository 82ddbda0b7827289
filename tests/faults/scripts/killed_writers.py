"""Processes that write backups or parts of checkpoints, without a framework, are killed."""

import os
import random
import shutil
import signal
import time
import traceback
from pathlib import Path

from faults import die_at_call, fault, run

from keras_dist.resume import format
from keras_dist.resume.format import Writer
from keras_dist.resume.read import bytes_by_name
from keras_dist.resume.tensor_file import Tensor, read_header, read_into

folder, RANKS, NBYTES = Path(os.environ["FOLDER"]), 2, 200_000


def tensor(number: int) -> Tensor:
    return Tensor("0:0", "int32", memoryview(number.to_bytes(4, "little") * (NBYTES // 4)))


def write_backups(acknowledge: int) -> None:
    previous, number = None, 0
    while True:
        number += 1
        path = format.write(folder, [tensor(number)], {"number": number}, previous)
        previous = format.number_of(path)
        os.write(acknowledge, number.to_bytes(4, "little"))


def is_whole(path: Path) -> bool:
    found = format.read(path)
    return found is not None and not format.find_damage(found)


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
        found = format.newest_first(folder)
        within.append(len([*folder.iterdir()]) > 2 * len(found))
        assert all(map(is_whole, found)), found
        [part] = sorted((folder / found[0].name.partition("-")[0]).glob("0*"))
        number = int(bytes_by_name(part)["0:0"].view("int32")[0])
        assert number in (last, last + 1), (number, last)
        # What was left of it goes when the next one is written.
        format.write(folder, [tensor(0)], {}, format.number_of(found[0]))
        assert len([*folder.iterdir()]) == 4
    print("killed within a write:", sum(within))
    assert sum(within) > 10


def write_parts(rank: int, read: int, write: int) -> None:
    """Writes generations as a rank does; the root tells the others the number of each."""
    while True:
        if rank == 0:
            number = format.begin(folder)
            os.write(write, number.to_bytes(4, "little") * (RANKS - 1))
        else:
            number = int.from_bytes(os.read(read, 4), "little")
        about = {"number": number} if rank == 0 else None
        writer = Writer(folder, number, (rank, RANKS), [tensor(number)], about, keep=2)
        assert writer.wait_for_part() is None
        assert writer.finish(are_whole=True) is None


def check() -> int:
    """Returns the number of the newest generation, which is whole."""
    read = [format.read(path) for path in format.newest_first(folder)]
    found = [generation for generation in read if generation is not None]
    assert found and len(found) == len(read)
    for generation in found:
        assert format.find_damage(generation, range(RANKS)) == []
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
        within += len([*folder.glob("0*")]) > 2 * len(format.newest_first(folder))
    print("killed within a write:", within)
    assert within


run(globals())
