"""What a coordinator knows and what it decides, without log, clock or engine.

The knowledge follows from the records alone: two coordinators that read the same log decide alike,
so one may die at any moment. A decision changes nothing until `committed` says that its transaction
is in the log. Nothing is admitted beyond the window (C3), nothing that was admitted is
forgotten (C2), and every attempt at a trajectory is of its group's version (C1).

Life of a started trajectory: `pending` (no worker generates it), leased to a worker (`workers`),
lost by it (`scans`: what it left in the chunk log is being read) or handed over, `pending` again
with that prefix, ..., finished. Times are seconds of the caller's monotonic clock.
"""

from collections.abc import Iterable
from dataclasses import replace

from dora.core.processes import GONE
from dora.core.ring import eval_group_id, parse_trajectory_id, trajectory_id
from dora.core.scheduling.estimates import History, PromptOf
from dora.core.scheduling.pending import PendingAttempt, PendingQueue
from dora.core.scheduling.placement import Admit, PlacementPlan, due_evaluations
from dora.core.scheduling.prefixes import Prefix
from dora.core.scheduling.scheduler import RUN_COMPLETE, Decision, Rules, Scheduler, Yield
from dora.core.scheduling.workers import WorkerRegistry, parse_lease_name
from dora.core.state import RunState, finished_facts
from dora.schemas.records import (
    Admission,
    Chunk,
    Command,
    Record,
    RunStarted,
    Status,
    Step,
    Trajectory,
)

__all__ = ["Coordination", "Decision", "Rules", "Yield"]


