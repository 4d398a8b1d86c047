"""The routes of the page: its files, the studies as JSON, their changes as server-sent events, and requests.

A request becomes one of the study, as the methods of `shoal.Study` make them.
"""

import asyncio
import hmac
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from shoal.core.errors import ShoalError
from shoal.journal import client
from shoal.look.page.feed import Stamp, StudyFeed, file_stamp, find_studies
from shoal.look.page.files import page_files
from shoal.look.page.guard import Guard
from shoal.look.page.views import (
    curves_view,
    json_text,
    log_view,
    overview_view,
    space_view,
    summary_view,
    trial_view,
)

__all__ = ["LOGIN", "STUDY_VERBS", "TRIAL_VERBS", "VERBS", "PageServer", "carry_out"]

TRIAL_VERBS: Mapping[str, Callable[[Path, list[int]], object]] = {
    "pause": client.pause,
    "resume": client.resume,
    "stop": client.stop,
    "retry": client.retry,
}
STUDY_VERBS: Mapping[str, Callable[[Path], object]] = {
    "pause study": client.pause_study,
    "resume study": client.resume_study,
    "end study": client.end_study,
}
_MAX_TRIALS = 10_000
_MAX_DEVICES = 1000
_MAX_EPOCHS = 10**9

LOGIN = "/api/session"

_log = logging.getLogger("shoal.look.page")

_LOOK_SECONDS = 0.5
"""Time between two looks at a journal that somebody watches."""
_LOOK_SHARE = 10
"""Looks take at most one part in so many of the time, so that those at a large study do not slow it."""
_VIEW_SHARE = 20
"""As `_LOOK_SHARE`, for a view that takes seconds."""
_ALIVE_SECONDS = 15.0
"""Time after which a quiet stream sends a comment, so that a browser that is gone is noticed."""
_MAX_STREAMS = 64
_MAX_CACHED = 64
"""Most views that are kept, beside one of each study for the list of studies."""


def _add_trial(study: Path, asked: Mapping[str, Any]) -> object:
    config, epochs = asked.get("config"), _epochs(asked)
    if not isinstance(config, dict) or epochs is None:
        raise ShoalError('a trial to add has a "config", an object, and "epochs"')
    return client.add(study, config, epochs, outside=_flag(asked, "outside"))


def _clone(study: Path, asked: Mapping[str, Any]) -> object:
    trial, changes = asked.get("trial"), asked.get("changes", {})
    if type(trial) is not int or not isinstance(changes, dict):
        raise ShoalError('a clone has the number of a "trial", and "changes", an object')
    flags = {name: _flag(asked, name) for name in ("anew", "outside")}
    return client.clone(study, trial, changes, epochs=_epochs(asked), **flags)


def _policy(study: Path, asked: Mapping[str, Any]) -> object:
    name = asked.get("policy")
    if not isinstance(name, str):
        raise ShoalError('"policy" must be the name of a policy')
    client.policy(study, name)
    return None


def _devices(verb: Literal["add devices", "remove devices"]) -> Callable[[Path, Mapping[str, Any]], object]:
    """Return a handler that writes the request and does not wait for it: the page shows what comes of it."""

    def handle(study: Path, asked: Mapping[str, Any]) -> object:
        names = asked.get("devices")
        if not isinstance(names, list) or not 0 < len(names) <= _MAX_DEVICES or not all(map(_is_name, names)):
            raise ShoalError(f'"devices" must be a list of 1 to {_MAX_DEVICES} names of devices')
        return client.change_devices(study, verb, names, patience=0)

    return handle


_FORMS: Mapping[str, Callable[[Path, Mapping[str, Any]], object]] = {
    "add trial": _add_trial,
    "clone": _clone,
    "policy": _policy,
    "add devices": _devices("add devices"),
    "remove devices": _devices("remove devices"),
}
VERBS = (*TRIAL_VERBS, *STUDY_VERBS, *_FORMS)


