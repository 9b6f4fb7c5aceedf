"""From samples to figures, the table and the targets. Pure but for the printing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from rich.console import Console
from rich.table import Table

from benchmarks.stall.options import METHODS, Sample

NOT_RUN = "not run"
NOT_INSTALLED = "not installed"


@dataclass(frozen=True)
class Figures:
    """What one method costs; the slowest rank counts for ``stall`` and ``durable``, the mean of ranks for ``lost``.

    Attributes:
        method: Its short name.
        saves: How many were measured.
        first_stall_s: Seconds for which the first save kept the training thread.
        stall_s: The same for the later ones, median.
        max_stall_s: The worst of all.
        stall_cpu_s: Processor time of the training thread in the later ones, median: the stall on idle cores.
        lost_s: Seconds by which steps were slower until the save was durable; median of the later ones.
        cost_s: Stall and that together, median of the later ones.
        first_durable_s: Seconds from the first call until durable.
        durable_s: Median of the later ones.
    """

    method: str
    saves: int
    first_stall_s: float
    stall_s: float
    max_stall_s: float
    stall_cpu_s: float
    lost_s: float
    cost_s: float
    first_durable_s: float
    durable_s: float


@dataclass(frozen=True)
class Target:
    """A promise, and what came out.

    Attributes:
        figure: What is measured.
        bound: What it must be, in words.
        measured: The value in words; empty when the methods it needs were not run.
        met: Whether it is kept.
    """

    figure: str
    bound: str
    measured: str
    met: bool


def lost_seconds(samples: Sequence[Sample]) -> list[float]:
    """How much longer the steps during each save took than steps without a save.

    Args:
        samples: All of one rank, in the order in which they were taken; the undisturbed steps around a save, its
            own and those before the next one, say how long a step takes.
    """
    after = [*samples[1:], *samples[-1:]]
    bases = [median(sample.idle_s + later.idle_s) for sample, later in zip(samples, after, strict=True)]
    return [sum(sample.busy_s) - base * len(sample.busy_s) for sample, base in zip(samples, bases, strict=True)]


def figures(ranks: Sequence[Sequence[Sample]]) -> dict[str, Figures]:
    """Figures by method.

    Args:
        ranks: Samples of each rank, in the order in which they were taken; that is the same on all ranks.
    """
    lost = [mean(values) for values in zip(*map(lost_seconds, ranks), strict=True)]
    saves = [_Save.merge(samples, extra) for samples, extra in zip(zip(*ranks, strict=True), lost, strict=True)]
    names = [name for name in METHODS if any(save.method == name for save in saves)]
    return {name: _figures(name, [save for save in saves if save.method == name]) for name in names}


@dataclass(frozen=True)
class _Save:
    method: str
    stall_s: float
    stall_cpu_s: float
    lost_s: float
    durable_s: float

    @staticmethod
    def merge(samples: Sequence[Sample], lost_s: float) -> _Save:
        return _Save(
            method=samples[0].method,
            stall_s=max(sample.stall_s for sample in samples),
            stall_cpu_s=max(sample.stall_cpu_s for sample in samples),
            lost_s=lost_s,
            durable_s=max(sample.durable_s for sample in samples),
        )


def _figures(name: str, saves: Sequence[_Save]) -> Figures:
    later = saves[1:] or saves
    return Figures(
        method=name,
        saves=len(saves),
        first_stall_s=saves[0].stall_s,
        stall_s=median(save.stall_s for save in later),
        max_stall_s=max(save.stall_s for save in saves),
        stall_cpu_s=median(save.stall_cpu_s for save in later),
        lost_s=median(save.lost_s for save in later),
        cost_s=median(save.stall_s + save.lost_s for save in later),
        first_durable_s=saves[0].durable_s,
        durable_s=median(save.durable_s for save in later),
    )


def best_peer(rows: Mapping[str, Figures]) -> Figures | None:
    """The cheapest of the other asynchronous saves."""
    peers = [row for name, row in rows.items() if METHODS[name].peer]
    return min(peers, key=lambda row: row.cost_s, default=None)


def targets(rows: Mapping[str, Figures], tensors: int) -> list[Target]:
    """The promises of the design, with what was measured.

    Args:
        rows: Figures by method.
        tensors: Number of small tensors, 0 for a realistic state.
    """
    ours = rows.get("ours")
    if ours is None:
        return []
    return _fixed_cost(ours, rows) if tensors else _ratios(ours, rows)


def _fixed_cost(ours: Figures, rows: Mapping[str, Figures]) -> list[Target]:
    copy_s, copy_cpu_s = (rows["memcpy"].stall_s, rows["memcpy"].stall_cpu_s) if "memcpy" in rows else (0.0, 0.0)
    costs = {
        "median": ours.stall_s - copy_s,
        "median of processor time": ours.stall_cpu_s - copy_cpu_s,
        "first save": ours.first_stall_s - copy_s,
    }
    return [
        Target(f"fixed cost of a save besides the copy, {which}", "≤ 10 ms", f"{1e3 * cost:.1f} ms", cost <= 0.010)
        for which, cost in costs.items()
    ]


def _ratios(ours: Figures, rows: Mapping[str, Figures]) -> list[Target]:
    peer = best_peer(rows)
    stalls = {name: row.stall_s for name, row in rows.items()}
    writes = {name: row.durable_s for name, row in rows.items()}
    return [
        _at_most("stall / memcpy", 1.15, ours.stall_s, stalls.get("memcpy")),
        _at_most("stall of the first save / memcpy", 1.15, ours.first_stall_s, stalls.get("memcpy")),
        _at_most("stall + slower steps / best peer", 0.5, ours.cost_s, peer.cost_s if peer else None),
        _at_most("stall / dcp.save", 0.1, ours.stall_s, stalls.get("dcp-save")),
        _at_least("raw write + fsync / until durable", 0.8, writes.get("raw"), ours.durable_s),
        _at_least("the same at equal priority", 0.8, writes.get("raw-nice"), ours.durable_s),
    ]


def _at_most(figure: str, bound: float, value: float, base: float | None) -> Target:
    ratio = value / base if base else None
    return Target(figure, f"≤ {bound:g}", _number(ratio), ratio is not None and ratio <= bound)


def _at_least(figure: str, bound: float, value: float | None, base: float) -> Target:
    ratio = value / base if value else None
    return Target(figure, f"≥ {bound:g}", _number(ratio), ratio is not None and ratio >= bound)


def _number(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def print_report(console: Console, rows: Mapping[str, Figures], missing: Mapping[str, str], tensors: int) -> None:
    """The table of methods and the table of targets.

    Args:
        console: Where to.
        rows: Figures by method.
        missing: Why a method has none, by short name.
        tensors: Number of small tensors, 0 for a realistic state.
    """
    console.print(_method_table(rows, missing))
    table = Table("figure", "target", "measured", "", title="targets of lightning_resilience")
    for target in targets(rows, tensors):
        verdict = "[green]met" if target.met else "[red]missed" if target.measured else NOT_RUN
        table.add_row(target.figure, target.bound, target.measured, verdict)
    console.print(table)


_COLUMNS: dict[str, Callable[[Figures], str]] = {
    "stall\nfirst": lambda row: f"{1e3 * row.first_stall_s:.1f}",
    "stall\nmedian": lambda row: f"{1e3 * row.stall_s:.1f}",
    "stall\nmax": lambda row: f"{1e3 * row.max_stall_s:.1f}",
    "of it\nCPU": lambda row: f"{1e3 * row.stall_cpu_s:.1f}",
    "slower\nsteps": lambda row: f"{1e3 * row.lost_s:.0f}",
    "stall +\nslower": lambda row: f"{1e3 * row.cost_s:.0f}",
    "durable\nfirst, s": lambda row: f"{row.first_durable_s:.2f}",
    "durable\nmedian, s": lambda row: f"{row.durable_s:.2f}",
}


def _method_table(rows: Mapping[str, Figures], missing: Mapping[str, str]) -> Table:
    table = Table(title="milliseconds per save unless said otherwise")
    table.add_column("method", no_wrap=True)
    for heading in (*_COLUMNS, "stall /\nmemcpy", "stall + slower\n/ best peer"):
        table.add_column(heading, justify="right")
    peer = best_peer(rows)
    for name, facts in METHODS.items():
        if row := rows.get(name):
            copy = _number(row.stall_s / rows["memcpy"].stall_s) if "memcpy" in rows else ""
            cost = _number(row.cost_s / peer.cost_s) if peer else ""
            table.add_row(facts.label, *(show(row) for show in _COLUMNS.values()), copy, cost)
        else:
            table.add_row(facts.label, missing.get(name, NOT_RUN), style="dim")
    return table
