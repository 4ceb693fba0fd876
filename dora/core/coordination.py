"""What a coordinator knows and what it decides, without log, clock or engine.

Invariant: the knowledge depends on the records alone: whoever folds the same log decides alike, so
a coordinator may die at any moment. A decision changes nothing until `committed` says that its
transaction is in the log. Nothing is admitted beyond the window (C3), nothing that was admitted is
forgotten (C2), and every attempt at a trajectory is of its group's version (C1).

Life of a started trajectory: `unplaced` (nobody generates it), held by a worker (`roster`), lost by
it (`scans`: what it left in the chunk log is being read), `unplaced` again with that prefix, ...,
finished. Times are seconds of the caller's monotonic clock.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from dora.core.placement import Admit, Plan, Unplaced, due_evaluations, plan
from dora.core.prefixes import Prefix
from dora.core.ring import eval_group_id, parse_trajectory_id, trajectory_id
from dora.core.roster import GONE, Roster, parse_holding
from dora.core.state import RunState, finished_facts
from dora.core.window import Window
from dora.schemas.records import (
    Admission,
    Command,
    Record,
    RunStarted,
    Status,
    Step,
    Trajectory,
)


@dataclass(frozen=True, slots=True)
class Rules:
    """What of a run's configuration a coordinator decides by; timeouts in seconds."""

    window: Window
    group_size: int
    steps: int
    success_threshold: float = 1.0
    heartbeat_timeout: float = 30.0
    load_timeout: float = 900.0
    max_attempts: int = 5
    evaluation_every: int = 0
    evaluation_prompts: int = 0


