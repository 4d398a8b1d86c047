"""Refusals before any code of the page runs: of other hosts, origins, methods and bodies, and without the token."""

import hmac
from collections.abc import Collection
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["MAX_BODY", "WRITE_HEADER", "Guard"]

MAX_BODY = 64 * 1024
"""Bytes of a request's body, at most."""

WRITE_HEADER = "x-shoal"
"""Header that each POST needs. A page of another origin cannot send it: that needs a permission of this server."""

_SAFE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """ASGI middleware that refuses by default.

    A request passes if its Host is one of the server's own, its Origin, if it has one, is that host, its
    Sec-Fetch-Site, if it has one, is "same-origin" or "none", its method is GET, HEAD or POST, and it brings the token
    as a cookie. A POST also needs the header `WRITE_HEADER` and a JSON body of at most `MAX_BODY` bytes.

    Args:
        public: Paths that may be read without the token: the files of the page, which say nothing of a study.
        login: Path to which the token may be posted without the cookie.
    """

    def __init__(
        self, app: ASGIApp, *, token: str, cookie: str, hosts: Collection[str], public: Collection[str], login: str
    ) -> None:
        self._app, self._token, self._cookie = app, token, cookie
        self._hosts, self._public, self._login = hosts, public, login

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with the reason of its refusal."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_SAFE_HEADERS)
            await send(message)

        refusal = self._refusal(scope["method"], scope["path"], Headers(scope=scope))
        if refusal is None:
            await self._app(scope, receive, send_safely)
        else:
            status, why = refusal
            await PlainTextResponse(why, status_code=status)(scope, receive, send_safely)

    def _refusal(self, method: str, path: str, headers: Headers) -> tuple[HTTPStatus, str] | None:
        hosts = headers.getlist("host")
        if len(hosts) != 1 or hosts[0] not in self._hosts:
            return HTTPStatus.FORBIDDEN, "this server answers only under the address that it has printed"
        if any(origin != f"http://{hosts[0]}" for origin in headers.getlist("origin")):
            return HTTPStatus.FORBIDDEN, "requests of other pages are refused"
        if any(site not in ("same-origin", "none") for site in headers.getlist("sec-fetch-site")):
            return HTTPStatus.FORBIDDEN, "requests of other sites are refused"
        if method not in ("GET", "HEAD", "POST"):
            return HTTPStatus.METHOD_NOT_ALLOWED, "the method is not allowed"
        if fault := _body_fault(method, headers):
            return fault
        if method == "POST":
            if headers.get(WRITE_HEADER) != "1" or headers.get("content-type") != "application/json":
                return HTTPStatus.FORBIDDEN, f"a request needs the header {WRITE_HEADER}: 1 and a JSON body"
            if path == self._login:
                return None
        elif path in self._public:
            return None
        if not self._has_token(headers):
            return HTTPStatus.UNAUTHORIZED, "open the whole address that shoal page has printed, with its token"
        return None

    def _has_token(self, headers: Headers) -> bool:
        found = [cookie_parser(text).get(self._cookie, "") for text in headers.getlist("cookie")]
        return any(hmac.compare_digest(each.encode(), self._token.encode()) for each in found)


def _body_fault(method: str, headers: Headers) -> tuple[HTTPStatus, str] | None:
    """Return why a body is refused; its length must be known, so that it is refused before it is read."""
    if "transfer-encoding" in headers:
        return HTTPStatus.LENGTH_REQUIRED, "a body needs a Content-Length"
    length = headers.get("content-length", "0")
    if not (length.isascii() and length.isdecimal()):
        return HTTPStatus.BAD_REQUEST, "the Content-Length is not a number"
    if len(length) > 9 or int(length) > (MAX_BODY if method == "POST" else 0):
        return HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body has at most {MAX_BODY if method == 'POST' else 0} bytes"
    return None
