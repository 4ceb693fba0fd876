"""A chaos run: starts everything, strikes it as planned, and lets it end in order.

Invariant: each fault is made on a process that is well (it has recovered from its last fault), is
watched until the run has recovered from it, and has its deadline. A process that dies is started
again at once with the same command. Whatever happens, nothing that was started outlives `run`.
"""

import logging
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dora.errors import DoraError
from tests.chaos.plan import Fault, plan
from tests.chaos.processes import Child, Processes
from tests.chaos.profiles import Profile
from tests.chaos.progress import Progress
from tests.chaos.proof import prove
from tests.chaos.report import Findings, Outcome
from tests.chaos.scene import Scene
from tests.chaos.watch import Watch

log = logging.getLogger(__name__)

FENCED = 4
ORDERLY = (0, 128 + signal.SIGTERM, -signal.SIGTERM)
"""Exit codes after SIGTERM; the latter ones while a process still starts."""
HOPELESS = (2, 3)
"""Exit codes of a process that would only fail the same way again."""

_TICK_SECONDS = 0.05
_RESTART_SECONDS = 0.3
_LOOK_AHEAD = 8
_WARM_STEPS = 2
_LAST_SECONDS = 300.0
_ORDERLY_SECONDS = 90.0
_DISK_CHECK_SECONDS = 20.0
_DISK_LIMIT_MIB = 6_000.0
_OWN_EXITS = 60
"""Ends that no fault of the process explains, at most: each broker fault may cause some."""


class ChaosFailure(Exception):
    """The run did not recover, or something happened that no fault explains."""


