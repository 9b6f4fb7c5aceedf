"""The restart itself, on each rank: a guarded run, and what happens around a fault.

Two threads take part. The *monitor* sleeps until a rank raises the alarm; then it ends this rank's collectives and
brings the main thread out. The *main thread* runs the guarded function; when that is left by a fault, it meets the
other ranks, makes the process groups again, lets the workload go back to its commit, and runs on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar, cast

import torch.distributed as dist

from lightning_resilience._torch_groups import ClosedGroups, Groups, Store
from lightning_resilience.errors import (
    PeerFailed,
    RankLost,
    ResilienceError,
    RestartError,
    RestartSignal,
    StartOver,
    StateLost,
)
from lightning_resilience.events import EventLog
from lightning_resilience.restart.abort import abort_groups, is_failed_collective, let_go_of_connections
from lightning_resilience.restart.company import Company
from lightning_resilience.restart.control import Control, Generation
from lightning_resilience.restart.events import Fewer, GaveUp, Hang, Incident, Stuck
from lightning_resilience.restart.fence import Fence
from lightning_resilience.restart.flight_recorder import DIRECTORY, keep_flight_record
from lightning_resilience.restart.interrupt import Interrupter
from lightning_resilience.restart.meeting import (
    FromRestorePoint,
    FromTheStart,
    Nowhere,
    Resumption,
    choose_resumption,
)
from lightning_resilience.restart.policy import (
    Action,
    DropRank,
    Fault,
    GiveUp,
    RestartInProcess,
    RestartPolicy,
    exception_fault,
)
from lightning_resilience.restart.reports import SETTING_UP, Meeting, Report, Standing, in_words
from lightning_resilience.restart.settling import Straggler
from lightning_resilience.restart.timeouts import Section, Timeouts
from lightning_resilience.restart.watchdog import Heart, Watchdog, main_thread_stack
from lightning_resilience.restart.witness import suspects, whereabouts
from lightning_resilience.restart.world import World, why_not_without, world_without

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_GOODBYE_S = 1.0
_GLANCE_S = 0.05

EXIT_CODE_STUCK = 85
"""The process leaves with this code when its main thread cannot be brought out of what it does."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long each part of a restart may take, in seconds.

    Attributes:
        settle_s: For ranks that are a step behind to come up.
        ready_s: For one of them to begin an update that it is ready for; longer than that it hangs just before it.
        grace_s: For the main thread to leave by itself, as its collectives fail.
        every_s: Between two interruptions.
        abort_s: For the main thread to leave at all; then the process ends.
        meeting_s: For all ranks to meet.
    """

    settle_s: float = 10.0
    ready_s: float = 0.5
    grace_s: float = 0.1
    every_s: float = 0.05
    abort_s: float = 60.0
    meeting_s: float = 120.0


class Workload(Protocol):
    """What is restarted. All but `standing` and `ready` are called by the main thread, in this order."""

    def recovering(self) -> AbstractContextManager[None]:
        """Around a restart, until a state is put back."""
        ...

    def standing(self) -> Standing:
        """The newest commit. Called by any thread."""
        ...

    def whole(self) -> bool:
        """Whether the state is surely not in the middle of an update."""
        ...

    def ready(self) -> bool:
        """Whether `restore` can do the update that was about to begin. Called by any thread."""
        ...

    def built(self) -> bool:
        """Whether the model of every rank is surely set up."""
        ...

    def updated(self) -> bool:
        """Whether parameters may have changed since `fit` began."""
        ...

    def first_groups(self, *, built: bool) -> Collection[str]:
        """Names of the process groups that are needed to run `fit` again from its beginning.

        Args:
            built: As in `FromTheStart`.
        """
        ...

    def stop(self) -> None:
        """Drop what belongs to the interrupted batch. Local; collectives are not possible."""
        ...

    def use_groups(self, groups: Groups) -> None:
        """Let everything that holds process groups hold the new ones."""
        ...

    def why_not_with(self, world_size: int) -> str:
        """Why it cannot go on with so many ranks; empty if it can. Local, and the same on all ranks."""
        ...

    def move(self, world: World, store: Store) -> None:
        """Go on as a rank of fewer: make process groups in `store`, and all that depends on the number of ranks.

        What ranks held parts of has to be restored after this. Called in place of `use_groups`; called again if it,
        or what comes after it, has failed.
        """
        ...

    def restore(self, resumption: Resumption) -> None:
        """Go back to a state that all ranks have, or do the update that leads to it. Collectives are possible again.

        Raises:
            StateLost: There is none. On all ranks alike.
        """
        ...

    def announce(self, incident: Incident) -> None:
        """Tell whoever wants to know that training goes on."""
        ...


class RestartEngine:
    """Owned by the strategy of one rank; lives for a `fit`.

    Args:
        control: The control store.
        policy: Whether to go on.
        workload: What is restarted.
        fence: Around optimizer updates.
        health: What is wrong with this rank, apart from the fault.
        events: Where incidents go.
        heart: Of this rank.
        timeouts: For the watchdog.
        generation: The first of the generations of this run; none of its keys were used before.
        patience: How long things may take.
    """

    def __init__(
        self,
        *,
        control: Control,
        policy: RestartPolicy,
        workload: Workload,
        fence: Fence,
        health: Callable[[], Sequence[str]] = tuple,
        events: EventLog,
        heart: Heart,
        timeouts: Timeouts,
        generation: int = 0,
        patience: Patience | None = None,
    ) -> None:
        self._control = control
        self._policy = policy
        self._workload = workload
        self._health = health
        self._events = events
        self._heart = heart
        self._timeouts = timeouts
        self._watched = control.another()
        self._watchdog: Watchdog | None = None
        self._patience = patience or Patience()
        self._fence = fence
        self._interrupter = Interrupter(may_interrupt=lambda: not fence.holds())
        self._number = generation
        self._closed: ClosedGroups | None = None
        self._moving = False
        self._group_control: Control | None = None
        self._earlier: list[Fault] = []
        self._restarts = 0
        self._training = False
        self._section = Section.SETUP
        self._advanced = threading.Condition()
        self._monitor: Monitor | None = None
        self._company = self._make_company(generation)

    # --- life

    def start(self) -> None:
        """Begin to listen. Main thread."""
        self._interrupter.install()
        self._company.start()
        self._begin_generation()
        self._enter_setup()

    def _enter_setup(self) -> None:
        self._training = False
        self._heart.enter(Section.SETUP)
        self._interrupter.arm()

    def close(self) -> None:
        """Stop to listen; other ranks are not told."""
        if self._monitor is not None:
            self._interrupter.disarm()
            with contextlib.suppress(dist.DistError):  # rank 0, which serves the store, may have left
                self._control.generation(self._number).finish()
            self._end_generation()
            let_go_of_connections()
            self._company.close()
            self._watched.disconnect()
            self._monitor = None
            self._interrupter.uninstall()
            self._events.close()

    @property
    def generation(self) -> int:
        """The number of the generation that runs."""
        return self._number

    @property
    def training(self) -> bool:
        """Whether this rank has begun to train."""
        return self._training

    # --- the guarded part: setting up, then training

    def leave(self) -> None:
        """What set up, or failed to, was left; until `begin_again` nothing is interrupted.

        Raises:
            RestartSignal: It came first.
        """
        self._interrupter.disarm()

    def recover_setup(self, error: BaseException) -> Incident:
        """After a fault before training began: meet, and bring everything to where `fit` began. Called when left.

        Raises:
            BaseException: `error` itself, if it is a verdict, or comes from after training.
            RestartError: As in `guard`.
        """
        if isinstance(error, StartOver):
            (incident,) = error.args
            return cast("Incident", incident)
        if self._training and not isinstance(error, RestartSignal):
            raise error
        self._section = self._heart.enter(Section.RESTORE)
        return self._recover(error)

    def begin_again(self, incident: Incident, fit: Callable[[], _T]) -> _T:
        """Set up again, from the beginning. Part of what is guarded."""
        self._enter_setup()
        self._workload.announce(incident)
        return fit()

    def guard(self, first: Callable[[], None], again: Callable[[], None]) -> None:
        """Run `first`; after each fault that can be recovered from, `again`; until all ranks are through.

        Raises:
            RestartError: The fault of another rank ends the run.
            BaseException: What `first` or `again` raised, if it is not retried or keeps coming back.
        """
        body = first
        while True:
            error = self._attempt(body)
            if error is None:
                return
            self._section = self._heart.enter(Section.RESTORE)
            incident = self._recover(error)
            if isinstance(incident.resumption, FromTheStart):
                raise StartOver(incident)
            body = partial(self._announce, incident, again)

    def _announce(self, incident: Incident, again: Callable[[], None]) -> None:
        """Part of the guarded run: what people do about an incident may fail too."""
        self._workload.announce(incident)
        again()

    def check(self) -> None:
        """A good moment to be interrupted. Main thread, inside the guarded part.

        Raises:
            RestartSignal: Another rank has a fault.
        """
        self._interrupter.check()

    def committed(self) -> None:
        """A commit was made; whoever waits for this rank to come up looks again. Main thread."""
        with self._advanced:
            self._advanced.notify_all()
        self._interrupter.check()

    def _attempt(self, body: Callable[[], None]) -> BaseException | None:
        """Run `body` to the end that all ranks come to together, or return what stopped it."""
        try:
            try:
                self._training = True
                self._interrupter.arm()
                self._heart.enter(Section.HOOKS)
                body()
                self._leave_together()
                self._interrupter.disarm()
                return None
            except BaseException as error:  # judged by the caller
                self._interrupter.disarm()
                return error
        except RestartSignal as signal:  # while disarming
            self._interrupter.disarm()
            return signal

    def _leave_together(self) -> None:
        """A rank that is through may still be needed: the others may have to go back a little."""
        generation = self._control.generation(self._number)
        self._heart.enter(Section.WAITING)
        generation.finish()
        if generation.wait_for_alarm() is not None:
            raise RestartSignal("another rank has a fault")

    # --- the restart

    def _recover(self, error: BaseException) -> Incident:
        with self._workload.recovering():
            return self._go_on_together(error)

    def _go_on_together(self, error: BaseException) -> Incident:
        incident = Incident(number=self._restarts + 1, rank=self._control.rank)
        while True:
            meeting = self._meet(error, incident)
            reports = meeting.reports
            world = self._decide(meeting, error, incident)
            resumption = choose_resumption(reports)
            if world is not None:
                resumption = FromRestorePoint(reason=f"{world.size} of {world.before} ranks go on")
            self._number += 1
            self._interrupter.forget()
            self._begin_generation()
            try:
                if world is None:
                    self._restore(resumption, reports, incident)
                else:
                    self._move(world, resumption, incident)
            except Exception as another:  # a restart of the restart
                if isinstance(another, ResilienceError):
                    raise
                error = another
                continue
            break
        self._restarts += 1
        self._events.write(incident.restarted(self._number))
        incident.tell()
        return incident

    def _fault(self, error: BaseException) -> Fault | None:
        """This rank's own fault, if it has one; failing collectives after an alarm are none."""
        if isinstance(error, RestartSignal) or (self._interrupter.requested and isinstance(error, Exception)):
            return None
        step, section = max(0, self._workload.standing().step), self._section.value
        return exception_fault(error, rank=self._control.rank, step=step, section=section, at_s=time.time())

    def _meet(self, error: BaseException, incident: Incident) -> Meeting:
        try:
            meeting = self._hold_meeting(error, incident)
        except dist.DistStoreError as missing:
            raise RankLost(
                f"not all ranks came together within {self._patience.meeting_s:.0f} s after a fault."
                " A process that is gone cannot be brought back from inside the others. Start the job again; with a"
                " checkpoint it goes on from there."
            ) from missing
        except dist.DistError:
            raise self._store_lost() from error
        let_go_of_connections()
        incident.done("meeting")
        return meeting

    def _hold_meeting(self, error: BaseException, incident: Incident) -> Meeting:
        fault = self._fault(error)
        generation = self._control.generation(self._number)
        if fault is not None:
            generation.raise_alarm(fault)
        assert self._monitor is not None
        alarm = self._monitor.wait_until_aborted(self._patience.abort_s)
        if alarm is None:
            raise self._store_lost() from error
        incident.done("unblock")
        self._workload.stop()
        if self._closed is None and not self._moving:
            self._closed = ClosedGroups()
        incident.done("reset")
        unhealthy = tuple(self._health())
        incident.done("health")
        report = Report(
            rank=self._control.rank,
            standing=self._workload.standing(),
            whole=self._workload.whole(),
            ready=self._workload.ready(),
            trained=self._training,
            built=self._workload.built(),
            updated=self._workload.updated(),
            groups=() if self._closed is None else tuple(self._closed.members),
            unhealthy=unhealthy,
            fault=alarm if alarm.rank == self._control.rank else fault if not is_failed_collective(error) else None,
            echo=is_failed_collective(error),
        )
        with_fewer = self._policy.min_world_size is not None
        meeting = generation.report(report, self._patience.meeting_s, without_late=with_fewer)
        if alarm.kind == "hang" and meeting.reports[0].rank == self._control.rank:
            self._tell_where_ranks_were(generation, alarm)
        return meeting

    def _tell_where_ranks_were(self, generation: Generation, alarm: Fault) -> None:
        statements = generation.statements()
        suspected = suspects(alarm.rank, statements)
        missing = set(range(self._control.world_size)) - {statement.rank for statement in statements}
        log.warning("%s\n%s", in_words(alarm), whereabouts(suspected, statements, sorted(missing)))
        reasons = {str(rank): why for rank, why in suspected.items()}
        self._events.write(Hang(alarm=alarm, suspects=reasons, ranks=statements))

    def _store_lost(self) -> RankLost:
        """Rank 0 is lost, and with it the control store."""
        return RankLost(
            f"{self._company.why_lost(0)}, and with it the control store through which ranks restart together."
            " Start the job again; with a checkpoint it goes on from there."
        )

    def _decide(self, meeting: Meeting, error: BaseException, incident: Incident) -> World | None:
        """Whether to go on; with fewer ranks if a world is returned."""
        reports = meeting.reports
        incident.faults = _faults(meeting)
        action, dropped = self._action(incident.faults, reports)
        self._earlier += incident.faults
        is_apart = bool(meeting.lost)
        if isinstance(action, RestartInProcess):
            if not dropped:
                return self._world_so_far() if self._moving else None
            if self._control.rank not in dropped:
                return self._shrink(dropped, incident)
            action, is_apart = GiveUp(dropped[self._control.rank]), True
        self._events.write(GaveUp(faults=incident.faults, reason=action.reason))
        log.error("no restart: %s", action.reason)
        self._number += 1
        if not is_apart and self._closed is not None:
            self._leave_groups_usable(reports, incident)
        own = next(report for report in reports if report.rank == self._control.rank)
        is_own = own.fault is not None and not (own.echo and is_apart)
        if isinstance(error, ResilienceError) or (is_own and not isinstance(error, RestartSignal)):
            raise error
        if meeting.lost:
            raise RankLost(f"{action.reason}. Start the job again; with a checkpoint it goes on from there.") from error
        types = {name for fault in incident.faults for name in fault.types[:1]}
        raise PeerFailed(f"no restart: {action.reason}. {incident.cause}", types) from error

    def _leave_groups_usable(self, reports: Sequence[Report], incident: Incident) -> None:
        """Whoever handles the error may communicate, and train again."""
        try:
            self._rebuild(_common_groups(reports, self._closed), incident)
        except RuntimeError as error:  # a rank has left already; the fault itself matters more
            log.warning("the process groups could not be made again: %s", error)

    def _action(self, faults: Sequence[Fault], reports: Sequence[Report]) -> tuple[Action, dict[int, str]]:
        """What to do in the end, and with whom not; nobody here can replace a process."""
        actions = [self._policy.decide(fault, self._earlier) for fault in faults]
        dropped = {action.rank: action.reason for action in actions if isinstance(action, DropRank)}
        drastic = [action for action in actions if not isinstance(action, (RestartInProcess, DropRank))]
        if not drastic and dropped:
            size = self._control.world_size
            why = why_not_without(dropped, size, self._policy.min_world_size or size)
            why = why or self._workload.why_not_with(size - len(dropped))
            if not why and not all(report.trained for report in reports):
                why = "a rank was lost before all had begun to train. Start the job again"
            if why:
                return GiveUp(why), dropped
        return next(iter(drastic), RestartInProcess()), dropped

    def _shrink(self, dropped: dict[int, str], incident: Incident) -> World:
        """From the next generation on this is a rank of fewer."""
        world = world_without(dropped, self._control.rank, self._control.world_size)
        self._earlier = [replace(fault, rank=world.number(fault.rank)) for fault in self._earlier]
        incident.world = world
        self._events.write(Fewer(ranks=world.ranks, dropped={str(rank): why for rank, why in dropped.items()}))
        self._stop_watchdog()
        self._company.close()
        for control in (self._control, self._watched):
            control.renumber(world.rank, world.size)
        self._events.renumber(world.rank)
        self._company = self._make_company(self._number + 1)
        self._company.start()
        return world

    def _world_so_far(self) -> World:
        """The move to it was interrupted, and has to be made again."""
        return world_without({}, self._control.rank, self._control.world_size)

    def _move(self, world: World, resumption: Resumption, incident: Incident) -> None:
        """Become a rank of fewer, and go on from an older state."""
        incident.resumption = resumption
        self._moving, self._closed = True, None
        self._group_control = self._control.another()
        self._workload.move(world, self._group_control.store_for_groups(self._number))
        incident.done("move")
        self._workload.restore(resumption)
        self._moving = False
        incident.done("restore")

    def _restore(self, resumption: Resumption, reports: Sequence[Report], incident: Incident) -> None:
        incident.resumption = resumption
        groups = _common_groups(reports, self._closed)
        if isinstance(resumption, Nowhere):
            raise StateLost(f"{resumption.reason}, and there is no state that fits both. Start the job again.")
        if isinstance(resumption, FromTheStart):
            groups = groups & set(self._workload.first_groups(built=resumption.built))
        self._rebuild(groups, incident)
        self._workload.restore(resumption)
        incident.done("restore")

    def _rebuild(self, names: Collection[str], incident: Incident) -> None:
        """Make these process groups again; all ranks do."""
        assert self._closed is not None
        self._group_control = self._control.another()
        groups = self._closed.make_again(self._group_control.store_for_groups(self._number), names)
        self._workload.use_groups(groups)
        self._closed = None
        incident.done("rebuild")

    # --- the monitor's side

    def _begin_generation(self) -> None:
        self._end_generation()
        try:
            control = self._control.another()
        except dist.DistError as error:
            raise self._store_lost() from error
        self._monitor = Monitor(control, self._number, self._unblock, on_store_lost=self._leave_alone)
        self._monitor.start()
        generation = self._watched.generation(self._number)
        self._watchdog = Watchdog(self._heart, self._timeouts, generation, describe=self._hang, turn=self._company.turn)
        self._watchdog.start()

    def _make_company(self, run: int) -> Company:
        return Company(
            self._watched,
            run,
            heart=self._heart,
            timeouts=self._timeouts,
            step=self._step,
            on_loss=self._tell_of_loss,
            on_store_lost=self._cut_store,
        )

    def _stop_watchdog(self) -> None:
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None

    def _end_generation(self) -> None:
        self._stop_watchdog()
        if self._monitor is not None:
            self._monitor.close()

    def _hang(self, message: str) -> Fault:
        step, section = max(0, self._workload.standing().step), self._heart.beat.section
        return Fault(
            kind="hang",
            rank=self._control.rank,
            step=step,
            section=section.value,
            message=message,
            where=_position(),
            at_s=time.time(),
        )

    def _unblock(self, generation: Generation, alarm: Fault) -> None:
        """On the monitor's thread."""
        if alarm.kind == "hang":
            generation.state(self._heart.statement(self._control.rank))
            keep_flight_record(self._events.path.parent / DIRECTORY, generation.number, self._control.rank)
        if alarm.kind != "lost":  # without the lost rank nobody comes up to the others
            self._settle(generation, alarm)
        self._bring_out(in_words(alarm), alarm)

    def _step(self) -> int:
        return max(0, self._workload.standing().step)

    def _leave_alone(self) -> None:
        """The control store is gone: this rank stops by itself. On the monitor's thread."""
        why = self._company.why_lost(0)
        fault = Fault(kind="lost", rank=0, step=self._step(), message=why, at_s=time.time())
        self._bring_out(why, fault)

    def _bring_out(self, cause: str, alarm: Fault) -> None:
        self._interrupter.request()
        if self._group_control is not None:
            self._group_control.disconnect()
        abort_groups(self._patience.abort_s)
        patience = self._patience
        left = self._interrupter.deliver(
            grace_s=patience.grace_s,
            every_s=patience.every_s,
            timeout_s=patience.abort_s,
            unblock=lambda: abort_groups(patience.every_s),  # a group may have been in the making
        )
        if not left:
            self._leave_process(cause, alarm)

    def _tell_of_loss(self) -> None:
        """On the lookout's thread."""
        if self._watchdog is not None:
            self._watchdog.wake()

    def _cut_store(self) -> None:
        """Whoever waits for the control store need not. On the lookout's thread."""
        for control in (self._watched, self._control):
            control.disconnect()
        if self._monitor is not None:
            self._monitor.cut()

    def _settle(self, generation: Generation, alarm: Fault) -> None:
        """Let ranks come up to the step of the others, while collectives still work.

        A rank that has finished an update has taken part in all collectives before it, so a rank that has not can.
        """
        limit = self._patience.settle_s
        try:
            standings = generation.stand(self._workload.standing(), limit)
            if len(standings) < self._control.world_size:
                return
            target = max(standing.step for standing in standings)
            if SETTING_UP in standings:  # nobody updates before all train
                return
            if all(standing.step == target for standing in standings):
                return
            self._come_up(target)
            generation.settle(limit)
        except RankLost:  # this rank itself, to the others; it is told again when it comes to meet them
            return
        except dist.DistError:  # a rank is gone; whether that matters shows when the ranks meet
            log.warning("after %s not all ranks answered within %.0f s", in_words(alarm), limit)

    def _come_up(self, step: int) -> None:
        """Until this rank is at the step, or it makes no sense to wait longer."""
        straggler = Straggler(self._patience.settle_s, self._patience.ready_s, time.monotonic())
        with self._advanced:
            while not (self._workload.standing().step >= step or self._interrupter.left):
                if not straggler.may_come(ready=self._workload.ready(), now=time.monotonic()):
                    return
                self._advanced.wait(_GLANCE_S)

    def _leave_process(self, cause: str, alarm: Fault) -> None:
        log.critical(
            "after %s the training thread could not be interrupted within %.0f s; this process leaves with code %d",
            cause,
            self._patience.abort_s,
            EXIT_CODE_STUCK,
        )
        self._events.write(Stuck(alarm=alarm, where=_position()))
        self._events.close()
        sys.stderr.flush()
        os._exit(EXIT_CODE_STUCK)


