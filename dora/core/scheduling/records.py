"""The records in which the coordinator's decisions take effect.

A decision's records are in the order in which they hold: admissions before the commands that follow
from them. A coordinator writes them into the log; a simulated one hands them on.
"""

from collections.abc import Callable, Mapping
from typing import Literal

from dora.core.ring import trajectory_id
from dora.core.scheduling.pending import PendingAttempt
from dora.core.scheduling.placement import PlacementPlan
from dora.core.scheduling.scheduler import RUN_COMPLETE, Decision, Yield
from dora.schemas.records import Admission, Command, Purpose, Record, Sampling, Status, Trajectory


class DecisionRecords:
    """Makes the records of one run. `sampling` is what a trajectory that is given up names;
    `now_ms` gives Unix time in milliseconds."""

    def __init__(
        self, run: str, group_size: int, sampling: Sampling, now_ms: Callable[[], int]
    ) -> None:
        self._run = run
        self._group_size = group_size
        self._sampling = sampling
        self._now_ms = now_ms

    def admission(
        self, group_id: str, ordinal: int, version: int, size: int, purpose: Purpose
    ) -> Admission:
        """The journal entry that starts a group."""
        return Admission(self._run, group_id, ordinal, version, size, purpose, self._now_ms())

    def command(
        self,
        addressee: Status,
        kind: Literal["switch", "yield", "move", "pause", "stop"],
        *,
        policy_version: int = -1,
        trajectory_id: str = "",
        attempt: int = 0,
        reason: str = "",
    ) -> Command:
        """A command to the incarnation that `addressee` came from."""
        return Command(
            run=self._run,
            worker=addressee.process,
            incarnation=addressee.incarnation,
            kind=kind,
            created_ms=self._now_ms(),
            policy_version=policy_version,
            trajectory_id=trajectory_id,
            attempt=attempt,
            reason=reason,
        )

    def start(self, addressee: Status, work: PendingAttempt) -> Command:
        """The command to generate a trajectory."""
        return Command(
            run=self._run,
            worker=addressee.process,
            incarnation=addressee.incarnation,
            kind="start",
            created_ms=self._now_ms(),
            trajectory_id=trajectory_id(work.group_id, work.sample),
            group_id=work.group_id,
            sample=work.sample,
            attempt=work.attempt,
            policy_version=work.version,
            ordinal=work.ordinal,
            purpose=work.purpose,
            prefix_token_ids=work.prefix_token_ids,
            prefix_logprobs=work.prefix_logprobs,
            prefix_runs=work.prefix_runs,
            prompt_hash=work.prompt_hash,
        )

    def of_decision(self, decision: Decision) -> list[Record]:
        """A decision's records, in the order in which they hold."""
        return [
            *(
                self.command(z, "stop", reason=f"another {z.process} took its place")
                for z in decision.zombies
            ),
            *(
                self.admission(admit.group_id, admit.ordinal, admit.version, 1, "eval")
                for admit in decision.evaluations
            ),
            *(self._ending(each, "yield") for each in decision.yields),
            *(self._ending(each, "move") for each in decision.moves),
            *(self.command(w, "pause", reason="a step is trained") for w in decision.pauses),
            *(self.command(w, "stop", reason=RUN_COMPLETE) for w in decision.stops),
            *self.of_plan(decision.plan, decision.addressees),
            *map(self.given_up, decision.given_up),
        ]  # fmt: skip

    def _ending(self, each: Yield, kind: Literal["yield", "move"]) -> Command:
        return self.command(
            each.worker,
            kind,
            trajectory_id=each.trajectory_id,
            attempt=each.attempt,
            reason=each.reason,
        )

    def of_plan(self, plan: PlacementPlan, addressees: Mapping[str, Status]) -> list[Record]:
        """A plan's records; `addressees` are the workers' newest statuses by worker id."""
        size = self._group_size
        return [
            *(
                self.admission(admit.group_id, admit.ordinal, admit.version, size, "train")
                for admit in plan.admissions
            ),
            *(
                self.command(
                    addressees[switch.worker],
                    "switch",
                    policy_version=switch.version,
                    reason=switch.reason,
                )
                for switch in plan.switches
            ),
            *(self.start(addressees[start.worker], start.work) for start in plan.starts),
        ]

    def given_up(self, work: PendingAttempt) -> Trajectory:
        """Ends a trajectory that no worker survives; its group will be set aside."""
        now = self._now_ms()
        return Trajectory(
            run=self._run,
            trajectory_id=trajectory_id(work.group_id, work.sample),
            group_id=work.group_id,
            sample=work.sample,
            attempt=work.attempt,
            chunks=0,
            policy_version=work.version,
            ordinal=work.ordinal,
            purpose=work.purpose,
            token_ids=b"",
            mask=b"",
            logprobs=b"",
            version_runs=(),
            finish_reason="error",
            reward=None,
            reward_parts={},
            error=f"gave up after {work.attempt} attempts: "
            "the last ones were lost without a new token",
            text=None,
            worker="coordinator",
            engine="none",
            sampling=self._sampling,
            started_ms=now,
            generated_ms=now,
            created_ms=now,
        )
