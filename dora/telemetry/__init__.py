"""How a run is watched from outside: metrics, experiment trackers, traces, lineage.

Nothing in here decides anything, and nothing that goes wrong in here stops or changes a run. What
is off is not imported and costs a call that returns at once.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from dora.bus.settings import ClusterSettings
from dora.config import Config
from dora.telemetry import tracer


@contextmanager
def observed(
    config: Config, role: str, process: str, settings: ClusterSettings | None = None
) -> Iterator[None]:
    """Within the block, metrics and traces of this process, called `process`, are on as configured.

    ConfigError if the address of the metrics cannot be listened on or packages are missing.
    """
    with ExitStack() as stack:
        if config.metrics.port:
            from dora.telemetry.endpoint import served_meter

            stack.enter_context(served_meter(config, role, process, settings))
        if config.traces.endpoint is not None:
            from dora.telemetry.span_export import ExportingTracer

            exporting = ExportingTracer(
                config.traces.endpoint, run=config.run.name, role=role, process=process
            )
            stack.callback(tracer.set_tracer, tracer.tracer())
            stack.callback(exporting.close)
            tracer.set_tracer(exporting)
        yield
