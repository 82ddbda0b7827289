"""What the scripts' parsers share."""

import argparse


def positive(text):
    """Returns a whole number of 1 or more."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)
