"""Every metric that the processes of a run export: the one table.

Names follow Prometheus' conventions (`dora_<role>_<what>_<base unit>`, `_total` for what
only counts) and never change their meaning. A metric has at most one label besides `run`, `role`
and `process`; its values are the closed set given here (anything else counts as `other`), the
versions of the window, or the first 32 reward parts, so the number of series is bounded however
long a run is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from dora.schemas.codec import UndecodableCode
from dora.schemas.records import CommandKind, FinishReason, ProcessState, Purpose, Status

Kind = Literal["counter", "gauge", "histogram"]
Role = Literal["process", "coordinator", "rollout", "trainer"]

OTHER = "other"
VERSION = "version"
PART_LABEL = "part"
COMMON = ("run", "role", "process")
"""Labels of every series: name of the run, role of the process, and its name."""

STATES: tuple[str, ...] = get_args(ProcessState)
DEAD_LETTERS: tuple[str, ...] = (
    *get_args(UndecodableCode),
    *("already_running", "wrong_version", "prompt_failed", "generation_failed", "stalled"),
    *("verifier_raised", "verifier_timeout", "verifier_bad_value", "verifier_died"),
)
SET_ASIDE = (
    *("no_signal", "invalid", "prompt_failed", "generation_failed"),
    *("verifier_raised", "verifier_timeout", "verifier_bad_value", "verifier_died", "gave_up"),
)
_FAST = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_MEDIUM = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_SLOW = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 3600.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. Where its values come from: `status` is the key in the metrics of the process's
    own Status (or `running`, `capacity`, `version`: its fields), `step` the key in those of a
    committed step; without either it is counted or set where it happens. The statuses of several
    workers in one process are added up, or with `largest` the largest counts."""

    name: str
    kind: Kind
    role: Role
    help: str
    status: str = ""
    step: str = ""
    largest: bool = False
    label: str = ""
    values: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def _gauge(role: Role, name: str, text: str, **more: object) -> Metric:
    return Metric(name, "gauge", role, text, **more)  # type: ignore[arg-type]


def _counter(role: Role, name: str, text: str, **more: object) -> Metric:
    return Metric(name, "counter", role, text, **more)  # type: ignore[arg-type]


def _histogram(
    role: Role, name: str, text: str, buckets: tuple[float, ...], **more: object
) -> Metric:
    return Metric(name, "histogram", role, text, buckets=buckets, **more)  # type: ignore[arg-type]


_PROCESS = (
    _gauge(
        "process", "dora_process_state", "Workers of the process in this state; the other roles "
        "count as one worker.", label="state", values=STATES,
    ),
    _gauge("process", "dora_process_heartbeat_age_seconds",
           "Time since the process last sent a heartbeat."),
    _gauge("process", "dora_process_late", "Workers of the process (or itself) silent for longer "
           "than the run allows: rollout.heartbeat_timeout_seconds, or, while starting or "
           "loading, rollout.load_timeout_seconds. Then /health answers 503."),
    _gauge("process", "dora_process_policy_version", "Newest policy version that the process "
           "knows or hosts; -1 is none.", status="version", largest=True),
    _counter("process", "dora_process_dead_letters_total", "Records that could not be read, "
             "generated or scored.", label="code", values=DEAD_LETTERS),
    _counter("process", "dora_process_spans_total", "Trace spans given to the exporter."),
    _counter("process", "dora_process_spans_dropped_total",
             "Trace spans dropped because the receiver was away or too slow."),
)  # fmt: skip

