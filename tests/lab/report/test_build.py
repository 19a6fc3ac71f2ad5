"""The page's contents: everything that was given to it, and nothing from the network."""

import base64
import csv
import re
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from helpers import sample_report, study_records
from helpers.root import ROOT
from helpers.sample_report import ANSWERS, TITLES, heads, plate, sample, verdict
from torchbelay import explorer
from torchbelay.lab import records
from torchbelay.lab.claims.errata import ERRATA, Erratum
from torchbelay.lab.claims.verdict import Answer, Verdict
from torchbelay.lab.part import MISSING, LabError, Plate, Settings, Table
from torchbelay.lab.report import build, style
from torchbelay.lab.report.build import build as build_report
from torchbelay.lab.report.words import sentence

DOCS = ROOT / "docs" / "errata.md"
FAR = "https://arxiv.org/abs/2310.13854"  # the paper, the one link that leads away


class Page(HTMLParser):
    """A parsed page: its tags, the text of each element that has an id, and its visible text."""

    VOID = frozenset({"meta", "link", "img", "input", "br", "hr", "use", "path", "circle"})

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.ids: list[str] = []
        self.texts: dict[str, str] = {}
        self._open: list[tuple[str, str | None]] = []
        self.feed(self.source)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.tags.append((tag, given))
        if "id" in given:
            self.ids.append(given["id"])
        if tag not in self.VOID:
            self._open.append((tag, given.get("id")))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self._open.pop()[0] == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        for tag, name in {*self._open}:
            for key in (name, f"<{tag}>"):
                if key is not None:
                    self.texts[key] = self.texts.get(key, "") + data

    def text(self, name: str) -> str:
        """The text of the element with this id (or of all `<tag>`s), with single spaces."""
        return " ".join(self.texts[name].split())

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attrs for name, attrs in self.tags if name == tag]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample_report.build(tmp_path_factory.mktemp("report")).parent


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    return Page(folder / "index.html")


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Page]:
    """Build a report with empty figures, for tests that look at words only."""
    monkeypatch.setattr(style, "as_bytes", lambda figure, kind: kind.encode())

    def build(*quick: str, **given: object) -> Page:
        return Page(sample_report.build(tmp_path, *quick, **given))

    return build


# files ----------------------------------------------------------------------------------------------------------------


def test_every_figure_lies_beside_the_page_in_both_kinds_and_nothing_else_does(folder: Path) -> None:
    written = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    figures = {f"figures/{name}.{kind}" for name in ("paths", "shares", "limits") for kind in ("png", "svg")}
    assert written == {"index.html", "explorer.html", *figures, "figures/results.csv"}
    assert (folder / "figures/paths.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (folder / "figures/paths.svg").read_bytes()


def test_the_same_report_is_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    again = sample_report.build(tmp_path).parent
    for path in (path for path in folder.rglob("*") if path.is_file()):
        assert (again / path.relative_to(folder)).read_bytes() == path.read_bytes(), path.name


def test_a_figure_in_the_page_is_the_svg_beside_it(folder: Path, page: Page) -> None:
    kind, data = page.all("img")[0]["src"].split(",")
    assert kind == "data:image/svg+xml;base64"
    assert base64.b64decode(data) == (folder / "figures/paths.svg").read_bytes()


def test_a_large_figure_is_a_png_in_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"png": 10, "svg": build.LARGEST_SVG}
    monkeypatch.setattr(style, "as_bytes", lambda figure, kind: bytes(sizes[kind]))
    assert "data:image/png" not in sample_report.build(tmp_path).read_text()
    sizes["svg"] += 1
    text = sample_report.build(tmp_path).read_text()
    assert text.count("data:image/png;base64," + base64.b64encode(bytes(10)).decode()) == 3
    assert (tmp_path / "figures/paths.svg").stat().st_size == sizes["svg"]


def test_a_report_that_fails_leaves_the_earlier_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sample_report.build(tmp_path).read_bytes()

    def refuse(figure: object, kind: str) -> bytes:
        raise RuntimeError("no pen")

    monkeypatch.setattr(style, "as_bytes", refuse)
    with pytest.raises(RuntimeError, match="no pen"):
        sample_report.build(tmp_path, verdicts=[])
    assert (tmp_path / "index.html").read_bytes() == before


