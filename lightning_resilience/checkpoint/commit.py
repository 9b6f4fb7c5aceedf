"""The commit: how the files of all ranks become one checkpoint, with no collective and no training process.

Runs in the writer processes. Every rank writes its files, then its record. When all records are there, rank 0's
writer writes the manifest and takes the one step that makes the checkpoint visible, so a kill at any instant leaves
either the whole checkpoint or none:

- where directories can be renamed the manifest is written among the files, and the directory gets its name;
- where not, the manifest is that step: one object, written last, that names the folder with the files. A checkpoint
  that is saved anew under the same name gets another folder, and the old one is valid until the manifest changes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable

from lightning_resilience.checkpoint.attempts import Attempt, Record, attempt_of, committed_folder
from lightning_resilience.checkpoint.manifest import MANIFEST, Manifest, read_manifest, read_seal
from lightning_resilience.checkpoint.messages import Save
from lightning_resilience.checkpoint.storage import Place
from lightning_resilience.errors import CheckpointError, SaveError

METADATA = ".metadata"
META = "meta.pt"
_QUIET_S = 60.0
_LOOKS_S = {True: (0.02, 0.5), False: (0.2, 2.0)}  # first and longest pause between two looks, local and remote


class CommitClock:
    """Times of commits, in nanoseconds, that only grow within a directory, whatever the clocks of earlier hosts.

    Owned by the writer process that commits; it looks at a directory once.

    Args:
        now_ns: Nanoseconds since the epoch.
    """

    def __init__(self, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._now_ns = now_ns
        self._last: dict[str, int] = {}

    def next(self, directory: Place) -> int:
        """A time after that of every checkpoint in ``directory``."""
        key = str(directory)
        if key not in self._last:
            self._last[key] = max(_commit_times(directory), default=0)
        self._last[key] = max(self._now_ns(), self._last[key] + 1)
        return self._last[key]


class Commit:
    """One checkpoint of which this process is the coordinator, from its own record to the last step.

    Args:
        request: The save as rank 0 asked for it.
        clock: Tells when it is committed.
        now: Monotonic time in seconds.
    """

    def __init__(self, request: Save, clock: CommitClock, now: float) -> None:
        self.request = request
        self._clock = clock
        self._attempt = attempt_of(request)
        self._target = self._attempt.target
        self._deadline = now + request.deadline_s
        self._progress: tuple[object, float] = (None, now)
        self._records: dict[int, Record] = {}
        self._pause_s, self._longest_pause_s = _LOOKS_S[self._target.storage.renames]
        self._next_look: float | None = None

    def advance(self, now: float, orphaned: bool) -> bool:
        """Commit if every rank has delivered; True when done, False to be called again.

        Args:
            now: Monotonic time in seconds.
            orphaned: The training process is gone, so a rank that shows no progress will not come back.

        Raises:
            SaveError: The checkpoint cannot be completed; what was written is deleted.
        """
        if self._next_look is None and self._was_decided():  # by a writer that was killed before it could finish
            return True
        if self._next_look is not None and now < self._next_look:
            return False
        self._look(now)
        failed = [f"rank {record.rank}: {record.error}" for record in self._records.values() if record.error]
        if failed:
            self.abandon()
            raise SaveError("; ".join(failed))
        if not self._missing:
            self._commit(self._records.values())
            return True
        self._check_patience(now, orphaned)
        return False

    @property
    def _missing(self) -> list[int]:
        return [rank for rank in range(self.request.world_size) if rank not in self._records]

    def _look(self, now: float) -> None:
        """Take what has come since; look less often the longer nothing comes."""
        new = self._attempt.new_records(self._records)
        self._records.update({record.rank: record for record in new})
        if new:
            self._pause_s = _LOOKS_S[self._target.storage.renames][0]
        self._next_look = now + self._pause_s
        self._pause_s = min(1.3 * self._pause_s, self._longest_pause_s)

    def abandon(self) -> None:
        """Delete what was written."""
        self._attempt.abandon()

    def _check_patience(self, now: float, orphaned: bool) -> None:
        if orphaned and (sight := self._attempt.looks()) != self._progress[0]:
            self._progress = (sight, now)
        if now <= self._deadline and not (orphaned and now > self._progress[1] + _QUIET_S):
            return
        missing = ", ".join(map(str, self._missing))
        self.abandon()
        raise SaveError(f"no bytes came from rank {missing} in time")

    def _commit(self, records: Iterable[Record]) -> None:
        manifest = Manifest(
            step=self.request.step,
            world_size=self.request.world_size,
            attempt=self.request.attempt,
            created_ns=self._clock.next(self._target.parent),
            files={name: record for entry in records for name, record in entry.files.items()},
            folder=self._attempt.folder,
        )
        if self._target.storage.renames:
            (self._attempt.scaffolding / MANIFEST).write(manifest.encode())
            self._rename()
        else:
            before = committed_folder(self._target)
            (self._target / MANIFEST).put(manifest.encode())
            self._tidy(before)

    def _was_decided(self) -> bool:
        """Finish what an earlier writer has decided, if it has."""
        if is_committed(self.request):
            if not self._target.storage.renames:
                self._tidy(before=None)
            return True
        if self._target.storage.renames and _holds_manifest(self._attempt):
            self._rename()
            return True
        return False

    def _rename(self) -> None:
        """Everything is there and proven: give it its name, then take the scaffolding away."""
        self._target.storage.publish(str(self._attempt.scaffolding), str(self._target))
        self._attempt.clear(self._target)

    def _tidy(self, before: str | None) -> None:
        """After the commit: what others than us look for beside the manifest, and what it has replaced.

        ``.metadata`` says in which folder the tensors lie, so ``torch.distributed.checkpoint`` reads the whole.
        """
        for name in (METADATA, META):
            with contextlib.suppress(FileNotFoundError):  # of a state without any
                (self._target / name).put((self._attempt.files / name).read())
        if before and before != self._attempt.folder:
            (self._target / before).delete()
        self._attempt.scaffolding.delete()


def write_file(attempt: Attempt, data: memoryview, seal: Callable[[str], bytes], progress: Callable[[], None]) -> None:
    """Write and commit a checkpoint that is one file: it appears whole, with the seal as its end.

    Where names can be changed it has another one until then. Where not, the storage shows no object before its last
    byte is there, and the scaffolding tells others that it is coming.
    """
    target, draft = attempt.target, attempt.scaffolding
    held_back = 2  # the length of a comment that the archive does not have yet
    try:
        if target.storage.renames:
            draft.write(data, seal, held_back, progress)
            target.storage.publish(str(draft), str(target))
        else:
            attempt.open(rank=0, one_file=True)
            target.write(data, seal, held_back, progress)
            draft.delete()
    except OSError:
        draft.delete()
        raise


def is_committed(request: Save) -> bool:
    """Whether this very attempt is in place already: a replayed request then has nothing left to write."""
    try:
        manifest = read_manifest(attempt_of(request).target)
    except (CheckpointError, OSError):
        return False
    return manifest is not None and manifest.attempt == request.attempt


def _holds_manifest(attempt: Attempt) -> bool:
    try:
        return read_manifest(attempt.scaffolding) is not None
    except CheckpointError:  # half written: the records are still there
        return False


def _commit_times(directory: Place) -> Iterable[int]:
    for entry in directory.entries():
        if entry.name.startswith("."):
            continue
        place = directory / entry.name
        try:
            proof = read_manifest(place) if entry.is_directory else read_seal(place)
        except (CheckpointError, OSError):
            continue
        if proof is not None:
            yield proof.created_ns
