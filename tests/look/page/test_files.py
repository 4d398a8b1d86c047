"""The files of the page: what a report joins has no name twice, and imports only what came before."""

import re
from pathlib import Path

from page_studies import lively_study

import shoal.look.page
from shoal.look.page.files import MODULES, frozen_page, page_files
from shoal.look.page.views import json_text
from shoal.results import Study

STATIC = Path(shoal.look.page.__file__).parent / "static"
TEXTS = {name: (STATIC / name).read_text() for name in MODULES}


def test_every_file_is_served_and_every_module_is_a_file() -> None:
    assert {path.name for path in STATIC.iterdir()} - page_files().keys() == {"uPlot.LICENSE.txt"}


def test_modules_import_from_those_before_what_they_export() -> None:
    for place, name in enumerate(MODULES):
        for names, module in re.findall(r'^import \{([^}]*)\} from "\./([\w.]+)";$', TEXTS[name], re.MULTILINE):
            assert module in MODULES[:place], f"{name} imports {module}"
            exported = set(
                re.findall(r"^export (?:async )?(?:function|const|class) (\w+)", TEXTS[module], re.MULTILINE)
            )
            assert {each.strip() for each in names.split(",")} <= exported
    assert sum(text.count("import ") for text in TEXTS.values()) == sum(
        len(re.findall(r"^import \{", text, re.MULTILINE)) for text in TEXTS.values()
    )


def test_no_name_at_the_top_of_modules_occurs_twice() -> None:
    declared = re.compile(r"^(?:export )?(?:async )?(?:function|const|class) (\w+)|^let (.*);", re.MULTILINE)
    names = []
    for text in TEXTS.values():
        for one, several in declared.findall(text):
            names += [one] if one else [re.match(r"\w+", part)[0] for part in several.split(", ")]
    assert sorted(names) == sorted(set(names))
    assert "uPlot" not in names


def test_lines_of_modules_are_not_endless() -> None:
    assert [name for name, text in TEXTS.items() if len(text.splitlines()) > 300] == []


def test_json_for_browsers_has_no_nan() -> None:
    value = {"a": [float("nan"), {"b": (float("inf"), 1.5)}], "c": None}
    assert json_text(value) == '{"a":["nan",{"b":["inf",1.5]}],"c":null}'


def test_a_report_holds_all_that_it_needs(tmp_path: Path) -> None:
    lively_study(tmp_path / "study").close()
    text = frozen_page(tmp_path / "study", 1.79e9)
    assert not re.search(r'(?:src|href)="[^#]', text)
    assert text.count("</script>") == 3
    assert '"valid_loss"' in text


def test_a_study_shows_itself_in_a_notebook(tmp_path: Path) -> None:
    lively_study(tmp_path / "a <study>").close()
    text = Study(tmp_path / "a <study>")._repr_html_()
    assert "a &lt;study&gt;" in text
    assert "<svg" in text
    assert "accuracy (max)" in text
