"""What the coordinator knows: the fold of a run's log, ledger to statuses.

Invariant: it depends on the log alone. `rebuild` and then `follow` leave the same knowledge as
having followed from the run's first record, so that a coordinator may die at any moment.
"""

import json
import logging
from collections.abc import Callable

from dora.bus.reader import LogReader, Message, Unreadable
from dora.bus.settings import ClusterSettings
from dora.bus.topics import RunTopics
from dora.config import Config
from dora.core.identity import differences
from dora.core.placement import Unplaced
from dora.core.ring import parse_trajectory_id, slot_partitions, trajectory_id
from dora.core.roster import GONE, Roster
from dora.core.state import RunState, finished_facts
from dora.core.window import Window
from dora.errors import RunError
from dora.schemas.records import Admission, Command, Policy, RunStarted, Status, Step, Trajectory

log = logging.getLogger(__name__)

JOURNAL = 0
BEGINNING = -2
REBUILD_SECONDS = 300.0


class RunFold:
    """State, roster and what waits for placement; `clock` is a monotonic one, in seconds, and
    `incarnation` the coordinator's own."""

    def __init__(
        self,
        config: Config,
        settings: ClusterSettings,
        clock: Callable[[], float],
        *,
        incarnation: str,
    ) -> None:
        self._incarnation = incarnation
        self._config = config
        self._clock = clock
        self._run = config.run.name
        self._topics = RunTopics(self._run)
        self.window = Window(config.window.max_staleness, config.window.groups_per_step)
        self.state = RunState(
            self.window,
            config.window.group_size,
            success_threshold=config.task.success_threshold,
        )
        self.roster = Roster(
            heartbeat_timeout=config.rollout.heartbeat_timeout_seconds,
            load_timeout=config.rollout.load_timeout_seconds,
        )
        self.unplaced: dict[str, Unplaced] = {}
        """Started trajectories that nobody holds, by id."""
        self.given_up: list[Unplaced] = []
        """Trajectories that were tried too often; whoever ends them takes them off the list."""
        self.zombies: dict[str, Status] = {}
        """Replaced incarnations of workers that still speak, by incarnation."""
        self.rival: Status | None = None
        """Last word of another coordinator of this run; whoever looks at it clears it."""
        self.opened = -1
        """Newest version with an admission in the journal; -1 is none."""
        self._policies: dict[int, Policy] = {}
        self._reader = LogReader(settings, client_id="coordinator")

    def rebuild(self) -> None:
        """Reads the log to its end; afterwards everything that was started and has no holder is in
        `unplaced`. DeadlineError if the log cannot be read in time."""
        topics = self._topics
        started = self._clock()
        positions = {(topics.steps, 0): BEGINNING, (topics.policies, 0): BEGINNING}
        positions[(topics.workers, 0)] = BEGINNING
        for index in range(self._config.kafka.dispatch_partitions):
            positions[(topics.dispatch, index)] = BEGINNING
        self._reader.assign(positions)
        commands: list[tuple[Command, int]] = []
        for message in self._reader.read_to_end(REBUILD_SECONDS):
            if isinstance(message.value, Command):
                commands.append((message.value, message.offset))
            else:
                self._apply(message, live=False)
        now = self._clock()
        for command, offset in commands:
            self.roster.sent(command, now, offset)
        self._follow_trajectories()
        for message in self._reader.read_to_end(REBUILD_SECONDS):
            self._apply(message, live=False)
        self.roster.lost(now)  # whatever has no live holder is found just below
        for group, missing in self.state.unfinished():
            for sample in missing:
                identity = trajectory_id(group.group_id, sample)
                if self.roster.held(identity) is None:
                    self.release(identity)
        log.info(
            "rebuilt from the log in %.2f s: version %d, %d groups outstanding, %d to place",
            self._clock() - started,
            self.state.newest,
            self.state.outstanding_total,
            len(self.unplaced),
        )

    def _follow_trajectories(self) -> None:
        """Reads finished trajectories from where the live versions start."""
        kafka, window = self._config.kafka, self._config.window
        every = [
            (self._topics.trajectories, index)
            for version in range(window.ring)
            for index in slot_partitions(version, window.ring, kafka.lanes)
        ]
        # nothing is generated for a version before this coordinator says so: the slots of versions
        # that are not live are followed from here on
        fresh = self.state.newest < 0
        positions = dict.fromkeys(every, BEGINNING) if fresh else self._reader.end_offsets(every)
        for version in range(self.window.oldest_live(self.state.newest), self.state.newest + 1):
            policy = self._policies.get(version)
            if policy is None and version == self.state.newest:
                continue  # its announcement is about to be read; nothing was generated for it yet
            if policy is None:
                raise RunError(f"{self._topics.policies} has no record of version {version}")
            for slot in policy.slots:
                if slot.topic == self._topics.trajectories:
                    positions[(slot.topic, slot.partition)] = slot.offset
        self._reader.assign(positions)

    def follow(self, timeout: float) -> None:
        """Takes what has arrived; waits up to `timeout` seconds for something to come."""
        for message in self._reader.poll(timeout=timeout):
            self._apply(message, live=True)

    def admitted(self, admission: Admission) -> None:
        """Takes an admission of this coordinator's own, once it is committed."""
        self.state.admit(admission)
        self.opened = max(self.opened, admission.policy_version)
        if admission.purpose == "eval":
            self.release(trajectory_id(admission.group_id, 0))

    def close(self) -> None:
        """Lets go of the cluster's connections."""
        self._reader.close()

    def _apply(self, message: Message, *, live: bool) -> None:
        try:
            self._fold(message, live=live)
        except ValueError as error:
            raise RunError(
                f"{_place(message)} contradicts the log before it: {error}",
                hint="Something else than this run wrote to the topic, or it was damaged.",
            ) from error

    def _fold(self, message: Message, *, live: bool) -> None:
        value = message.value
        match value:
            case Unreadable():
                self._unreadable(message, value)
            case Trajectory():
                facts = finished_facts(value, message.partition, message.offset)
                self.roster.seen_attempt(value.trajectory_id, value.attempt)
                if self.state.finish(facts) == "counted":
                    self.roster.finished(value.trajectory_id)
                    self.unplaced.pop(value.trajectory_id, None)
            case Status(role="rollout"):
                if not self.roster.hear(value, self._clock(), live=live) and live:
                    self.zombies[value.incarnation] = value
            case Status(role="coordinator") if live and value.state not in GONE:
                if value.incarnation != self._incarnation:
                    self.rival = value
            case Admission():
                # after start-up admissions are this coordinator's own and known since their commit
                if not live:
                    self.state.admit(value)
                    self.opened = max(self.opened, value.policy_version)
            case RunStarted():
                self._check_identity(value)
                self.state.start()
            case Step():
                self.state.commit(value)
                for group in (*value.trained, *value.set_aside):
                    self._forget(group.group_id)
            case Policy():
                self._policies[value.version] = value
                # the ledger may be read a step behind the policies
                oldest = self.window.oldest_live(value.version) - 1
                for version in [v for v in self._policies if v < oldest]:
                    del self._policies[version]
            case _:
                pass

    def _unreadable(self, message: Message, value: Unreadable) -> None:
        """What the rules rest on must be readable; a trajectory is the trainer's to report, and
        commands and status are their readers'."""
        topics = self._topics
        journal = message.topic == topics.dispatch and message.partition == JOURNAL
        if journal or message.topic in (topics.steps, topics.policies):
            raise RunError(
                f"{_place(message)} cannot be read ({value.code}): {value.reason}",
                hint="Without it nobody knows what was started or trained. The topic is damaged, "
                "or was written by a newer dora.",
            )
        log.warning("%s cannot be read (%s): %s", _place(message), value.code, value.reason)

    def _check_identity(self, started: RunStarted) -> None:
        found = differences(json.loads(started.identity), self._config.identity())
        if found:
            raise RunError(
                f"run {self._run} was started with another configuration: " + "; ".join(found),
                hint="give the run another name (run.name), or restore the recorded values",
            )

    def _forget(self, group_id: str) -> None:
        for sample in range(self._config.window.group_size):
            identity = trajectory_id(group_id, sample)
            self.roster.finished(identity)
            self.unplaced.pop(identity, None)

    def release(self, identity: str) -> None:
        """Puts a trajectory without a holder up for placement, unless it was tried too often.

        An evaluation of a version that left the window is given up: its slot is somebody else's.
        """
        group_id, sample = parse_trajectory_id(identity)
        group = self.state.groups.get(group_id)
        if group is None or sample in group.samples:
            return
        if group.version < self.window.oldest_live(self.state.newest):
            return
        attempt = self.roster.next_attempt(identity)
        work = Unplaced(group_id, sample, group.version, group.ordinal, group.purpose, attempt)
        if attempt >= self._config.rollout.max_attempts:
            self.given_up.append(work)
        else:
            self.unplaced[identity] = work


def _place(message: Message) -> str:
    return f"{message.topic} partition {message.partition} offset {message.offset}"
