"""Records on disk: a file is written whole or not at all, comes back as it was, and damage is found."""

import json
import math
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torchbelay
from torchbelay.lab import records
from torchbelay.lab.part import LabError, Record, Settings

UNHURRIED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]

SOME: list[Record] = [
    {"kind": "path", "arm": "θ = −0.5", "at": [0, 1], "w1": [[0.1, -2e-17], [1e300, 0.0]], "w2": None},
    {"kind": "share", "converged": 0.333333333, "on": True, "nested": {"a": [], "b": "two\nlines\r\n"}},
    {"kind": "odd", "text": 'quote " tab \t next line \x85 separators \u2028 \u2029 \x1c nul \x00'},
]


def written(path: Path, lines: list[Record] = SOME, **head: object) -> Path:
    records.write(path, records.header("fig1", Settings(seed=3, quick=True), 1.234) | head, lines)
    return path


def refused(path: Path) -> str:
    """Return the error message of a file that cannot be used: one line with its name and a cure."""
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(LabError) as error:
        records.read(path)
    message = str(error.value)
    assert str(path) in message
    assert message.endswith("; move it away, or run again with --force")
    assert "\n" not in message
    assert before is None or path.read_bytes() == before
    return message


# Writing and reading --------------------------------------------------------------------------------------------------


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    head, lines = records.read(written(tmp_path / "records" / "fig1.jsonl"))
    assert lines == SOME
    assert head == {
        "format": 1,
        "part": "fig1",
        "seed": 3,
        "quick": True,
        "wall_s": 1.23,
        "device": head["device"],
        "torchbelay": torchbelay.__version__,
        "torch": torch.__version__,
        "python": head["python"],
        "records": 3,
    }
    assert head["device"]
    assert head["python"].startswith("3.")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=50, deadline=None, suppress_health_check=UNHURRIED)
@given(st.lists(st.dictionaries(st.text(), json_values, max_size=4), max_size=4))
def test_any_plain_records_come_back_as_they_were(tmp_path: Path, lines: list[Record]) -> None:
    assert records.read(written(tmp_path / "some.jsonl", lines))[1] == lines


def test_a_file_has_one_line_for_each_record_and_one_about_them(tmp_path: Path) -> None:
    lines = written(tmp_path / "fig1.jsonl").read_text(encoding="utf-8").split("\n")
    assert [json.loads(line).get("kind") for line in lines[:-1]] == [None, "path", "share", "odd"]
    assert lines[-1] == ""
    assert "θ = −0.5" in lines[1]  # readable without a decoder


def test_no_records_are_records(tmp_path: Path) -> None:
    assert records.read(written(tmp_path / "none.jsonl", []))[1] == []


def test_times_are_known_by_their_names() -> None:
    record = {"kind": "run", "wall_s": 1.0, "step_s": 2.0, "steps": 3, "s": 4}
    assert records.without_times(record) == {"kind": "run", "steps": 3, "s": 4}


# Rounding and selection -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "digits", "kept"),
    [
        (0.123456789, 5, 0.12346),
        (0.123456789, 6, 0.123457),
        (0.1 + 0.2, 9, 0.3),
        (1 / 3, 9, 0.333333333),
        (-2e-17 / 3, 9, -6.66666667e-18),
        (123456789.5, 9, 123456790.0),
        (1.0, 5, 1.0),
        (0.0, 9, 0.0),
        (math.inf, 9, None),
        (-math.inf, 5, None),
        (math.nan, 6, None),
    ],
)
def test_a_record_keeps_some_digits_and_none_for_a_number_that_is_not_finite(
    value: float, digits: int, kept: float | None
) -> None:
    assert records.rounded(value, digits) == kept


def test_records_are_selected_by_their_kind_and_fields() -> None:
    lines = [{"kind": "run", "lr": 0.1, "arm": "EMA"}, {"kind": "run", "lr": 0.1, "arm": "BELAY"}, {"kind": "pair"}]
    assert records.select(lines, "run") == lines[:2]
    assert records.select(lines, "run", lr=0.1, arm="BELAY") == lines[1:2]
    assert records.select(lines, "choice") == []