class Coordination:
    """Feed the log to `handle`; then `decide`, commit, and call `committed`. `incarnation` is the
    coordinator's own; `prompt_of` is needed to start long groups first."""

    def __init__(self, rules: Rules, incarnation: str, prompt_of: PromptOf | None = None) -> None:
        self.rules = rules
        self.state = RunState(rules.window, rules.group_size, rules.success_threshold)
        self.workers = WorkerRegistry(
            heartbeat_timeout=rules.heartbeat_timeout,
            load_timeout=rules.load_timeout,
            memory_threshold=rules.schedule.memory_threshold,
        )
        self.pending = PendingQueue()
        """Started trajectories that no worker has, by id."""
        self.scans: dict[str, PendingAttempt] = {}
        """Lost trajectories whose chunks are to be read; see `scanned`."""
        self.given_up: dict[str, PendingAttempt] = {}
        """Trajectories that were tried too often and are to be recorded as failed."""
        self.rival: Status | None = None
        """Last status of another coordinator of this run; the process that reads it clears it."""
        self.opened = -1
        """Newest version with an admission in the journal; -1 is none."""
        self.stopped_at: float | None = None
        """When the workers were told that the run is complete."""
        self.takeovers = 0
        self.migrations = 0
        self.resumed_tokens = 0
        ranked = rules.schedule.longest_first
        self._history = History(prompt_of) if ranked and prompt_of is not None else None
        self._scheduler = Scheduler(
            rules, self.state, self.workers, self.pending, ranked=self._history is not None
        )
        self._incarnation = incarnation
        self._echo_at: float | None = None
        self._decided_at: float | None = None
        self._alone_since: float | None = None
        self._zombies: dict[str, Status] = {}
        self._last_yields_sent = False
        self._told_to_stop: set[str] = set()  # incarnations
        self._commands: list[tuple[Command, int]] = []

    def handle(
        self, record: Record, partition: int, offset: int, *, now: float, live: bool = True
    ) -> None:
        """Follow a record of the ledger, the journal, the commands, trajectories or statuses.

        Each partition must be fed in its order. `live` is false while catching up; `rebuilt` ends
        that. ValueError if the log contradicts itself.
        """
        match record:
            case Trajectory():
                facts = finished_facts(record, partition, offset)
                outcome = self.state.finish(facts)
                if outcome == "counted":
                    self._finished(record.trajectory_id)
                    if self._history is not None and record.purpose == "train":
                        self._history.finished(record.ordinal, facts.generated_tokens)
                elif outcome in ("unknown", "foreign"):
                    self.workers.seen_attempt(record.trajectory_id, record.attempt)
            case Chunk() if live:
                self._handed_over(record)
            case Status(role="rollout"):
                if not self.workers.on_status(record, now, live=live) and live:
                    self._zombies[record.incarnation] = record
            case Status(role="coordinator") if live:
                if record.incarnation == self._incarnation:
                    self._echo_at = now
                elif record.state not in GONE:
                    self.rival = record
            case Status(role="trainer"):
                self._scheduler.pauses.on_trainer_status(record)
            case Admission():
                # once live, admissions are this coordinator's own and known since their commit
                if not live:
                    self.state.admit(record)
                    self.opened = max(self.opened, record.policy_version)
            case Command():
                if not live:
                    self._commands.append((record, offset))
            case RunStarted():
                self.state.start()
            case Step():
                self._stepped(record)
            case _:
                pass

    def commands_read(self, now: float) -> None:
        """While catching up: all commands and statuses of the log were fed; trajectories may
        follow."""
        for command, offset in self._commands:
            self.workers.on_command(command, now, offset)
        self._commands.clear()

    def rebuilt(self, now: float) -> None:
        """The log was fed to its end: finds trajectories that were started and have no holder."""
        self.commands_read(now)
        self.workers.lost(now)  # what has no live holder is found just below
        for group, missing in self.state.unfinished():
            for sample in missing:
                identity = trajectory_id(group.group_id, sample)
                if self.workers.held(identity) is None:
                    self._release(identity)

    def scanned(self, identity: str, prefix: Prefix) -> None:
        """The chunks of a trajectory in `scans` were read; unless it was tried too often without
        a new token, it goes on from `prefix`."""
        work = self.scans.pop(identity, None)
        if work is None:
            return  # finished meanwhile
        tried = work.attempt - prefix.barren_since
        if tried - self.workers.moved(identity, prefix.barren_since) >= self.rules.max_attempts:
            self.given_up[identity] = work
            return
        self.takeovers += 1
        self.resumed_tokens += prefix.tokens
        self.pending[identity] = replace(
            work,
            prefix_token_ids=prefix.token_ids,
            prefix_logprobs=prefix.logprobs,
            prefix_runs=prefix.runs,
            prompt_hash=prefix.prompt_hash,
        )

    def _handed_over(self, chunk: Chunk) -> None:
        """A worker that was told to move an attempt sent all that it has: no need to scan."""
        identity, work = chunk.trajectory_id, self.scans.get(chunk.trajectory_id)
        group = self.state.groups.get(chunk.group_id)
        if group is None or chunk.position or chunk.policy_version != group.version:
            return
        if work is not None and work.attempt == chunk.attempt + 1:
            del self.scans[identity]  # it came late
        elif self.workers.on_handover(identity, chunk.attempt):
            work = self._unheld(identity)
        else:
            return
        if work is not None:
            self.migrations += 1
            self.pending[identity] = replace(
                work,
                prefix_token_ids=chunk.token_ids,
                prefix_logprobs=chunk.logprobs,
                prompt_hash=chunk.prompt_hash if chunk.token_ids else "",
            )

    def _stepped(self, step: Step) -> None:
        """The trajectories of a step need no worker any more."""
        for ref in (*step.trained, *step.set_aside):
            group = self.state.groups.get(ref.group_id)
            samples = range(self.rules.group_size) if group is None else group.missing
            for sample in samples:
                self._finished(trajectory_id(ref.group_id, sample))
        self.state.commit(step)
        self._give_up_departed()

    def decide(self, now: float) -> Decision:
        """What is lost, what is due, who does it."""
        if self._deaf(now):
            self.workers.excuse(now)
        for identity in self.workers.lost(now):
            self._release(identity)
        if self.state.newest < 0:
            return Decision()
        if self.stopped_at is not None:  # workers that report only now are stopped too
            return Decision(stops=self._stops(), zombies=tuple(self._zombies.values()))
        complete = self.state.newest >= self.rules.steps
        zombies = tuple(self._zombies.values())
        yields = self._superseded()
        evaluations = self._evaluations_due()
        last_yields = complete and not self._last_yields_sent
        if last_yields:
            yields += self._last_yields()
        stops: tuple[Status, ...] = ()
        if complete and not (zombies or yields or evaluations):
            stops = self._stops()
            self._end_alone(now)
        decided = PlacementPlan()
        moves: list[Yield] = []
        pauses: list[Status] = []
        if not stops:
            # what is about to be placed comes before new groups
            blocked = complete or bool(evaluations or self.scans)
            decided, moves = self._scheduler.place(now, blocked=blocked)
            if not complete:
                decided, pauses = self._scheduler.pause(decided)
        return Decision(
            evaluations=evaluations,
            plan=decided,
            yields=tuple(yields),
            moves=tuple(moves),
            pauses=tuple(pauses),
            stops=stops,
            zombies=zombies,
            given_up=tuple(self.given_up.values()),
            last_yields=last_yields,
            addressees=self._scheduler.addressees(decided),
        )

    def _deaf(self, now: float) -> bool:
        """Whether statuses of workers may not have been read yet: this process stood still, or its
        own do not come back from the log either."""
        before, self._decided_at = self._decided_at, now
        limit = self.rules.heartbeat_timeout
        stood_still = before is not None and now - before > limit
        return stood_still or (self._echo_at is not None and now - self._echo_at > limit / 2)

    def committed(self, decision: Decision, records: Iterable[Record], now: float) -> None:
        """The transaction with the `records` made of `decision` is in the log."""
        admitted: list[Admission] = []
        for record in records:
            if isinstance(record, Admission):
                self.state.admit(record)
                self.opened = max(self.opened, record.policy_version)
                admitted.append(record)
            elif isinstance(record, Command):
                self.workers.on_command(record, now)
                self._scheduler.pauses.on_command(record, self.state.newest)
                if record.kind == "start":
                    self.pending.pop(record.trajectory_id, None)
        for admission in admitted:
            for sample in range(admission.group_size):
                identity = trajectory_id(admission.group_id, sample)
                if self.workers.held(identity) is None:
                    self._release(identity)
        for work in decision.given_up:
            self.given_up.pop(trajectory_id(work.group_id, work.sample), None)
        self._zombies.clear()
        self._last_yields_sent = self._last_yields_sent or decision.last_yields
        self._told_to_stop.update(worker.incarnation for worker in decision.stops)
        if decision.stops and self.stopped_at is None:
            self.stopped_at = now

    def _release(self, identity: str) -> None:
        """Puts a trajectory without a holder up for placement or, if it was begun before, for a
        scan of its chunks."""
        work = self._unheld(identity)
        if work is None:
            return
        if work.attempt == 0:
            history = self._history if work.purpose == "train" else None
            rank = 0.0 if history is None else -history.expected(work.ordinal)
            self.pending.put(identity, work, rank)
        else:
            self.scans[identity] = work

    def _unheld(self, identity: str) -> PendingAttempt | None:
        """The next attempt at a trajectory; None if it needs none."""
        group_id, sample = parse_trajectory_id(identity)
        group = self.state.groups.get(group_id)
        if group is None or sample in group.samples:
            return None
        if group.version < self.rules.window.oldest_live(self.state.newest):
            return None  # see `_give_up_departed`
        attempt = self.workers.next_attempt(identity)
        return PendingAttempt(
            group_id, sample, group.version, group.ordinal, group.purpose, attempt
        )

    def _give_up_departed(self) -> None:
        """Evaluations of versions that left the window are given up: their slots belong to
        another version, and no worker loads such a version any more."""
        oldest = self.rules.window.oldest_live(self.state.newest)
        for queue in (self.pending, self.scans):
            for identity in [i for i, work in queue.items() if work.version < oldest]:
                del queue[identity]

    def _finished(self, identity: str) -> None:
        self.workers.finished(identity)
        self.pending.pop(identity, None)
        self.scans.pop(identity, None)
        self.given_up.pop(identity, None)

    def _superseded(self) -> list[Yield]:
        """What a worker that was given up and reports again still generates: others have it now."""
        yields = []
        for name in sorted(self.workers.disputed):
            worker = self.workers.worker(name)
            for held in sorted(worker.superseded if worker else ()):
                identity, attempt = parse_lease_name(held)
                assert worker is not None
                yields.append(Yield(worker.status, identity, attempt, "another worker took over"))
        return yields

    def _last_yields(self) -> list[Yield]:
        """After the last step: takes back what will not be trained any more."""
        for queue in (self.pending, self.scans):
            for identity in [i for i, work in queue.items() if work.purpose == "train"]:
                del queue[identity]
        yields = []
        for worker in self.workers.workers():
            for identity in sorted(worker.leases):
                group = self.state.groups.get(parse_trajectory_id(identity)[0])
                lease = self.workers.held(identity)
                if group is not None and group.purpose == "train" and lease is not None:
                    yields.append(Yield(worker.status, identity, lease.attempt, RUN_COMPLETE))
        return yields

    def _end_alone(self, now: float) -> None:
        """A complete run may have no worker left to tell; one that is about to send a status has a
        heartbeat's time for it."""
        alone = all(worker.status.state in GONE for worker in self.workers.workers())
        if not (alone and self._evaluated):
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now
        elif now - self._alone_since > self.rules.heartbeat_timeout:
            self.stopped_at = now

    def _evaluations_due(self) -> tuple[Admit, ...]:
        rules = self.rules
        due = due_evaluations(
            opened=self.opened,
            newest=self.state.newest,
            every=rules.evaluation_every,
            last=rules.steps,
        )
        return tuple(
            Admit(eval_group_id(version, ordinal), ordinal, version)
            for version in due
            for ordinal in range(rules.evaluation_prompts)
        )

    @property
    def _evaluated(self) -> bool:
        tally = self.state.evaluations.get(self.rules.steps)
        return not self.rules.evaluation_prompts or (
            tally is not None and tally.finished == tally.admitted
        )

    def _stops(self) -> tuple[Status, ...]:
        """Whom to end, once the last version is evaluated."""
        if not self._evaluated:
            return ()
        return tuple(
            worker.status
            for worker in self.workers.workers()
            if worker.status.state not in GONE
            and worker.status.incarnation not in self._told_to_stop
        )
