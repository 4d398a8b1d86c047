"""Each view and each control in a real browser, on a served study and in a report."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from page_studies import NASTY, lively_study, nasty_study
from serving import Page, served
from tabs import filled, go, opened, ready, shows, wait

from shoal.core.request import Request
from shoal.core.trial import Report
from shoal.journal.requests import pending_requests
from shoal.look.page.files import write_frozen_page

VIEWS = ["overview", "curves", "space", "trials", "devices", "diagnosis", "failures", "trial/33", "trial/45"]
SEEN = {
    "overview": [
        *("What is best?", "Best accuracy", "When is it done?", "Time left"),
        *(
            "Is it getting better?",
            "The best value has changed",
            "What is wrong?",
            "1 trial failed: ValueError: the loss is not finite",
        ),
        "Trials in a training job",
        "waits for a free device",
        "ben",
        "trial 2 is complete",
        "3 reasons such as",
        "policy: auto",
        "plain, 5 members (trials 0, 1, 2, …): gradient of `block.0.weight` has norm 0 in the array, and 0.48 alone",
        "fused, 4 members (trials 3, 5, 9, …); equal to plain PyTorch at 15 checks, largest difference 3e-16",
    ],
    "space": ["Parallel coordinates", "48 of 48 trials", "Grid of states", "Explained of the ranking"],
    "curves": ["Learning curves", "against", "trial "],
    "trials": ["48 of 48 trials", "batch_size", "running", "waiting"],
    "devices": [
        *("Timeline of devices", "cuda:3", "Use of devices", "What the time was spent on"),
        *("not measured", "measured: a kernel runs", "these still run, or were killed"),
    ],
    "diagnosis": ["Devices idle while others train", "Remedy: Use more trials", "not known yet"],
    "failures": ["the loss is not finite", "job-00003"],
    "trial/33": ["Trial 33", "Configuration", "valid_loss", "job-00005", "Checkpoints"],
    "trial/45": ["It waits: needs 9.1 GB", "It has been in no job yet."],
}


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("studies")
    with lively_study(folder / "study"):  # this process runs it
        kept = folder / "study" / "checkpoints" / "000033"
        kept.mkdir(parents=True)
        (kept / "000012-000000-0123abcd.pt").write_bytes(b"x" * 123_456)
        (kept / "000012-000007-0123abcd.pt").write_bytes(b"x" * 1000)
        (folder / "study" / "logs").mkdir()
        (folder / "study" / "logs" / "job-00005.log").write_text("said <b>this</b>\n")
        with served(folder / "study") as page:
            yield page


@pytest.fixture(scope="module")
def tab(browser, page: Page) -> Iterator[Any]:
    """A tab for all tests that each look at a view of its own; to open one takes seconds."""
    with opened(browser, page.address) as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Of studies of which tests change one each: no process runs "unchanged", which they copy."""
    place = tmp_path_factory.mktemp("changed")
    lively_study(place / "unchanged").close()
    kept = place / "unchanged" / "checkpoints" / "000033"
    kept.mkdir(parents=True)
    (kept / "000012-000000-0123abcd.pt").touch()
    return place


@pytest.fixture(scope="module")
def site(folder: Path) -> Iterator[Page]:
    with served(folder) as page:
        yield page


def copied(folder: Path, name: str) -> Path:
    return shutil.copytree(folder / "unchanged", folder / name)


def written(tab: Any, study: Path) -> list[Request]:
    """Requests to a study, when there are any."""
    for _ in range(600):
        if found := pending_requests(study):
            return found
        tab.wait_for_timeout(50)
    pytest.fail(f"no request after half a minute: {tab.inner_text('body')[:2000]}")


