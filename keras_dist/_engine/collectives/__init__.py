"""The collectives: operations that every rank of a communicator calls."""

from keras_dist._engine.collectives import on_device
from keras_dist._engine.collectives.adasum import adasum, check_power_of_two
from keras_dist._engine.collectives.allgather import allgather
from keras_dist._engine.collectives.allgather import grouped_allgather as _grouped_allgather
from keras_dist._engine.collectives.allreduce import ListKey, allreduce
from keras_dist._engine.collectives.broadcast import (
    allgather_object,
    broadcast_into,
    broadcast_object,
)
from keras_dist._engine.collectives.broadcast import broadcast as _broadcast
from keras_dist._engine.collectives.join import compare_gradients, join_all, wait_for_end
from keras_dist._engine.collectives.on_device import rows_through
from keras_dist._engine.collectives.rendezvous import (
    barrier,
    raise_on_all,
    rendezvous_count,
    report_error,
)
from keras_dist._engine.collectives.rows import alltoall
from keras_dist._engine.collectives.rows import reducescatter as _reducescatter
from keras_dist._engine.collectives.slices import reduce_slices as _reduce_slices

broadcast = on_device.through(_broadcast, on_device.broadcast)
grouped_allgather = on_device.through(_grouped_allgather, on_device.allgather)
reduce_slices = rows_through(_reduce_slices)
reducescatter = on_device.through(_reducescatter, on_device.reducescatter)
