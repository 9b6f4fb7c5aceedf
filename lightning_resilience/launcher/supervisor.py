"""Carries out what `decide` says: one thread, one loop, which sleeps until a signal, an exit or output wakes it."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType

from lightning_resilience.launcher.console import Outputs, Tee, say
from lightning_resilience.launcher.decide import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    Exit,
    GoOn,
    RestartAll,
    Stop,
    after_exit,
    code_after_stop,
)
from lightning_resilience.launcher.meeting_place import MeetingPlace
from lightning_resilience.launcher.process import Rank, adopt_orphans, children
from lightning_resilience.launcher.spec import Spec, Std

_RESTART_GRACE_S = 5.0
"""For the other ranks, when one has failed: what they have in memory is of no use any more."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Supervisor:
    """Runs a job to its end. In the main thread of its process, of which it owns signals and children.

    Args:
        spec: The plan.
    """

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._place = MeetingPlace(spec.master_addr, spec.master_port)
        self._outputs = Outputs(spec)
        self._ranks: dict[int, Rank] = {}
        self._codes: dict[int, int] = {}
        self._restarts = 0
        self._ending: RestartAll | Stop | None = None
        self._kill_at: float | None = None
        self._began = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._tees: dict[int, list[Tee]] = {}

    def run(self) -> int:
        """Until all is over; returns the exit code.

        Raises:
            ConfigurationError: The command cannot be run.
        """
        adopt_orphans()
        with self._signals() as wakes:
            self._selector.register(wakes, selectors.EVENT_READ)
            try:
                self._start_all()
                while not self._is_over():
                    self._turn(wakes)
            finally:
                self._kill_all()
                self._clear_away(wakes)
                self._place.close()
                self._selector.close()
        return self._conclude()

    # --- the loop

    def _turn(self, wakes: int) -> None:
        wait_s = None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())
        for key, _ in self._selector.select(wait_s):
            if key.fd == wakes:
                self._heed(os.read(wakes, 512))
            elif not key.data.pump():
                self._selector.unregister(key.fileobj)
        self._reap()
        if self._kill_at is not None and time.monotonic() >= self._kill_at and self._ranks:
            say(f"{_names(self._ranks)} did not end in time: killed")
            self._kill_all()
        if isinstance(self._ending, RestartAll) and not self._ranks:
            self._restart()

    def _is_over(self) -> bool:
        return isinstance(self._ending, Stop) and not self._ranks

    def _heed(self, numbers: bytes) -> None:
        for number in numbers:
            if number in _SIGNALS:
                self._heed_stop(signal.Signals(number))

    def _heed_stop(self, number: signal.Signals) -> None:
        """A second one does not wait any longer."""
        is_interrupt = number is signal.SIGINT
        if isinstance(self._ending, Stop) and self._ending.code in (EXIT_PREEMPTED, EXIT_INTERRUPTED):
            self._kill_at = time.monotonic()
            return
        say(f"{number.name}: passed on to {_names(self._ranks)}, which have {self._spec.grace_s:g} s to end")
        code = EXIT_INTERRUPTED if is_interrupt else EXIT_PREEMPTED
        self._end(Stop(code, f"stopped by {number.name}"), signal.SIGINT if is_interrupt else signal.SIGTERM)

    def _reap(self) -> None:
        """Everything that has ended, adopted processes too."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                gone = next((rank for rank in self._ranks.values() if rank.pid == pid), None)
                if gone is not None:
                    self._ended(gone, os.waitstatus_to_exitcode(status))

    def _ended(self, gone: Rank, code: int) -> None:
        gone.reaped(code)
        del self._ranks[gone.rank]
        self._close_tees(gone.rank)
        self._codes[gone.rank] = code
        if self._ending is not None:
            return
        exit_ = Exit(rank=gone.rank, code=code)
        action = after_exit(
            exit_, running=len(self._ranks), restarts=self._restarts, max_restarts=self._spec.max_restarts
        )
        match action:
            case GoOn():
                return
            case RestartAll():
                self._end(action)
            case Stop():
                if action.code:
                    say(action.reason)
                self._end(action)

    # --- what it does

    def _start_all(self) -> None:
        self._codes.clear()
        plan = replace(self._spec, master_port=self._place.port)
        for rank in range(self._spec.ranks):
            environment = plan.environment(rank, self._restarts, os.environ)
            sinks = tuple(self._outputs.of(rank, self._restarts, std) for std in (Std.OUT, Std.ERR))
            started = Rank(rank, self._spec.command, environment, (sinks[0], sinks[1]))
            self._ranks[rank] = started
            self._tees[rank] = started.tees
            for tee in started.tees:
                self._selector.register(tee.reader, selectors.EVENT_READ, tee)
        self._place.open()

    def _end(self, action: RestartAll | Stop, number: signal.Signals = signal.SIGTERM) -> None:
        self._ending = action
        grace_s = self._spec.grace_s
        if isinstance(action, RestartAll) or action.code == EXIT_FAILED:
            grace_s = min(grace_s, _RESTART_GRACE_S)
        self._kill_at = time.monotonic() + grace_s
        for rank in self._ranks.values():
            rank.send(number)

    def _restart(self) -> None:
        assert isinstance(self._ending, RestartAll)
        self._restarts += 1
        most = self._spec.max_restarts
        say(
            f"{self._ending.reason}. Restart {self._restarts} of {most}: all {self._spec.ranks} ranks start anew, from"
            " where the script resumes"
        )
        self._ending = self._kill_at = None
        self._place.close()
        self._place = MeetingPlace(self._spec.master_addr, self._spec.master_port)
        self._start_all()

    def _kill_all(self) -> None:
        for rank in self._ranks.values():
            rank.send(signal.SIGKILL)
        self._kill_at = None

    def _clear_away(self, wakes: int) -> None:
        """Processes that ranks have left behind, such as writers of checkpoints, may finish; then they are killed."""
        kill_at = time.monotonic() + self._spec.grace_s
        while left := self._left():
            self._selector.select(max(0.0, kill_at - time.monotonic()))
            with contextlib.suppress(BlockingIOError):
                if any(number in _SIGNALS for number in os.read(wakes, 512)):
                    kill_at = time.monotonic()
            if time.monotonic() >= kill_at:
                say(f"processes that ranks have left behind did not end in time: killed ({_numbers(left)})")
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
                kill_at += 1.0
        for rank in list(self._tees):
            self._close_tees(rank)

    def _left(self) -> list[int]:
        self._reap()
        return children()

    def _close_tees(self, rank: int) -> None:
        for tee in self._tees.pop(rank, []):
            if tee.reader in self._selector.get_map():
                self._selector.unregister(tee.reader)
            tee.close()

    def _conclude(self) -> int:
        assert isinstance(self._ending, Stop)
        code = code_after_stop(self._ending, self._codes, exit_zero=self._spec.exit_zero_on_preempt)
        times = f"{self._restarts} restart{'' if self._restarts == 1 else 's'}"
        bad = ", ".join(str(Exit(rank=rank, code=ended)) for rank, ended in sorted(self._codes.items()) if ended)
        logs = f". Output is in {self._outputs.directory}" if self._outputs.directory else ""
        took_s = time.monotonic() - self._began
        say(
            f"{self._spec.ranks} ranks, {took_s:.1f} s, {times}: {self._ending.reason}"
            f"{f' ({bad})' if bad else ''}. Exit code {code}{logs}"
        )
        return code

    @contextlib.contextmanager
    def _signals(self) -> Iterator[int]:
        """Signals become bytes in a pipe; a child that ends is one of them."""
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        before = {number: signal.signal(number, _noted) for number in (*_SIGNALS, signal.SIGCHLD)}
        earlier = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        try:
            yield reader
        finally:
            signal.set_wakeup_fd(earlier)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(reader)
            os.close(writer)


def _noted(number: int, frame: FrameType | None) -> None:
    """The pipe has it."""


def _names(ranks: dict[int, Rank]) -> str:
    return f"rank {next(iter(ranks))}" if len(ranks) == 1 else f"ranks {_numbers(sorted(ranks))}"


def _numbers(values: list[int]) -> str:
    return ", ".join(map(str, values))
