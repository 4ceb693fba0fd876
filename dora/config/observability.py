"""The sections `metrics`, `traces` and `lineage`.

None of them changes what a run does: all may differ between two starts of the same run. Nothing is
served or sent unless it is asked for; TensorBoard files in the run's directory are always written.
"""

from typing import Annotated

from pydantic import AfterValidator, Field

from dora.config.section import Seconds, Section


class MetricsSection(Section):
    """Prometheus endpoints and experiment trackers."""

    port: Annotated[int, Field(ge=0, le=65_535)] = 0
    """First port of the processes' Prometheus endpoints (`/metrics`, and `/health` and `/ready`
    for Kubernetes); 0 is none. Where several processes share a machine each takes the next free
    port, reports it in its log and as `metrics_port` in its status, and writes it to a file for
    Prometheus (file_sd_configs) in `.prometheus` below run.directory."""
    address: str = "127.0.0.1"
    """Address that the endpoints listen on; `0.0.0.0` for all of the machine's."""
    wandb: bool = False
    """Log committed steps to Weights & Biases too, if the package `wandb` is installed; it takes
    its key and WANDB_MODE (`offline`) from the environment."""
    mlflow: bool = False
    """Log committed steps to MLflow too, if the package `mlflow` is installed; without
    MLFLOW_TRACKING_URI in the environment to a file in the directory of the run."""
    project: str = "dora"
    """Project at Weights & Biases, or experiment in MLflow."""


class TracesSection(Section):
    """OpenTelemetry traces: one for each group, from its admission to the step that trained it."""

    endpoint: Annotated[str, Field(pattern=r"^https?://")] | None = None
    """URL of an OTLP receiver over HTTP, such as `http://localhost:4318`; without it no spans are
    made. Needs the extra `traces`. Headers for it, such as credentials, are taken from
    OTEL_EXPORTER_OTLP_HEADERS in the environment."""


def _without_login(url: str) -> str:
    if "@" in url:  # the value is not repeated: it may hold a password
        raise ValueError("lineage.url must hold no login: put a key into OPENLINEAGE_API_KEY")
    return url


class LineageSection(Section):
    """OpenLineage: one event for each committed step, with the topics it read and wrote."""

    url: Annotated[str, AfterValidator(_without_login), Field(pattern=r"^https?://")] | None = None
    """URL of a service that takes OpenLineage events, such as `http://marquez:5000`; without it no
    events are sent. Needs the extra `lineage`. A key for it is taken from OPENLINEAGE_API_KEY in
    the environment."""
    from_environment: bool = False
    """Send events as OpenLineage's own configuration says (OPENLINEAGE_CONFIG,
    OPENLINEAGE__TRANSPORT__TYPE and so on): for other transports and logins."""
    namespace: Annotated[str, Field(min_length=1)] = "dora"
    """Namespace of the jobs in the events."""
    timeout_seconds: Seconds = 5.0
    """How long one attempt to send an event to `url` may take."""
