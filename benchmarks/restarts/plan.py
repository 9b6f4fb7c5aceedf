"""What a job of the benchmark does: imported by the command and by every rank, and light for that."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

METHODS = {
    "ours": "lightning_resilience",
    "nvrx": "NVRx inprocess.Wrapper, defaults",
    "nvrx-tuned": "NVRx, tuned to its limits, gloo abort added",
}
KINDS = ("exception", "hang")
_STEPS_BETWEEN = 6


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One job: some ranks, one method, one kind of fault, several times.

    Attributes:
        method: Who recovers.
        kind: What happens.
        ranks: Training processes.
        millions: Parameters of the model in millions.
        faults: How many.
        deadline_s: Seconds after which a step without progress is a hang.
        directory: Where ranks write what they saw.
    """

    method: str
    kind: str
    ranks: int
    millions: int
    faults: int
    deadline_s: float
    directory: str

    def faulty_rank(self, step: int) -> int | None:
        """The rank at which a fault strikes in this step (from 0), if one does; they take turns."""
        number, rest = divmod(step, _STEPS_BETWEEN)
        strikes = rest == _STEPS_BETWEEN - 1 and number < self.faults
        return number % self.ranks if strikes else None

    @property
    def steps(self) -> int:
        """Steps of the whole job: as many after the last fault as before the first."""
        return (self.faults + 1) * _STEPS_BETWEEN

    @property
    def label(self) -> str:
        """What tells this job from others with the same method."""
        return f"{self.kind}, {self.ranks} ranks, {self.millions} M parameters"

    def encode(self) -> str:
        """For the command line of a rank."""
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> Plan:
        """The opposite of :meth:`encode`."""
        return Plan(**json.loads(text))
