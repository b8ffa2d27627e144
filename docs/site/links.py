"""Links of Markdown files to folders of the repository: on the site they lead to the page of the folder,
or of the next one above it that has a page.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Container

_LINK = re.compile(r"\[([^\[\]]*)\]\(([^)#\s:]+)\)")
#: The page of a folder without a README of its own.
_PAGES = {"docs": "docs/index"}


def of_folders(text: str, page: str, folders: Container[str], pages: Collection[str]) -> str:
    """Give the text of a page with its links to ``folders`` leading to ``pages``, or being no links."""
    here = posixpath.dirname(page)

    def led(found: re.Match[str]) -> str:
        folder = posixpath.normpath(posixpath.join(here, found[2]))
        if folder not in folders:
            return found[0]
        target = _page_of(folder, pages)
        if target in {"", page}:
            return found[1]
        return f"[{found[1]}]({posixpath.relpath(target, here or '.')}.md)"

    return _LINK.sub(led, text)


def _page_of(folder: str, pages: Collection[str]) -> str:
    while folder:
        page = _PAGES.get(folder, f"{folder}/README")
        if page in pages:
            return page
        folder = posixpath.dirname(folder)
    return ""
