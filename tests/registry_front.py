"""A server before the tests' registry that passes requests on, and fails where a test says so.

What a real registry does only with its own configuration is done here: it is away, asks for a
password, speaks TLS, forbids writing, and keeps each test's schemas apart (a group of Apicurio's,
named in a header, is a registry of its own; ids are those of the whole registry).
"""

import base64
import json
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from dora.bus.broker_process import free_port

_PASSED = ("Accept", "Content-Type")


class Front:
    """What it does, and what was asked of it; change the attributes at any time."""

    def __init__(self, behind: str, group: str, tls: ssl.SSLContext | None) -> None:
        self.behind = behind
        self.group = group
        self.tls = tls
        self.port = free_port(set())
        self.password: str | None = None
        """`user:password` that is asked for."""
        self.read_only = False
        """Whether schemas and compatibility levels may not be changed, as for a user without the
        right to write (the answer is that of Confluent's registry)."""
        self.asked: list[str] = []
        """Methods and paths of all requests."""
        self._server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        """Root of the API."""
        return f"http{'s' if self.tls else ''}://localhost:{self.port}"

    def start(self) -> None:
        """Listen; again after `stop`, at the same port."""
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), _handler(self))
        self._server.daemon_threads = True
        if self.tls is not None:
            self._server.socket = self.tls.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        """Go away: connections are refused."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def refusal(self, method: str, path: str, authorization: str | None) -> tuple[int, int, str]:
        """Status, code and message of what is not passed on; status 0 for what is."""
        if self.password is not None:
            wanted = "Basic " + base64.b64encode(self.password.encode()).decode()
            if authorization != wanted:
                return 401, 40101, "Unauthorized"
        writes = method == "PUT" or (method == "POST" and "/versions" in path)
        if self.read_only and writes:
            return 403, 40301, "User is denied operation Write on this server."
        return 0, 0, ""


def _handler(front: Front) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        # Connections end with their answer, so that a front that goes away is away at once.
        protocol_version = "HTTP/1.0"

        def _answer(self) -> None:
            front.asked.append(f"{self.command} {self.path}")
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            refused = front.refusal(self.command, self.path, self.headers.get("Authorization"))
            if refused[0]:
                status, code, message = refused
                content = json.dumps({"error_code": code, "message": message}).encode()
            else:
                status, content = self._pass_on(body)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _pass_on(self, body: bytes) -> tuple[int, bytes]:
            headers = {name: self.headers[name] for name in _PASSED if name in self.headers}
            headers["X-Registry-GroupId"] = front.group
            request = urllib.request.Request(
                front.behind + self.path, body or None, headers, method=self.command
            )
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return answer.status, answer.read()
            except urllib.error.HTTPError as error:
                return error.code, error.read()

        do_GET = do_POST = do_PUT = do_DELETE = _answer

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


@contextmanager
def registry_front(behind: str, group: str, tls: ssl.SSLContext | None = None) -> Iterator[Front]:
    """A front with an empty registry (a new `group`) behind it."""
    front = Front(behind, group, tls)
    front.start()
    try:
        yield front
    finally:
        front.stop()
