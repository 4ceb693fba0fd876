"""A server before the tests' registry that passes requests on, and fails where a test says so.

What a real registry does only with its own configuration is done here: it is away, asks for a
password, speaks TLS, forbids writing, and keeps each test's schemas apart (a group of Apicurio's,
named in a header, is a registry of its own; ids are those of the whole registry).
"""

import base64
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer

from dora.broker.process import free_port
from tests.http_server import Handler, end, listening

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
        self._server = listening(_handler(self), self.port, self.tls)

    def stop(self) -> None:
        """Go away: connections are refused."""
        if self._server is not None:
            end(self._server)
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


def _handler(front: Front) -> type[Handler]:
    class Passing(Handler):
        def _answer(self) -> None:
            front.asked.append(f"{self.command} {self.path}")
            body = self.body()
            status, code, message = front.refusal(
                self.command, self.path, self.headers.get("Authorization")
            )
            if status:
                content = json.dumps({"error_code": code, "message": message}).encode()
            else:
                status, content = self._pass_on(body)
            self.answer(status, content)

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

    return Passing


@contextmanager
def registry_front(behind: str, group: str, tls: ssl.SSLContext | None = None) -> Iterator[Front]:
    """A front with an empty registry (a new `group`) behind it."""
    front = Front(behind, group, tls)
    front.start()
    try:
        yield front
    finally:
        front.stop()