@pytest.mark.parametrize(
    ("width", "dark"),
    [
        pytest.param(390, True, id="390-dark"),
        pytest.param(1280, False, id="1280-light", marks=pytest.mark.thorough),  # fast, as the report is
        pytest.param(1280, True, id="1280-dark", marks=pytest.mark.thorough),
        pytest.param(390, False, id="390-light", marks=pytest.mark.thorough),
    ],
)
def test_each_view_shows_the_study_in_both_widths_and_themes(
    browser, page: Page, pictures: Path | None, width: int, dark: bool
) -> None:
    with opened(browser, page.address, width=width, dark=dark) as tab:
        assert "token" not in tab.url
        for view in VIEWS:
            go(tab, "study", view)
            shows(tab, SEEN[view])
            assert not re.search(r"\b(null|undefined)\b", tab.inner_text("main")), f"{view} shows a missing value"
            assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
                f"{view} is wider than the window"
            )
            if pictures is not None:
                name = f"{view.replace('/', '-')}-{width}-{'dark' if dark else 'light'}.png"
                tab.screenshot(path=pictures / name, full_page=True)


def test_the_table_is_sorted_searched_filtered_and_saved(tab) -> None:
    go(tab, "study", "trials")

    def numbers() -> list[int]:
        return [int(text) for text in tab.locator("tbody tr td:nth-child(2)").all_inner_texts()]

    def values() -> list[float]:
        texts = tab.locator("tbody tr td:nth-child(4)").all_inner_texts()
        return [float(text) for text in texts if text != "–"]

    assert values()[:30] == sorted(values()[:30], reverse=True)
    tab.click("th button[data-sort='trial']")
    assert numbers() == list(range(48))
    tab.keyboard.press("Enter")  # the focus has stayed there
    assert numbers() == list(range(47, -1, -1))
    tab.select_option("select[name=state]", "failed")
    assert numbers() == [17]
    assert tab.inner_text("tbody td.line") == "ValueError: the loss is not finite"
    tab.select_option("select[name=state]", "")
    tab.fill("input[type=search]", "cuda:3")
    assert set(numbers()) == set(range(24, 32))
    with tab.expect_download() as download:
        tab.click("#csv")
    lines = Path(download.value.path()).read_text().splitlines()
    assert lines[0].startswith("trial,state,metric.accuracy,best_epoch,last.accuracy,epochs,seconds,config.lr")
    assert len(lines) == 9


def test_curves_of_every_metric_against_epochs_and_seconds(tab) -> None:
    go(tab, "study", "curves")
    for metric in ("valid_loss", "accuracy"):
        tab.select_option("select[name=metric]", metric)
        wait(tab, f"document.querySelector('.chart').getAttribute('aria-label').startsWith('{metric} of 40 trials')")
    tab.select_option("select[name=x]", "time")
    tab.check("input[name=logY]")
    tab.check("input[name=logX]")
    assert tab.locator("canvas").count() == 1
    image = "c.getContext('2d').getImageData(0, 0, c.width, c.height).data"
    painted = f"(() => {{const c = document.querySelector('canvas'); return new Set({image}).size}})()"
    assert tab.evaluate(painted) > 20


CONTROLS = [
    ("trial/33", "pause", (33,)),
    ("trial/33", "stop", (33,)),
    ("trial/17", "retry", (17,)),
    ("failures", "retry", (17,)),
    ("overview", "pause study", ()),
    ("overview", "end study", ()),
]


@pytest.mark.in_turns(6)
@pytest.mark.parametrize(("view", "verb", "trials"), CONTROLS)
def test_a_control_asks_once_and_writes_its_request(
    browser, site: Page, folder: Path, view: str, verb: str, trials: tuple[int, ...]
) -> None:
    study = copied(folder, f"controlled-{view}-{verb}".replace("/", "-").replace(" ", "-"))
    with opened(browser, site.address) as tab:
        go(tab, study.name, view)
        tab.locator(f"[data-verb='{verb}']").first.click()
        tab.click("dialog >> text=Cancel")
        assert pending_requests(study) == []
        tab.locator(f"[data-verb='{verb}']").first.click()
        tab.click("#ask-yes")
        assert [(each.verb, each.trials) for each in written(tab, study)] == [(verb, trials)]
        go(tab, study.name, "overview")
        tab.wait_for_selector(".requests .badge >> text=to be done")