def _faults(meeting: Meeting) -> list[Fault]:
    """Of all ranks. When one is lost, that the others got no answer from it is no fault of theirs."""
    told = [report.fault for report in meeting.reports if report.fault and not (meeting.lost and report.echo)]
    gone = {fault.rank for fault in meeting.lost}
    faults = [*(fault for fault in told if fault.rank not in gone), *meeting.lost]
    now_s = max((fault.at_s for fault in faults), default=0.0)  # the same on all ranks
    return [*faults, *(replace(found, at_s=now_s) for report in meeting.reports if (found := report.unfitness))]


def _common_groups(reports: Sequence[Report], closed: ClosedGroups | None) -> set[str]:
    """Process groups that all their members have: one may have been interrupted while it made or closed a group."""
    assert closed is not None
    members = closed.members.items()
    return {name for name, ranks in members if all(name in reports[rank].groups for rank in ranks)}


def _position() -> str:
    """Where the main thread is."""
    return " > ".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in main_thread_stack()[-3:])


class Monitor:
    """Waits for the alarm of one generation, on a thread and a connection of its own.

    Args:
        control: A connection that nobody else uses.
        number: Of the generation.
        unblock: What to do at an alarm.
        on_store_lost: What to do when the control store is gone.
    """

    def __init__(
        self,
        control: Control,
        number: int,
        unblock: Callable[[Generation, Fault], None],
        on_store_lost: Callable[[], None],
    ) -> None:
        self._control = control
        self._on_store_lost = on_store_lost
        self._closed = False
        self._generation = control.generation(number)
        self._unblock = unblock
        self._thread = threading.Thread(target=self._run, name=f"lightning-resilience-monitor-{number}", daemon=True)
        self._alarm: Fault | None = None
        self._aborted = threading.Event()

    def start(self) -> None:
        """Begin to wait."""
        self._thread.start()

    def wait_until_aborted(self, timeout_s: float) -> Fault | None:
        """Until collectives have been ended after an alarm; returns the alarm, None if the control store is gone.

        Raises:
            RestartError: It takes too long.
        """
        if not self._aborted.wait(timeout_s):
            raise RestartError(f"the collectives of this rank could not be ended within {timeout_s:.0f} s")
        return self._alarm

    def cut(self) -> None:
        """Let it find that the control store is gone."""
        self._control.disconnect()

    def close(self) -> None:
        """End the thread; it ends by itself when all ranks have finished, and torch complains of a cut connection."""
        self._thread.join(_GOODBYE_S)
        self._closed = True
        self._control.disconnect()
        self._thread.join()

    def _run(self) -> None:
        try:
            alarm = self._generation.wait_for_alarm()
            if alarm is not None:
                self._alarm = alarm
                self._unblock(self._generation, alarm)
        except dist.DistError:  # the edge of the thread: closed, or the store is gone
            if not self._closed:
                self._on_store_lost()
        except Exception:  # the edge of the thread: without it this rank would never hear of a fault again
            log.exception("the thread that listens for faults has failed")
        finally:
            self._aborted.set()
