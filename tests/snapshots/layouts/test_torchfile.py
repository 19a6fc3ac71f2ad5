"""Files of torch.save: what is found in them, what is refused, and what a file that is written like them keeps."""

import random
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchbelay.snapshots import open_checkpoint


def doubled(path: Path, out: Path, key: str | None = None) -> Any:
    """Write a file like the one at `path` with all weights doubled, and load it."""
    with open_checkpoint(path, key=key) as checkpoint, checkpoint.output(out, {}) as output:
        for name in checkpoint.names:
            output.write(name, checkpoint.read(name) * 2)
    with zipfile.ZipFile(out) as archive:
        assert archive.testzip() is None  # checksums, which torch.load ignores
    return torch.load(out, weights_only=True)


def test_a_training_checkpoint_keeps_everything_but_its_weights(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7, "names": ["a", "b"]}
    torch.save(whole, tmp_path / "a.pt")
    with open_checkpoint(tmp_path / "a.pt") as checkpoint:
        assert checkpoint.names == ("weight", "bias")
        assert checkpoint.beside == ["optimizer", "step", "names"]
    made = doubled(tmp_path / "a.pt", tmp_path / "b.pt")
    assert torch.equal(made["model"]["weight"], 2 * model.weight)
    assert made["model"]._metadata == model.state_dict()._metadata
    assert (made["step"], made["names"]) == (7, ["a", "b"])
    assert torch.equal(made["optimizer"]["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


def test_tied_weights_stay_tied_unless_they_are_taken_apart(tmp_path: Path) -> None:
    shared = torch.randn(4, 4)
    torch.save({"a": shared, "b": shared, "c": shared.T, "d": shared.clone()}, tmp_path / "a.pt")
    with open_checkpoint(tmp_path / "a.pt") as checkpoint:
        assert checkpoint.tied == (("a", "b"),)
    made = doubled(tmp_path / "a.pt", tmp_path / "b.pt")
    assert made["a"].data_ptr() == made["b"].data_ptr() != made["d"].data_ptr()
    assert torch.equal(made["c"], 2 * shared.T)
    with (
        open_checkpoint(tmp_path / "a.pt") as checkpoint,
        checkpoint.output(tmp_path / "c.pt", {}, ["a", "b"]) as output,
    ):
        for name in checkpoint.names:
            output.write(name, checkpoint.read(name) + (name == "b"))
    untied = torch.load(tmp_path / "c.pt")
    assert torch.equal(untied["a"] + 1, untied["b"])


def test_tensors_in_rows_are_written_in_parts_at_their_places(tmp_path: Path) -> None:
    state = {
        "a": torch.randn(30, 7),
        "b": torch.randn(11).bfloat16(),
        "t": torch.randn(4, 6).t(),
        "none": torch.ones(0),
    }
    torch.save({"model": state, "other": {"x": torch.randn(5)}}, tmp_path / "a.pt")
    with (
        open_checkpoint(tmp_path / "a.pt", key="model") as checkpoint,
        checkpoint.output(tmp_path / "b.pt", {}) as output,
    ):
        assert {"a", "b"} <= output.places.keys()
        assert "t" not in output.places
        output.write("t", checkpoint.read("t") * 2)
        for name in ("a", "b"):
            for start in range(0, state[name].numel(), 4):
                part = checkpoint.read(name).view(-1)[start : start + 4]
                output.write(name, part * 2, start)
    made = torch.load(tmp_path / "b.pt")
    assert all(torch.equal(made["model"][name], 2 * value) for name, value in state.items())
    assert torch.equal(made["other"]["x"], torch.load(tmp_path / "a.pt")["other"]["x"])
    with zipfile.ZipFile(tmp_path / "b.pt") as archive:
        assert archive.testzip() is None


def test_parameters_stay_parameters(tmp_path: Path) -> None:
    made = {"w": nn.Parameter(torch.ones(2)), "frozen": nn.Parameter(torch.ones(2), requires_grad=False)}
    torch.save(OrderedDict(made), tmp_path / "a.pt")
    back = doubled(tmp_path / "a.pt", tmp_path / "b.pt")
    assert isinstance(back["w"], nn.Parameter)
    assert [value.requires_grad for value in back.values()] == [True, False]


def test_a_tensor_that_does_not_lie_in_rows_is_read_in_rows(tmp_path: Path) -> None:
    kernel = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    torch.save({"k": kernel}, tmp_path / "a.pt")
    with open_checkpoint(tmp_path / "a.pt") as checkpoint:
        assert not checkpoint.sliceable
        part = torch.empty(50)
        checkpoint.read_into("k", 30, part)
        assert torch.equal(part, kernel.contiguous().view(-1)[30:80])


def test_a_file_from_before_torch_1_6_is_read(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(3.0)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    with open_checkpoint(tmp_path / "a.pt") as checkpoint:
        assert torch.equal(checkpoint.read("w"), torch.arange(3.0))


def test_weights_that_share_memory_with_something_else_get_their_own(tmp_path: Path) -> None:
    big = torch.arange(100_000.0)
    model = {"whole": big, "half": big[50_000:], "few": torch.arange(1000.0)[:3]}
    torch.save({"model": model, "copies": [big, (big[:5],)], "step": 3}, tmp_path / "a.pt")
    made = doubled(tmp_path / "a.pt", tmp_path / "b.pt")
    assert all(torch.equal(made["model"][name], 2 * tensor) for name, tensor in model.items())
    assert torch.equal(made["copies"][0], big)
    assert torch.equal(made["copies"][1][0], big[:5])
    assert made["model"]["few"].untyped_storage().nbytes() == 12
    assert sorted(item.name for item in tmp_path.iterdir()) == ["a.pt", "b.pt"]


def test_a_memory_of_many_tensors_is_carried_along_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, other = torch.arange(3000.0), torch.arange(5.0)
    beside = [memory[3 * i : 3 * i + 3] for i in range(1000)] + [other, other]
    torch.save({"model": {"w": torch.ones(2)}, "beside": beside}, tmp_path / "a.pt")
    copy, copied = torch.UntypedStorage.copy_, []

    def counting(self: Any, source: Any, *options: Any) -> Any:
        copied.append(self.nbytes())
        return copy(self, source, *options)

    monkeypatch.setattr(torch.UntypedStorage, "copy_", counting)
    made = doubled(tmp_path / "a.pt", tmp_path / "b.pt")
    assert sorted(copied) == [20, 12_000]
    assert all(map(torch.equal, made["beside"], beside))


def test_strides_stay_as_they_are(tmp_path: Path) -> None:
    kernel = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    torch.save({"k": kernel, "t": torch.randn(3, 4).T}, tmp_path / "a.pt")
    made = doubled(tmp_path / "a.pt", tmp_path / "b.pt")
    assert torch.equal(made["k"], 2 * kernel)
    assert (made["k"].stride(), made["t"].stride()) == (kernel.stride(), (1, 4))


def test_expanded_tensors_are_written_whole_and_carried_along_as_they_are(tmp_path: Path) -> None:
    """In memory that is as large as they look, also that of a larger tensor: 6 rows of which all are the first."""
    expanded = {
        "row": torch.arange(36.0).view(6, 6)[:1].expand(6, 6),
        "small": torch.arange(3.0).expand(2, 3),
        "overlapping": torch.arange(9.0).as_strided((3, 3), (2, 2)),
    }
    beside = {"row": torch.arange(36.0).view(6, 6)[1:2].expand(6, 6), "none": torch.empty(0)}
    torch.save({"model": expanded, "beside": [beside["row"], beside["none"]]}, tmp_path / "a.pt")
    made = doubled(tmp_path / "a.pt", tmp_path / "b.pt")
    assert made["model"]["row"][5].tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert all(torch.equal(made["model"][name], 2 * tensor) for name, tensor in expanded.items())
    assert all(torch.equal(new, old) for new, old in zip(made["beside"], beside.values(), strict=True))
    assert made["beside"][0].stride() == (0, 1)


def test_conjugate_and_negated_views_are_written_as_the_values_that_they_show(tmp_path: Path) -> None:
    views = {"conjugate": torch.randn(3, dtype=torch.complex64).conj(), "negated": torch._neg_view(torch.randn(3))}
    torch.save(views, tmp_path / "a.pt")
    made = doubled(tmp_path / "a.pt", tmp_path / "b.pt")
    assert all(torch.equal(made[name], 2 * view) for name, view in views.items())


def test_views_that_show_other_values_of_one_memory_are_not_tied(tmp_path: Path) -> None:
    weights = torch.randn(3, dtype=torch.complex64)
    views = {"plain": weights, "conjugate": weights.conj(), "same": weights.conj()}
    torch.save(views, tmp_path / "a.pt")
    with open_checkpoint(tmp_path / "a.pt") as checkpoint:
        assert checkpoint.tied == (("conjugate", "same"),)
    made = doubled(tmp_path / "a.pt", tmp_path / "b.pt")
    assert all(torch.equal(made[name], 2 * view) for name, view in views.items())


def test_a_file_that_is_not_written_whole_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(4)}, tmp_path / "a.pt")
    with open_checkpoint(tmp_path / "a.pt") as checkpoint:
        output = checkpoint.output(tmp_path / "b.pt", {})
        output.write("w", torch.ones(3))
        with pytest.raises(ValueError, match="not written whole: w; write every element once"):
            output.finish()


def test_key_says_which_entry_holds_the_weights(tmp_path: Path) -> None:
    whole = {
        "model": {"w": torch.ones(1)},
        "ema": {"shadow": {"w": torch.zeros(1)}, "decay": 0.9},
        "other": {"w": torch.ones(1)},
    }
    torch.save(whole, tmp_path / "a.pt")
    with open_checkpoint(tmp_path / "a.pt", key="ema.shadow") as checkpoint:
        assert checkpoint.read("w") == 0
    made = doubled(tmp_path / "a.pt", tmp_path / "b.pt", key="model")
    assert (made["model"]["w"].item(), made["ema"]["decay"], made["other"]["w"].item()) == (2, 0.9, 1)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    ("content", "key", "message"),
    [
        (
            {"model": {"w": torch.ones(1)}, "ema": {"w": torch.ones(1)}},
            None,
            r"several state dicts \(model, ema\); say which",
        ),
        ({"step": 3, "names": ["a"]}, None, "no state dict but the entries step, names; say which entry"),
        ([torch.ones(1)], None, "no state dict but a list"),
        ({"model": {"w": torch.ones(1)}}, "ema", "key='ema' is not in .*, which holds the entries model; give one"),
        ({"model": {"w": torch.ones(1)}}, "model.w", "key='model.w' in .* is not a state dict but a Tensor"),
        ({"w": torch.ones(2, 2).to_sparse()}, None, "'w' is torch.sparse_coo, which cannot be averaged by elements"),
    ],
)
def test_what_holds_no_weights_is_refused(tmp_path: Path, content: object, key: str | None, message: str) -> None:
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=message):
        open_checkpoint(tmp_path / "a.pt", key=key)


class Other:
    pass


def test_objects_that_may_run_code_are_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1), "config": Other()}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="holds Python objects besides tensors, which may run code"):
        open_checkpoint(tmp_path / "a.pt")


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1000)}, tmp_path / "a.pt")
    whole = (tmp_path / "a.pt").read_bytes()
    for length in (0, 10, 2000):
        (tmp_path / "b.pt").write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"b\.pt is not a"):
            open_checkpoint(tmp_path / "b.pt")


def test_a_file_with_wrong_bytes_is_refused_by_its_name_or_read(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3), "b": torch.ones(2, dtype=torch.int64)}, tmp_path / "a.pt")
    whole = (tmp_path / "a.pt").read_bytes()
    begin = whole.index(b"data.pkl") + len("data.pkl")
    draw = random.Random(0)
    said: list[str] = []
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(3):
            damaged[draw.randrange(begin, begin + 300)] = draw.randrange(256)
        (tmp_path / "b.pt").write_bytes(damaged)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                open_checkpoint(tmp_path / "b.pt").close()
        except ValueError as error:
            said.append(str(error))
    assert len(said) > 100
    assert all("b.pt" in each for each in said)
