"""The text of the language model: whole packages, split by name."""

from pathlib import Path

import numpy as np
import pytest
import torch

from torchbelay.lab.gpt import corpus
from torchbelay.lab.gpt.corpus import FILE, SPLITS, collect, find, load, split_of, unigram_loss, windows
from torchbelay.lab.part import LabError

NAMES = [f"package{i}" for i in range(40)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in NAMES:
        (tmp_path / name / "tests").mkdir(parents=True)
        (tmp_path / name / "code.py").write_text(f"# {name}\n" * 20)
        (tmp_path / name / "tests" / "hidden.py").write_text("HIDDEN")
    (tmp_path / "single.py").write_text("single = 1\n")
    (tmp_path / "notes.txt").write_text("NOT CODE")
    return tmp_path


def test_every_package_is_in_the_split_of_its_name(folder: Path) -> None:
    found = collect(1_000_000, [folder])
    for name in NAMES:
        for split in ("train", "tune", "judge"):
            text = bytes(found.held_out(split).tolist())  # type: ignore[arg-type]
            assert (f"# {name}\n".encode() in text) == (split == split_of(name)), (name, split)
    everything = b"".join(bytes(each.tolist()) for each in (found.train, found.tune, found.judge))
    assert b"single = 1" in everything
    assert b"HIDDEN" not in everything
    assert b"NOT CODE" not in everything
    assert found.packages == len(NAMES) + 1


def test_the_digest_is_that_of_the_text(folder: Path) -> None:
    one, again = (collect(1_000_000, [folder]) for _ in range(2))
    assert one.digest == again.digest
    (folder / NAMES[3] / "code.py").write_text("# other\n")
    assert collect(1_000_000, [folder]).digest != one.digest


def test_a_saved_text_is_read_as_it_was(folder: Path, tmp_path: Path) -> None:
    one = collect(1_000_000, [folder])
    one.save(tmp_path / FILE)
    again = find(tmp_path, 1000)
    assert again.digest == one.digest
    assert again.packages == one.packages
    for split in SPLITS:
        assert torch.equal(again.held_out(split), one.held_out(split))


def test_a_damaged_text_is_refused(folder: Path, tmp_path: Path) -> None:
    one = collect(1_000_000, [folder])
    path = tmp_path / FILE
    texts = {split: one.held_out(split).numpy() for split in SPLITS}
    texts["judge"] = texts["judge"][::-1]
    np.savez(path, packages=np.array(1), digest=np.array(one.digest), **texts)  # type: ignore[arg-type]
    with pytest.raises(LabError, match="SHA-256 differs; move it away"):
        load(path)
    path.write_bytes(b"PK")
    with pytest.raises(LabError, match=f"cannot read {path}"):
        load(path)


def test_without_a_saved_text_it_is_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(corpus, "_folders", lambda: [folder])
    (tmp_path / "empty").mkdir()
    assert find(tmp_path / "empty", 1_000_000).packages == find(None, 1_000_000).packages == len(NAMES) + 1


def test_no_package_has_more_than_its_share_and_all_have_at_most_what_was_asked_for(folder: Path) -> None:
    (folder / NAMES[0] / "code.py").write_text("x" * 100_000)
    found = collect(5_000, [folder])
    text = b"".join(bytes(each.tolist()) for each in (found.train, found.tune, found.judge))
    assert text.count(b"x" * 10) <= 10
    assert len(text) <= 5_000 + 100


def test_too_few_packages_are_refused_with_the_cure(tmp_path: Path) -> None:
    (tmp_path / "only.py").write_text("x = 1\n")
    with pytest.raises(LabError, match="install more packages"):
        collect(1000, [tmp_path])


def test_windows_are_shifted_by_one_byte() -> None:
    text = torch.randint(0, 256, (100,), dtype=torch.uint8)
    seen, following = windows(text, torch.tensor([0, 7, 90]), 9)
    assert torch.equal(seen[:, 1:], following[:, :-1])
    assert torch.equal(following[1], text[8:17].long())
    assert seen.dtype == torch.long


def test_the_loss_of_frequencies_is_the_entropy_of_the_same_text() -> None:
    text = torch.tensor([0, 1] * 50_000, dtype=torch.uint8)
    assert unigram_loss(text, text) == pytest.approx(0.693147, abs=0.02)
    assert unigram_loss(text, torch.tensor([7], dtype=torch.uint8)) > 10


def test_a_link_that_leads_nowhere_is_no_obstacle(folder: Path) -> None:
    before = collect(1_000_000, [folder])
    (folder / NAMES[0] / "gone.py").symlink_to(folder / "nowhere.py")
    assert collect(1_000_000, [folder]).digest == before.digest


def test_no_more_of_a_package_is_read_than_its_share(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(30):
        (folder / NAMES[0] / f"more{i:02}.py").write_text("y" * 100)
    read: list[str] = []
    once = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path.name) or once(path))
    collect(20_000, [folder])  # a share of 400 bytes
    assert len([name for name in read if name.startswith("more")]) == 2  # 221 bytes, and 101 of each