@dataclass(frozen=True, slots=True)
class Yield:
    """Let a worker stop an attempt and hand it back."""

    worker: Status
    trajectory_id: str
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to be committed in one transaction; admissions come before what follows from them.

    `moves` lets workers stop attempts and hand their tokens over, `pauses` suspends generation,
    `stops` ends workers because the run is complete, `zombies` ends replaced incarnations,
    `given_up` ends trajectories that no worker survives: their groups will be set aside. Plans name
    workers; `addressees` are their newest statuses.
    """

    evaluations: tuple[Admit, ...] = ()
    plan: Plan = field(default_factory=Plan)
    yields: tuple[Yield, ...] = ()
    moves: tuple[Yield, ...] = ()
    pauses: tuple[Status, ...] = ()
    stops: tuple[Status, ...] = ()
    zombies: tuple[Status, ...] = ()
    given_up: tuple[Unplaced, ...] = ()
    last_yields: bool = False
    addressees: Mapping[str, Status] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(
            self.evaluations
            or self.plan
            or self.yields
            or self.moves
            or self.pauses
            or self.stops
            or self.zombies
            or self.given_up
        )


class Coordination:
    """Feed the log to `take`; then `decide`, commit, and tell `committed`. `incarnation` is the
    coordinator's own."""

    def __init__(self, rules: Rules, incarnation: str) -> None:
        self.rules = rules
        self.state = RunState(rules.window, rules.group_size, rules.success_threshold)
        self.roster = Roster(
            heartbeat_timeout=rules.heartbeat_timeout, load_timeout=rules.load_timeout
        )
        self.unplaced: dict[str, Unplaced] = {}
        """Started trajectories that nobody generates, by id."""
        self.scans: dict[str, Unplaced] = {}
        """Lost trajectories whose chunks are to be read; see `scanned`."""
        self.given_up: dict[str, Unplaced] = {}
        """Trajectories that were tried too often and are to be recorded as failed."""
        self.rival: Status | None = None
        """Last word of another coordinator of this run; whoever looks at it clears it."""
        self.opened = -1
        """Newest version with an admission in the journal; -1 is none."""
        self.stopped_at: float | None = None
        """When the workers were told that the run is complete."""
        self.takeovers = 0
        self.migrations = 0
        self.resumed_tokens = 0
        self._incarnation = incarnation
        self._echo_at: float | None = None
        self._decided_at: float | None = None
        self._alone_since: float | None = None
        self._zombies: dict[str, Status] = {}
        self._last_yields_sent = False
        self._told_to_stop: set[str] = set()  # incarnations
        self._commands: list[tuple[Command, int]] = []

    def take(
        self, record: Record, partition: int, offset: int, *, now: float, live: bool = True
    ) -> None:
        """Fold a record of the ledger, the journal, the commands, trajectories or statuses.

        Each partition must be fed in its order. `live` is false while catching up; `rebuilt` ends
        that. ValueError if the log contradicts itself.
        """
        match record:
            case Trajectory():
                facts = finished_facts(record, partition, offset)
                self.roster.seen_attempt(record.trajectory_id, record.attempt)
                if self.state.finish(facts) == "counted":
                    self._finished(record.trajectory_id)
            case Status(role="rollout"):
                if not self.roster.hear(record, now, live=live) and live:
                    self._zombies[record.incarnation] = record
            case Status(role="coordinator") if live:
                if record.incarnation == self._incarnation:
                    self._echo_at = now
                elif record.state not in GONE:
                    self.rival = record
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
                self.state.commit(record)
                for group in (*record.trained, *record.set_aside):
                    for sample in range(self.rules.group_size):
                        self._finished(trajectory_id(group.group_id, sample))
                self._give_up_departed()
            case _:
                pass

    def heard_commands(self, now: float) -> None:
        """While catching up: all commands and statuses of the log were fed; trajectories may
        follow."""
        for command, offset in self._commands:
            self.roster.sent(command, now, offset)
        self._commands.clear()

    def rebuilt(self, now: float) -> None:
        """The log was fed to its end: whatever was started and has no holder is found."""
        self.heard_commands(now)
        self.roster.lost(now)  # what has no live holder is found just below
        for group, missing in self.state.unfinished():
            for sample in missing:
                identity = trajectory_id(group.group_id, sample)
                if self.roster.held(identity) is None:
                    self._release(identity)

    def scanned(self, identity: str, prefix: Prefix) -> None:
        """The chunks of a trajectory in `scans` were read; unless it was tried too often without
        a new token, it goes on from `prefix`."""
        work = self.scans.pop(identity, None)
        if work is None:
            return  # finished meanwhile
        if work.attempt - prefix.barren_since >= self.rules.max_attempts:
            self.given_up[identity] = work
            return
        self.takeovers += 1
        self.resumed_tokens += prefix.tokens
        self.unplaced[identity] = replace(
            work,
            prefix_token_ids=prefix.token_ids,
            prefix_logprobs=prefix.logprobs,
            prefix_runs=prefix.runs,
        )

    def decide(self, now: float) -> Decision:
        """What is lost, what is due, who does it."""
        if self._deaf(now):
            self.roster.excuse(now)
        for identity in self.roster.lost(now):
            self._release(identity)
        if self.state.newest < 0:
            return Decision()
        if self.stopped_at is not None:  # who speaks only now is told as well
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
        decided = Plan()
        if not stops:
            steps_left = self.rules.steps - self.state.newest
            admissible = self.state.admissible(steps_left)
            if complete or evaluations or self.scans:
                admissible = 0  # what is about to be placed comes first
            decided = plan(
                self.roster.views(),
                list(self.unplaced.values()),
                newest=self.state.newest,
                admissible=admissible,
                next_ordinal=self.state.next_ordinal,
                group_size=self.rules.group_size,
            )
        return Decision(
            evaluations=evaluations,
            plan=decided,
            yields=tuple(yields),
            stops=stops,
            zombies=zombies,
            given_up=tuple(self.given_up.values()),
            last_yields=last_yields,
            addressees={member.status.process: member.status for member in self.roster.members()},
        )

    def _deaf(self, now: float) -> bool:
        """Whether workers may have spoken without being heard: this process stood still, or its own
        words do not come back from the log either."""
        before, self._decided_at = self._decided_at, now
        limit = self.rules.heartbeat_timeout
        stood_still = before is not None and now - before > limit
        return stood_still or (self._echo_at is not None and now - self._echo_at > limit / 2)

    def committed(self, decision: Decision, records: Iterable[Record], now: float) -> None:
        """The transaction with the `records` made of `decision` is in the log."""
        for record in records:
            if isinstance(record, Admission):
                self.state.admit(record)
                self.opened = max(self.opened, record.policy_version)
                if record.purpose == "eval":
                    self._release(trajectory_id(record.group_id, 0))
            elif isinstance(record, Command):
                self.roster.sent(record, now)
                if record.kind == "start":
                    self.unplaced.pop(record.trajectory_id, None)
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
        group_id, sample = parse_trajectory_id(identity)
        group = self.state.groups.get(group_id)
        if group is None or sample in group.samples:
            return
        if group.version < self.rules.window.oldest_live(self.state.newest):
            return  # see `_give_up_departed`
        attempt = self.roster.next_attempt(identity)
        work = Unplaced(group_id, sample, group.version, group.ordinal, group.purpose, attempt)
        if attempt == 0:
            self.unplaced[identity] = work
        else:
            self.scans[identity] = work

    def _give_up_departed(self) -> None:
        """Evaluations of versions that left the window are given up: their slots are somebody
        else's, and no worker loads such a version any more."""
        oldest = self.rules.window.oldest_live(self.state.newest)
        for waiting in (self.unplaced, self.scans):
            for identity in [i for i, work in waiting.items() if work.version < oldest]:
                del waiting[identity]

    def _finished(self, identity: str) -> None:
        self.roster.finished(identity)
        self.unplaced.pop(identity, None)
        self.scans.pop(identity, None)
        self.given_up.pop(identity, None)

    def _superseded(self) -> list[Yield]:
        """What a worker that was given up and speaks again still generates: others have it now."""
        yields = []
        for member in self.roster.members():
            for held in sorted(member.superseded):
                identity, attempt = parse_holding(held)
                yields.append(Yield(member.status, identity, attempt, "another worker took over"))
        return yields

    def _last_yields(self) -> list[Yield]:
        """After the last step: takes back what nobody will train any more."""
        for waiting in (self.unplaced, self.scans):
            for identity in [i for i, work in waiting.items() if work.purpose == "train"]:
                del waiting[identity]
        yields = []
        for member in self.roster.members():
            for identity in sorted(member.holds):
                group = self.state.groups.get(parse_trajectory_id(identity)[0])
                hold = self.roster.held(identity)
                if group is not None and group.purpose == "train" and hold is not None:
                    yields.append(
                        Yield(member.status, identity, hold.attempt, "the run is complete")
                    )
        return yields

    def _end_alone(self, now: float) -> None:
        """A run that is complete may have nobody left to be told; whoever is about to speak has a
        heartbeat's time for it."""
        alone = all(member.status.state in GONE for member in self.roster.members())
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
            member.status
            for member in self.roster.members()
            if member.status.state not in GONE
            and member.status.incarnation not in self._told_to_stop
        )
