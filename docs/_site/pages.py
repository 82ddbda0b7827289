"""Makes the site of the repository's own pages: README.md is the front page.

Links are written as they hold in the repository. What the pages link to comes along: README files
and sources of examples, CONTRIBUTING.md.
"""

import os
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
FRONT = ROOT / "README.md"
LINK = re.compile(r"(?<=\]\()(?!\w+:|[#/])[^)#\s]+")


def on_files(files, config):
    """Adds the front page, and what is linked to."""
    waiting = [FRONT, *(Path(page.abs_src_path) for page in files.documentation_pages())]
    for source in waiting:
        address = _address(source)
        if address not in files.src_uris:
            files.append(File.generated(config, address, abs_src_path=str(source)))
        if source.suffix == ".md":
            waiting.extend(target for target in _targets(source) if target not in waiting)
    return files


def on_page_markdown(markdown, page, **_):
    """Turns links that hold in the repository into those that hold on the site."""
    source = Path(page.file.abs_src_path)

    def on_site(link):
        target = _target(source, link[0])
        return link[0] if target is None else _between(_address(source), _address(target))

    return LINK.sub(on_site, markdown)


def _targets(source):
    found = (_target(source, link) for link in LINK.findall(source.read_text()))
    return [target for target in found if target is not None]


def _target(source, link):
    """Returns the file of the repository that a link is about, if it is one."""
    path = Path(os.path.normpath(source.parent / link))
    return path if path.is_file() and path.is_relative_to(ROOT) else None


def _address(path):
    """Returns where a file of the repository is on the site."""
    if path == FRONT:
        return "index.md"
    docs = ROOT / "docs"
    return path.relative_to(docs if path.is_relative_to(docs) else ROOT).as_posix()


def _between(address, target):
    return Path(os.path.relpath(target, Path(address).parent)).as_posix()
