"""What stands between the training loop and its loaders: a loader that is idle, a fetcher that looks ahead."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from lightning_resilience._lightning import DataFetcher, PrefetchDataFetcher, sized_len
from lightning_resilience.data.position import is_stateful


class IdleLoader:
    """As long as the loader it stands for, and empty: for measuring lengths without starting any loading."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    @property
    def dataset(self) -> Any:
        """Lightning looks at the dataset of a loader to warn about iterable ones."""
        return getattr(self.loader, "dataset", None)


class LaggingFetcher(PrefetchDataFetcher):
    """Looks one batch ahead, but reports the loaders' states as of the batch it handed out last.

    Loaders without a length must be looked ahead in to know the last batch. Their own state is then one batch
    further than training is, and resuming from it would lose that batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.states: list[Any] | None = None

    def __next__(self) -> Any:
        # The batch handed out now was drawn before; the loaders move on in the call below. A copy, because a
        # loader may answer with an object that it goes on to change.
        self.states = copy.deepcopy(self.combined_loader._state_dicts())
        return super().__next__()

    def reset(self) -> None:
        super().reset()
        self.states = None


def lagging_if_needed(fetcher: DataFetcher) -> DataFetcher:
    """A :class:`LaggingFetcher` in place of a fetcher that looks ahead in stateful loaders."""
    loader = fetcher.combined_loader
    looks_ahead = type(fetcher) is PrefetchDataFetcher and sized_len(loader) is None
    if not looks_ahead or not any(map(is_stateful, loader.flattened)):
        return fetcher
    lagging = LaggingFetcher()
    lagging.setup(loader)
    return lagging