def carry_out(directory: Path, asked: Any) -> None:
    """Write the request of a browser for the process that runs the study.

    Args:
        asked: JSON value: {"verb": "pause", "trials": [3]}, {"verb": "pause study"}, {"verb": "policy", "policy":
            "fifo"}, {"verb": "add devices", "devices": ["cpu:1"]}, {"verb": "add trial", "config": {"lr": 0.1},
            "epochs": 9}, or {"verb": "clone", "trial": 3, "changes": {"lr": 0.1}, "epochs": 9, "anew": true}. The last
            two may have "outside": true.

    Raises:
        ShoalError: the request is none of these, or the study refuses it.
    """
    try:
        json.dumps(asked, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ShoalError("a request must be text that UTF-8 can encode") from error
    if not isinstance(asked, dict) or not isinstance(verb := asked.get("verb"), str):
        raise ShoalError('a request is an object with a "verb"')
    if verb in STUDY_VERBS:
        STUDY_VERBS[verb](directory)
    elif verb in TRIAL_VERBS:
        TRIAL_VERBS[verb](directory, _trials(asked))
    elif verb in _FORMS:
        _FORMS[verb](directory, asked)
    else:
        raise ShoalError(f"the page has no {verb[:40]!r}; it has {', '.join(VERBS)}")


def _trials(asked: Mapping[str, Any]) -> list[int]:
    trials = asked.get("trials")
    if not isinstance(trials, list) or not 0 < len(trials) <= _MAX_TRIALS or not all(type(x) is int for x in trials):
        raise ShoalError(f'"trials" must be a list of 1 to {_MAX_TRIALS} numbers of trials')
    return trials


def _epochs(asked: Mapping[str, Any]) -> int | None:
    epochs = asked.get("epochs")
    if epochs is not None and (type(epochs) is not int or not 0 < epochs <= _MAX_EPOCHS):
        raise ShoalError(f'"epochs" must be a whole number from 1 to {_MAX_EPOCHS}')
    return epochs


def _flag(asked: Mapping[str, Any], name: str) -> bool:
    value = asked.get(name, False)
    if not isinstance(value, bool):
        raise ShoalError(f'"{name}" must be true or false')
    return value


def _is_name(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[\w.@:/+-]{1,200}", value) is not None


class PageServer:
    """The page of a study, or of a folder of studies.

    Journals are read in two threads: one for what changes, one for views that may take seconds. A stream reads from the
    memory of its feed whenever its browser has taken the last piece, so a browser that does not read holds up nothing.

    Attributes:
        failed: Whether an unexpected error has ended all updates; the server must end then.
    """

    def __init__(self, root: Path, *, token: str, port: int) -> None:
        self._root, self._token, self._cookie = root, token, f"shoal-{port}"
        self._files = page_files()
        self._feeds: dict[str, StudyFeed] = {}
        self._watched: dict[str, int] = {}
        self._changed = asyncio.Condition()
        self._ending = False
        self.failed = False
        self._cache: dict[tuple[str, ...], tuple[Stamp, float, str]] = {}
        self._looks = ThreadPoolExecutor(1, "shoal-page-looks")
        self._views = ThreadPoolExecutor(1, "shoal-page-views")
        guard = Middleware(
            Guard,
            token=token,
            cookie=self._cookie,
            hosts=frozenset([f"127.0.0.1:{port}", f"localhost:{port}"]),
            public=frozenset(["/", *(f"/{name}" for name in self._files)]),
            login=LOGIN,
        )
        self.app = Starlette(routes=self._routes(), middleware=[guard], lifespan=self._running)

    def _routes(self) -> list[Route]:
        json_routes: Mapping[str, Callable[[Request], Awaitable[str]]] = {
            "studies": self._studies,
            "state": self._state,
            "overview": self._overview,
            "curves": self._curves,
            "space": self._space,
            "trial": self._trial,
            "log": self._log,
        }
        return [
            Route(LOGIN, self._login, methods=["POST"]),
            Route("/api/request", self._request, methods=["POST"]),
            Route("/api/events", self._events, methods=["GET"]),
            *(
                Route(f"/api/{name}", partial(_answer, text_of), methods=["GET"])
                for name, text_of in json_routes.items()
            ),
            Route("/{name:path}", self._file, methods=["GET"]),
        ]

    @asynccontextmanager
    async def _running(self, app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(self._follow())
        task.add_done_callback(self._stopped_following)
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
            self._looks.shutdown(wait=False, cancel_futures=True)
            self._views.shutdown(wait=False, cancel_futures=True)

    async def _follow(self) -> None:
        while True:
            longest = 0.0
            for name in [name for name, count in self._watched.items() if count]:
                await self._look(self._feeds[name])
                longest = max(longest, self._feeds[name].seconds)
            await asyncio.sleep(max(_LOOK_SECONDS, _LOOK_SHARE * longest))

    def _stopped_following(self, task: asyncio.Task[None]) -> None:
        """Log an unexpected error and let the server end, as browsers would wait for changes in vain."""
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("the page cannot follow its studies", exc_info=error)
            self.failed = True

    async def end_streams(self) -> None:
        """Let all streams end, as a server waits for them before it ends."""
        self._ending = True
        async with self._changed:
            self._changed.notify_all()

    async def _look(self, feed: StudyFeed) -> None:
        """Look at a journal, and wake the streams if there is something new."""
        if await asyncio.get_running_loop().run_in_executor(self._looks, feed.look):
            async with self._changed:
                self._changed.notify_all()

    async def _file(self, request: Request) -> Response:
        found = self._files.get(request.path_params["name"] or "index.html")
        if found is None:
            return PlainTextResponse("there is nothing here", status_code=HTTPStatus.NOT_FOUND)
        content, kind = found
        return Response(content, media_type=kind)

    async def _login(self, request: Request) -> Response:
        with suppress(
            ValueError, TypeError, LookupError, AttributeError, RecursionError
        ):  # another body than an object with a text is no token
            given = json.loads(await request.body())["token"]
            if hmac.compare_digest(given.encode(), self._token.encode()):
                response = Response(status_code=HTTPStatus.NO_CONTENT)
                response.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", path="/")
                return response
        return PlainTextResponse("this is not the token of this page", status_code=HTTPStatus.UNAUTHORIZED)

    async def _request(self, request: Request) -> Response:
        try:
            directory = self._feed(request).directory
            asked = json.loads(await request.body())
            await asyncio.get_running_loop().run_in_executor(self._views, carry_out, directory, asked)
        except ShoalError as error:
            return PlainTextResponse(str(error), status_code=HTTPStatus.CONFLICT)
        except (ValueError, RecursionError):  # no JSON, or nested too deeply
            return PlainTextResponse("the body is not JSON", status_code=HTTPStatus.BAD_REQUEST)
        return Response(status_code=HTTPStatus.ACCEPTED)

    async def _events(self, request: Request) -> Response:
        try:
            feed = self._feed(request)
        except ShoalError as error:
            return PlainTextResponse(str(error), status_code=HTTPStatus.NOT_FOUND)
        if sum(self._watched.values()) >= _MAX_STREAMS:
            return PlainTextResponse("too many browsers", status_code=HTTPStatus.SERVICE_UNAVAILABLE)
        position = request.headers.get("last-event-id") or request.query_params.get("position", "")
        return StreamingResponse(self._stream(feed, position), media_type="text/event-stream")

    async def _stream(self, feed: StudyFeed, position: str) -> AsyncIterator[str]:
        self._watched[feed.name] = self._watched.get(feed.name, 0) + 1
        try:
            yield "retry: 1000\n\n"
            while not self._ending:
                if (news := feed.delta(position)) is not None:
                    position, text = news
                    yield f"id: {position}\ndata: {text}\n\n"
                    continue
                try:
                    async with asyncio.timeout(_ALIVE_SECONDS), self._changed:
                        await self._changed.wait_for(lambda: self._ending or feed.position != position)  # noqa: B023
                except TimeoutError:
                    yield ": alive\n\n"
        finally:
            self._watched[feed.name] -= 1

    async def _studies(self, request: Request) -> str:
        now = time.time()

        def read() -> str:
            found = find_studies(self._root)
            shown = []
            for name, directory in found.items():
                text = self._cached(("studies", name), directory, partial(summary_view, directory, now), 5.0)
                shown.append(f'{{"name":{json_text(name)},"study":{text}}}')
            return f'{{"folder":{json_text(self._root.resolve().name)},"studies":[{",".join(shown)}]}}'

        return await self._in_views(read)

    async def _state(self, request: Request) -> str:
        feed = self._feed(request)
        await self._look(feed)
        return feed.state()

    async def _overview(self, request: Request) -> str:
        feed = self._feed(request)
        return await self._in_views(
            lambda: self._cached(
                ("overview", feed.name), feed.directory, lambda: overview_view(feed.directory, time.time()), 1.0
            )
        )

    async def _curves(self, request: Request) -> str:
        feed, metric = self._feed(request), request.query_params.get("metric", "")
        return await self._in_views(
            lambda: self._cached(
                ("curves", feed.name, metric), feed.directory, lambda: curves_view(feed.directory, metric)
            )
        )

    async def _space(self, request: Request) -> str:
        feed = self._feed(request)
        return await self._in_views(
            lambda: self._cached(("space", feed.name), feed.directory, lambda: space_view(feed.directory), 1.0)
        )

    async def _trial(self, request: Request) -> str:
        feed, number = self._feed(request), request.query_params.get("trial", "")
        if not (number.isascii() and number.isdecimal() and len(number) < 16):
            raise ShoalError("a trial is named by its number")
        return await self._in_views(lambda: json_text(trial_view(feed.directory, int(number))))

    async def _log(self, request: Request) -> str:
        feed, job = self._feed(request), request.query_params.get("job", "")
        return await self._in_views(lambda: json_text(log_view(feed.directory, job)))

    async def _in_views(self, read: Callable[[], str]) -> str:
        return await asyncio.get_running_loop().run_in_executor(self._views, read)

    def _cached(self, key: tuple[str, ...], directory: Path, read: Callable[[], Any], seconds: float = 0.0) -> str:
        """Return a view as JSON text, computed again once it is old, or has no age and the journal has changed.

        An old view is computed again even if no file has changed, as the end of a killed process changes none."""
        stamp, now = file_stamp(directory), time.monotonic()
        if (kept := self._cache.get(key)) is not None:
            known, until, text = kept
            if now < until or (known == stamp and not seconds):
                return text
        text = json_text(read())
        took = time.monotonic() - now
        self._cache.pop(key, None)
        self._cache[key] = (stamp, now + max(seconds, _VIEW_SHARE * took) if seconds else 0.0, text)
        views = [each for each in self._cache if each[0] != "studies"]
        for old in views[: max(0, len(views) - _MAX_CACHED)]:
            del self._cache[old]
        return text

    def _feed(self, request: Request) -> StudyFeed:
        """Return the feed of the study that a request names; a name is looked up, never joined to a path."""
        name = request.query_params.get("study", "")
        if name not in self._feeds:
            found = find_studies(self._root)
            if name not in found:
                raise ShoalError("there is no study of this name")
            self._feeds[name] = StudyFeed(name, found[name])
        return self._feeds[name]


async def _answer(text_of: Callable[[Request], Awaitable[str]], request: Request) -> Response:
    """Answer with JSON; an error of Shoal is answered with its text."""
    try:
        return Response(await text_of(request), media_type="application/json")
    except ShoalError as error:
        return PlainTextResponse(str(error), status_code=HTTPStatus.NOT_FOUND)
