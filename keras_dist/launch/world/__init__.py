"""Ranks in processes that others have started, such as the workers of Ray. See decision 57."""

from keras_dist.launch.world.member import join_world
from keras_dist.launch.world.world_server import WorldServer

__all__ = ["WorldServer", "join_world"]
