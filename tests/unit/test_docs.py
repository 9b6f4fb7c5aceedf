"""The documentation names nothing that does not exist, and the check that says so finds what is wrong."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from docs.check import ROOT, block_problems, broken_links, file_problems, headings, problems, resolves
from lightning_resilience import AsyncCheckpointIO, ResilientFSDPStrategy


def test_documentation_is_right() -> None:
    assert problems() == []


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.md"
    path.write_text("# One heading: two words\n\ntext\n\n```sh\n# no heading\n[no](link.md)\n```\n")
    return path


@pytest.mark.parametrize(
    ("link", "broken"),
    [
        ("page.md", False),
        ("#one-heading-two-words", False),
        ("page.md#one-heading-two-words", False),
        ("https://example.org/nothing", False),
        ("other.md", True),
        ("#no-heading", True),
    ],
)
def test_links(page: Path, link: str, broken: bool) -> None:
    assert list(broken_links(f"see [there]({link})", page)) == ([link] if broken else [])


def test_code_blocks_hold_neither_headings_nor_links(page: Path) -> None:
    assert headings(page) == {"one-heading-two-words"}
    assert list(file_problems(page)) == []


@pytest.mark.parametrize(
    ("name", "exists"),
    [
        ("lightning_resilience.errors", True),
        ("lightning_resilience.errors.LoadError", True),
        ("lightning_resilience.errors.NoSuchError", False),
        ("lightning_resilience.nothing", False),
        ("no_such_package.name", False),
    ],
)
def test_names(name: str, exists: bool) -> None:
    assert resolves(name) is exists


@pytest.mark.parametrize(
    ("page", "owner"), [("strategy.md", ResilientFSDPStrategy), ("checkpoints.md", AsyncCheckpointIO)]
)
def test_options_tables_agree_with_the_code(page: str, owner: type) -> None:
    text = (ROOT / "docs" / page).read_text()
    rows = re.findall(r"^\| `(\w+)` \| `(.*)` \|.*\|$", text, re.MULTILINE)
    parameters = inspect.signature(owner).parameters.values()
    assert rows == [(parameter.name, repr(parameter.default)) for parameter in parameters]


def test_python_blocks_must_parse_and_import() -> None:
    assert list(block_problems("from lightning_resilience.errors import LoadError\nimport json")) == []
    assert len(list(block_problems("from lightning_resilience.errors import NoSuchError"))) == 1
    assert len(list(block_problems("this is no Python"))) == 1
