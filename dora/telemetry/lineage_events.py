"""A committed step as an OpenLineage RunEvent, and the client that sends it.

An event follows from the ledger's entry and the configuration alone, so it is always the same; it
holds no secrets. Its step's run id is a UUID of the run's id and the step's number. Apart from
`dora.telemetry.lineage` because it imports openlineage.
"""

import os
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from math import isfinite

import attr
from openlineage.client import OpenLineageClient
from openlineage.client.event_v2 import (
    InputDataset,
    Job,
    OutputDataset,
    Run,
    RunEvent,
    RunState,
)
from openlineage.client.generated.base import InputDatasetFacet, RunFacet
from openlineage.client.generated.dataset_version_dataset import DatasetVersionDatasetFacet
from openlineage.client.generated.input_statistics_input_dataset import (
    InputStatisticsInputDatasetFacet,
)
from openlineage.client.generated.job_type_job import JobTypeJobFacet
from openlineage.client.generated.output_statistics_output_dataset import (
    OutputStatisticsOutputDatasetFacet,
)
from openlineage.client.generated.parent_run import Job as ParentJob
from openlineage.client.generated.parent_run import ParentRunFacet
from openlineage.client.generated.parent_run import Run as ParentRun
from openlineage.client.generated.processing_engine_run import ProcessingEngineRunFacet
from openlineage.client.transport.http import ApiKeyTokenProvider, HttpConfig, HttpTransport

from dora import __version__
from dora.bus.topic_plan import RunTopics
from dora.config import Config
from dora.errors import ConfigError
from dora.schemas.records import Step

PRODUCER = f"urn:dora:{__version__}"
_IDS = uuid.UUID("6b1f0a64-6f0e-5f4c-9d0a-2f8c7f4f3f5e")
_RETRIES = 2


@attr.define
class StepRunFacet(RunFacet):
    """What the ledger says of the step."""

    version_in: int
    version_out: int
    groups_trained: int
    groups_set_aside: int
    weights_checksum: str
    metrics: dict[str, float]

    @staticmethod
    def _get_schema() -> str:
        return "urn:dora:facet:step:1"


@attr.define
class OffsetsInputDatasetFacet(InputDatasetFacet):
    """First and last offset, by partition, of the trajectories that were trained; not all between
    them were."""

    partitions: dict[str, list[int]]

    @staticmethod
    def _get_schema() -> str:
        return "urn:dora:facet:offsets:1"


def run_uuid(run_id: str, step: int | None = None) -> str:
    """Id of a run of dora, or of one of its steps, in OpenLineage."""
    return str(uuid.uuid5(_IDS, run_id if step is None else f"{run_id}/{step}"))


def event_of(step: Step, run_id: str, config: Config) -> RunEvent:
    """The event that `step`, a committed one, is complete."""
    name, namespace = config.run.name, config.lineage.namespace
    topics, cluster = RunTopics(name), _cluster(config)
    samples = [sample for ref in step.trained for sample in ref.samples]
    offsets: dict[str, list[int]] = {}
    for sample in samples:
        found = offsets.setdefault(str(sample.partition), [sample.offset, sample.offset])
        found[:] = [min(found[0], sample.offset), max(found[1], sample.offset)]
    read = InputDataset(
        cluster,
        topics.trajectories,
        inputFacets={
            "inputStatistics": InputStatisticsInputDatasetFacet(
                rowCount=len(samples), producer=PRODUCER
            ),
            "dora_offsets": OffsetsInputDatasetFacet(offsets, producer=PRODUCER),
        },
    )
    written = [
        OutputDataset(
            cluster,
            topic,
            facets={"version": DatasetVersionDatasetFacet(str(version), producer=PRODUCER)},
            outputFacets={
                "outputStatistics": OutputStatisticsOutputDatasetFacet(
                    rowCount=1, producer=PRODUCER
                )
            },
        )
        for topic, version in ((topics.policies, step.version_out), (topics.steps, step.sequence))
    ]
    return RunEvent(
        eventType=RunState.COMPLETE,
        eventTime=datetime.fromtimestamp(step.created_ms / 1000, UTC).isoformat(),
        run=Run(
            run_uuid(run_id, step.version_out),
            facets={
                "parent": ParentRunFacet(
                    ParentRun(run_uuid(run_id)), ParentJob(namespace, name), producer=PRODUCER
                ),
                "processing_engine": ProcessingEngineRunFacet(
                    version=__version__, name="dora", producer=PRODUCER
                ),
                "dora_step": StepRunFacet(
                    step.version_in,
                    step.version_out,
                    len(step.trained),
                    len(step.set_aside),
                    step.weights_checksum,
                    {name: value for name, value in step.metrics.items() if isfinite(value)},
                    producer=PRODUCER,
                ),
            },
        ),
        job=Job(
            namespace,
            f"{name}.train",
            facets={
                "jobType": JobTypeJobFacet(
                    processingType="STREAMING",
                    integration="DORA",
                    jobType="TRAINING_STEP",
                    producer=PRODUCER,
                )
            },
        ),
        producer=PRODUCER,
        inputs=[read],
        outputs=written,
    )


def _cluster(config: Config) -> str:
    """The namespace of the topics, as OpenLineage names Kafka's: the first address."""
    first = (config.kafka.bootstrap_servers or "localhost:9092").split(",")[0].strip()
    return f"kafka://{first.rpartition('://')[2]}"


def sender(config: Config) -> Callable[[Step, str], None]:
    """Sends the event of a step of the run with this id, and raises what the transport raises;
    ConfigError if OpenLineage refuses its configuration."""
    client = _client(config)
    return lambda step, run_id: client.emit(event_of(step, run_id, config))


def _client(config: Config) -> OpenLineageClient:
    section = config.lineage
    if section.url is None:
        try:
            return OpenLineageClient()
        except Exception as error:
            raise ConfigError(
                "lineage.from_environment: OpenLineage's configuration cannot be used: "
                f"{type(error).__name__}",
                hint="Check OPENLINEAGE_CONFIG and OPENLINEAGE__TRANSPORT__*.",
            ) from error
    given = HttpConfig(url=section.url, timeout=section.timeout_seconds)
    given.retry = {**given.retry, "total": _RETRIES}
    key = os.environ.get("OPENLINEAGE_API_KEY")
    if key:
        given.auth = ApiKeyTokenProvider({"api_key": key})
    return OpenLineageClient(transport=HttpTransport(given))
