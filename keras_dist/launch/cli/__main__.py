"""`python -m keras_dist.launch.cli` is `keras-dist`, for the Python that is named."""

import sys

from keras_dist.launch.cli import main

sys.exit(main())
