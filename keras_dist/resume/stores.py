"""Where generations are written to and read from while a model trains."""

import contextlib
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_dist import errors, runtime
from keras_dist.resume import format, state, variables
from keras_dist.resume.format import REMEDY, SHARED, Writer, number_of
from keras_dist.resume.memory import MemoryCopies
from keras_dist.resume.read import Contents, newest_of_all
from keras_dist.resume.tensor_file import Tensor
from keras_dist.resume.variables import Piece, Stage, pieces_of_rank, whole_tensors
from keras_dist.storage.root_action import RetryPolicy, on_all, on_root
from keras_dist.training.rank_exchanges import allgather_object
from keras_dist.training.replicas import (
    average_accumulated,
    broadcast_state,
    build_optimizers_alike,
    restore_accumulated,
)
from keras_dist.training.sharded_state import gathered

#: remedy of errors about files that cannot be written
NEEDS_ROOM = "Choose a directory that the root can write to, with enough free space."
WHOLE = "The checkpoint is whole and stays, and training continues. Repair the file system."

# What a generation holds besides variables: what the manifest says, and `state.read` of it.
Found = tuple[Mapping[str, Any], list[state.Packed]]
Moment = tuple[int, int]  # epoch and step
AddStates = Callable[[dict[str, Any], dict[str, np.ndarray]], None]