class Campaign:
    """One chaos run in `directory`; `run` does everything."""

    def __init__(self, directory: Path, profile: Profile, seed: int, faults: int) -> None:
        self._profile = profile
        self._scene = Scene(directory, profile, seed)
        self._processes = Processes(directory, self._scene.logs)
        self._progress = Progress()
        self._watch: Watch
        self._plan = plan(seed, faults, profile.mix)
        self._outcomes = [Outcome(fault) for fault in self._plan]
        self.findings = Findings(
            seed, profile.engine, self._outcomes, max_staleness_allowed=profile.max_staleness
        )
        self._pending: list[Fault] = list(self._plan)
        self._due: dict[str, float] = {}  # when the next fault of a victim may be made
        self._struck: dict[str, Fault] = {}  # faults made and not recovered from, by victim
        self._arming: dict[str, tuple[Fault, float]] = {}  # waiting for a point, since when
        self._restarts: list[tuple[float, str, str]] = []  # when, post, name
        self._names = {post: post for post in ("trainer", "coordinator", *profile.workers)}
        self._sets: dict[str, str] = {}
        self._broker_thaw_at: float | None = None
        self._broker_fault: Fault | None = None
        self._ending = False
        self._disk_at = 0.0
        self._begun = time.monotonic()

    def run(self) -> Findings:
        """Everything: start, faults, end, proof. Never raises for what the run did: see
        `findings.failures`."""
        try:
            try:
                self._start()
                self._strike_all()
                self._finish()
            except (ChaosFailure, DoraError) as error:
                self._failed(error)
            self._processes.end()
            self._observe()
            if self._scene.broker_lives:
                log.info("proving: audit, conservation, redo of the whole ledger")
                prove(self._scene, self.findings)
            self.findings.disk_mib = self._scene.disk_mib()
        except DoraError as error:
            self.findings.failures.append(str(error))
        finally:
            self._processes.end()
            self._scene.close()
            self.findings.wall_seconds = time.monotonic() - self._begun
        return self.findings

    def _failed(self, error: Exception) -> None:
        log.error("%s", error)
        self.findings.failures.append(str(error))
        log.error("the processes' last words:\n%s", self._processes.tails())
        if self._broker_thaw_at is not None:
            self._scene.strike_broker(signal.SIGCONT)

    def _start(self) -> None:
        log.info("starting a broker in %s", self._scene.directory)
        self._scene.start()
        self._watch = Watch(self._scene.config(), self._scene.settings)
        for post in self._names:
            self._launch(post)
        self._until(
            lambda: self._progress.newest >= _WARM_STEPS,
            self._profile.patience,
            lambda: f"version {self._progress.newest} after the start",
        )
        now = time.monotonic()
        for post in (*self._names, "broker"):
            self._well(post, now)

    def _launch(self, post: str, name: str | None = None) -> Child:
        """Start what belongs to a post, armed if its next fault is one at a point."""
        name = name or self._names[post]
        self._names[post] = name
        command = {"trainer": ["train"], "coordinator": ["coordinator"]}.get(
            post, ["rollout", "--worker-id", name]
        )
        sets = [part for key, value in self._sets.items() for part in ("--set", f"{key}={value}")]
        arguments = [*command, str(self._scene.path), *sets, "-b", self._scene.address]
        armed = self._arming[post][0] if post in self._arming else None
        return self._processes.start(post, name, arguments, armed)

    def _child(self, post: str) -> Child | None:
        """The process that has the post now."""
        mine = [c for c in self._processes.children if c.post == post and not c.replaced]
        return mine[-1] if mine else None

    def _until(self, done: Callable[[], bool], seconds: float, what: Callable[[], str]) -> None:
        """Turn until `done`; ChaosFailure after `seconds`."""
        deadline = time.monotonic() + seconds
        while not done():
            if time.monotonic() > deadline:
                raise ChaosFailure(f"waited {seconds:g} s for {what()}{self._state()}")
            self._turn()

    def _turn(self) -> None:
        """One look at everything."""
        self._observe()
        now = time.monotonic()
        self._take_ends(now)
        self._take_freezes(now)
        self._keep_broker(now)
        self._restart(now)
        self._check_deadlines(now)
        self._check_disk(now)

    def _observe(self) -> None:
        for message in self._watch.poll(_TICK_SECONDS):
            for number in self._progress.take(message, time.monotonic()):
                self._recovered(number)
        findings, progress = self.findings, self._progress
        findings.steps = max(progress.newest, 0)
        findings.trajectories = progress.trajectories
        findings.takeovers = progress.takeovers
        findings.resumed_tokens = progress.resumed_tokens

    def _recovered(self, number: int) -> None:
        outcome = self._outcomes[number]
        outcome.recovery = self._progress.recovered[number]
        log.info("fault %d: recovered after %.1f s", number, outcome.recovery)

    def _take_ends(self, now: float) -> None:
        for child, code in self._processes.ended():
            if child.replaced:
                self._replaced_ended(child, code)
            elif child.killed_by is not None:
                self._restarts.append((now, child.post, child.name))
            elif code == -signal.SIGKILL and child.armed is not None:
                self._fired(child, now)
                self._restarts.append((now, child.post, child.name))
            elif child.asked_to_end and code in ORDERLY:
                if not self._ending:
                    self._restarts.append((now, child.post, child.name))
            elif self._ending and code == 0:
                log.info("%s is done", child.name)
            else:
                self._own_end(child, code, now)

    def _own_end(self, child: Child, code: int, now: float) -> None:
        """A process ended by itself."""
        text = f"{child.name} ended with code {code} at {now - self._begun:.1f} s"
        if code in HOPELESS or code == FENCED:
            raise ChaosFailure(f"{text}: it says that it cannot go on")
        if code == 0 and not self._ending:
            raise ChaosFailure(f"{text} before the run was over")
        log.info("%s; starting it again", text)
        self.findings.own_exits.append(text)
        if len(self.findings.own_exits) > _OWN_EXITS:
            raise ChaosFailure(f"{text}; {_OWN_EXITS} other processes did so before")
        self._restarts.append((now + _RESTART_SECONDS, child.post, child.name))

    def _replaced_ended(self, child: Child, code: int) -> None:
        assert child.frozen_by is not None
        fault = child.frozen_by
        self._outcomes[fault.number].replaced_exit = code
        log.info("fault %d: the replaced %s ended with code %d", fault.number, child.name, code)
        if child.thaw_at is not None:
            raise ChaosFailure(f"the frozen {child.name} ended with code {code} in its sleep")
        if child.post in ("trainer", "coordinator"):
            if code != FENCED:
                raise ChaosFailure(
                    f"a {child.post} that slept while another took over ended with code {code} "
                    f"instead of {FENCED}"
                )
            self.findings.fenced += 1
        elif code != 0:
            raise ChaosFailure(f"the replaced {child.name} ended with code {code} instead of 0")

    def _take_freezes(self, now: float) -> None:
        for child in list(self._processes.children):
            if child.armed is not None and child.frozen_by is None and child.stopped:
                self._fired(child, now)
                self._frozen(child, child.armed, now)
            if child.thaw_at is not None and now >= child.thaw_at:
                child.thaw_at = None
                child.thawed_at = now
                assert child.frozen_by is not None
                self._outcomes[child.frozen_by.number].frozen = now - child.frozen_at
                log.info("fault %d: %s goes on", child.frozen_by.number, child.name)
                child.signal(signal.SIGCONT)
                if child.replaced and child.frozen_by.successor == "other":
                    child.ask_to_end()

    def _frozen(self, child: Child, fault: Fault, now: float) -> None:
        """A process sleeps from now on; start its successor if it is to have one."""
        child.signal(signal.SIGSTOP)  # its children too
        child.frozen_by = fault
        child.frozen_at = now
        child.thaw_at = now + self._profile.freeze_seconds(fault.victim, fault.stretch)
        if fault.successor != "none":
            child.replaced = True
            name = f"{child.post}-{fault.number}" if fault.successor == "other" else child.name
            self._restarts.append((now, child.post, name))

    def _keep_broker(self, now: float) -> None:
        problem = self._scene.broker_problem()
        if problem is not None:
            raise ChaosFailure(f"the broker did not come back: {problem}")
        if self._broker_thaw_at is not None and now >= self._broker_thaw_at:
            self._broker_thaw_at = None
            self._scene.strike_broker(signal.SIGCONT)
            if self._broker_fault is not None:
                outcome = self._outcomes[self._broker_fault.number]
                outcome.frozen = now - self._begun - (outcome.at or 0.0)
        if not self._scene.broker_lives and not self._scene.broker_starting:
            self._scene.revive_broker()

    def _restart(self, now: float) -> None:
        due = [entry for entry in self._restarts if entry[0] <= now]
        self._restarts = [entry for entry in self._restarts if entry[0] > now]
        for _, post, name in due:
            if post not in self._arming:
                self._arm_next(post, now)
            self._launch(post, name)

    def _arm_next(self, post: str, now: float) -> None:
        """Arm the post with its next fault, if that is one at a point: it has to start anyway."""
        following = [fault for fault in self._pending[:_LOOK_AHEAD] if fault.process == post]
        if following and following[0].kind == "point":
            self._pending.remove(following[0])
            self._arming[post] = (following[0], now)

    def _check_deadlines(self, now: float) -> None:
        patience = self._profile.patience
        for awaited in self._progress.awaited:
            fault = self._plan[awaited.number]
            if now - awaited.at > patience:
                raise ChaosFailure(
                    f"the run did not recover from {_words(fault)} in {patience:g} s{self._state()}"
                )
        for fault, since in self._arming.values():
            if now - since > 2 * patience:
                raise ChaosFailure(
                    f"{fault.process} did not pass {fault.point} {fault.passage} times in "
                    f"{2 * patience:g} s{self._state()}"
                )
        for child in self._processes.children:
            if child.thawed_at is not None and child.replaced and now - child.thawed_at > patience:
                raise ChaosFailure(
                    f"{child.name} was replaced while it slept and did not stop within "
                    f"{patience:g} s of going on"
                )

    def _check_disk(self, now: float) -> None:
        if now < self._disk_at:
            return
        self._disk_at = now + _DISK_CHECK_SECONDS
        used = self._scene.disk_mib()
        if used > _DISK_LIMIT_MIB:
            raise ChaosFailure(f"the run takes {used:,.0f} MiB on disk")

    def _state(self) -> str:
        progress = self._progress
        away = f"; reading: {self._watch.problem}" if self._watch.problem else ""
        return (
            f"; version {progress.newest}, {len(progress.outstanding)} groups outstanding, "
            f"{progress.trajectories} trajectories, last record seen "
            f"{time.monotonic() - progress.last_at:.1f} s ago{away}"
        )

    def _well(self, post: str, now: float) -> None:
        """A victim may be struck again, after the delay of its next fault."""
        following = [fault for fault in self._pending if fault.process == post]
        self._due[post] = now + (following[0].delay if following else 0.0)

    def _strike_all(self) -> None:
        log.info("version %d: %d faults are to come", self._progress.newest, len(self._plan))
        while self._pending or self._busy():
            self._settle(time.monotonic())
            fault = self._next(time.monotonic())
            if fault is not None:
                self._pending.remove(fault)
                self._make(fault)
            self._turn()

    def _busy(self) -> set[str]:
        """Victims with a fault that is not over: not recovered from, armed, asleep, or about to
        start again."""
        awaited = {self._plan[each.number].process for each in self._progress.awaited}
        asleep = {c.post for c in self._processes.children if c.frozen_by and not _over(c)}
        broker = {"broker"} if self._broker_thaw_at is not None else set()
        starting = {post for _, post, _ in self._restarts}
        return awaited | asleep | broker | starting | set(self._arming)

    def _settle(self, now: float) -> None:
        """Victims that have become well get the time of their next fault."""
        busy = self._busy()
        for post in [post for post in self._struck if post not in busy]:
            del self._struck[post]
            self._well(post, now)

    def _next(self, now: float) -> Fault | None:
        """The next fault whose victim is well."""
        busy = self._busy()
        if len(busy) >= self._profile.at_once:
            return None
        seen: set[str] = set()
        for fault in self._pending[:_LOOK_AHEAD]:
            post = fault.process
            ready = post not in busy and now >= self._due[post]
            if post not in seen and ready and (post == "broker" or self._child(post) is not None):
                return fault
            seen.add(post)
        return None

    def _make(self, fault: Fault) -> None:
        now = time.monotonic()
        if fault.kind == "point":
            self._arming[fault.process] = (fault, now)
            child = self._child(fault.process)
            assert child is not None
            child.ask_to_end()
            return
        if fault.victim == "broker":
            self._note(fault, now)
            self._strike_broker(fault, now)
            return
        child = self._child(fault.process)
        if child is None or child.popen.poll() is not None:
            self._pending.insert(0, fault)  # it ended in this very moment
            return
        self._note(fault, now)
        if fault.effect == "kill":
            child.killed_by = fault
            child.popen.kill()
        else:
            self._frozen(child, fault, now)

    def _strike_broker(self, fault: Fault, now: float) -> None:
        self._broker_fault = fault
        if fault.effect == "kill":
            self._scene.strike_broker(signal.SIGKILL)
        else:
            self._scene.strike_broker(signal.SIGSTOP)
            seconds = self._profile.freeze_seconds("broker", fault.stretch)
            self._broker_thaw_at = now + seconds

    def _fired(self, child: Child, now: float) -> None:
        """A process has struck itself at its point."""
        fault = child.armed
        assert fault is not None
        self._arming.pop(child.post, None)
        child.killed_by = fault if fault.effect == "kill" else None
        self._note(fault, now)

    def _note(self, fault: Fault, now: float) -> None:
        """The fault happens now."""
        self._outcomes[fault.number].at = now - self._begun
        self._struck[fault.process] = fault
        name = self._names.get(fault.process, fault.process)
        self._progress.struck(fault.number, fault.victim, name, now, time.time_ns() // 1_000_000)
        log.info(
            "%.1f s, version %d: fault %d, %s",
            now - self._begun, self._progress.newest, fault.number, _words(fault),
        )  # fmt: skip

    def _finish(self) -> None:
        """After the last fault: train what is outstanding, and let everything end by itself."""
        log.info("all faults are made: letting the run end")
        # Both have to hear of the last step, which no running process does.
        self._ending = True
        self._end_in_order(("trainer", "coordinator"))
        last = self._progress.newest + self._profile.max_staleness + 3
        self._sets["trainer.steps"] = str(last)
        for post in ("trainer", "coordinator"):
            self._launch(post)
        self._until(
            lambda: not self._processes.children and not self._restarts,
            _LAST_SECONDS,
            lambda: (
                "the end of "
                + ", ".join(child.name for child in self._processes.children)
                + f" after version {last}"
            ),
        )
        self._observe_rest()
        if self._progress.newest != last:
            raise ChaosFailure(f"the run ended at version {self._progress.newest}, not {last}")
        if self._progress.outstanding:
            raise ChaosFailure(
                f"{len(self._progress.outstanding)} groups are outstanding at the end: "
                + ", ".join(sorted(self._progress.outstanding)[:10])
            )

    def _end_in_order(self, posts: Sequence[str]) -> None:
        for post in posts:
            child = self._child(post)
            if child is not None:
                child.ask_to_end()
        self._until(
            lambda: all(self._child(post) is None for post in posts),
            _ORDERLY_SECONDS,
            lambda: f"the orderly end of {' and '.join(posts)}",
        )
        self._restarts = [entry for entry in self._restarts if entry[1] not in posts]

    def _observe_rest(self) -> None:
        for message in self._watch.rest():
            for number in self._progress.take(message, time.monotonic()):
                self._recovered(number)
        self._observe()


def _over(child: Child) -> bool:
    """Whether a freeze is over for a process that was not replaced: it goes on."""
    return child.thaw_at is None and not child.replaced


def _words(fault: Fault) -> str:
    struck = f"{fault.effect} of {fault.process}"
    if fault.point is not None:
        struck += f" at {fault.point}, passage {fault.passage}"
    return struck + (f", successor: {fault.successor}" if fault.effect == "freeze" else "")
