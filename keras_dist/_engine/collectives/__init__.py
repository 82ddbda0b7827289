"""The collectives: operations that every rank of a communicator calls."""

from keras_dist._engine.collectives.adasum import adasum, check_power_of_two
from keras_dist._engine.collectives.allgather import allgather, grouped_allgather
from keras_dist._engine.collectives.allreduce import allreduce
from keras_dist._engine.collectives.alltoall import alltoall
from keras_dist._engine.collectives.barrier import barrier
from keras_dist._engine.collectives.broadcast import broadcast, broadcast_into
from keras_dist._engine.collectives.end_of_script import wait_for_end
from keras_dist._engine.collectives.join import join_all
from keras_dist._engine.collectives.objects import allgather_object, broadcast_object
from keras_dist._engine.collectives.reducescatter import reducescatter
from keras_dist._engine.collectives.rendezvous import raise_on_all, rendezvous_count, report_error
from keras_dist._engine.collectives.slices import reduce_slices

__all__ = [
    "adasum",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_into",
    "broadcast_object",
    "check_power_of_two",
    "grouped_allgather",
    "join_all",
    "raise_on_all",
    "reduce_slices",
    "reducescatter",
    "rendezvous_count",
    "report_error",
    "wait_for_end",
]
