"""The name of a request holds its user, also a strange one."""

from types import SimpleNamespace

import pytest

from shoal.core.request import requester
from shoal.journal import requests
from shoal.journal.requests import pending_requests, write_request


@pytest.mark.parametrize(
    ("name", "user"),
    [
        pytest.param("00017-0a1b2c3d-anna", "anna", id="a name"),
        pytest.param("00017-0a1b2c3d-anna-maria.b", "anna-maria.b", id="a name with a dash"),
    ],
)
def test_the_user_of_a_name(name: str, user: str) -> None:
    assert requester(name) == user


@pytest.mark.parametrize(
    ("login", "user"),
    [("anna", "anna"), ("DOMAIN\\anna b/../c", "DOMAIN_anna_b_.._c"), ("ü" * 100, "ü" * 64), ("a\n\0b", "a__b")],
)
def test_any_login_name_is_a_name_of_a_file(monkeypatch, tmp_path, login: str, user: str) -> None:
    monkeypatch.setattr(requests.pwd, "getpwuid", lambda number: SimpleNamespace(pw_name=login))
    name = write_request(tmp_path, "pause", trials=[3])
    assert requester(name) == user
    assert [each.name for each in pending_requests(tmp_path)] == [name]


def test_a_user_without_a_name_has_a_number(monkeypatch, tmp_path) -> None:
    def nameless(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr(requests.pwd, "getpwuid", nameless)
    monkeypatch.setattr(requests.os, "geteuid", lambda: 4711)
    assert requester(write_request(tmp_path, "pause", trials=[3])) == "uid_4711"


def test_the_environment_does_not_name_the_user(monkeypatch, tmp_path) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "somebody-else")
    assert "somebody-else" not in write_request(tmp_path, "pause", trials=[3])
