"""What dora says when it cannot go on.

Every error carries what happened and, where there is something to do, what to do next. The command
line prints both and ends with the error's exit code: 1 when a check or an operation failed, 2 when
the user asked for something that makes no sense.
"""


class DoraError(Exception):
    """An operation failed; `str(error)` says what, `hint` says what to do about it."""

    exit_code = 1
    permanent = False
    """Whether the same process, started again, would only fail the same way: a supervisor gives up
    instead of trying again."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message


class UsageError(DoraError):
    """The command line asks for something impossible."""

    exit_code = 2


class ConfigError(UsageError):
    """The configuration is wrong; the message names file, section and key."""


class BrokerError(DoraError):
    """The local broker could not be started, stopped or found."""


class BusError(DoraError):
    """Kafka refused or did not answer in time; the message names the topic and the address."""


class AccessError(BusError):
    """The cluster refuses who asks: certificate, password or a right; the message names the
    principal, the operation and the resource, as far as they are known."""

    permanent = True


class FencedError(BusError):
    """Another process took over this role; this one must stop and can change nothing any more.

    Its exit code tells a supervisor that starting it again would only fence the other one."""

    exit_code = 4


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


class ExportError(DoraError):
    """An export's target cannot take what was to be exported; what it holds already is whole."""


class RunError(DoraError):
    """The run as recorded in its log does not allow what was asked."""

    permanent = True


class InUseError(RunError):
    """Another process has what this one needs; it may let go of it."""

    permanent = False


class DeadlineError(DoraError):
    """Something that was awaited did not come in time; the message says what, and from whom."""


class RankError(DoraError):
    """Another rank of the trainer ended, hangs or failed; this one cannot go on without it."""


def first_line(error: BaseException) -> str:
    """What a library said, without the stack that it appends."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