FORMS = {
    "clone from its weights": (
        *("trial/33", "Clone", {"lr": "0.5", "train up to": "30"}, "from its weights"),
        ("clone", {"config": {"lr": 0.5, "width": 128, "batch_size": 32}, "epochs": 30, "source": 33}),
        {"trial": 33, "epoch": 12},
    ),
    "clone anew": (
        *("trial/33", "Clone", {"width": "64"}, "anew"),
        ("clone", {"config": {"lr": ..., "width": 64, "batch_size": 32}, "epochs": 24, "source": 33}),
        None,
    ),
    "add": (
        *("trials", "Add a trial", {"lr": "0.25", "width": "128", "train": "3"}, ""),
        ("add trial", {"config": {"lr": 0.25, "width": 128, "batch_size": 32}, "epochs": 3}),
        None,
    ),
    "add outside the space": (
        *("trials", "Add a trial", {"lr": "7"}, "allow values outside the space"),
        ("add trial", {"config": {"lr": 7, "width": 256, "batch_size": 32}, "epochs": 24, "outside": True}),
        None,
    ),
    "policy": ("overview", "Change the policy", {"policy": "fifo"}, "", ("policy", {"policy": "fifo"}), None),
}


@pytest.mark.in_turns(5)
@pytest.mark.parametrize("form", FORMS)
def test_a_form_asks_once_and_writes_its_request(browser, site: Page, folder: Path, form: str) -> None:
    view, button, values, choice, (verb, expected), origin = FORMS[form]
    study = copied(folder, f"formed-{form.replace(' ', '-')}")
    with opened(browser, site.address) as tab:
        go(tab, study.name, view)
        filled(tab, button, values, choice, answer="dialog >> text=Cancel")
        assert pending_requests(study) == []
        filled(tab, button, values, choice)
        (found,) = written(tab, study)
        config = found.arguments.get("config", {})
        known = {name: ... if expected["config"][name] is ... else value for name, value in config.items()}
        shown = {name: known if name == "config" else found.arguments[name] for name in expected}
        assert (found.verb, shown, found.arguments.get("origin")) == (verb, expected, origin)
        go(tab, study.name, "overview")
        tab.wait_for_selector(".requests .badge >> text=to be done")


def test_what_a_form_cannot_ask_is_said_and_not_sent(browser, site: Page, folder: Path) -> None:
    study = copied(folder, "refused")
    with opened(browser, site.address, javascript_faults=True) as tab:
        go(tab, "refused", "trials")
        for field, value, said in (
            ("field-train", "0", "whole number of epochs"),
            ("field-lr", "7", "outside the space"),
            ("field-lr", "much", "outside the space"),
        ):
            tab.click("[data-form='Add a trial']")
            tab.fill(f"dialog [name='{field}']", value)
            tab.click("#ask-yes")
            wait(tab, f"document.getElementById('said').textContent.includes('{said}')")
        go(tab, "refused", "trial/45")
        tab.click("[data-form=Clone]")
        assert "begins anew" in tab.inner_text("dialog")
        assert tab.locator("dialog label:has-text('from its weights') input").is_disabled()
        tab.keyboard.press("Escape")
        assert pending_requests(study) == []


def test_an_axis_is_brushed_by_pointer_and_by_keyboard(tab) -> None:
    go(tab, "study", "space")
    assert tab.inner_text("#picked") == "48 of 48 trials"
    box = tab.locator("[data-axis=lr]").bounding_box()
    tab.mouse.move(box["x"] + 14, box["y"] + 10)
    tab.mouse.down()
    tab.mouse.move(box["x"] + 14, box["y"] + box["height"] / 2)
    tab.mouse.up()
    text = tab.inner_text("#picked")
    assert "between the marks" in text
    assert 0 < int(text.split()[0]) < 48
    assert all(float(x) > 0.005 for x in tab.locator("main table").first.locator("td:nth-child(3)").all_inner_texts())
    tab.click("#unbrush")
    assert tab.inner_text("#picked") == "48 of 48 trials"
    tab.focus("[data-axis=width]")
    for _ in range(3):
        tab.keyboard.press("ArrowUp")
    widths = set(tab.locator("main table").first.locator("td:nth-child(4)").all_inner_texts())
    assert "64" not in widths
    tab.keyboard.press("Escape")
    assert tab.inner_text("#picked") == "48 of 48 trials"
    tab.select_option("select[name=metric]", "valid_loss")
    assert "valid_loss" in tab.inner_text(".coordinates")