def test_an_unwritable_folder_is_one_line_with_the_cure(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file, not a folder")
    with pytest.raises(LabError, match=r"cannot write .*taken.* --out"):
        sample_report.build(tmp_path / "taken")


# nothing from elsewhere -----------------------------------------------------------------------------------------------


def test_nothing_is_loaded_from_elsewhere(page: Page) -> None:
    loaded = [attrs["src"] for _, attrs in page.tags if "src" in attrs]
    loaded += [attrs["href"] for attrs in page.all("link")]
    assert len(loaded) == 4
    assert [address for address in loaded if not address.startswith("data:")] == []
    assert not re.search(r"url\(|@import", page.text("<style>"))
    assert not page.all("script")
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on")]


def test_the_page_itself_forbids_scripts_and_requests(page: Page) -> None:
    policies = [m["content"] for m in page.all("meta") if m.get("http-equiv") == "Content-Security-Policy"]
    assert policies == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]


def test_every_link_leads_to_something_on_the_page_or_beside_it(folder: Path, page: Page) -> None:
    assert len({*page.ids}) == len(page.ids)
    records = {f"records/{name}.jsonl" for name in heads()}
    for address in [attrs["href"] for tag, attrs in page.tags if tag in ("a", "use")]:
        if address.startswith("#"):
            assert address[1:] in page.ids
        else:
            assert address in {FAR, *records} or (folder / address).is_file(), address


def test_the_explorer_lies_beside_the_page_and_is_linked(folder: Path, page: Page) -> None:
    assert [attrs["href"] for attrs in page.all("a")].count("explorer.html") == 1
    assert (folder / "explorer.html").read_text(encoding="utf-8") == explorer.page()


def test_headings_go_down_one_level_at_a_time(page: Page) -> None:
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h\d", tag)]
    assert levels.count(1) == 1
    assert levels[0] == 1
    assert {4} <= {*levels}
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_every_image_has_a_text_instead_and_the_language_is_known(page: Page) -> None:
    assert [image["alt"] for image in page.all("img")] == [
        f"Title of {name} <b>; the caption describes it" for name in ("paths", "shares", "limits")
    ]
    assert page.all("html")[0]["lang"] == "en"


# the answer -----------------------------------------------------------------------------------------------------------

YES, PART, NO, OPEN = Answer.HOLDS, Answer.IN_PART, Answer.FAILS, Answer.OPEN


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([YES], "Of 1 claims of the paper, 1 holds."),
        ([NO, YES, NO], "Of 3 claims of the paper, 1 holds and 2 do not hold."),
        (
            [YES, YES, PART, NO, OPEN],
            "Of 5 claims of the paper, 2 hold, 1 holds in part, 1 does not hold and 1 was not run.",
        ),
        ([OPEN, PART, PART, OPEN], "Of 4 claims of the paper, 2 hold in part and 2 were not run."),
        ([OPEN, OPEN], "No claim of the paper has been judged yet."),
        ([], "No claim of the paper has been judged yet."),
    ],
)
def test_the_answer_counts_the_verdicts(small: Callable[..., Page], answers: list[Answer], expected: str) -> None:
    page = small(verdicts=[verdict(f"C{n}", answer) for n, answer in enumerate(answers, 1)])
    assert expected in page.text("answer")
    assert {"name": "description", "content": expected} in page.all("meta")


@pytest.mark.parametrize(
    ("answers", "leading"),
    [
        (ANSWERS, ["C11", "C2", "C3"]),
        (ANSWERS | {"C2": OPEN}, ["C11", "C3", "C1"]),
        ({"C8": NO, "C5": OPEN, "C7": YES}, ["C8", "C7"]),
        ({"C11": OPEN}, []),
    ],
)
def test_the_most_important_findings_come_first_and_none_that_was_not_run(
    small: Callable[..., Page], answers: dict[str, Answer], leading: list[str]
) -> None:
    found = {name: f"found of {name} 12.5%" for name in answers}
    page = small(verdicts=[verdict(name, answer, found[name]) for name, answer in answers.items()])
    shown = re.findall(r"(C\d+) ([\w ]+): [^:]*? Found of \1 12\.5%\.", page.text("answer"))
    assert shown == [(name, answers[name]) for name in leading]


