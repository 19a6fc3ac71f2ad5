"""What is said about checkpoints before they are merged, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from torchbelay.snapshots import open_checkpoint
from torchbelay.snapshots.differences import Findings, examine


def look(folder: Path, *states: dict[str, torch.Tensor]) -> Findings:
    """Write states as folders with a configuration, and compare them."""
    inputs = []
    for number, state in enumerate(states):
        (folder / str(number)).mkdir()
        save_file(state, folder / str(number) / "model.safetensors")
        inputs.append(open_checkpoint(folder / str(number)))
    return examine(inputs)


def test_checkpoints_of_one_model_give_no_notes(tmp_path: Path) -> None:
    found = look(tmp_path, *({"w": torch.randn(3), "n": torch.arange(3)} for _ in range(3)))
    assert (found.averaged, found.kept, found.notes) == (["w"], {"n"}, [])


def test_a_name_that_one_lacks_is_refused(tmp_path: Path) -> None:
    message = (
        r"not of one model: 'b' is in .*0 and not in .*1; 'c' is in .*1 and not in .*0; give checkpoints with the same"
    )
    with pytest.raises(ValueError, match=message):
        look(tmp_path, {"a": torch.ones(1), "b": torch.zeros(1)}, {"a": torch.ones(1), "c": torch.zeros(1)})


def test_many_names_are_not_all_listed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\(7 more\)"):
        look(tmp_path, {f"x{k}": torch.zeros(1) for k in range(10)} | {"w": torch.ones(1)}, {"w": torch.ones(1)})


def test_shapes_that_differ_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"shapes differ: 'w' is \[2, 3\] in .*0 and \[3, 2\] in .*1; give checkpoints of"
    ):
        look(tmp_path, {"w": torch.ones(2, 3)}, {"w": torch.ones(3, 2)})


@pytest.mark.parametrize("who", [0, 1, 2])
def test_a_tied_weight_may_be_left_out_of_some(tmp_path: Path, who: int) -> None:
    """Transformers leaves lm_head.weight out if it is tied to the embedding."""
    states = []
    for number in range(3):
        embedding = torch.randn(4, 3)
        states.append({"embed": embedding, "other": torch.randn(4, 3)})
        if number != who:
            states[-1]["head"] = embedding.clone()
    found = look(tmp_path, *states)
    assert found.notes == [
        "'head' is tied to 'embed' in some checkpoints and left out in others; written as in the last"
    ]
    assert found.stand_ins == {(who, "head"): "embed"}
    assert ("head" in found.averaged) == (who != 2)


def test_a_weight_that_is_left_out_and_was_not_tied_is_refused(tmp_path: Path) -> None:
    embedding = torch.randn(4, 3)
    with pytest.raises(ValueError, match=r"'head' is in .*0 and not in"):
        look(tmp_path, {"embed": embedding, "head": embedding + 1}, {"embed": embedding})


def test_integers_are_kept_and_counters_may_differ(tmp_path: Path) -> None:
    def state(steps: int) -> dict[str, torch.Tensor]:
        return {"w": torch.ones(1), "ids": torch.arange(9), "mask": torch.ones(3) > 0, "steps": torch.tensor(steps)}

    found = look(tmp_path, state(1), state(2))
    assert found.kept == {"ids", "mask", "steps"}
    assert found.notes == ["'steps': integers that differ are taken from the last checkpoint"]


def test_integers_that_differ_are_refused_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"'q' is torch\.int8 and differs .* convert the checkpoints to floating point"
    ):
        look(tmp_path, {"q": torch.tensor([1, 2], dtype=torch.int8)}, {"q": torch.tensor([1, 3], dtype=torch.int8)})


def test_float8_is_refused_unless_equal(tmp_path: Path) -> None:
    scale = torch.tensor([1.0, 2.0])
    one = {"q": scale.to(torch.float8_e4m3fn)}
    assert look(tmp_path, one, one).kept == {"q"}
    (tmp_path / "more").mkdir()
    with pytest.raises(ValueError, match=r"'q' is torch\.float8_e4m3fn and differs"):
        look(tmp_path / "more", one, {"q": (2 * scale).to(torch.float8_e4m3fn)})


def test_dtypes_that_differ_are_said(tmp_path: Path) -> None:
    found = look(
        tmp_path, {"a": torch.ones(2).half(), "b": torch.ones(2).half()}, {"a": torch.ones(2), "b": torch.ones(2)}
    )
    assert found.averaged == ["a", "b"]
    assert found.notes == [
        "'a' and 1 more: dtypes differ (float16 and float32); written in the dtype of the last checkpoint"
    ]


def test_a_weight_that_is_an_integer_elsewhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"'w' is torch\.int64 in .*0 and torch\.float32 in .*1; give checkpoints of one"
    ):
        look(tmp_path, {"w": torch.arange(2)}, {"w": torch.ones(2)})


def test_batch_norm_is_said(tmp_path: Path) -> None:
    states = [torch.nn.BatchNorm1d(3).state_dict() for _ in range(2)]
    (note,) = look(tmp_path, *states).notes
    assert note.startswith("'running_mean' and 1 more: statistics of BatchNorm are averaged too")
    assert "update_bn(loader, model)" in note


@pytest.mark.parametrize("times", [1, 2])
def test_batch_norm_of_one_checkpoint_fits_the_merge_and_nothing_is_said(tmp_path: Path, times: int) -> None:
    torch.save(torch.nn.BatchNorm1d(3).state_dict(), tmp_path / "one.pt")
    with open_checkpoint(tmp_path / "one.pt") as one:
        assert examine([one] * times).notes == []


def test_configurations_that_differ_are_said_and_what_they_say_about_themselves_is_not(tmp_path: Path) -> None:
    inputs = []
    for number, (size, version) in enumerate([(3, "4.1"), (3, "5.0"), (4, "5.0")]):
        folder = tmp_path / str(number)
        folder.mkdir()
        save_file({"w": torch.ones(1)}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"hidden_size": size, "transformers_version": version}))
        inputs.append(open_checkpoint(folder))
    assert examine(inputs[:2]).notes == []
    (note,) = examine(inputs).notes
    assert note == f"config.json differs between {tmp_path / '0'} and {tmp_path / '2'}; the last one is kept"


def test_a_configuration_that_is_not_json_is_compared_too(tmp_path: Path) -> None:
    inputs = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        save_file({"w": torch.ones(1)}, tmp_path / str(number) / "model.safetensors")
        (tmp_path / str(number) / "config.json").write_text(f"// {number}")
        inputs.append(open_checkpoint(tmp_path / str(number)))
    assert len(examine(inputs).notes) == 1
    assert examine([inputs[0]] * 2).notes == []


def test_weights_that_are_tied_in_one_file_only_are_said(tmp_path: Path) -> None:
    shared = torch.randn(3)
    torch.save({"a": shared, "b": shared}, tmp_path / "tied.pt")
    torch.save({"a": shared.clone(), "b": shared.clone()}, tmp_path / "loose.pt")
    tied, loose = (open_checkpoint(tmp_path / name) for name in ("tied.pt", "loose.pt"))
    assert examine([tied, tied]).notes == []
    for inputs in ([tied, loose], [loose, tied]):
        (note,) = examine(inputs).notes
        assert note.startswith(f"a and b are tied in {tied.path} and not in {loose.path}; in the merge they are ")
        assert note.endswith(" not tied" if inputs[1] is loose else " are tied")
    torch.save({"a": shared, "b": shared + 1}, tmp_path / "other.pt")
    found = examine([open_checkpoint(tmp_path / "other.pt"), tied])
    assert found.apart == {"a", "b"}
    assert found.notes[0].endswith("in the merge they are not tied")