def test_the_grid_counts_every_trial_once_by_any_two_axes(tab) -> None:
    go(tab, "study", "space")
    for across in ("batch_size", "width"):
        tab.select_option("select[name=across]", across)
        texts = tab.locator(".grid-of-states td .small").all_inner_texts()
        assert sum(int(count) for text in texts for count in re.findall(r"(\d+) ", text)) == 48
    assert tab.locator(".grid-of-states td a").count() > 5


def test_chosen_trials_are_paused_together_and_a_refusal_is_shown(browser, site: Page, folder: Path) -> None:
    study = copied(folder, "chosen")
    with opened(browser, site.address, javascript_faults=True) as tab:
        go(tab, "chosen", "trials")
        for expected in ("Noted", "paused already"):
            for trial in (0, 33, 35):  # trial 0 has ended
                tab.check(f"input[aria-label='choose trial {trial}']")
            tab.click("[data-verb=pause]")
            assert "33, 35" in tab.inner_text("#ask-title")
            tab.click("#ask-yes")
            wait(tab, f"document.getElementById('said').textContent.includes('{expected}')")
            chosen = tab.locator("tbody input:checked").count()
            assert chosen == (0 if expected == "Noted" else 3)
        assert [each.trials for each in pending_requests(study)] == [(33, 35)]


def test_a_report_reaches_the_page_without_a_reload(browser, site: Page, folder: Path) -> None:
    with lively_study(folder / "reported") as journal, opened(browser, site.address) as tab:
        go(tab, "reported", "trials")
        tab.fill("input[type=search]", "cuda:0")
        journal.record_reports("job-00005", [Report(32, 13, {"accuracy": 0.987654}, 0.1)])
        tab.wait_for_selector("tbody tr:first-child td:nth-child(4) >> text=0.9877")
        go(tab, "reported", "overview")
        tab.wait_for_selector(".figure >> text=0.9877")


def test_a_change_takes_neither_the_focus_nor_the_place_in_the_window(browser, site: Page, folder: Path) -> None:
    with lively_study(folder / "focused") as journal, opened(browser, site.address) as tab:
        go(tab, "focused", "trials")
        tab.focus("[data-verb='pause study']")
        tab.evaluate("scrollTo(0, 400)")
        journal.record_reports("job-00005", [Report(32, 13, {"accuracy": 0.987654}, 0.1)])
        tab.wait_for_selector("tbody tr:first-child td:nth-child(4) >> text=0.9877", state="attached")
        tab.wait_for_timeout(600)  # the head is drawn at its own pace
        assert tab.evaluate("scrollY") == 400
        assert tab.evaluate("document.activeElement.dataset.verb") == "pause study"
        tab.focus("input[aria-label='choose trial 32']")
        journal.record_reports("job-00005", [Report(32, 14, {"accuracy": 0.9912}, 0.1)])
        tab.wait_for_timeout(1500)
        assert tab.evaluate("document.activeElement.ariaLabel") == "choose trial 32"
        tab.focus("[data-verb='pause study']")  # the table shows then what it has missed
        tab.wait_for_selector("tbody tr:first-child td:nth-child(4) >> text=0.9912", state="attached")


