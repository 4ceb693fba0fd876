"""What keeps a struck run going: restarts, ends of freezes, and what of it may never happen.

Invariant: a process that dies is started again at once with the same command, whoever killed it. A
process that slept while another took its place has to stop by itself: a trainer or coordinator as
fenced, a worker because it was told to. Every wait has its deadline.
"""

import logging
import signal
import time
from collections.abc import Callable, Iterable

from dora.bus import Message
from dora.errors import DoraError
from tests.chaos.agenda import Agenda, words
from tests.chaos.plan import Fault
from tests.chaos.processes import Child, Processes
from tests.chaos.profiles import Profile
from tests.chaos.progress import Progress
from tests.chaos.report import Findings
from tests.chaos.scene import Scene
from tests.chaos.watch import Watch

log = logging.getLogger(__name__)

FENCED = 4
HOPELESS = (2, 3)
"""Exit codes of a process that would only end the same way again. One whose transaction expired
while the broker or it itself slept ends as fenced too, although nobody took its place."""
ORDERLY = (0, 128 + signal.SIGTERM, -signal.SIGTERM)
"""Exit codes after SIGTERM; the latter ones while a process still starts."""

_TICK_SECONDS = 0.05
_RESTART_SECONDS = 0.3
_DISK_CHECK_SECONDS = 20.0
_DISK_LIMIT_MIB = 6_000.0
_AFTER = 60.0
"""Seconds after a broker fault in which a process may end for that reason."""
_OWN_EXITS = 300
"""Ends that no fault of the process explains, at most: each broker fault may cause some."""


class ChaosFailure(DoraError):
    """The run did not recover, or something happened that no fault explains."""


