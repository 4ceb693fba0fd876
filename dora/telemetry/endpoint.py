"""The HTTP endpoint of a process: `/metrics` for Prometheus, `/health` and `/ready` for Kubernetes.

It is served by threads of its own, so it answers while the process is busy or stuck, and it ends
with the process. Each process takes the first port that is free.
"""

import errno
import json
import logging
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from prometheus_client.exposition import choose_encoder

from dora.atomic_write import atomic_write
from dora.bus.settings import ClusterSettings
from dora.config import Config
from dora.errors import ConfigError
from dora.telemetry.exporter import ExportingMeter
from dora.telemetry.meter import meter, set_meter

log = logging.getLogger(__name__)

PORTS = 200
"""Ports that are tried, from the configured one on."""
_CONNECTION_SECONDS = 10.0


class Endpoint:
    """Serves `meter` on the first free port from `port` on until `close`.

    ConfigError if the address is none of this machine's, or no port is free.
    """

    def __init__(self, meter: ExportingMeter, address: str, port: int) -> None:
        handler = type("Handler", (_Handler,), {"meter": meter})
        self._server = _listen(address, port, handler)
        self.address, self.port = address, int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


def _listen(address: str, first: int, handler: type[BaseHTTPRequestHandler]) -> "_Server":
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    server = type("Server", (_Server,), {"address_family": family})
    last = min(first + PORTS - 1, 65_535)
    refused: OSError | None = None
    for port in range(first, last + 1):
        try:
            made: _Server = server((address, port), handler)
        except OSError as error:
            refused = error
            if error.errno != errno.EADDRINUSE:
                break
            continue
        return made
    raise ConfigError(
        f"metrics.port = {first}: nothing from there to {last} at metrics.address = {address} "
        f"could be listened on: {refused}"
    )


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A reader that went away is no error."""
        log.debug("an answer to %s was not taken", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    meter: ExportingMeter
    timeout = _CONNECTION_SECONDS

    def do_GET(self) -> None:
        """Answer one request."""
        path = self.path.partition("?")[0]
        if path == "/metrics":
            encode, content_type = choose_encoder(self.headers.get("Accept", ""))
            self._answer(200, content_type, encode(self.meter.registry))
        elif path in ("/health", "/ready"):
            well, facts = self.meter.health() if path == "/health" else self.meter.ready()
            self._answer(200 if well else 503, "application/json", json.dumps(facts).encode())
        else:
            self._answer(404, "text/plain; charset=utf-8", b"see /metrics, /health and /ready\n")

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: scrapes are many."""


@contextmanager
def served_meter(
    config: Config, role: str, process: str, settings: ClusterSettings | None
) -> Iterator[None]:
    """Within the block this process measures, serves its metrics and names its endpoint in a file.

    ConfigError as for `Endpoint`; a file that cannot be written is a warning.
    """
    measuring = ExportingMeter(config, role, process, settings)
    endpoint = Endpoint(measuring, config.metrics.address, config.metrics.port)
    measuring.port = endpoint.port
    path = target_file(config.run.directory, config.run.name, process)
    with ExitStack() as stack:
        stack.callback(set_meter, meter())
        stack.callback(measuring.close)
        stack.callback(endpoint.close)
        set_meter(measuring)
        log.info("metrics at http://%s:%d/metrics", endpoint.address, endpoint.port)
        try:
            announce(path, measuring, endpoint, config.run.name)
        except OSError as error:
            log.warning("%s could not be written: %s", path, error)
        else:
            stack.callback(path.unlink, missing_ok=True)
        yield


def target_file(runs: Path, run: str, process: str) -> Path:
    """Where a process names its endpoint, for Prometheus' file_sd_configs. All runs share the
    directory, since only the last part of such a path may be a pattern; no run has its name."""
    return runs / ".prometheus" / f"{run}.{re.sub(r'[^A-Za-z0-9_-]', '_', process)}.json"


def announce(path: Path, meter: ExportingMeter, endpoint: Endpoint, run: str) -> None:
    """Write that file. Prometheus reads it when it appears, so it appears whole."""
    host = endpoint.address
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    target = f"[{host}]:{endpoint.port}" if ":" in host else f"{host}:{endpoint.port}"
    labels = {"run": run, "role": meter.role, "process": meter.process}
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, json.dumps([{"targets": [target], "labels": labels}]) + "\n")
