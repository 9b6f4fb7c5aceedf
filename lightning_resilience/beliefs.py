"""What a `ModelCheckpoint` believes to be saved, and what of it is true.

It writes its books when it asks for a save: best model, the k best, last. The checkpoint is committed later, or never.
So there are two versions of the books: what it has in mind, with which it goes on working, and what is shown to
everybody else, which names only what is committed. A save that is not committed is taken out of both, as if it had
never been asked for. Pure values, the same on all ranks; nothing here touches a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_resilience.checkpoint.history import Outcome, Verdict


@dataclass(frozen=True)
class Beliefs:
    """The books.

    Attributes:
        best: Score of each of the k best, by path; empty when nothing is monitored.
        kth_path: The worst of them.
        kth_value: Its score.
        best_path: The best of them, or the newest when nothing is monitored.
        best_score: Its score.
        last_path: What ``save_last`` wrote or linked.
        score: Of the newest save.
        saved: Step and path of the newest save, which `ModelCheckpoint` keeps for itself.
    """

    best: Mapping[str, Any]
    kth_path: str
    kth_value: Any
    best_path: str
    best_score: Any
    last_path: str
    score: Any
    saved: tuple[int, str]

    @property
    def names(self) -> tuple[object, ...]:
        """Everything that names a checkpoint."""
        return tuple(self.best), self.kth_path, self.best_path, self.last_path

    @property
    def kept(self) -> set[str]:
        """Checkpoints that must not be deleted."""
        return {*self.best, self.best_path, self.last_path} - {""}


@dataclass(frozen=True)
class Rules:
    """What the books are kept by.

    Attributes:
        top_k: How many are kept; -1 for all.
        worst: The path with the worst score of several; None when nothing is monitored.
        best: The one with the best.
    """

    top_k: int
    worst: Callable[[Mapping[str, Any]], str] | None
    best: Callable[[Mapping[str, Any]], str] | None


@dataclass
class Entry:
    """One save that was asked for.

    Attributes:
        tag: Its number.
        step: Optimizer steps done by then.
        path: Where the checkpoint is to be.
        before: The books before it.
        displaced: Score of what it pushed out of the best, by path.
        after: The books with it; None while they are being written.
        removed: What was to be deleted because of it.
        link: Another name that was to be made for it.
        outcome: What became of it.
    """

    tag: int
    step: int
    path: str
    before: Beliefs
    displaced: Mapping[str, Any] = field(default_factory=dict)
    after: Beliefs | None = None
    removed: list[str] = field(default_factory=list)
    link: str = ""
    outcome: Outcome = "pending"


def without(beliefs: Beliefs, entry: Entry, rules: Rules) -> Beliefs:
    """The books as if the save had never been asked for."""
    saved = entry.before.saved if beliefs.saved == (entry.step, entry.path) else beliefs.saved
    beliefs = replace(beliefs, saved=saved)
    last_path = entry.before.last_path if beliefs.last_path in (entry.path, entry.link) else beliefs.last_path
    if rules.best is None or rules.worst is None:
        best_path = entry.before.best_path if beliefs.best_path == entry.path else beliefs.best_path
        return replace(beliefs, best_path=best_path, last_path=last_path)
    best = {path: score for path, score in beliefs.best.items() if path != entry.path}
    older = {entry.path: entry.before.best[entry.path]} if entry.path in entry.before.best else {}
    for path, score in {**entry.displaced, **older}.items():
        if path not in best and (rules.top_k == -1 or len(best) < rules.top_k):
            best[path] = score
    if not best:
        return replace(beliefs, best={}, kth_path="", best_path="", best_score=None, last_path=last_path)
    kth_path, best_path = rules.worst(best), rules.best(best)
    return replace(
        beliefs,
        best=best,
        kth_path=kth_path,
        kth_value=best[kth_path],
        best_path=best_path,
        best_score=best[best_path],
        last_path=last_path,
    )


def only(beliefs: Beliefs, missing: Iterable[str], rules: Rules) -> Beliefs:
    """The books without paths at which nothing is."""
    for path in missing:
        nothing = replace(beliefs, best={}, best_path="", last_path="", saved=(0, ""))
        beliefs = without(beliefs, Entry(0, beliefs.saved[0], path, before=nothing), rules)
    return beliefs


class Ledger:
    """The books of one `ModelCheckpoint` during one `fit`.

    Args:
        beliefs: At the start.
        rules: See there.
    """

    def __init__(self, beliefs: Beliefs, rules: Rules) -> None:
        self._rules = rules
        self._entries: list[Entry] = []
        self.shown = beliefs
        self.mind = beliefs
        self._before = beliefs
        self._committed: list[Entry] = []

    @property
    def newest(self) -> Entry | None:
        """The last save that was asked for and is not settled yet."""
        return self._entries[-1] if self._entries else None

    @property
    def tags(self) -> set[int]:
        """Saves that are not settled."""
        return {entry.tag for entry in self._entries}

    @property
    def asked(self) -> Beliefs:
        """The books as of the last save that was asked for on this page, or as they were at its opening."""
        return self._before

    def open_page(self, beliefs: Beliefs) -> Beliefs:
        """The books are going to be written; returns them as they must be for that.

        Args:
            beliefs: What is shown now. If somebody else has changed it, that is what counts.
        """
        if beliefs.names != self.shown.names:
            self.mind = self.shown = beliefs
        self._before = self.mind
        return self.mind

    def ask(self, tag: int, step: int, path: str, beliefs: Beliefs) -> Entry:
        """A save is asked for; the books tell of it already."""
        displaced = {path: score for path, score in self._before.best.items() if path not in beliefs.best}
        self._entries.append(Entry(tag, step, path, self._before, displaced))
        self._before = beliefs
        return self._entries[-1]

    def close_page(self, beliefs: Beliefs) -> Beliefs:
        """The books are written for the saves asked for so far; returns them as they are to be shown."""
        self.mind = beliefs
        for entry in self._entries:
            entry.after = entry.after or beliefs
        self._show()
        return self.visible

    @property
    def visible(self) -> Beliefs:
        """What everybody is shown; only the callback itself looks at what it has saved last."""
        return replace(self.shown, saved=self.mind.saved)

    def take_committed(self) -> list[Entry]:
        """What more is shown as committed since the last call."""
        more, self._committed = self._committed, []
        return more

    def settle(self, verdicts: Iterable[Verdict], mind: Beliefs) -> tuple[Beliefs, list[str]]:
        """What became of some saves is known.

        Args:
            verdicts: Of any saves.
            mind: The books as they are being written now.

        Returns:
            The corrected books, and what should have been deleted because of a save that was not committed and is to
            be deleted after the newest one instead.
        """
        outcomes = {verdict.tag: verdict.outcome for verdict in verdicts}
        for entry in self._entries:
            entry.outcome = outcomes.get(entry.tag, entry.outcome)
        again: list[str] = []
        lost = [entry for entry in self._entries if entry.outcome not in ("pending", "saved")]
        for entry in lost:
            self._entries.remove(entry)
            if self._forget(entry):
                mind = without(mind, entry, self._rules)
            again += [path for path in entry.removed if path not in mind.kept]
        self._show()
        if self._entries:
            self._entries[-1].removed += again
        return mind, again

    def _forget(self, lost: Entry) -> bool:
        """Later saves were asked for with this one in mind; False when one of them is to the same path.

        From that one on the path is named rightly.
        """
        for entry in (entry for entry in self._entries if entry.tag > lost.tag):
            entry.before = without(entry.before, lost, self._rules)
            if entry.path == lost.path:
                return False
            entry.after = None if entry.after is None else without(entry.after, lost, self._rules)
            entry.displaced = {path: score for path, score in entry.displaced.items() if path != lost.path}
            entry.removed = [path for path in entry.removed if path != lost.path]
        self.mind = without(self.mind, lost, self._rules)
        self._before = without(self._before, lost, self._rules)
        return True

    def _show(self) -> None:
        while self._entries and self._entries[0].outcome == "saved" and self._entries[0].after is not None:
            entry = self._entries.pop(0)
            self.shown = entry.after or self.shown
            self._committed.append(entry)