class Upkeep:
    """Everything that runs, looked after by `turn`."""

    def __init__(self, scene: Scene, profile: Profile, agenda: Agenda, findings: Findings) -> None:
        self.processes = Processes(
            scene.directory, scene.logs, profile.modules, scene.broker_directory
        )
        self.progress = Progress()
        self.settings: dict[str, str] = {}
        """Keys of the configuration that are set anew when a process starts."""
        self.ending = False
        """Whether processes may end by themselves."""
        self.begun = time.monotonic()
        self._scene = scene
        self._profile = profile
        self._agenda = agenda
        self._findings = findings
        self._watch: Watch | None = None
        self._names = {post: post for post in ("trainer", "coordinator", *profile.workers)}
        self._restarts: list[tuple[float, str]] = []
        self._broker_thaw: tuple[Fault, float] | None = None
        self._broker_struck_at = float("-inf")
        self._disk_at = 0.0

    @property
    def posts(self) -> tuple[str, ...]:
        """Places of the processes, the broker left out."""
        return tuple(self._names)

    def start(self) -> None:
        """Start everything; the scene has been started."""
        self.processes.await_nursery()
        self._watch = Watch(self._scene.config(), self._scene.settings)
        for post in self.posts:
            self.launch(post)

    def launch(self, post: str) -> None:
        """Start what belongs to a post, armed if the agenda wants that."""
        name = self._names[post]
        command = {"trainer": ["train"], "coordinator": ["coordinator"]}.get(
            post, ["rollout", "--worker-id", name]
        )
        sets = [
            text for key, value in self.settings.items() for text in ("--set", f"{key}={value}")
        ]
        arguments = [*command, str(self._scene.path), *sets, "-b", self._scene.address]
        armed = None if self.ending else self._agenda.arm(post, time.monotonic())
        self.processes.start(post, name, arguments, armed)

    def child(self, post: str) -> Child | None:
        """The process that has the post now."""
        mine = [c for c in self.processes.children if c.post == post and not c.replaced]
        return mine[-1] if mine else None

    def until(self, done: Callable[[], bool], seconds: float, what: Callable[[], str]) -> None:
        """Turn until `done`; ChaosFailure after `seconds`."""
        deadline = time.monotonic() + seconds
        while not done():
            if time.monotonic() > deadline:
                raise ChaosFailure(f"waited {seconds:g} s for {what()}{self.state()}")
            self.turn()

    def turn(self) -> None:
        """One look at everything."""
        self.observe()
        now = time.monotonic()
        self._take_ends(now)
        self._take_freezes(now)
        self._keep_broker(now)
        self._restart(now)
        self._check_deadlines(now)
        self._check_disk(now)

    def observe(self) -> None:
        """Fold what the log has to say."""
        assert self._watch is not None
        self._fold(self._watch.poll(_TICK_SECONDS))

    def observe_rest(self) -> None:
        """Fold everything up to the end of the log."""
        assert self._watch is not None
        self._fold(self._watch.rest())

    def _fold(self, messages: Iterable[Message]) -> None:
        progress, findings = self.progress, self._findings
        for message in messages:
            for number in progress.take(message, time.monotonic()):
                outcome = findings.outcomes[number]
                outcome.recovery = progress.recovered[number]
                log.info("fault %d: recovered after %.1f s", number, outcome.recovery)
        findings.steps = max(progress.newest, 0)
        findings.trajectories = progress.trajectories
        findings.takeovers = progress.takeovers
        findings.resumed_tokens = progress.resumed_tokens

    def busy(self) -> set[str]:
        """Posts with a fault that is not over, or without a process."""
        faults = self._findings.outcomes
        awaited = {faults[each.number].fault.process for each in self.progress.awaited}
        asleep = {c.post for c in self.processes.children if c.thaw_at is not None or c.replaced}
        broker = set() if self._broker_thaw is None else {"broker"}
        starting = {post for _, post in self._restarts}
        return awaited | asleep | broker | starting | set(self._agenda.armed)

    def strike(self, fault: Fault) -> None:
        """Make the fault now; for one at a point, start its process anew, armed."""
        now = time.monotonic()
        if fault.victim == "broker":
            self._note(fault, now)
            self._broker_struck_at = now
            kill = fault.effect == "kill"
            self._scene.strike_broker(signal.SIGKILL if kill else signal.SIGSTOP)
            if not kill:
                seconds = self._profile.freeze_seconds("broker", fault.stretch)
                self._broker_thaw = (fault, now + seconds)
            return
        child = self.child(fault.process)
        assert child is not None, fault
        if fault.point is not None:
            log.info("fault %d is to come: %s", fault.number, words(fault))
            child.ask_to_end()
        elif fault.effect == "kill":
            self._note(fault, now)
            child.killed_by = fault
            child.kill()
        else:
            self._note(fault, now)
            self._frozen(child, fault, now)

    def _note(self, fault: Fault, now: float) -> None:
        self._agenda.made(fault)
        self._findings.outcomes[fault.number].at = now - self.begun
        names = [self._names.get(fault.process, fault.process), self._successor(fault)]
        self.progress.struck(fault.number, fault.victim, names, now, time.time_ns() // 1_000_000)
        version = self.progress.newest
        log.info("version %d: fault %d, %s", version, fault.number, words(fault))

    def _take_ends(self, now: float) -> None:
        for child, code in self.processes.ended():
            if child.replaced:
                self._replaced_ended(child, code)
            elif child.killed_by is not None:
                self._restarts.append((now, child.post))
            elif code == -signal.SIGKILL and child.armed is not None:
                self._note(child.armed, now)
                self._restarts.append((now, child.post))
            elif child.asked_to_end and code in ORDERLY:
                if not self.ending:
                    self._restarts.append((now, child.post))
            elif self.ending and code == 0:
                log.info("%s is done", child.name)
            else:
                self._own_end(child, code, now)

    def _own_end(self, child: Child, code: int, now: float) -> None:
        text = f"{child.name} ended with code {code} at {now - self.begun:.1f} s"
        if code in HOPELESS:
            raise ChaosFailure(f"{text}: it says that it cannot go on")
        if code == 0:
            raise ChaosFailure(f"{text} before the run was over")
        log.info("%s; starting it again", text)
        self._findings.own_exits.append(text)
        if len(self._findings.own_exits) > _OWN_EXITS:
            raise ChaosFailure(f"{text}, as {_OWN_EXITS} processes did before it")
        self._restarts.append((now + _RESTART_SECONDS, child.post))

    def _replaced_ended(self, child: Child, code: int) -> None:
        assert child.frozen_by is not None
        number = child.frozen_by.number
        self._findings.outcomes[number].replaced_exit = code
        log.info("fault %d: the replaced %s ended with code %d", number, child.name, code)
        self._findings.fenced += code == FENCED
        if child.thaw_at is not None:
            raise ChaosFailure(f"the frozen {child.name} ended with code {code} in its sleep")
        if (
            child.pid not in self.progress.heard
            or child.frozen_at < self._broker_struck_at + _AFTER
        ):
            return  # it never had the place, or Kafka was away when it went on: any end will do
        fenced = child.post in ("trainer", "coordinator")
        if code != (FENCED if fenced else 0):
            raise ChaosFailure(
                f"{child.name}, which slept while another took its place, ended with code {code} "
                f"instead of {FENCED if fenced else 0}"
            )

    def _take_freezes(self, now: float) -> None:
        for child in list(self.processes.children):
            if child.armed is not None and child.frozen_by is None and child.stopped:
                self._note(child.armed, now)
                self._frozen(child, child.armed, now)
            if child.thaw_at is not None and now >= child.thaw_at and self._succeeded(child, now):
                assert child.frozen_by is not None
                log.info("fault %d: %s goes on", child.frozen_by.number, child.name)
                self._findings.outcomes[child.frozen_by.number].frozen = now - child.frozen_at
                child.thaw_at = None
                child.thawed_at = now
                child.signal(signal.SIGCONT)
                if child.frozen_by.successor == "other":
                    child.ask_to_end()

    def _frozen(self, child: Child, fault: Fault, now: float) -> None:
        """A process sleeps from now on; its successor starts, if it is to have one."""
        child.signal(signal.SIGSTOP)  # its children too
        child.frozen_by = fault
        child.frozen_at = now
        child.thaw_at = now + self._profile.freeze_seconds(fault.victim, fault.stretch)
        if fault.successor != "none":
            child.replaced = True
            self._names[child.post] = self._successor(fault)
            self._restarts.append((now, child.post))

    def _successor(self, fault: Fault) -> str:
        """Name of the process that takes the victim's place."""
        if fault.successor == "other":
            return f"{fault.process}-{fault.number}"
        return self._names.get(fault.process, fault.process)

    def _succeeded(self, child: Child, now: float) -> bool:
        """Whether a frozen worker's successor has spoken: a worker of the same name is refused
        while the former one does."""
        if child.post in ("trainer", "coordinator") or not child.replaced:
            return True
        successor = self.child(child.post)
        if successor is not None and successor.pid in self.progress.heard:
            return True
        if now - child.frozen_at > self._profile.patience:
            raise ChaosFailure(
                f"the successor of the frozen {child.name} did not speak in "
                f"{self._profile.patience:g} s{self.state()}"
            )
        return False

    def _keep_broker(self, now: float) -> None:
        problem = self._scene.broker_problem()
        if problem is not None:
            raise ChaosFailure(f"the broker did not come back: {problem}")
        if self._broker_thaw is not None and now >= self._broker_thaw[1]:
            self.thaw_broker()
        if not self._scene.broker_lives and not self._scene.broker_starting:
            self._scene.revive_broker()

    def thaw_broker(self) -> None:
        """Let the broker go on, if it sleeps."""
        if self._broker_thaw is not None:
            outcome = self._findings.outcomes[self._broker_thaw[0].number]
            outcome.frozen = time.monotonic() - self.begun - (outcome.at or 0.0)
            self._broker_thaw = None
            self._scene.strike_broker(signal.SIGCONT)

    def _restart(self, now: float) -> None:
        due = [post for at, post in self._restarts if at <= now]
        self._restarts = [(at, post) for at, post in self._restarts if at > now]
        for post in due:
            self.launch(post)

    def end_in_order(self, posts: tuple[str, ...], seconds: float) -> None:
        """Ask processes to end, wait until they have, and do not start them again."""
        for post in posts:
            child = self.child(post)
            if child is not None:
                child.ask_to_end()
        gone = f"the orderly end of {' and '.join(posts)}"
        self.until(lambda: all(self.child(p) is None for p in posts), seconds, lambda: gone)
        self._restarts = [(at, post) for at, post in self._restarts if post not in posts]

    @property
    def all_ended(self) -> bool:
        """Whether nothing runs any more, and nothing is to be started."""
        return not self.processes.children and not self._restarts

    def _check_deadlines(self, now: float) -> None:
        patience = self._profile.patience
        for awaited in self.progress.awaited:
            if now - awaited.at > patience:
                fault = self._findings.outcomes[awaited.number].fault
                raise ChaosFailure(
                    f"the run did not recover from {words(fault)} in {patience:g} s{self.state()}"
                )
        overdue = self._agenda.overdue(now, 2 * patience)
        if overdue is not None:
            raise ChaosFailure(
                f"{overdue.process} did not pass {overdue.point} {overdue.passage} times in "
                f"{2 * patience:g} s{self.state()}"
            )
        for child in self.processes.children:
            if child.replaced and child.thawed_at is not None and now - child.thawed_at > patience:
                raise ChaosFailure(
                    f"{child.name}, which slept while another took its place, did not stop within "
                    f"{patience:g} s of going on"
                )

    def _check_disk(self, now: float) -> None:
        if now >= self._disk_at:
            self._disk_at = now + _DISK_CHECK_SECONDS
            used = self._scene.disk_mib()
            if used > _DISK_LIMIT_MIB:
                raise ChaosFailure(f"the run takes {used:,.0f} MiB on disk")

    def state(self) -> str:
        """How far the run is, for a message."""
        progress, problem = self.progress, "" if self._watch is None else self._watch.problem
        return (
            f"; version {progress.newest}, {len(progress.outstanding)} groups outstanding, "
            f"{progress.trajectories} trajectories, last record seen "
            f"{time.monotonic() - progress.last_at:.1f} s ago"
            + (f"; reading failed last with: {problem}" if problem else "")
        )
