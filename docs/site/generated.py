"""Parts of pages that are made of the code when the site is built. Each stands where its marker is, a comment
that nobody sees on a git host. What is made here is Markdown; nothing of it is kept in a file.
"""

from __future__ import annotations

import importlib
import inspect
import re
import typing
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import command_line
import links

if TYPE_CHECKING:
    from sphinx.application import Sphinx

REPOSITORY = Path(__file__).resolve().parents[2]
_MARKER = re.compile(r"<!-- made of the code: ([a-z ]+)(?:, ([\w.]+))? -->")
#: What of an example is shown below its README, and by which language.
_SHOWN = {
    ".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".pbtxt": "text", ".sh": "bash",
}  # fmt: skip


def on_source_read(app: Sphinx, page: str, source: list[str]) -> None:
    """Fill the markers of a page, and add to the pages of examples what lies beside them."""
    source[0] = _MARKER.sub(lambda found: _MAKERS[found[1]](found[2] or ""), source[0])
    source[0] = links.of_folders(source[0], page, _Folders(), app.env.found_docs)
    if page == "examples/README":
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\n*/README\n```\n"
    elif page.startswith("examples/") and page.endswith("/README"):
        source[0] += "\n".join(_files(REPOSITORY / page.removesuffix("/README")))


def on_docstring(
    _app: Sphinx, what: str, _name: str, value: object, _options: object, lines: list[str]
) -> None:
    """Let an asterisk be one, as our docstrings have no markup but ``code``; and a colon of a property, where
    napoleon would look for a type. What a property that is no function of ours says is not ours.
    """
    if isinstance(value, property) and not inspect.isfunction(value.fget):
        lines.clear()
    parts = re.split(r"(``.*?``)", "\n".join(lines), flags=re.DOTALL)
    parts[::2] = [prose.replace("*", r"\*") for prose in parts[::2]]
    if what == "property":
        parts[::2] = [prose.replace(": ", " \N{EN DASH} ") for prose in parts[::2]]
    lines[:] = "".join(parts).split("\n")


def _files(folder: Path) -> Iterator[str]:
    yield "\n\n## Its files\n"
    for path in sorted(folder.rglob("*")):
        language = _SHOWN.get(path.suffix)
        if language is not None and not any(part.startswith((".", "__")) for part in path.parts):
            name = path.relative_to(folder).as_posix()
            yield f"```{{literalinclude}} {name}\n:language: {language}\n:caption: {name}\n```\n"


def public_names(module: str) -> str:
    """Give a module's public names, each with its signature and its docstring."""
    loaded = importlib.import_module(module)
    values = {name: getattr(loaded, name) for name in loaded.__all__}
    shown = {name: value for name, value in values.items() if _home(name, value) in {"", module}}
    entries = "".join(_entry(module, name, value) for name, value in shown.items())
    others = [f"``{name}`` (of ``{_home(name, values[name])}``)" for name in values if name not in shown]
    also = f"Also {', '.join(others)}.\n\n" if others else ""
    return f"```{{eval-rst}}\n.. currentmodule:: {module}\n\n{also}{entries}```\n"


def _home(name: str, value: object) -> str:
    """Give the first of our modules that has this very value under this name."""
    return next((one for one in _MODULES if getattr(importlib.import_module(one), name, None) is value), "")


def _entry(module: str, name: str, value: object) -> str:
    full = f"{module}.{name}"
    if inspect.isclass(value):
        return f".. autoclass:: {full}\n   :members:\n   :inherited-members: {_FOREIGN}\n\n"
    if inspect.isroutine(value):
        return f".. autofunction:: {full}\n\n"
    return f".. py:data:: {full}\n   :value: {_shown(value)}\n\n"


def _shown(value: object) -> str:
    """Give a value as it would be written: an alias of types without the long names of modules."""
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", repr(value)) if typing.get_origin(value) else repr(value)


#: Whose members are not shown: those of Python itself, and of classes that ours are made of.
_FOREIGN = "object,Exception,BaseException,tuple,dict,str,int,float,Enum,NamedTuple,Protocol,BaseModel"

#: Whose names are public, in the order of the page: a name that two have is shown at the first.
_MODULES = ("gpuserve", "gpuserve.typed", "gpuserve.decorators")


class _Folders(Container[str]):
    """The folders of the repository."""

    def __contains__(self, name: object) -> bool:
        return (REPOSITORY / str(name)).is_dir()


_MAKERS: dict[str, Callable[[str], str]] = {
    "command line": lambda _: command_line.page(),
    "public names": public_names,
}