def test_each_claim_has_a_badge_in_words_that_leads_to_its_row(page: Page) -> None:
    badges = re.findall(r'<li><a class="([\w-]+)" href="#claim-(C\d+)">.*</b> ([\w ]+)</a></li>', page.source)
    judged = {name: answer for name, answer in ANSWERS.items() if answer is not OPEN}
    assert badges == [(answer.replace(" ", "-"), name, answer) for name, answer in judged.items()]
    assert re.search(r'<a class="not-run" href="#unjudged"><b>.*2 claims</b> not run</a>', page.source)


def test_claims_that_were_not_judged_stand_together_in_a_closed_disclosure(small: Callable[..., Page]) -> None:
    assert "2 claims were not run: C9, C12" in small().text("unjudged")
    assert "1 claim was not run: C2" in small(verdicts=[verdict("C1", YES), verdict("C2", OPEN)]).text("unjudged")
    none, every = (small(verdicts=[verdict("C1", answer)]) for answer in (OPEN, YES))
    assert [attrs.get("class") for attrs in none.all("table")].count("rows claims") == 1
    assert "unjudged" not in every.ids


def test_below_the_title_it_says_which_parts_were_run(tmp_path: Path, page: Page) -> None:
    assert page.text("status") == (
        f"2 of 3 parts have been run, all but {TITLES['ring']}. 2 claims need parts that have not been run."
    )
    assert '<a href="#part-ring">' in page.source.split('id="status"')[1].split("</p>")[0]
    head = {"fig2": heads()["fig2"]}
    titles = TITLES | {"ring": "A <ring>"}
    only = Page(build.build(tmp_path, head, {"fig2": []}, [verdict("C12", OPEN)], {}, titles=titles))
    assert only.text("status") == (
        f"1 of 3 parts has been run: {TITLES['fig2']}. 1 claim needs parts that have not been run."
    )
    assert "A <ring>" not in only.source
    whole = build.build(tmp_path, heads(), {name: [] for name in heads()}, [], {})
    assert "status" not in Page(whole).ids


def test_the_rules_are_text_with_headings_lists_and_tables(page: Page) -> None:
    assert {"rules-history", "rules-verdicts", "study-hypotheses"} <= {*page.ids}
    assert not page.source.count("**")


@pytest.mark.parametrize(
    ("quick", "says"),
    [
        ((), None),
        (("fig2", "robustness"), "This is a quick run. It shows"),
        (("robustness",), "This is a quick run of robustness. It shows"),
    ],
)
def test_a_quick_run_says_that_its_verdicts_mean_little(
    small: Callable[..., Page], quick: tuple[str, ...], says: str | None
) -> None:
    page = small(*quick)
    assert ("quick" in page.ids) is (says is not None)
    if says is not None:
        assert says in page.text("quick")
        assert "its verdicts mean little" in page.text("answer")


# claims, figures, errata, settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", sample(), ids=lambda given: given.claim.id)
def test_a_claims_row_has_text_verdict_summary_rule_numbers_and_figure(page: Page, given: Verdict) -> None:
    claim, finding = given.claim, given.finding
    row = page.text(f"claim-{claim.id}")
    assert f"{claim.id} {claim.text.replace('`', '')} {finding.answer}" in row
    assert sentence(finding.summary) in row
    assert f"The rule of {claim.id}{claim.rule}" in row
    for what, value in finding.numbers:
        assert f"{what}{value}" in row
    assert f"The figure behind {claim.id}" in row


def test_what_was_not_run_names_the_command_that_runs_it(page: Page) -> None:
    assert "To run it: torchbelay reproduce ring --seed 7 " in page.text("claim-C12")
    assert "To run it" not in page.text("claim-C9")  # what it needs is no part of this laboratory
    assert page.text("figures").count("Not run.") == 1
    assert f"{TITLES['ring']} Not run. torchbelay reproduce ring --seed 7 runs it." in page.text("figures")


