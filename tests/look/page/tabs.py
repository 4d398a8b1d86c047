"""Tabs of a browser that show a page."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def opened(
    browser: Any,
    address: str,
    *,
    width: int = 1280,
    dark: bool = False,
    javascript_faults: bool = False,
    asked: list[str] | None = None,
) -> Iterator[Any]:
    """A tab at an address; what its console says is a failure; `asked` gets the addresses that it loads."""
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light", reduced_motion="reduce"
    )
    tab = context.new_page()
    faults: list[str] = []
    tab.on("console", lambda message: faults.append(message.text) if message.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: faults.append(str(error)))
    tab.on("dialog", lambda dialog: faults.append(f"a dialog: {dialog.message}"))
    if asked is not None:
        tab.on("request", lambda request: asked.append(request.url))
    tab.goto(address)
    ready(tab)
    yield tab
    assert javascript_faults or not faults, faults
    context.close()


def wait(tab: Any, expression: str) -> None:
    """Wait until an expression is true; the policy of the page forbids playwright's own way."""
    for _ in range(1200):
        if tab.evaluate(expression):
            return
        tab.wait_for_timeout(50)
    pytest.fail(f"not so after a minute: {expression}\n{tab.inner_text('body')[:2000]}")


def shows(tab: Any, texts: Sequence[str]) -> None:
    """Wait until all of some texts are to be read."""
    wait(tab, f"(seen => {json.dumps(texts)}.every(text => seen.includes(text)))(document.body.innerText)")


def ready(tab: Any, view: str = "") -> None:
    wait(tab, f"document.body.dataset.ready {f'=== {view!r}' if view else '!== undefined'}")


def go(tab: Any, study: str, view: str) -> None:
    there = json.dumps(f"#/{study}/{view}")
    tab.evaluate(f"if (location.hash !== {there}) {{ delete document.body.dataset.ready; location.hash = {there} }}")
    ready(tab, view.partition("/")[0])
    wait(tab, f"document.title.startsWith({json.dumps(study + ' ')})")


def filled(tab: Any, button: str, values: dict[str, str], choice: str = "", answer: str = "#ask-yes") -> None:
    """Open a form, fill it and answer it; by default it is sent."""
    tab.click(f"[data-form='{button}']")
    tab.wait_for_selector("dialog[open]")
    for name, value in values.items():
        field = tab.locator(f"dialog [name='field-{name}']")
        (field.select_option if field.evaluate("x => x.tagName") == "SELECT" else field.fill)(value)
    if choice:
        tab.check(f"dialog label:has-text('{choice}') input")
    tab.click(answer)