def test_a_hidden_tab_follows_nothing_and_catches_up_when_it_is_seen(browser, site: Page, folder: Path) -> None:
    turn = "Object.defineProperty(document, 'hidden', {value: %s, configurable: true}); " + (
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    with lively_study(folder / "hidden") as journal, opened(browser, site.address) as tab:
        go(tab, "hidden", "trials")
        tab.evaluate(turn % "true")
        events = site.events("hidden", site.json("/api/state?study=hidden")["position"])
        journal.record_reports("job-00005", [Report(32, 13, {"accuracy": 0.987654}, 0.1)])
        events.until(lambda event: event["reports"])
        tab.wait_for_timeout(800)
        assert "0.9877" not in tab.inner_text("main")
        tab.evaluate(turn % "false")
        tab.wait_for_selector("tbody tr:first-child td:nth-child(4) >> text=0.9877")
        events.close()


def test_an_open_traceback_stays_open(browser, site: Page, folder: Path) -> None:
    with lively_study(folder / "opened") as journal, opened(browser, site.address) as tab:
        go(tab, "opened", "failures")
        tab.locator("summary").first.click()
        with tab.expect_response(lambda answer: "/api/overview" in answer.url):
            journal.record_reports("job-00005", [Report(32, 13, {"accuracy": 0.9}, 0.1)])
        tab.wait_for_timeout(300)
        assert tab.locator("details[open]").count() == 1


def test_a_study_that_was_begun_again_replaces_the_old_one(browser, site: Page, folder: Path) -> None:
    study = copied(folder, "again")
    # While there is no study, the browser logs a request that fails.
    with opened(browser, site.address, javascript_faults=True) as tab:
        go(tab, "again", "trials")
        shutil.rmtree(study)
        lively_study(study, trials=16, running=False).close()
        wait(tab, "document.body.innerText.includes('16 of 16 trials')")


def test_a_log_is_shown_as_text(tab) -> None:
    go(tab, "study", "trial/33")
    tab.click(".show-log")
    tab.wait_for_selector("pre.log >> text=said <b>this</b>")


def test_markup_of_a_study_is_inert_served_and_in_a_report(browser, site: Page, folder: Path, tmp_path: Path) -> None:
    nasty_study(folder / "nasty")
    write_frozen_page(folder / "nasty", tmp_path / "report.html")
    for address in (site.address, (tmp_path / "report.html").as_uri()):
        with opened(browser, address) as tab:
            for view in (*VIEWS[:-2], "trial/0"):
                go(tab, "nasty", view)
                assert tab.locator("img").count() == 0
                assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
            assert NASTY[:20] in tab.inner_text("body")


def test_a_report_is_one_file_with_all_views_that_asks_for_nothing(
    browser, tmp_path: Path, pictures: Path | None
) -> None:
    with lively_study(tmp_path / "study"):
        write_frozen_page(tmp_path / "study", tmp_path / "report.html")
    address, asked = (tmp_path / "report.html").as_uri(), list[str]()
    with opened(browser, address, asked=asked) as tab:
        for view in VIEWS:
            go(tab, "study", view)
            shows(tab, SEEN[view])
            assert tab.locator("[data-verb]").count() == 0
        assert asked == [address]
        if pictures is not None:
            tab.screenshot(path=pictures / "report-trial.png", full_page=True)


def test_without_a_token_the_page_says_what_to_do(browser, page) -> None:
    with opened(browser, page.address.partition("#")[0], javascript_faults=True) as tab:
        assert "open the whole address" in tab.inner_text("main")


def test_all_is_reached_by_the_keyboard(browser, page) -> None:
    with opened(browser, page.address) as tab:
        names = []
        for _ in range(12):
            tab.keyboard.press("Tab")
            names.append(tab.evaluate("document.activeElement.textContent.trim()"))
        assert names[:10] == [
            "To the content",
            "Pause the study",
            "End the study",
            *("Overview", "Curves", "Space", "Trials", "Devices", "Diagnosis"),
            names[9],
        ]
        assert re.match(r"Failures \(\d+\)", names[9])


def test_a_folder_lists_its_studies(browser, site: Page, folder: Path) -> None:
    copied(folder, "group/two")
    with opened(browser, site.address) as tab:
        tab.wait_for_selector("a >> text=group/two")
        tab.click("a >> text=group/two")
        ready(tab, "overview")
        assert tab.inner_text("h1") == "group/two"