@pytest.mark.parametrize(
    ("made", "command"),
    [
        ([], "torchbelay reproduce ring runs it"),
        ([(0, False)], "torchbelay reproduce ring runs it"),
        ([(0, True), (0, True)], "torchbelay reproduce ring --quick runs it"),
        ([(5, True)], "torchbelay reproduce ring --seed 5 --quick runs it"),
        ([(5, False), (6, False)], "torchbelay reproduce ring runs it"),
    ],
)
def test_the_command_makes_records_that_go_with_the_others(
    tmp_path: Path, made: list[tuple[int, bool]], command: str
) -> None:
    given = {f"part{n}": {"seed": seed, "quick": quick} for n, (seed, quick) in enumerate(made)}
    titles = {name: name for name in (*given, "ring")}
    page = Page(build.build(tmp_path, given, dict.fromkeys(given, ()), [], {}, titles=titles))
    assert f"Not run. {command}." in page.text("figures")


@pytest.mark.parametrize(("folder", "option"), [(None, ""), ("trial", " --out trial"), ("my runs", " --out 'my runs'")])
def test_the_command_writes_into_the_same_folder(tmp_path: Path, folder: str | None, option: str) -> None:
    head = {"fig2": heads("fig2")["fig2"]}
    claims = [verdict("C12", OPEN)]
    page = Page(build.build(tmp_path, head, {"fig2": []}, claims, {}, titles=TITLES, folder=folder))
    assert f"To run it: torchbelay reproduce ring --seed 7 --quick{option} " in page.text("claim-C12")
    assert f"Not run. torchbelay reproduce ring --seed 7 --quick{option} runs it." in page.text("figures")
    assert f"run torchbelay reproduce all --force{option}." in page.text("quick")


def test_a_claim_whose_figure_was_not_drawn_has_no_link_to_it(small: Callable[..., Page]) -> None:
    page = small(verdicts=[verdict("C1", YES, plate="elsewhere"), verdict("C2", YES, plate=None)])
    assert "The figure" not in page.text("claims")


def test_figures_stand_under_their_part_with_title_and_caption(page: Page) -> None:
    shown = page.text("figures")
    captions = [
        f"Title of {name} <b> Caption of {name}: 30 steps from (0.05, 0.05) & seed 7." for name in ("paths", "limits")
    ]
    order = [TITLES["fig2"], captions[0], TITLES["robustness"], captions[1], TITLES["ring"]]
    places = [shown.index(text) for text in order]
    assert places == sorted(places)


def test_a_figure_called_as_its_part_has_one_heading(tmp_path: Path) -> None:
    only = plate("paths")
    head = {"fig2": heads()["fig2"]}
    page = Page(build.build(tmp_path, head, {"fig2": []}, [], {"fig2": [only]}, titles={"fig2": only.title}))
    assert page.text("figures").count(only.title) == 1


def test_a_table_has_every_cell_under_its_heading_and_lies_beside_the_page(folder: Path, page: Page) -> None:
    plate = sample_report.table("results")
    assert isinstance(plate.figure, Table)
    shown = page.text("figure-results")
    for row in plate.figure.rows:
        assert "".join(row) in shown
    labels = [cell["data-label"] for cell in page.all("td") if "data-label" in cell and cell["data-label"][0] in "wS"]
    assert labels == [*plate.figure.columns[1:]] * len(plate.figure.rows)
    missing = [cell["data-label"] for cell in page.all("td") if cell.get("class") == "missing"]
    assert missing == ["w2 test ÷ EMA's", "w1 train", "w1 test", "w1 FID", "Seeds"]
    with (folder / "figures/results.csv").open(encoding="utf-8", newline="") as file:
        assert [tuple(row) for row in csv.reader(file)] == [plate.figure.columns, *plate.figure.rows]
    assert "CSV Records" in shown
    assert "PNG" not in shown
    assert "Full size" not in shown


