"""What the page says of a study: what is best and wrong, where its time went, and nothing that misleads."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from page_studies import halving_study
from serving import Page, served
from tabs import go, opened, wait

from shoal.look.page.views import overview_view, space_view

VIEWS = ["overview", "curves", "space", "trials", "devices", "diagnosis", "failures", "trial/0"]
LONG = "loss_" + "of_a_very_long_name_" * 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("answers")
    halving_study(place / "halving")
    halving_study(place / "long", LONG)
    return place


@pytest.fixture(scope="module")
def page(folder: Path) -> Iterator[Page]:
    with served(folder) as page:
        yield page


@pytest.fixture(scope="module")
def tab(browser, page: Page) -> Iterator[Any]:
    with opened(browser, page.address) as found:
        yield found


def inside(tab: Any, selector: str) -> list[bool]:
    """Whether each element lies within the width of the window, and shows all of its text."""
    return tab.evaluate(
        f"[...document.querySelectorAll({json.dumps(selector)})].map(each => {{"
        "const box = each.getBoundingClientRect();"
        "const whole = each.scrollWidth <= each.clientWidth + 1;"
        "return box.width > 0 && box.left >= 0 && box.right <= innerWidth && whole;})"
    )


def test_the_first_view_answers_four_questions_in_order(tab) -> None:
    go(tab, "halving", "overview")
    titles = tab.locator("main h2").all_inner_texts()
    assert titles[:3] == ["What is best?", "When is it done?", "What is wrong?"]
    assert "Is it getting better?" in titles
    wait(tab, "document.getElementById('since').textContent.startsWith('The best value has changed 9 times')")
    best = tab.locator("main .card").first.inner_text()
    assert "lr 1" in best
    assert "optimizer" not in best
    assert "momentum" not in best
    assert "1 trial paused by a user: 1" in tab.inner_text("#wrong")


def test_the_largest_losses_are_those_of_the_accounting_each_with_a_remedy(tab, folder: Path) -> None:
    found = overview_view(folder / "halving", 2000.0)["diagnosis"]
    go(tab, "halving", "diagnosis")
    assert tab.inner_text("#diagnosis") == found["summary"]
    shown = tab.locator(".loss .figure").all_inner_texts()
    assert [float(text.removesuffix(" s")) for text in shown] == pytest.approx(
        [loss["seconds"] for loss in found["losses"]], rel=0.01
    )
    assert tab.locator(".loss >> text=Remedy:").count() == len(found["losses"]) <= 3


def test_the_grid_begins_with_axes_that_explain_something(tab, folder: Path) -> None:
    found = space_view(folder / "halving")
    assert found["explained"]["seed"] < 0.005 < found["explained"]["lr"]
    assert found["main"] == ["lr"]
    go(tab, "halving", "space")
    assert tab.input_value("select[name=across]") == "lr"
    assert tab.input_value("select[name=down]") == ""
    text = tab.inner_text(".grid-of-states")
    assert "waiting for others" in text
    axes = tab.locator("svg.parallel:not(.slice) text.name").all_inner_texts()
    assert not {"momentum", "optimizer"} & set(axes)
    tab.select_option("select[name=down]", "seed")
    assert tab.locator(".grid-of-states tbody tr").count() == 2


def test_constants_are_columns_only_if_asked_for(tab) -> None:
    go(tab, "halving", "trials")
    titles = "[...document.querySelectorAll('th button')].map(each => each.textContent)"
    assert {"lr", "seed"} <= set(tab.evaluate(titles))
    assert not {"optimizer", "momentum"} & set(tab.evaluate(titles))
    tab.check("input[name=constants]")
    assert {"lr", "seed", "optimizer", "momentum"} <= set(tab.evaluate(titles))


def test_a_pause_by_a_user_and_a_wait_for_others_are_two_states(tab) -> None:
    go(tab, "halving", "trials")
    states = tab.evaluate(
        "Object.fromEntries([...document.querySelectorAll('tr:not(.why) td .badge')].map("
        "each => [each.closest('tr').querySelector('a').textContent, each.textContent]))"
    )
    assert (states["0"], states["1"], states["2"]) == ("complete", "paused", "waiting for others")

    go(tab, "halving", "trial/2")
    assert tab.inner_text("#why") == "It waits: for others at epoch 3"
    verbs = "[...document.querySelectorAll('main [data-verb]')].map(each => each.dataset.verb)"
    assert tab.evaluate(verbs) == ["stop"]
    go(tab, "halving", "trial/1")
    assert tab.evaluate(verbs) == ["resume", "stop"]


def test_at_the_pointer_only_trials_that_reached_this_epoch_have_a_value(tab) -> None:
    go(tab, "halving", "curves")
    values = "[...document.querySelectorAll('.u-series .u-value')].map(each => each.textContent)"
    names = "[...document.querySelectorAll('.u-series .u-label')].map(each => each.textContent)"
    assert tab.evaluate(names) == ["epochs", *(f"trial {number}" for number in range(6))]
    assert tab.evaluate(values)[:2] == ["best", "0.1556"]
    box = tab.locator(".u-over").bounding_box()
    for epoch, expected in ((9, 2), (3, 6)):
        tab.mouse.move(box["x"] + (epoch - 1) / 8 * (box["width"] - 1), box["y"] + 40)
        wait(tab, f"document.querySelector('.u-series .u-value').textContent === '{epoch}'")
        assert sum(text != "–" for text in tab.evaluate(values)[1:]) == expected
    assert tab.evaluate("document.querySelectorAll('.u-series')[1].title") == "lr 1\nseed 0".replace(
        "lr 1\nseed 0", "seed 0\nlr 1"
    )


def test_one_bad_trial_does_not_squash_the_others_and_is_marked(tab) -> None:
    go(tab, "halving", "curves")
    note = tab.inner_text(".beyond")
    assert note.startswith("Values beyond the chart are marked at its edge (")
    assert "as far as 290000" in note
    bounds = "import('/chart.js').then(({bounds}) => bounds(%s, %s, %s, %s))"
    many = [[[], [0.1 * step for step in range(1, 20)]], [[], [1e6]]]
    low, high = tab.evaluate(bounds % (many, [], "false", "'min'"))
    assert 0 <= low < 0.1
    assert 1.9 < high < 4
    low, high = tab.evaluate(bounds % (many, [], "true", "'min'"))
    assert high < 1e4
    few = [[[], [0.1, 0.2, 1e6]]]
    assert tab.evaluate(bounds % (few, [], "false", "'min'"))[1] > 1e6
    assert tab.evaluate(bounds % (many, [], "false", "'max'"))[1] > 1e6  # the best is never left out


def test_the_chart_of_the_best_value_has_no_line_but_its_own(tab) -> None:
    go(tab, "halving", "trials")
    tab.evaluate(
        "(() => { window.strokes = []; const own = CanvasRenderingContext2D.prototype.stroke;"
        "CanvasRenderingContext2D.prototype.stroke = function (...given) "
        "{ strokes.push(this.strokeStyle); return own.apply(this, given); }; })()"
    )
    go(tab, "halving", "overview")
    wait(tab, "strokes.includes('#3b6ea5')")  # that of the best value
    others = "rgba(70, 90, 110, 0.22)"
    assert others not in tab.evaluate("strokes")
    go(tab, "halving", "curves")
    wait(tab, f"strokes.includes('{others}')")


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_reasons_and_the_main_hyper_parameters_are_in_view(
    browser, page: Page, pictures: Path | None, width: int, dark: bool
) -> None:
    with opened(browser, page.address, width=width, dark=dark) as tab:
        go(tab, "halving", "trials")
        wait(tab, "document.querySelectorAll('td.key[data-name=lr]').length > 0")
        lr = inside(tab, "td[data-name=lr]")
        assert len(lr) == 24
        assert all(lr)
        reasons = inside(tab, "tr.why div")
        assert len(reasons) == 21
        assert all(reasons)
        if pictures is not None:
            tab.screenshot(path=pictures / f"halving-trials-{width}.png", full_page=True)


def test_a_long_name_of_a_metric_makes_no_view_wider_than_a_narrow_window(
    browser, page: Page, pictures: Path | None
) -> None:
    with opened(browser, page.address, width=390) as tab:
        for view in VIEWS:
            go(tab, "long", view)
            tab.wait_for_timeout(100)
            wide = tab.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert wide <= 0, f"{view} is {wide} pixels wider than the window"
            if pictures is not None:
                tab.screenshot(path=pictures / f"long-{view.replace('/', '-')}-390.png", full_page=True)
