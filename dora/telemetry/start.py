"""Metrics and traces of a process: switched on at its start, off at its end."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from dora.bus.settings import ClusterSettings
from dora.config import Config
from dora.telemetry import meter, tracer

log = logging.getLogger(__name__)


@contextmanager
def observed(
    config: Config, role: str, process: str, settings: ClusterSettings | None = None
) -> Iterator[None]:
    """Within the block this process, called `process`, is watched as the configuration says.

    ConfigError if the address of the metrics cannot be listened on or packages are missing. What is
    off is not imported.
    """
    with ExitStack() as stack:
        if config.metrics.port:
            _measure(config, role, process, settings, stack)
        if config.traces.endpoint is not None:
            from dora.telemetry.span_export import ExportingTracer

            sending = ExportingTracer(
                config.traces.endpoint, run=config.run.name, role=role, process=process
            )
            stack.callback(tracer.use, tracer.tracer())
            stack.callback(sending.close)
            tracer.use(sending)
        yield


def _measure(
    config: Config,
    role: str,
    process: str,
    settings: ClusterSettings | None,
    stack: ExitStack,
) -> None:
    from dora.telemetry.endpoint import Endpoint, announce, target_file
    from dora.telemetry.exporter import ExportingMeter

    measuring = ExportingMeter(config, role, process, settings)
    endpoint = Endpoint(measuring, config.metrics.address, config.metrics.port)
    measuring.port = endpoint.port
    stack.callback(meter.use, meter.meter())
    stack.callback(measuring.close)
    stack.callback(endpoint.close)
    meter.use(measuring)
    log.info("metrics at http://%s:%d/metrics", endpoint.address, endpoint.port)
    path = target_file(config.run.directory, config.run.name, process)
    try:
        announce(path, measuring, endpoint, config.run.name)
    except OSError as error:
        log.warning("%s could not be written: %s", path, error)
        return
    stack.callback(path.unlink, missing_ok=True)
