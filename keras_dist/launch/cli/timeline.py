"""`keras-dist timeline`: summarizes the timeline of a job."""

import argparse
from typing import Any

from keras_dist import errors


def add_to(commands: Any) -> None:
    """Adds the command to the subparsers."""
    parser = commands.add_parser(
        "timeline",
        description="Summarizes the time of a job from its timeline (KERAS_DIST_TIMELINE), and "
        "merges the recordings of the ranks if the job was killed.",
    )
    parser.set_defaults(act=_summarise)
    parser.add_argument("files", nargs="+", metavar="FILE", help="timeline of a job")
    parser.add_argument("--html", metavar="FILE", help="write the tables to an HTML page")
    parser.add_argument("--png", metavar="FILE", help="draw a figure (requires matplotlib)")


def _summarise(options: argparse.Namespace) -> int:
    from keras_dist.monitor.timeline.summary import summarise

    summaries = [(path, summarise(path)) for path in options.files]
    try:
        from keras_dist.monitor.timeline.figure import save_png
        from keras_dist.monitor.timeline.tables import print_report, save_html

        print_report(summaries)
        if options.html:
            save_html(summaries, options.html)
        if options.png:
            save_png(summaries, options.png)
    except (OSError, ImportError) as error:
        remedy = (
            "Pass another file, or install the requirements: pip install 'keras_dist[timeline]'"
        )
        expected = "to print the timeline, and to write the files of --html and --png"
        raise errors.ArgumentError("[keras-dist timeline]", expected, str(error), remedy) from None
    return 0
