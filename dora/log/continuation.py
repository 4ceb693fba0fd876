"""Whether a process may take part in the run that the topics hold.

Invariant: a part that starts on another cluster, on topics that were made anew, or with another
configuration than the run was started with, ends before it reads or writes anything else.
"""

from dora.bus.reader import BEGINNING, LogReader
from dora.bus.settings import ClusterSettings
from dora.bus.topics import RunTopics, TopicAdmin
from dora.config import Config
from dora.log.ledger import check_continues
from dora.schemas.records import RunStarted

READ_SECONDS = 60.0


def check_recorded(config: Config, settings: ClusterSettings) -> None:
    """RunError, with the differences, unless `config` on this cluster continues the run that the
    ledger's first record tells of. A run that has not begun is continued by anything.

    Whether that record is readable, and the first one, is for those to say that rest on it.
    """
    run = config.run.name
    with LogReader(settings, client_id="continuation") as reader:
        reader.assign({(RunTopics(run).steps, 0): BEGINNING})
        first = next(iter(reader.read_to_end(READ_SECONDS)), None)
    if first is None or not isinstance(first.value, RunStarted):
        return
    with TopicAdmin(settings) as admin:
        check_continues(first.value, config, admin.cluster_id(), admin.topic_ids(run))
