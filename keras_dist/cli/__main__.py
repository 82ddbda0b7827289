"""`python -m keras_dist.cli` is `keras-dist`, for the Python that is named."""

import sys

from keras_dist.cli import main

sys.exit(main())
