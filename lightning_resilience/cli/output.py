"""What people see: tables and progress, in colour where the terminal and `rich` allow, and plain text elsewhere."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_LONG = ("name", "tensor")  # columns that may be broken over lines
_UNITS = ("B", "kB", "MB", "GB", "TB")


def show_json(value: Any) -> None:
    """For machines: one JSON object."""
    print(json.dumps(value, indent=2))


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
    """Rows under headings.

    Args:
        columns: The headings.
        rows: A text for each column.
        right: Headings of the columns to align on the right.
    """
    rows = [[printable(text) for text in row] for row in rows]
    if _has_rich() and sys.stdout.isatty():
        _show_rich_table(columns, rows, right)
        return
    widths = [max(len(row[index]) for row in (columns, *rows)) for index in range(len(columns))]
    for row in (columns, *rows):
        cells = [
            text.rjust(width) if heading in right else text.ljust(width)
            for text, width, heading in zip(row, widths, columns, strict=True)
        ]
        print("  ".join(cells).rstrip())


def printable(text: str) -> str:
    """The text without what could command a terminal: names in a checkpoint are somebody else's."""
    return "".join(letter if letter.isprintable() else "�" for letter in text)


def say(text: str) -> None:
    """A line for people."""
    print(printable(text))


def _show_rich_table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in columns:
        table.add_column(
            heading, justify="right" if heading in right else "left", overflow="fold", no_wrap=heading not in _LONG
        )
    for row in rows:
        table.add_row(*(Text(text, _style(text)) for text in row))
    Console().print(table)


def _style(text: str) -> str:
    word = text.partition(" ")[0].partition(",")[0]
    return {"committed": "green", "whole": "green", "damaged": "red", "DAMAGED": "red", "unfinished": "yellow"}.get(
        word, ""
    )


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on the terminal while the block runs; nothing elsewhere.

    Args:
        what: What is being done.
        total: How many bytes there are.

    Yields:
        To be told how many bytes more are done; any thread may.
    """
    if not sys.stderr.isatty() or total == 0:
        yield lambda count: None
    elif _has_rich():
        with _rich_progress(what, total) as advance:
            yield advance
    else:
        bar = _Bar(what, total)
        try:
            yield bar.advance
        finally:
            bar.end()


@contextlib.contextmanager
def _rich_progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


class _Bar:
    """Percents on one line of stderr."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, total, 0
        self._lock = threading.Lock()
        self._shown_at = 0.0

    def advance(self, count: int) -> None:
        with self._lock:
            self._done += count
            if (now := time.monotonic()) - self._shown_at > 0.1:
                self._shown_at = now
                share = min(1.0, self._done / self._total)
                print(f"\r{self._what} {share:4.0%} of {size(self._total)}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def confirm(question: str) -> bool:
    """Ask whoever sits at the terminal."""
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


def is_terminal() -> bool:
    """Whether somebody is there to be asked."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def size(count: int) -> str:
    """Bytes for people: 1.5 GB."""
    value = float(count)
    for unit in _UNITS:
        if value < 999.5 or unit == _UNITS[-1]:
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" or value >= 99.5 else f"{value:.1f} {unit}"


def when(created_ns: int) -> str:
    """Local time, to the second."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(created_ns / 1e9))


def _has_rich() -> bool:
    return importlib.util.find_spec("rich") is not None