def test_a_column_of_sentences_is_marked_from_its_heading_to_its_last_cell(tmp_path: Path) -> None:
    figure = Table(("", "Seeds", "Says"), (("one", "3", "It holds, at last."), ("two", MISSING, MISSING)), ("Says",))
    plates = {"fig2": [Plate("words", "Words", "Caption.", figure)]}
    head = {"fig2": heads()["fig2"]}
    shown = Page(build_report(tmp_path, head, {"fig2": [{"kind": "run"}]}, sample(), plates, titles=TITLES))
    marked = [(tag, attrs["class"]) for tag, attrs in shown.tags if "prose" in attrs.get("class", "").split()]
    assert marked == [("th", "prose"), ("td", "prose"), ("td", "missing prose")]


def test_notes_are_a_list_in_a_closed_disclosure_below_the_caption(page: Page) -> None:
    notes = "The paper does not say T & <i>. Nor how long it trained."
    title = "Title of results <b>"
    assert f"Caption of results; what differs: How this was made: {title} {notes} CSV" in page.text("figure-results")
    assert notes in page.text("<details>")
    assert page.source.count('<ul class="notes">') == 1  # no disclosure without notes
    assert not [attrs for attrs in page.all("details") if "open" in attrs]


ORIGIN = {
    "kind": "origin",
    "device": "NVIDIA H200",
    "torch": "2.11.0",
    "python": "3.12.3",
    "date": "2026-11",
    "device_s": 90,
}


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, None),
        (
            {"committed": True, "why": "there is no GPU here"},
            "These are the committed records, made on NVIDIA H200 (torch 2.11.0, Python 3.12.3, 2026-11, 1 min 30 s of "
            "device time). There is no GPU here.",
        ),
        ({"committed": False, "why": "not shown"}, None),
    ],
)
def test_committed_records_are_named_with_the_machine_that_made_them(
    tmp_path: Path, more: dict[str, object], expected: str | None
) -> None:
    given = heads("fig2", "robustness")
    lines = {"fig2": [{"kind": "run"}], "robustness": [{"kind": "run"}, ORIGIN | more]}
    page = Page(build.build(tmp_path, given, lines, [], {}, titles=TITLES))
    assert page.text("figures").count("committed") == (expected is not None)
    assert expected is None or expected in page.text("figures")
    settings = page.text("settings")
    assert re.search(r"robustness 2 records of robustness 1 min 40 s .*2\.11\.0 3\.12\.3 NVIDIA H200", settings)
    assert ("This is a quick run of fig2." in page.text("quick")) is (
        expected is not None
    )  # committed records are not a quick run


def test_a_committed_record_without_details_is_named_too(tmp_path: Path) -> None:
    given, lines = {"fig2": heads()["fig2"]}, {"fig2": [{"kind": "origin", "committed": True}]}
    page = Page(build.build(tmp_path, given, lines, [], {}, titles=TITLES))
    assert "These are the committed records, made on another machine. " in page.text("figures")


def test_settings_that_the_parts_share_are_shown_once_and_others_per_part(small: Callable[..., Page]) -> None:
    alike, mixed = small().text("settings"), small("fig2").text("settings")
    head = heads()["fig2"]
    for text in (alike, mixed):
        assert "All parts together took 1 min 43 s." in text
        assert f"Seed7 torchbelay{head['torchbelay']} torch{head['torch']} Python{head['python']}" in text.replace(
            "  ", " "
        )
        assert head["device"] in text
    assert "Sizefull" in alike
    assert "PartRecordsTime fig2 3 records of fig2 2.3 s robustness 1,234 records of robustness 1 min 40 s" in alike
    assert "PartRecordsTimeSize fig2 3 records of fig2 2.3 s quick robustness" in mixed


