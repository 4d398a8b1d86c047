"""A page that is served for tests, and clients of it."""

import http.client
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Page:
    """A server of the page in a process of its own."""

    address: str
    pid: int

    @property
    def port(self) -> int:
        return int(re.search(r":(\d+)/", self.address)[1])

    @property
    def token(self) -> str:
        return self.address.partition("token=")[2]

    @property
    def cookie(self) -> str:
        return f"shoal-{self.port}={self.token}"

    def ask(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, body: Any = None, token: bool = True
    ) -> tuple[int, str, http.client.HTTPMessage]:
        """Status, text and headers of the answer; a request with a body has the headers that the page sends."""
        sent = {"Cookie": self.cookie} if token else {}
        if body is not None:
            sent |= {"Content-Type": "application/json", "X-Shoal": "1"}
        content = json.dumps(body).encode() if isinstance(body, dict) else body
        return self.send(method, path, content, sent | dict(headers or {}))

    def send(self, method: str, path: str, body: Any, headers: Mapping[str, str]) -> tuple[int, str, Any]:
        """Status, text and headers of the answer to a request with these headers alone."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)) as connection:
            connection.request(method, path, body, headers, encode_chunked="Transfer-Encoding" in headers)
            with connection.getresponse() as answer:
                return answer.status, answer.read().decode("utf-8", "replace"), answer.headers

    def json(self, path: str) -> Any:
        status, text, _ = self.ask("GET", path)
        assert status == 200, text
        return json.loads(text)

    def events(self, study: str, position: str) -> "Events":
        return Events(self, study, position)


class Events:
    """Server-sent events of a study, one by one."""

    def __init__(self, page: Page, study: str, position: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=30)
        self._connection.request(
            "GET", f"/api/events?study={study}&position={position}", headers={"Cookie": page.cookie}
        )
        self._answer = self._connection.getresponse()
        assert self._answer.status == 200

    def next(self) -> dict[str, Any]:
        """The next event, as long as it takes."""
        while True:
            line = self._answer.readline().decode()
            assert line, "the stream has ended"
            if line.startswith("data: "):
                return json.loads(line.removeprefix("data: "))

    def until(self, wanted: Any) -> dict[str, Any]:
        """The first event that `wanted` accepts."""
        while not wanted(event := self.next()):
            pass
        return event

    def close(self) -> None:
        self._answer.close()
        self._connection.close()


@contextmanager
def served(root: Path, *options: str) -> Iterator[Page]:
    """A page of a folder, which ends with the context."""
    program = (
        "import sys; from pathlib import Path; from shoal.look.page.server import serve; "
        "serve(Path(sys.argv[1]), announce=lambda address: print(address, flush=True))"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(root), *options], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        assert address, "the page was not served"
        yield Page(address, process.pid)
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()
