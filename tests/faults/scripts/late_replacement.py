"""A rank spawns a process in place of another, as `runtime.replacement` does; no job is there."""

import json
import sys

from faults import FOLDER, fault
from mpi4py import MPI

# The text may use the names of the module that runs it.
text = "import os, keras_dist; errors = JobDirectory = replacement = 0; "
text += "open(os.environ['FAULT_FOLDER'] + f'/pid-{os.getpid()}', 'w'); "
text += "keras_dist.init(); print('initialized')"
program = json.dumps({"text": text, "arguments": ["-c"]})
arguments = ["-m", "keras_dist.launch.newcomer", str(FOLDER / "none"), ".", program]
spawned = MPI.COMM_WORLD.Spawn(sys.executable, args=arguments, maxprocs=1)
spawned.recv(source=0)
fault()
spawned.Disconnect()
print("disconnected")
