"""HTTP servers that tests talk to, each on a thread of its own."""

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """Whole bodies in and out; silent. Connections end with their answer (HTTP/1.0), so that a
    server that goes away is away at once."""

    def body(self) -> bytes:
        """What was sent."""
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def answer(self, status: int, content: bytes = b"", kind: str = "application/json") -> None:
        """Answer the request."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


def listening(
    handler: type[Handler], port: int = 0, tls: ssl.SSLContext | None = None
) -> ThreadingHTTPServer:
    """A server that answers until `end`; port 0 is a free one."""
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def end(server: ThreadingHTTPServer) -> None:
    """Go away: connections are refused."""
    server.shutdown()
    server.server_close()


@contextmanager
def served(handler: type[Handler]) -> Iterator[str]:
    """URL of a server."""
    server = listening(handler)
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        end(server)
