"""`python -m keras_dist.launch.cli` runs `keras-dist` with a certain Python."""

import sys

from keras_dist.launch.cli import main

sys.exit(main())
