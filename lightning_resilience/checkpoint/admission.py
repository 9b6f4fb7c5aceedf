"""How a save begins: the ranks say what they hold and know, and all conclude the same. On the training thread."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from lightning_resilience.checkpoint.backpressure import Action, Decision, OnBusy, Staged, decide
from lightning_resilience.checkpoint.exchange import Exchange, gather_json
from lightning_resilience.checkpoint.history import History, Verdict
from lightning_resilience.checkpoint.writer import WriterClient


@dataclass(frozen=True)
class Admission:
    """What all ranks have agreed on for one save.

    Attributes:
        path: Where the checkpoint will be.
        attempt: The name of this try.
        known: Whether every rank has a plan for this state.
        decision: Whether it is taken.
        news: What became of earlier saves, as all ranks now know.
    """

    path: str
    attempt: str
    known: bool
    decision: Decision
    news: Sequence[Verdict]

    @property
    def skipped(self) -> bool:
        """Whether this save is not taken."""
        return self.decision.action is Action.SKIP


@dataclass(frozen=True)
class Wish:
    """A save as one rank asks for it.

    Attributes:
        path: Where the checkpoint shall be; rank 0's counts.
        step: Optimizer steps done.
        required: It must not be skipped or replaced; rank 0's counts.
        known: Whether this rank has a plan for this state.
    """

    path: str
    step: int
    required: bool
    known: bool


def admit(
    wish: Wish, exchange: Exchange, writer: WriterClient, history: History, policy: OnBusy, slots: int
) -> Admission:
    """Agree on a save and make room for it.

    No rank's writer begins another save from before the exchange until the decision is carried out, so that what
    the ranks have said of their queues is still true then.
    """
    with writer.held() as queue:
        told = history.take_news() if exchange.rank == 0 else []
        mine = {
            **asdict(wish),
            "attempt": uuid.uuid4().hex[:12],
            "queue": [asdict(staged) for staged in queue],
            "news": [asdict(verdict) for verdict in told],
        }
        try:
            answers = gather_json(exchange, mine)
        except BaseException:  # another rank is gone: what it was not told is told next time
            history.put_back(told)
            raise
        first = answers[0]
        queues = [[Staged(**staged) for staged in answer["queue"]] for answer in answers]
        decision = decide(policy, slots, wish.step, first["required"], queues)
        news = [Verdict(**verdict) for verdict in first["news"]]
        if decision.action is Action.REPLACE and (number := writer.drop(decision.replaced)) is not None:
            news.append(history.replaced(number, wish.step))
    return Admission(
        path=first["path"],
        attempt=first["attempt"],
        known=all(answer["known"] for answer in answers),
        decision=decision,
        news=news,
    )
