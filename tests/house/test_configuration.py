"""docs/configuration.md lists the environment variables of keras_dist/config.py.

python tests/house/test_configuration.py --write      rewrites the table
python tests/house/test_configuration.py              prints the differences; exits with 1
"""

import difflib
import re
import sys
from pathlib import Path

from keras_dist import config
from keras_dist.runtime.startup import ALIKE

DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"
BEGIN, END = "<!-- made by tests/house/test_configuration.py -->\n", "<!-- end -->\n"
COMMAND = "python tests/house/test_configuration.py --write"


def table():
    """Returns the generated part of the page."""
    rows = ["| variable | default | values | meaning |", "|---|---|---|---|"]
    for variable in config.VARIABLES:
        star = " \\*" if variable.field in ALIKE else ""
        default = f"`{variable.default}`" if variable.default else "empty"
        other = f" `{variable.other_name}` is accepted too." if variable.other_name else ""
        rows.append(
            f"| `{variable.name}`{star} | {default} | {variable.expected} "
            f"| {variable.meaning}{other} |"
        )
    return "".join(f"{row}\n" for row in rows)


def rewritten(page):
    """Returns a page with the current table between the markers."""
    head, _, tail = re.split(f"{BEGIN}|{END}", page)
    return f"{head}{BEGIN}{table()}{END}{tail}"


def main(arguments):
    """Compares or rewrites the page; returns the exit status."""
    found = DOCUMENT.read_text()
    wanted = rewritten(found)
    if arguments == ["--write"]:
        DOCUMENT.write_text(wanted)
    elif found != wanted:
        lines = (text.splitlines(True) for text in (found, wanted))
        sys.stdout.writelines(difflib.unified_diff(*lines, str(DOCUMENT), "config.py", n=0))
        return 1
    return 0


def test_the_page_has_the_variables_of_config():
    assert DOCUMENT.read_text() == rewritten(DOCUMENT.read_text()), f"Write it: {COMMAND}"


def test_a_missing_variable_is_found():
    page = DOCUMENT.read_text()
    row = next(line for line in page.splitlines() if line.startswith("| `KERAS_DIST_REDUCE`"))
    cut = page.replace(f"{row}\n", "")
    assert cut != page
    assert rewritten(cut) == page


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
