"""Builds the site in build/site, with warnings as errors, or serves it.

    python docs/_site/website.py
    python docs/_site/website.py serve

The pages are the repository's own: README.md is the front page. Links are written as they hold in
the repository, and turned into those that hold on the site. What pages link to comes along: README
files and sources of examples, CONTRIBUTING.md.
"""

import contextlib
import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FRONT = ROOT / "README.md"
CONFIGURATION = ROOT / "mkdocs.yml"
PAGES = ROOT / "build" / "pages"
# In Markdown, and the addresses of pictures in HTML.
LINK = re.compile(r"""(?:(?<=\]\()|(?<=src=")|(?<=srcset="))(?!\w+:|#)[^)#\s"]+""")
ENTRY = re.compile(r"^ +- .*?([\w./-]+\.md)$", re.MULTILINE)


def main(arguments):
    """Builds or serves the site; returns the exit status."""
    write(PAGES)
    if arguments == ["serve"]:
        return serve()
    for fault in (found := faults()):
        print(fault, file=sys.stderr)
    return 1 if found else build()


def build():
    """Builds the site; returns the exit status."""
    import zensical  # tests of the links run without it

    warned = _Warned()
    logging.basicConfig(handlers=[logging.StreamHandler(), warned])
    try:
        zensical.build(str(CONFIGURATION), {"strict": True, "clean": True})
    except RuntimeError as error:
        sys.exit(str(error))
    return 1 if warned.records else 0


def serve():
    """Serves the site at http://localhost:8000 and follows changes of the pages."""
    with subprocess.Popen([sys.executable, "-m", "zensical", "serve"], cwd=ROOT) as server:
        try:
            while server.poll() is None:
                time.sleep(1)
                with contextlib.suppress(FileNotFoundError):  # while an editor saves a page
                    write(PAGES)
        except KeyboardInterrupt:
            return 0
        finally:
            server.terminate()
    return server.returncode


class _Warned(logging.Handler):
    """Counts warnings of docstrings' readers, which zensical prints and does not count."""

    records = 0

    def emit(self, record):
        self.records += record.levelno >= logging.WARNING


def faults():
    """Returns a message for each link and entry of `nav` without a page, and page without entry."""
    entries = set(ENTRY.findall(CONFIGURATION.read_text()))
    sources = [source for source in _sources() if source.suffix == ".md"]
    addresses = {_address(source) for source in sources}
    return [
        *(fault for source in sources for fault in _broken_links(source)),
        *(f"mkdocs.yml: nav has {name}, which is no page" for name in sorted(entries - addresses)),
        *(f"mkdocs.yml: nav lacks {name}" for name in sorted(addresses - entries)),
    ]


def write(folder):
    """Writes the changed files of the site to a folder, and removes others from it."""
    written = {folder / _address(source): _content(source) for source in _sources()}
    for path, content in written.items():
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    for path in folder.rglob("*"):
        if path.is_file() and path not in written:
            path.unlink()


def _sources():
    """Returns the front page, the files of docs/, and all that these link to."""
    shown = (path for path in DOCS.rglob("*") if Path(__file__).parent not in path.parents)
    found = [FRONT, *(path for path in sorted(shown) if path.is_file())]
    for source in found:
        found.extend(path for path in _links(source).values() if path and path not in found)
    return found


def _content(source):
    """Returns a file as it is on the site."""
    targets = _links(source)

    def on_site(link):
        target = targets[link[0]]
        return _between(_address(source), _address(target)) if target else link[0]

    return LINK.sub(on_site, source.read_text()).encode() if targets else source.read_bytes()


def _broken_links(source):
    return [
        f"{source}: links to {link}, which is no file of the repository"
        for link, target in _links(source).items()
        if target is None
    ]


def _links(source):
    """Returns the file of the repository, or `None`, of each link of a page."""
    links = LINK.findall(source.read_text()) if source.suffix == ".md" else []
    return {link: _target(source, link) for link in links}


def _target(source, link):
    path = Path(os.path.normpath(source.parent / link))
    return path if path.is_file() and path.is_relative_to(ROOT) else None


def _address(path):
    """Returns where a file of the repository is on the site."""
    if path == FRONT:
        return "index.md"
    return path.relative_to(DOCS if path.is_relative_to(DOCS) else ROOT).as_posix()


def _between(address, target):
    return Path(os.path.relpath(target, Path(address).parent)).as_posix()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
