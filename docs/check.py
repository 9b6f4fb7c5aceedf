"""Checks the Markdown files against the repository: links, names of the package, imports in code blocks.

Run by `make docs` and by the tests. Prints what is wrong, one line each; the exit status is their number.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "lightning_resilience"
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_NAME = re.compile(rf"\b{PACKAGE}(?:\.[A-Za-z_]\w*)+")
_PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def markdown_files(root: Path) -> list[Path]:
    """The Markdown files that a reader of the repository sees."""
    folders = [root, root / "docs", *(path for path in (root / "examples").rglob("*") if path.is_dir())]
    return sorted(path for folder in folders for path in folder.glob("*.md"))


def problems(root: Path = ROOT) -> list[str]:
    """Everything wrong in any of the files; empty when all is well."""
    return [f"{path.relative_to(root)}: {text}" for path in markdown_files(root) for text in file_problems(path)]


def file_problems(path: Path) -> Iterator[str]:
    """What is wrong in one file."""
    text = path.read_text()
    for link in broken_links(text, path):
        yield f"the link {link} leads nowhere"
    for name in sorted(set(_NAME.findall(text))):
        if not resolves(name) and not (ROOT / name).exists():
            yield f"there is no {name}"
    for block in _PYTHON.findall(text):
        yield from block_problems(block)


def broken_links(text: str, path: Path) -> Iterator[str]:
    """Relative links of the file at `path` whose file or heading does not exist."""
    for link in _LINK.findall(_CODE.sub("", text)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, heading = link.partition("#")
        target = path.parent / name if name else path
        if not target.exists() or (heading and heading not in headings(target)):
            yield link


def headings(path: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a file."""
    lines = re.findall(r"^#+ (.*)$", _CODE.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


def resolves(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        return _has(found, parts[length:])
    return False


def _has(found: object, attributes: list[str]) -> bool:
    for attribute in attributes:
        try:
            found = getattr(found, attribute)
        except (AttributeError, ModuleNotFoundError):
            return False
    return True


def block_problems(block: str) -> Iterator[str]:
    """A Python block must parse, and its imports must exist."""
    try:
        tree = ast.parse(block)
    except SyntaxError as error:
        yield f"a Python block does not parse: {error}"
        return
    for name in imported_names(tree):
        if not resolves(name):
            yield f"a Python block imports {name}, which does not exist"


def imported_names(tree: ast.Module) -> Iterator[str]:
    """Dotted names of everything that the code imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def main() -> int:
    found = problems()
    print("\n".join(found) or "docs: every link, name and import exists")
    return min(len(found), 100)


if __name__ == "__main__":
    sys.exit(main())
