"""Every error this package raises, as one tree.

    ResilienceError
    ├── ConfigurationError      an argument cannot work; change it
    ├── ShardingError           the model cannot be sharded as asked; change the model or the policy
    ├── RestartError            training could not go on in this process after a fault; `__cause__` is the fault
    │   ├── PeerFailed          another rank has a fault that is not retried; its own log says which
    │   ├── RankLost            the process of a rank has ended, is stopped or says nothing any more
    │   └── StateLost           the fault left a state that cannot be trusted, and there is no other
    └── CheckpointError         something about a checkpoint
        ├── SaveError           a save did not become durable; the training state is unharmed
        │   ├── ArenaError      not enough shared memory to stage the state
        │   └── WriterError     the writer process failed, died or missed its deadline
        └── LoadError           a checkpoint cannot be used
            ├── DamagedCheckpointError    its bytes are not the bytes that were written
            ├── MismatchedCheckpointError it belongs to another model or optimizer
            │   └── WeightsOnlyCheckpointError   it has weights, and training cannot go on from those alone
            ├── UntrustedCheckpointError  it holds objects, links or sizes that were not allowed
            └── NoValidCheckpointError    checkpoints exist, none of them is valid

The text of each says what happened, where, and what to do next. Beside the tree stands one signal, which is no error
and derives from `BaseException` so that `except Exception` lets it pass:

    RestartSignal               another rank has a fault: leave `fit` for a moment, to restart together
        StartOver               nothing was trained yet: leave `fit`, to begin it again
"""

from __future__ import annotations

from collections.abc import Collection


class ResilienceError(Exception):
    """Base of every error raised by this package."""


class ConfigurationError(ResilienceError, ValueError):
    """An argument cannot work as given."""


class ShardingError(ResilienceError):
    """The model cannot be sharded as asked."""


class RestartError(ResilienceError):
    """Training could not go on in this process after a fault."""


class PeerFailed(RestartError):
    """Another rank has a fault that is not retried.

    Args:
        text: What happened.
        types: Full names of the classes of the exceptions that the other ranks have.
    """

    def __init__(self, text: str, types: Collection[str] = ()) -> None:
        super().__init__(text)
        self.types = types


class RankLost(RestartError):
    """The process of a rank has ended, is stopped or says nothing any more, and training cannot go on without it."""


class StateLost(RestartError):
    """A fault left a state that cannot be trusted, and there is no other to go back to."""


class RestartSignal(BaseException):
    """Another rank has a fault. Raised in the thread that trains; code that catches it will meet it again."""


class StartOver(RestartSignal):
    """All ranks have agreed to begin `fit` again; whoever runs it does."""


class CheckpointError(ResilienceError):
    """Base of everything that can go wrong with a checkpoint."""


class SaveError(CheckpointError):
    """A checkpoint did not become durable. The training state is unharmed."""


class ArenaError(SaveError):
    """Not enough shared memory to stage the state."""


class WriterError(SaveError):
    """The writer process failed, died or missed its deadline."""


class LoadError(CheckpointError):
    """A checkpoint cannot be used."""


class DamagedCheckpointError(LoadError):
    """The bytes on storage are not the bytes that were written."""


class MismatchedCheckpointError(LoadError):
    """The checkpoint belongs to another model or optimizer layout."""


class WeightsOnlyCheckpointError(MismatchedCheckpointError):
    """The checkpoint has no state of optimizers, so training cannot go on from it."""


class UntrustedCheckpointError(LoadError):
    """The checkpoint holds what only ``trust=True`` allows: objects that can run code, links, sizes that are absurd."""


class NoValidCheckpointError(LoadError):
    """Checkpoints exist but none of them is valid."""