def test_the_errata_are_those_of_the_documentation_in_its_order() -> None:
    headings = re.findall(r"^## (E\d+): (.+)$", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    assert [(erratum.id, erratum.title) for erratum in ERRATA] == headings
    assert len(headings) == 17


def test_the_errata_point_to_the_same_place_of_the_paper_as_the_documentation() -> None:
    table = dict(re.findall(r"^\| \[(E\d+)\]\(.*?\) \| (.*?) \|", DOCS.read_text(encoding="utf-8"), re.MULTILINE))
    for erratum in ERRATA:
        assert table[erratum.id].split()[0].rstrip(",") in erratum.place, erratum.id


@pytest.mark.parametrize("erratum", ERRATA, ids=lambda erratum: erratum.id)
def test_every_erratum_is_on_the_page(page: Page, erratum: Erratum) -> None:
    heading = f"{erratum.id} {erratum.title} ({erratum.place})"
    row = " ".join((heading, erratum.printed, erratum.correct, erratum.software))
    assert page.text(erratum.id) == row.replace("`", "")
    for cell in (erratum.printed, erratum.correct, erratum.software):
        assert len(re.sub(r"`[^`]+`", "formula", cell).split()) <= 25  # what a cell of a table may hold


# odd input ------------------------------------------------------------------------------------------------------------


def test_nothing_run_is_a_page_too(tmp_path: Path) -> None:
    page = Page(build.build(tmp_path, {}, {}, [], {}, titles=TITLES))
    assert page.text("settings").endswith("Nothing has been run yet.")
    assert page.text("figures").count("Not run.") == len(TITLES)


def test_without_titles_the_parts_are_those_that_ran_and_those_that_claims_need(tmp_path: Path) -> None:
    given = heads()
    page = Page(build.build(tmp_path, given, {name: [] for name in given}, [verdict("C12", OPEN)], {}))
    assert [name for name in page.ids if name.startswith("part-")] == ["part-fig2", "part-robustness", "part-ring"]


def test_text_cannot_become_markup(small: Callable[..., Page]) -> None:
    page = small(verdicts=[verdict("C1", YES, "<script>alert(1)</script> `<b>`")])
    assert not page.all("script")
    assert "<script>alert(1)</script> <b>." in page.text("claim-C1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"plates": {"fig2": [plate("same")], "robustness": [plate("same")]}},
            "two figures are called same; give each its own name",
        ),
        ({"plates": {"ring": [plate("ring")]}}, "heads, records and plates disagree on ring; a part"),
        ({"records": {"fig2": []}}, "heads, records and plates disagree on robustness; a part"),
        ({"titles": {"fig2": "Figure 2"}}, "titles lacks robustness; give every part a title"),
    ],
)
def test_input_that_would_lose_a_part_is_refused_before_anything_is_written(
    tmp_path: Path, change: dict[str, dict[str, object]], message: str
) -> None:
    given = {"heads": heads(), "records": {name: [] for name in heads()}, "plates": {}, "titles": TITLES} | change
    with pytest.raises(ValueError, match=message):
        build.build(tmp_path, verdicts=[], **given)
    assert not [*tmp_path.iterdir()]


# the study ------------------------------------------------------------------------------------------------------------


def test_the_study_has_one_table_with_p_and_bars_and_names_the_parts_that_were_not_run(tmp_path: Path) -> None:
    lines = study_records.warmup([None] * 8, [0.17] * 8)
    head = records.header("warmup", Settings(), 1.0)
    titles = {"warmup": "W", "penalty": "P", "gpt": "G"}
    found = Page(build_report(tmp_path, {"warmup": head}, {"warmup": lines}, [], {}, titles=titles))
    assert found.ids.count("figure-study-hypotheses") == 1
    text = found.text("study")
    assert "Not run. torchbelay reproduce penalty runs it. Not run. torchbelay reproduce gpt runs it." in text
    assert "reproduce warmup runs it" not in text
    with (tmp_path / "figures" / "study-hypotheses.csv").open(newline="") as file:
        saved = list(csv.DictReader(file))
    assert [row["Answer"] for row in saved] == ["holds"] + ["not run"] * 6
    assert (saved[0]["p"], saved[0]["Holm's bar"]) == ("0.00391", "0.05/7 = 0.00714, met")
    assert all("".join(row.values()) in text for row in saved)  # the page has the same cells
    links = {attrs.get("href") for attrs in found.all("a")}
    assert {"figures/study-hypotheses.csv", "records/warmup.jsonl", "#study"} <= links


def test_a_study_of_which_nothing_was_run_has_no_table(page: Page) -> None:
    assert "figure-study-hypotheses" not in page.ids
    assert page.text("study").endswith("Not run.")
