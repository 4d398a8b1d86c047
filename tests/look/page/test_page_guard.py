"""What the page refuses: every route and method without a token, foreign pages, paths, bodies; and what is inert."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from page_studies import NASTY, lively_study, nasty_study
from serving import Page, served
from timeline_samples import training

from shoal.core.errors import ShoalError
from shoal.look.page.app import STUDY_VERBS, TRIAL_VERBS, VERBS, PageServer
from shoal.look.page.files import MODULES
from shoal.look.page.guard import MAX_BODY
from shoal.look.page.views import log_view

READS = ["studies", "state", "overview", "curves", "space", "trial", "log", "events"]
QUERY = "?study=nasty&metric=accuracy&trial=0&job=job-00001&position=x"
ROUTES = [
    *(f"/api/{name}{QUERY}" for name in READS),
    f"/api/request{QUERY}",
    "/api/session",
    "/api/none",
    "/api/",
    "/x",
]
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND"]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("studies")
    nasty_study(folder / "nasty")
    (folder / "secret.txt").write_text("secret")
    with served(folder) as page:
        yield page


@pytest.mark.parametrize("method", METHODS)
def test_without_a_token_nothing_is_answered(page: Page, method: str) -> None:
    body = {"verb": "end study"} if method == "POST" else None
    for route in ROUTES:
        status, text, headers = page.ask(method, route, body=body, token=False)
        assert status == (401 if method in ("GET", "HEAD", "POST") else 405), route
        assert "trials" not in text
        assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize("cookie", ["", "shoal-0=x", "{name}=", "{name}=wrong", "{name}={token}x", "other={token}"])
def test_another_cookie_is_no_token(page: Page, cookie: str) -> None:
    text = cookie.format(name=f"shoal-{page.port}", token=page.token)
    assert page.ask("GET", "/api/studies", {"Cookie": text}, token=False)[0] == 401


FOREIGN = {
    "another host": {"Host": "evil.example"},
    "a host that resolves to this machine": {"Host": "localtest.me:{port}"},
    "another port": {"Host": "127.0.0.1:1"},
    "no port": {"Host": "127.0.0.1"},
    "another origin": {"Origin": "http://evil.example"},
    "an opaque origin": {"Origin": "null"},
    "the same host by https": {"Origin": "https://127.0.0.1:{port}"},
    "another port as origin": {"Origin": "http://127.0.0.1:1"},
    "another site": {"Sec-Fetch-Site": "cross-site"},
    "the same site on another port": {"Sec-Fetch-Site": "same-site"},
    "a site that is not known": {"Sec-Fetch-Site": "?"},
}


@pytest.mark.parametrize("headers", FOREIGN.values(), ids=FOREIGN)
def test_requests_of_other_pages_are_refused_in_spite_of_the_token(page: Page, headers: dict[str, str]) -> None:
    sent = {name: value.format(port=page.port) for name, value in headers.items()}
    for route in ("/", "/main.js", ROUTES[1], ROUTES[6]):
        assert page.ask("GET", route, sent)[0] == 403, route
    assert page.ask("POST", ROUTES[7], sent, {"verb": "end study"})[0] == 403


@pytest.mark.parametrize(
    "headers",
    [
        pytest.param({}, id="neither header nor type"),
        pytest.param({"Content-Type": "application/json"}, id="no header"),
        pytest.param({"X-Shoal": "1"}, id="no type"),
        pytest.param({"X-Shoal": "1", "Content-Type": "text/plain"}, id="a form of another page"),
    ],
)
@pytest.mark.parametrize("route", [f"/api/request{QUERY}", "/api/session"])
def test_a_request_needs_what_another_page_cannot_send(page: Page, headers, route) -> None:
    assert page.send("POST", route, b'{"verb": "end study"}', {"Cookie": page.cookie, **headers})[0] == 403


@pytest.mark.parametrize(
    ("method", "body", "status"),
    [
        pytest.param("POST", b"1" * (MAX_BODY + 1), 413, id="more than it may have"),
        pytest.param("POST", b"[" * MAX_BODY, 400, id="deeply nested"),
        pytest.param("POST", b"\xff\xfe", 400, id="no text"),
        pytest.param("POST", b"{", 400, id="no JSON"),
        pytest.param("POST", b"[]", 409, id="no object"),
        pytest.param("POST", b'{"verb": 1}', 409, id="no verb"),
        pytest.param("POST", b'{"verb": "__init__"}', 409, id="a method that is no verb"),
        pytest.param("POST", b'{"verb": "rerun", "trials": [0]}', 409, id="a method that runs code"),
        pytest.param("POST", b'{"verb": "pause"}', 409, id="no trials"),
        pytest.param("POST", b'{"verb": "pause", "trials": []}', 409, id="an empty list"),
        pytest.param("POST", b'{"verb": "pause", "trials": [true]}', 409, id="no number"),
        pytest.param("POST", b'{"verb": "pause", "trials": ["0"]}', 409, id="a text"),
        pytest.param("POST", b'{"verb": "pause", "trials": [99]}', 409, id="a trial that is not there"),
        pytest.param("GET", b"{}", 413, id="a body where none is"),
    ],
)
def test_bodies_are_checked(page: Page, method: str, body: bytes, status: int) -> None:
    found, text, _ = page.ask(method, f"/api/request{QUERY}" if method == "POST" else ROUTES[0], body=body)
    assert found == status, text
    assert "Traceback" not in text


WRONG = {
    "clone": [
        *({}, {"trial": "0"}, {"trial": True}, {"trial": 99}, {"trial": 0, "changes": []}, {"trial": 0, "epochs": 0}),
        *(
            {"trial": 0, "anew": 1},
            {"trial": 0, "epochs": "9", "anew": True},
            {"trial": 0, "epochs": True, "anew": True},
        ),
        {"trial": 0},  # it has no checkpoint
        {"trial": 0, "anew": True, "changes": {"lr": {"deep": [{}]}}},
        {"trial": 0, "anew": True, "changes": {"lr.deep.deeper": 1}},
    ],
    "add trial": [
        *({}, {"config": {"lr": 0.1}}, {"config": [], "epochs": 1}, {"config": {"lr": 0.1}, "epochs": 10**10}),
        *({"config": {}, "epochs": 1}, {"config": {"lr": 7}, "epochs": 1}, {"config": {"lr": None}, "epochs": 1}),
        *({"config": {"lr": "0.1"}, "epochs": 1}, {"config": {"lr": [0.1]}, "epochs": 1}),
        {"config": {"lr": 0.1, "__proto__": {}}, "epochs": 1},
        {"config": {"lr": 0.1}, "epochs": 1, "outside": "yes"},
    ],
    "policy": [{}, {"policy": 1}, {"policy": ""}, {"policy": "none such"}, {"policy": ["fifo"]}],
    "add devices": [
        {},
        {"devices": []},
        {"devices": "cpu:1"},
        {"devices": [1]},
        {"devices": [""]},
        {"devices": ["\0"]},
        {"devices": ["\ud800"]},
    ],
    "remove devices": [{}, {"devices": ["cuda:9"]}, {"devices": ["cuda:0"] * 1001}],
}


@pytest.mark.parametrize(
    ("verb", "given"), [pytest.param(verb, each, id=f"{verb} {each}") for verb in WRONG for each in WRONG[verb]]
)
def test_requests_with_wrong_values_are_refused_in_words(page: Page, verb: str, given: dict[str, Any]) -> None:
    status, text, _ = page.ask("POST", f"/api/request{QUERY}", body={"verb": verb} | given)
    assert status == 409, text
    assert "Traceback" not in text
    assert page.json(f"/api/state{QUERY}")["snapshot"]["pending"] == []


def test_the_table_of_requests_names_every_verb() -> None:
    assert set(WRONG) | set(TRIAL_VERBS) | set(STUDY_VERBS) == set(VERBS)


def test_every_route_of_the_server_is_in_the_table_of_attacks() -> None:
    routes = {route.path for route in PageServer(Path(), token="x", port=1).app.routes}
    assert routes - {"/{name:path}"} == {"/api/session", "/api/request", *(f"/api/{name}" for name in READS)}


def test_a_body_of_unknown_length_is_refused(page: Page) -> None:
    headers = {"X-Shoal": "1", "Content-Type": "application/json", "Transfer-Encoding": "chunked"}
    assert page.ask("POST", f"/api/request{QUERY}", headers, body=iter([b"{}"]))[0] == 411


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/../secret.txt",
            "/..%2fsecret.txt",
            "/%2e%2e/secret.txt",
            "/..%5csecret.txt",
            "//etc/passwd",
            "/etc/passwd",
        ),
        *(
            "/main.js/../../guard.py",
            "/guard.py",
            "/__init__.py",
            "/static/main.js",
            "/main.js%00.css",
            "/nasty/journal.sqlite",
        ),
    ],
)
def test_no_path_leads_to_a_file_of_the_disk(page: Page, path: str) -> None:
    status, text, _ = page.ask("GET", path)
    assert status == 404
    assert "secret" not in text


@pytest.mark.parametrize("name", ["..", "../nasty", "/etc", "nasty/..", "nasty/", "./nasty", "NASTY", "", "%00"])
def test_a_study_is_looked_up_by_its_name(page: Page, name: str) -> None:
    for route in (name for name in READS if name not in ("studies", "events")):
        assert page.ask("GET", f"/api/{route}?study={name}&trial=0&metric=accuracy&job=x")[0] == 404, route


@pytest.mark.parametrize(
    "job", ["../journal.sqlite", "..%2f..%2fsecret.txt", "/etc/passwd", "job-9", "", "%00", "callbacks"]
)
def test_only_logs_of_jobs_are_shown(page: Page, job: str) -> None:
    assert page.ask("GET", f"/api/log?study=nasty&job={job}")[0] == 404


LOGS = {
    "../../secret": "above",
    "{folder}/secret": "an absolute path",
    "link": "a link to a file elsewhere",
    "folder": "a folder",
    "pipe": "a pipe",
    "none": "no file",
}


@pytest.mark.parametrize("name", LOGS, ids=LOGS.values())
def test_an_id_of_a_damaged_journal_opens_no_other_file(tmp_path: Path, name: str) -> None:
    job = name.format(folder=tmp_path)
    (tmp_path / "secret.log").write_text("secret")
    with lively_study(tmp_path / "study") as journal:
        journal.record_job_start(training(job, [47]), "cuda:3")
        journal.record_job_start(training("own", [46]), "cuda:3")
    logs = tmp_path / "study" / "logs"
    logs.mkdir()
    (logs / "own.log").write_text("printed")
    (logs / "link.log").symlink_to(tmp_path / "secret.log")
    (logs / "folder.log").mkdir()
    os.mkfifo(logs / "pipe.log")
    assert log_view(tmp_path / "study", "own")["text"] == "printed"
    with pytest.raises(ShoalError, match="has no log in"):
        log_view(tmp_path / "study", job)


@pytest.mark.parametrize("trial", ["-1", "1e9", "x", "", "0;DROP TABLE trials", "9" * 30])
def test_a_trial_is_a_number(page: Page, trial: str) -> None:
    status, text, _ = page.ask("GET", f"/api/trial?study=nasty&trial={trial.replace(' ', '%20')}")
    assert (status, "Traceback" in text) == (404, False)


@pytest.mark.parametrize("path", ["/", *(f"/{name}" for name in ("style.css", *MODULES))])
def test_the_files_of_the_page_are_public_and_say_nothing_of_a_study(page: Page, path: str) -> None:
    status, text, headers = page.ask("GET", path, token=False)
    assert status == 200
    assert page.token not in text
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cross-origin-resource-policy"] == "same-origin"


def test_a_token_becomes_a_cookie_that_no_script_reads(page: Page) -> None:
    assert page.ask("POST", "/api/session", body={"token": "x"}, token=False)[0] == 401
    for wrong in (b"1", b'{"token": 1}', b"{}", b"{"):
        assert page.ask("POST", "/api/session", body=wrong, token=False)[0] == 401
    status, _, headers = page.ask("POST", "/api/session", body={"token": page.token}, token=False)
    cookie = headers["set-cookie"].lower()
    assert (status, "httponly" in cookie, "samesite=strict" in cookie) == (204, True, True)


def test_names_configs_and_errors_stay_text(page: Page) -> None:
    state = page.json("/api/state?study=nasty")
    assert state["trials"][0]["config"]["lr"] == NASTY
    status, text, headers = page.ask("GET", "/api/overview?study=nasty")
    assert (status, headers["content-type"]) == (200, "application/json")
    assert NASTY in json.loads(text)["failures"][0]["message"]


def test_no_module_of_the_page_makes_markup_of_text() -> None:
    folder = Path(__file__).parents[3] / "src" / "shoal" / "look" / "page" / "static"
    ways = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc")
    assert [(name, way) for name in MODULES for way in ways if way in (folder / name).read_text()] == []
