"""Watches a run from its log alone, for `dora status`, the live display and the summary.

What is shown was read from the log and nothing is written to it; a monitor may come and
go at any time, on any machine that reaches the cluster.
"""

import logging
import time

from dora.bus.offsets import Partition
from dora.bus.reader import BEGINNING, LogReader
from dora.bus.settings import ClusterSettings
from dora.bus.topics import RunTopics, TopicAdmin
from dora.consumers.monitor.chunk_progress import ChunkProgress, Search
from dora.consumers.monitor.run_view import RunView
from dora.consumers.monitor.snapshot import Snapshot
from dora.core.groups import Group
from dora.core.identity import dispatch_partitions
from dora.core.ring import JOURNAL, partition, slot_starts, trajectory_id, version_starts
from dora.errors import BusError

log = logging.getLogger(__name__)

_LOOK_EVERY_SECONDS = 2.0
_LOOK_SECONDS = 5.0
_EXPLAINED = 20


class RunMonitor:
    """Reads a run's topics into a `RunView`.

    With `history` (records) set, trajectories that left the window are skipped in a log with more
    records than that; totals and former evaluations then count from the window on. What has held
    the run up for `explain_after` seconds is looked for in the chunks. TopicError if the run has
    no topics.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        run: str,
        *,
        steps_target: int | None = None,
        heartbeat_timeout: float = 30.0,
        load_timeout: float = 900.0,
        launched_ms: int | None = None,
        history: int | None = None,
        explain_after: float = 3.0,
    ) -> None:
        self._topics = RunTopics(run)
        self._attached = False
        self._explain_after = explain_after
        self._progress = ChunkProgress(settings, f"{run}.monitor-chunks")
        self._blocking_since: dict[str, float] = {}
        self._looked_at = float("-inf")
        control = (
            self._topics.steps,
            self._topics.policies,
            self._topics.workers,
            self._topics.dead_letters,
        )
        admin = TopicAdmin(settings)
        partitions = admin.partitions_of(run)
        needed = {*control, self._topics.dispatch, self._topics.trajectories}
        if not needed <= partitions.keys():
            raise admin.unknown_run(run)
        topic = self._topics.trajectories
        self._reader = LogReader(settings, client_id=f"{run}.monitor")
        self._trajectories = [(topic, number) for number in range(partitions[topic])]
        self.view = RunView(
            run,
            steps_target=steps_target,
            heartbeat_timeout=heartbeat_timeout,
            load_timeout=load_timeout,
            launched_ms=launched_ms,
            whole_history=history is None or self._records() <= history,
        )
        self._reader.assign({(topic, 0): BEGINNING for topic in control})

    def poll(self, timeout: float = 0.0) -> int:
        """Fold what has arrived, waiting up to `timeout` seconds for the first record; its count.

        Call `catch_up` before the first `poll`.
        """
        messages = self._reader.poll(timeout=timeout)
        for message in messages:
            self.view.handle(message)
        if not self._attached and self.view.started is not None:
            self._attach()
        return len(messages)

    def catch_up(self, deadline: float = 60.0) -> None:
        """Fold everything that the log holds now; DeadlineError after `deadline` seconds.

        The ledger comes first, which says what is closed; then the journal, without which a
        trajectory of a closed version would be one too many; then the trajectories.
        """
        end = time.monotonic() + deadline
        self._fold(end)
        if not self._attached and self.view.started is not None:
            self._reader.assign(self._dispatch_positions())
            self._fold(end)
            self._reader.assign(self._trajectory_positions())
            self._attached = True
            self._fold(end)

    def _fold(self, end: float) -> None:
        for message in self._reader.read_to_end(max(1.0, end - time.monotonic())):
            self.view.handle(message)

    def snapshot(self) -> Snapshot:
        """The run as read so far, now, with what is said in the chunks of what it waits for."""
        self._look()
        return self.view.snapshot(time.time_ns() // 1_000_000)

    def _look(self) -> None:
        """Look for the newest chunks of what the run has been waiting for, now and then."""
        now = time.monotonic()
        blocking = {
            trajectory_id(group.group_id, sample): group
            for group, sample in self.view.blocking()[:_EXPLAINED]
        }
        self._blocking_since = {each: self._blocking_since.get(each, now) for each in blocking}
        due = [each for each, at in self._blocking_since.items() if now - at >= self._explain_after]
        if not due or now - self._looked_at < _LOOK_EVERY_SECONDS:
            return
        searches = {}
        for each in due:
            search = self._search(blocking[each])
            if search is not None:
                searches[each] = search
        try:
            self.view.set_progress(self._progress.look(searches, _LOOK_SECONDS))
        except BusError as error:
            # a follower of the run meets a lost cluster with the next poll
            log.info("no chunks could be looked at: %s", error.message)
        self._looked_at = time.monotonic()

    def _search(self, group: Group) -> Search | None:
        """Where a group's chunks lie; None if its version's announcement was not read."""
        started, policy = self.view.started, self.view.policies.get(group.version)
        if started is None or policy is None:
            return None
        number = partition(group.version, group.group_id, started.ring, started.lanes)
        place = (self._topics.chunks, number)
        return Search(place, version_starts(policy).get(place, 0))

    def close(self) -> None:
        """Close the connection."""
        self._reader.close()

    def _attach(self) -> None:
        """Start to read admissions and trajectories of a run that has just begun."""
        self._reader.assign(self._trajectory_positions() | self._dispatch_positions())
        self._attached = True

    def _trajectory_positions(self) -> dict[Partition, int]:
        """All trajectories, or those of the window where the history is too long."""
        if self.view.whole_history:
            return dict.fromkeys(self._trajectories, BEGINNING)
        return self._window_positions(self._reader.end_offsets(self._trajectories))

    def _records(self) -> int:
        """How many trajectories the log holds, about."""
        starts = self._reader.start_offsets(self._trajectories)
        ends = self._reader.end_offsets(self._trajectories)
        return sum(ends[each] - starts[each] for each in self._trajectories)

    def _dispatch_positions(self) -> dict[Partition, int]:
        """The journal from its start, and commands from where the live versions begin: whatever
        concerns a version comes after its announcement."""
        view = self.view
        assert view.started is not None and view.state is not None
        topic, count = self._topics.dispatch, dispatch_partitions(view.started.identity)
        oldest = view.policies.get(view.state.window.oldest_live(view.state.newest))
        positions = dict.fromkeys([(topic, each) for each in range(1, count)], BEGINNING)
        return positions | version_starts(oldest, topic) | {(topic, JOURNAL): BEGINNING}

    def _window_positions(self, ends: dict[tuple[str, int], int]) -> dict[tuple[str, int], int]:
        """Where the live versions start; the spare slot holds nothing that counts so far."""
        view = self.view
        assert view.started is not None and view.state is not None
        newest = view.state.newest
        live = range(view.state.window.oldest_live(newest), newest + 1)
        return ends | slot_starts(
            view.policies,
            live,
            self._topics.trajectories,
            view.started.ring,
            view.started.lanes,
            unknown=BEGINNING,
        )
