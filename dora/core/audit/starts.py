"""What an audit cannot tell afterwards: whether each start was allowed when it was made.

The simulator and the model of the protocol feed it every committed record as it is written.
"""

from dora.schemas.records import Admission, Command, Record, Step


class StartCheck:
    """Checks the admission rule, the order of the journal, and the numbers of attempts.

    At most `capacity` groups may be outstanding; the journal's versions may go back by `behind`.
    """

    def __init__(self, capacity: int, behind: int = 0) -> None:
        self._capacity = capacity
        self._behind = behind
        self._outstanding = 0
        self._next_ordinal = 0
        self._version = 0
        self._started: set[tuple[str, int]] = set()

    def fault(self, record: Record) -> str | None:
        """What is wrong with the next record of the log; None if nothing is."""
        match record:
            case Admission(purpose="train"):
                return self._admission(record)
            case Command(kind="start"):
                attempt = record.trajectory_id, record.attempt
                if attempt in self._started:
                    return f"attempt {record.attempt} at {record.trajectory_id} was started twice"
                self._started.add(attempt)
            case Step():
                self._outstanding -= len(record.trained) + len(record.set_aside)
            case _:
                pass
        return None

    def _admission(self, record: Admission) -> str | None:
        self._outstanding += 1
        due, self._next_ordinal = self._next_ordinal, record.ordinal + 1
        before, self._version = self._version, max(self._version, record.policy_version)
        if self._outstanding > self._capacity:
            return f"group {record.group_id} was admitted beyond the window"
        if record.ordinal != due:
            return f"group {record.group_id} has ordinal {record.ordinal}, where {due} is due"
        if record.policy_version < before - self._behind:
            return f"group {record.group_id} was admitted under a version that is too old"
        return None