# Whole or not at all --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_json_does_not_have_is_refused_and_the_old_file_stays(tmp_path: Path, value: float) -> None:
    path = written(tmp_path / "fig1.jsonl")
    before = path.read_bytes()
    with pytest.raises(ValueError, match="JSON"):
        written(path, [{"ok": 1.0}, {"bad": value}])
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("call", ["fsync", "chmod", "replace"])
@pytest.mark.parametrize("exists", [True, False], ids=["over an old file", "a new file"])
@pytest.mark.parametrize(
    "failure", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "Ctrl-C"]
)
def test_a_failure_during_the_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, exists: bool, failure: BaseException
) -> None:
    path = tmp_path / "fig1.jsonl"
    if exists:
        written(path)
    before = {p: p.read_bytes() for p in tmp_path.iterdir()}

    def fail(*_: Any, **__: Any) -> None:
        assert [p.suffix for p in tmp_path.iterdir() if p != path] == [".tmp"]  # the write is under way
        raise failure

    monkeypatch.setattr(os, call, fail)
    with pytest.raises((LabError, KeyboardInterrupt)) as error:
        written(path, [{"kind": "new"}])
    if isinstance(failure, OSError):
        assert str(error.value) == f"cannot write {path}: No space left on device; choose another folder with --out"
    else:
        assert error.value is failure
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_writing_again_replaces_the_old_records(tmp_path: Path) -> None:
    path = written(tmp_path / "fig1.jsonl")
    written(path, [{"kind": "new"}])
    assert records.read(path)[1] == [{"kind": "new"}]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_a_report_has_the_permissions_of_the_users_other_files(tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        assert stat.S_IMODE(written(tmp_path / "fig1.jsonl").stat().st_mode) == mode
    finally:
        os.umask(before)


def test_the_folders_of_a_file_are_made(tmp_path: Path) -> None:
    records.write_text(tmp_path / "a" / "b" / "note.txt", "text")
    assert (tmp_path / "a" / "b" / "note.txt").read_text() == "text"


@pytest.mark.parametrize(
    "obstacle",
    [
        pytest.param(lambda out: out.write_text("a file"), id="a file in the way"),
        pytest.param(
            lambda out: (out / "records" / "fig1.jsonl" / "x").mkdir(parents=True), id="a folder in its place"
        ),
    ],
)
def test_a_place_that_cannot_be_written_to_is_reported_in_one_line(
    tmp_path: Path, obstacle: Callable[[Path], None]
) -> None:
    out = tmp_path / "out"
    obstacle(out)
    with pytest.raises(LabError) as error:
        written(out / "records" / "fig1.jsonl")
    message = str(error.value)
    assert message.startswith(f"cannot write {out / 'records' / 'fig1.jsonl'}: ")
    assert message.endswith("; choose another folder with --out")
    assert "\n" not in message
    assert not list(tmp_path.rglob("*.tmp"))


# Damage ---------------------------------------------------------------------------------------------------------------


def test_a_file_cut_short_at_any_byte_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "fig1.jsonl")
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        refused(path)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "empty"),
        (b"\n", "line 1"),
        (b"\n\n\n", "line 1"),
        (b"\x80\x81\xff\x00" * 50, "cannot read"),
        (b"\x89PNG\r\n\x1a\n", "cannot read"),
        (b"\x00" * 100 + b"\n", "line 1"),
        (b"not json\n", "line 1"),
        (b"[1, 2]\n", "not an object"),
        (b'"part"\n', "not an object"),
        (b"null\n", "not an object"),
        (b"[" * 100_000 + b"\n", "line 1"),  # deeper than Python goes
        (b'{"a":' * 100_000 + b"\n", "line 1"),
        (b"9" * 5000 + b"\n", "line 1"),  # longer than Python reads
        (b"{}\n", "format None"),
        (b'{"part": "fig1"}\n', "format None"),
        ("\ufeff{}\n".encode(), "line 1"),
    ],
)
def test_a_file_without_records_is_refused(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "fig1.jsonl"
    path.write_bytes(content)
    assert why in refused(path)


@pytest.mark.parametrize("version", [0, 2, "1", None, [1]])
def test_another_format_is_refused(tmp_path: Path, version: object) -> None:
    assert f"has format {version!r}, this version reads 1" in refused(written(tmp_path / "fig1.jsonl", format=version))


@pytest.mark.parametrize("key", ["part", "seed", "quick", "records", "wall_s"])
@pytest.mark.parametrize("value", ["gone", None, []])
def test_a_header_without_what_is_needed_is_refused(tmp_path: Path, key: str, value: object) -> None:
    path = written(tmp_path / "fig1.jsonl")
    head, *rest = path.read_text(encoding="utf-8").split("\n")
    changed = json.loads(head) | {key: value}
    if value == "gone":
        del changed[key]
    path.write_text("\n".join((json.dumps(changed), *rest)), encoding="utf-8")
    assert f"damaged in line 1 (no {key})" in refused(path)


@pytest.mark.parametrize(("lines", "count"), [(slice(0, 3), 2), (slice(0, 1), 0)])
def test_missing_records_are_noticed(tmp_path: Path, lines: slice, count: int) -> None:
    path = written(tmp_path / "fig1.jsonl")
    kept = path.read_text(encoding="utf-8").split("\n")[lines]
    path.write_text("\n".join(kept) + "\n", encoding="utf-8")
    assert f"damaged ({count} of 3 records)" in refused(path)


def test_a_record_too_many_is_noticed(tmp_path: Path) -> None:
    path = written(tmp_path / "fig1.jsonl")
    path.write_text(path.read_text(encoding="utf-8") + "{}\n", encoding="utf-8")
    assert "damaged (4 of 3 records)" in refused(path)


@pytest.mark.parametrize("line", [2, 3, 4])
def test_the_damaged_line_is_named(tmp_path: Path, line: int) -> None:
    path = written(tmp_path / "fig1.jsonl")
    lines = path.read_text(encoding="utf-8").split("\n")
    lines[line - 1] = lines[line - 1][:-1]
    path.write_text("\n".join(lines), encoding="utf-8")
    assert f"damaged in line {line} " in refused(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    assert "No such file" in refused(tmp_path / "none.jsonl")
    assert "directory" in refused(tmp_path)


@settings(max_examples=150, deadline=None, suppress_health_check=UNHURRIED)
@given(st.data())
def test_random_damage_is_refused_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    path = written(tmp_path / "fig1.jsonl")
    content = path.read_bytes()
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content)))
        lost = data.draw(st.integers(0, 40))
        content = content[:at] + data.draw(st.binary(max_size=20)) + content[at + lost :]
    path.write_bytes(content)
    try:
        head, lines = records.read(path)
    except LabError:
        refused(path)
    else:  # inside a text or a number damage cannot be seen, but what is read has the form of records
        assert (head["format"], head["records"]) == (1, len(lines))
        assert all(isinstance(line, dict) for line in lines)
        assert (type(head["part"]), type(head["seed"]), type(head["quick"])) == (str, int, bool)
