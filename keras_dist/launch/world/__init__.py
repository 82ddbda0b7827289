"""Ranks in processes that others have started, such as the workers of Ray, Dask or Spark.

The driver runs a `WorldServer`. Each worker calls `join_world` and becomes a rank. The server
speaks PMI-1, the protocol by which MPICH asks its launcher for the other ranks.
"""

from keras_dist.launch.world.member import join_world
from keras_dist.launch.world.world_server import WorldServer

__all__ = ["WorldServer", "join_world"]