class Store:
    """The generations of a directory. Methods are collective and block."""

    def __init__(
        self,
        directory: pathlib.Path,
        root_rank: int,
        *,
        by_all: bool,
        keep: int = 2,
        restores: bool = True,
        asynchronous: bool = False,
        memory: bool = False,
    ):
        self._directory, self.root_rank, self.by_all = directory, root_rank, by_all
        self._keep, self._restores, self._asynchronous = keep, restores, asynchronous
        self._remedy = SHARED if by_all else NEEDS_ROOM
        self._copies = MemoryCopies(directory, root_rank, memory)
        self._stage, self._retry_policy = Stage(), RetryPolicy()
        self._contents: Contents | None = None  # what is found
        self._previous: int | None = None  # number of the newest that is known undamaged
        self._number = 0  # of the next generation
        # What is being written: its moment, and the number of parts.
        self._writing: tuple[Writer | None, Moment, int] | None = None
        self.written: Moment | None = None  # of the newest generation

    def find(self) -> bool:
        """Returns whether there is a generation to resume from."""
        self.settle()
        self._await_earlier()
        if not self._restores:
            self._contents = None
        elif self.by_all:
            self._contents = newest_of_all(self._directory, self.root_rank)
        else:
            find = functools.partial(self._copies.newest, self._copies.find())
            self._contents = self._ask_root(find, "to find the backup in", REMEDY)
        if self._contents is not None:
            self._previous = self._copies.number = number_of(self._contents.generation.path)
        return self._contents is not None

    def _await_earlier(self) -> None:
        """Waits for writes of an earlier `fit` of this process, which has raised."""
        writers = Writer.running_in(self._directory)
        for writer in writers:
            writer.wait_for_part()
        mine = Writer.newest_part.get(self._directory)
        everyone = set(allgather_object(mine, "the earlier checkpoints"))
        for writer in writers:
            is_whole = not self.by_all or everyone == {writer.number}
            failure = writer.finish(is_whole)
            if failure is not None and self._is_root():
                self._retry_policy.log(failure, f"to write a checkpoint in {self._directory}")

    def read(self, model: keras.Model) -> Found | None:
        """Restores the model; returns what else was found, or `None`: nothing."""
        if (contents := self._contents) is None:
            return None

        def read() -> Found:
            variables.restore(model, contents, self._is_root(), alone=not self.by_all)
            return contents.about, state.read(contents.about, contents.others())

        if self.by_all:
            found: list[Found] = []
            on_all(lambda: found.append(read()), "the reading of a checkpoint")
        else:
            found = [self._ask_root(read, "to restore the backup in", REMEDY)]
            build_optimizers_alike(model)
            broadcast_state(model, self.root_rank)
        restore_accumulated(model, self.root_rank, bool(contents.about.get("accumulated")))
        return found[0]

    def begin(self, model: keras.Model, equal: Sequence[Any]) -> None:
        """Makes room for copies of what this rank writes, see `write`."""
        if self._asynchronous:
            self._stage.reserve(self._pieces(variables.describe(model, {}), equal))

    def begin_epoch(self) -> None:
        """Shows other jobs that this one is alive. Not collective."""
        self._copies.touch()

    def write(
        self,
        model: keras.Model,
        equal: Sequence[Any],
        moment: Moment,
        about: dict[str, Any],
        add_states: AddStates,
    ) -> None:
        """Writes a generation, or starts to. If that is not possible, the root logs why."""
        self.settle()
        number, has_begun = self._ask_root(self._begin, "to begin a checkpoint in", self._remedy)
        if number is None:
            return
        about["accumulated"] = average_accumulated(model)
        held, self._number = variables.describe(model, about), number
        with contextlib.nullcontext() if self.by_all else gathered(model, self.root_rank):
            tensors = self._tensors(held, equal)
            if self._is_root():
                arrays = variables.others_of(model, about)
                add_states(about, arrays)
                # Copies: callbacks may change their arrays during the write.
                tensors += [Tensor(n, "uint8", each.copy().data) for n, each in arrays.items()]
            self._copies.write(number, tensors, about)
            place = (runtime.fit_rank(), runtime.fit_size()) if self.by_all else (0, 1)
            writer = None
            if has_begun and (self.by_all or self._is_root()):
                manifest = about if self._is_root() else None
                where = self._directory, number, place
                writer = Writer(*where, tensors, manifest, self._keep, self._previous)
            self._writing = (writer, moment, place[1]) if has_begun else None
            if not self._asynchronous:
                self.settle()

    def _begin(self) -> tuple[int | None, bool]:
        """Returns the number of a new generation, and whether it could be begun on the disk."""
        number, has_begun = self._copies.next_number(), False
        with self._retry_policy.attempt(f"to begin a checkpoint in {self._directory}"):
            number, has_begun = format.begin(self._directory, number), True
        return number, has_begun

    def settle(self) -> None:
        """Waits until the last generation is whole."""
        if self._writing is None:
            return
        (writer, moment, parts), self._writing = self._writing, None
        mine = None if writer is None else writer.wait_for_part()
        failures = allgather_object(mine, "the parts of a checkpoint")
        conclude = functools.partial(self._conclude, writer, parts, failures)
        is_whole = self._ask_root(conclude, "to write", self._remedy)
        if writer is not None:
            writer.finish(are_whole=True)
        if is_whole:
            self.written, self._previous = moment, self._number
            self._retry_policy.succeed()

    def end(self) -> None:
        """Ends a fit: waits until the last generation is whole, and frees memory."""
        self.settle()
        self._stage.release()
        self._copies.remove()

    def remove(self) -> None:
        """Removes all generations."""
        remove = functools.partial(format.remove, self._directory)
        self._ask_root(remove, "to remove the backup in", "Remove it by hand.")

    def _conclude(
        self, writer: Writer | None, parts: int, failures: Sequence[OSError | None]
    ) -> bool:
        """Waits for the manifest, on the root; returns whether the generation is whole."""
        failed = {rank: each for rank, each in enumerate(failures) if each is not None}
        lost = parts - runtime.fit_size() if self.by_all else int(writer is None)
        who = f"rank {min(failed)} to write its part" if failed else "to write the manifest"
        expected = f"{who} of a checkpoint in {self._directory}"
        is_complete = not failed and not lost
        own = None if writer is None else writer.finish(is_complete)
        failure = next(iter(failed.values()), own)
        is_whole = writer is not None and writer.is_whole()
        if lost and not is_whole:
            # The root may be another rank now, whose host may not see a manifest of the dead one
            # yet: the next manifest removes the parts.
            text = f"{lost} of {parts} ranks have died during the write"
            self._retry_policy.log(errors.CheckpointError(text), expected)
            return False
        if failure is None:
            return True
        if is_whole:  # what failed came after the manifest
            self._retry_policy.log(failure, expected, WHOLE)
            return True
        format.discard(self._directory, self._number)
        self._retry_policy.judge(failure, expected)
        return False

    def _tensors(self, held: Sequence[Any], equal: Sequence[Any]) -> list[Tensor]:
        """Returns the variables that this rank writes."""
        if not self.by_all:
            return whole_tensors(held) if self._is_root() else []
        return self._stage.tensors(self._pieces(held, equal), self._asynchronous)

    def _pieces(self, held: Sequence[Any], equal: Sequence[Any]) -> list[Piece]:
        place = runtime.fit_rank(), runtime.fit_size()
        return pieces_of_rank(held, *place, {id(each) for each in equal}, self._is_root())

    def _is_root(self) -> bool:
        return runtime.rank() == self.root_rank

    def _ask_root(self, work: Any, what: str, remedy: str) -> Any:
        expected = f"{what} {self._directory}"
        return on_root(self.root_rank, what, work, errors.CheckpointError, expected, remedy)