_TRAINER = (
    _counter("trainer", "dora_trainer_steps_total", "Steps committed."),
    _gauge("trainer", "dora_trainer_steps_target", "trainer.steps.", status="steps_target"),
    _gauge("trainer", "dora_trainer_last_step_timestamp_seconds",
           "Unix time of the last commit of a step; before the first, of the start."),
    _histogram("trainer", "dora_trainer_step_seconds", "Whole step, from the last commit on.",
               _SLOW, step="step_seconds"),
    _histogram("trainer", "dora_trainer_idle_seconds", "Part of a step spent waiting for groups.",
               _SLOW, step="idle_seconds"),
    _histogram("trainer", "dora_trainer_train_seconds", "Part of a step spent training.",
               _SLOW, step="train_seconds"),
    _histogram("trainer", "dora_trainer_publish_seconds",
               "Part of a step spent storing weights and checkpoint.", _SLOW,
               step="publish_seconds"),
    _counter("trainer", "dora_trainer_tokens_total", "Generated tokens in committed steps.",
             step="tokens"),
    _counter("trainer", "dora_trainer_trajectories_total", "Trajectories in committed steps.",
             step="trajectories"),
    _counter("trainer", "dora_trainer_groups_trained_total", "Groups in committed steps."),
    _counter("trainer", "dora_trainer_groups_set_aside_total", "Groups set aside.",
             label="reason", values=SET_ASIDE),
    _gauge("trainer", "dora_trainer_groups_outstanding",
           "Groups that were started and are in no committed step."),
    _gauge("trainer", "dora_trainer_groups_capacity",
           "Groups that may be outstanding at once (the window)."),
    _gauge("trainer", "dora_trainer_backlog_trajectories",
           "Unfinished trajectories of outstanding groups.", label=VERSION),
    _gauge("trainer", "dora_trainer_backlog_groups",
           "Finished groups that wait to be trained.", label=VERSION),
    _gauge("trainer", "dora_trainer_reward_mean", "Mean reward of the last step.",
           step="reward_mean"),
    _gauge("trainer", "dora_trainer_success_ratio",
           "Share of the last step's trajectories that reach task.success_threshold.",
           step="success_rate"),
    _gauge("trainer", "dora_trainer_loss", "Loss of the last step.", step="loss"),
    _gauge("trainer", "dora_trainer_gradient_norm",
           "Norm of the last step's gradient before clipping.", step="grad_norm"),
    _gauge("trainer", "dora_trainer_learning_rate", "Learning rate of the last step.",
           step="learning_rate"),
    _gauge("trainer", "dora_trainer_entropy_nats", "Estimate of the policy's entropy per token.",
           step="entropy"),
    _gauge("trainer", "dora_trainer_clip_ratio", "Share of the last step's tokens that were "
           "clipped.", step="clip_fraction"),
    _gauge("trainer", "dora_trainer_mismatch_mean_nats", "Mean difference between the trainer's "
           "and the engine's log-probabilities under the same weights.",
           step="logprob_mismatch_mean"),
    _gauge("trainer", "dora_trainer_mismatch_max_nats", "Largest of these differences.",
           step="logprob_mismatch_max"),
    _gauge("trainer", "dora_trainer_staleness_mean", "Mean staleness, in versions, of the last "
           "step's trajectories.", step="staleness_mean"),
    _gauge("trainer", "dora_trainer_staleness_max", "Largest staleness of the last step.",
           step="staleness_max"),
    _gauge("trainer", "dora_trainer_staleness_bound", "window.max_staleness."),
    _gauge("trainer", "dora_trainer_response_tokens_mean", "Mean length of the last step's "
           "responses.", step="response_length_mean"),
    _gauge("trainer", "dora_trainer_response_tokens_max", "Longest response of the last step.",
           step="response_length_max"),
    _gauge("trainer", "dora_trainer_truncated_ratio", "Share of the last step's responses cut at "
           "rollout.max_new_tokens.", step="truncated_fraction"),
    _gauge("trainer", "dora_trainer_unscored_ratio", "Share of the training responses read during "
           "the last step that got no score.", step="unscored_fraction"),
    _gauge("trainer", "dora_trainer_held_out_success_ratio", "Success on held-out prompts of the "
           "newest version whose evaluation was complete.", step="held_out_success_rate"),
    _gauge("trainer", "dora_trainer_held_out_reward_mean", "Mean reward on these.",
           step="held_out_reward_mean"),
    _gauge("trainer", "dora_trainer_held_out_version", "That version.", step="held_out_version"),
    _gauge("trainer", "dora_trainer_reward_part_mean", "Means of the last step's reward parts, of "
           "the first 32 by name.", label=PART_LABEL),
    _gauge("trainer", "dora_trainer_journal_lag_records", "Offsets between the trainer's position "
           "in the admission journal and its last stable offset."),
    _gauge("trainer", "dora_trainer_trajectories_lag_records", "Offsets between the trainer's "
           "positions in the version's partitions of trajectories and their last stable offsets.",
           label=VERSION),
    _gauge("trainer", "dora_trainer_lag_age_seconds", "Time since the lag was measured."),
    _counter("trainer", "dora_trainer_commit_failures_total",
             "Transactions that Kafka refused and that were tried again."),
    _counter("trainer", "dora_trainer_redone_steps_total",
             "Committed steps that were trained again from the log after a restart."),
    _counter("trainer", "dora_trainer_tracker_failures_total",
             "Experiment trackers that were switched off because they failed or hung."),
    _counter("trainer", "dora_trainer_lineage_events_total", "OpenLineage events sent."),
    _counter("trainer", "dora_trainer_lineage_events_dropped_total",
             "OpenLineage events dropped because the receiver was away, too slow or refused them."),
)  # fmt: skip

