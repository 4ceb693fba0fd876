"""The errors that dora raises, and the exit codes of its processes.

Every error carries what happened and, where there is something to do, what to do next. The command
line prints both and ends with the error's exit code.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """How a process ended, for the shell and for a supervisor."""

    FAILED = 1
    """A check or an operation failed."""
    USAGE = 2
    """The command line or the configuration asks for something impossible."""
    PERMANENT = 3
    """Failed, and started again it would fail the same way; only a supervisor is told so."""
    FENCED = 4
    """Another process took over this one's role."""
    INCOMPLETE = 5
    """A trainer was asked to end before all its steps were done, and the caller wants to know."""


class DoraError(Exception):
    """An operation failed; `str(error)` says what, `hint` says what to do about it."""

    exit_code: int = ExitCode.FAILED
    permanent = False
    """Whether the same process, started again, would fail the same way: a supervisor gives up."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message


class UsageError(DoraError):
    """The command line asks for something impossible."""

    exit_code = ExitCode.USAGE


class ConfigError(UsageError):
    """The configuration is wrong; the message names file, section and key."""


class BrokerError(DoraError):
    """The local broker could not be started, stopped or found."""


class BusError(DoraError):
    """Kafka refused or did not answer in time; the message names the topic and the address."""


class AccessError(BusError):
    """The cluster refuses this user's certificate, password or right; the message names the
    principal, the operation and the resource, as far as they are known."""

    permanent = True


class FencedError(BusError):
    """Another process took over this role; this one must stop and can change nothing any more.

    Started again it would fence the other one in turn."""

    exit_code = ExitCode.FENCED


class TopicError(BusError):
    """A topic is missing, exists already, or has another shape than the run needs."""


class RegistryError(BusError):
    """The schema registry did not answer in time; the message names its address."""


class RegistryRefusal(RegistryError):
    """The schema registry refused a schema, its compatibility level, or this user."""

    permanent = True


class RecordError(DoraError):
    """A record cannot be read; the message says what is wrong with its bytes."""


class WeightsError(DoraError):
    """Weights are missing, damaged, or could not be stored."""


class MissingWeightsError(WeightsError):
    """A version's files are not in the weight store."""


class CanaryError(WeightsError):
    """An engine's log-probabilities differ from the trainer's after an update of the weights."""


class PolicyError(DoraError):
    """The model or its tokenizer cannot be used for this run."""

    permanent = True


class TaskError(DoraError):
    """Prompts or the verifier of a task cannot be used."""

    permanent = True


class ChangedDataError(DoraError):
    """The data file of a task is not what this process read at its start; no prompt of it may be
    used."""

    permanent = True


class ExportError(DoraError):
    """An export's target cannot take what was to be exported; what it holds stays complete."""


class RunError(DoraError):
    """The run as recorded in its log does not allow what was asked."""

    permanent = True


class InUseError(RunError):
    """Another process holds what this one needs, and may release it."""

    permanent = False


class ActiveRunError(InUseError):
    """Another `dora run` of the same run is at work on this machine."""

    exit_code = ExitCode.FENCED


class UncommittedError(RunError):
    """The topics hold the start of another configuration and no step: the run can begin anew."""


class DeadlineError(DoraError):
    """Something did not arrive in time; the message says what, and from where."""


class RankError(DoraError):
    """Another rank of the trainer ended, hangs or failed; this one cannot go on without it."""


def first_line(error: BaseException) -> str:
    """The message of an error of a library, without the stack that it appends."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