_WORKER = (
    _counter("rollout", "dora_worker_tokens_total", "Tokens generated.", status="tokens_total"),
    _gauge("rollout", "dora_worker_tokens_per_second", "Decoding speed over the last heartbeats.",
           status="tokens_per_second"),
    _counter("rollout", "dora_worker_trajectories_total", "Trajectories written.",
             label="finish_reason", values=get_args(FinishReason)),
    _gauge("rollout", "dora_worker_running_trajectories", "Trajectories inflight.",
           status="running"),
    _gauge("rollout", "dora_worker_capacity_trajectories", "rollout.capacity of all workers of "
           "the process.", status="capacity"),
    _counter("rollout", "dora_worker_attempts_total", "Attempts started."),
    _counter("rollout", "dora_worker_attempts_resumed_total",
             "Attempts that went on from the tokens of an earlier one."),
    _counter("rollout", "dora_worker_moved_total",
             "Attempts handed over to another worker.", status="moved_total"),
    _histogram("rollout", "dora_worker_engine_step_seconds", "One step of the engine that "
               "brought tokens.", _FAST),
    _gauge("rollout", "dora_worker_kv_cache_used_ratio", "Share of the key-value cache in use.",
           status="kv_used_share", largest=True),
    _gauge("rollout", "dora_worker_weights_load_seconds", "Duration of the last change of weights, "
           "download and canary included.", status="load_seconds", largest=True),
    _counter("rollout", "dora_worker_switches_total", "Versions put into the engine.",
             status="switches_total"),
    _gauge("rollout", "dora_worker_canary_difference_nats", "Largest difference between engine and "
           "trainer on the canary of the last version.", status="canary_difference_max",
           largest=True),
    _histogram("rollout", "dora_worker_scoring_seconds",
               "From the last token of a response to its reward, waiting included.", _MEDIUM),
    _gauge("rollout", "dora_worker_scoring_trajectories", "Responses that are being scored or wait "
           "for it.", status="scoring"),
)  # fmt: skip

_COORDINATOR = (
    _histogram("coordinator", "dora_coordinator_decision_seconds",
               "One tick: deciding what is due, and committing it.", _FAST),
    _histogram("coordinator", "dora_coordinator_tick_lag_seconds",
               "Time between the ends of two ticks, reading the log included.", _FAST),
    _counter("coordinator", "dora_coordinator_admissions_total", "Groups started.",
             label="purpose", values=get_args(Purpose)),
    _counter("coordinator", "dora_coordinator_commands_total", "Commands sent to workers.",
             label="kind", values=get_args(CommandKind)),
    _counter("coordinator", "dora_coordinator_takeovers_total",
             "Trajectories of lost workers that others went on with.", status="takeovers_total"),
    _counter("coordinator", "dora_coordinator_migrations_total",
             "Trajectories that workers handed over to others.", status="migrations_total"),
    _counter("coordinator", "dora_coordinator_resumed_tokens_total",
             "Tokens saved by takeovers.", status="resumed_tokens_total"),
    _counter("coordinator", "dora_coordinator_commit_failures_total",
             "Transactions that Kafka refused; nothing of them took effect."),
    _gauge("coordinator", "dora_coordinator_workers", "Workers by the state of their "
           "last status; `silent` are those without a status for longer than the run allows.",
           label="state",
           values=(*STATES, "silent")),
    _gauge("coordinator", "dora_coordinator_worker_silence_seconds",
           "Longest time since the last status of a worker that should be alive."),
    _gauge("coordinator", "dora_coordinator_unplaced_trajectories",
           "Started trajectories that no worker generates.", status="unplaced"),
    _gauge("coordinator", "dora_coordinator_scanning_trajectories",
           "Lost trajectories whose chunks are being read.", status="scanning"),
    _gauge("coordinator", "dora_coordinator_groups_outstanding",
           "Groups that were started and are in no committed step.", status="outstanding"),
    _gauge("coordinator", "dora_coordinator_live_versions",
           "Versions with unfinished groups.", status="live_versions"),
)  # fmt: skip

CATALOGUE: tuple[Metric, ...] = (*_PROCESS, *_COORDINATOR, *_WORKER, *_TRAINER)


def of_role(role: str) -> list[Metric]:
    """What a process of this role exports."""
    return [metric for metric in CATALOGUE if metric.role in ("process", role)]


def facts_of(status: Status) -> Mapping[str, float]:
    """What `Metric.status` is looked up in."""
    return {
        **status.metrics,
        "running": float(len(status.running)),
        "capacity": float(status.capacity),
        "version": float(status.version),
    }


def bounded(metric: Metric, value: str) -> str:
    """`value` as the metric's label: itself, or `other` where it is not one of the known ones. A
    reason with an explanation (`verifier_timeout: ...`) counts by what stands before it."""
    if value in metric.values:
        return value
    plain = value.replace(" ", "_")
    return next((known for known in metric.values if plain.startswith(known)), OTHER)
