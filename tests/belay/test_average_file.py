"""A file with an average is read into a plain model, all of it or nothing."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchbelay as tb
from helpers.small import BELAY, EMA, attached, batch, mlp, same, train, values, with_batchnorm


def saved(path: Path, **options: Any) -> tuple[nn.Module, tb.Belay]:
    model, optimizer, belay = attached(EMA, **options)
    train(model, optimizer, 3)
    belay.save_average(path)
    return model, belay


def test_a_plain_model_computes_with_the_average_and_the_file_says_what_it_is(tmp_path: Path) -> None:
    model, belay = saved(tmp_path / "average", model=with_batchnorm())
    plain = with_batchnorm(seed=1)
    about = tb.load_average(tmp_path / "average", plain)
    assert about == {
        "format": "pt", "average": "average", "method": repr(EMA), "step": "3", "torchbelay": tb.__version__,
    }  # fmt: skip
    assert same(values(plain), dict(belay.average_state_dict()))
    with belay.averaged(), torch.no_grad():
        assert torch.equal(plain.eval()(batch(0)), model.eval()(batch(0)))


def test_a_file_of_torch_save_is_read_too(tmp_path: Path) -> None:
    _, belay = saved(tmp_path / "average", model=with_batchnorm())
    torch.save(belay.average_state_dict(), tmp_path / "average.pt")
    plain = with_batchnorm(seed=1)
    assert tb.load_average(str(tmp_path / "average.pt"), plain) == {}
    assert same(values(plain), dict(belay.average_state_dict()))


def test_extra_state_goes_along_in_a_file_of_torch_save(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        count = 3

        def get_extra_state(self) -> int:
            return self.count

        def set_extra_state(self, state: int) -> None:
            self.count = state

    model = nn.Sequential(Counting(3, 1))
    model[0].count = 7
    belay = tb.Belay(model, torch.optim.SGD(model.parameters(), lr=0.1), EMA)
    torch.save(belay.average_state_dict(), tmp_path / "average.pt")
    plain = nn.Sequential(Counting(3, 1))
    tb.load_average(tmp_path / "average.pt", plain)
    assert plain[0].count == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_numbers_are_converted_to_the_models_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    _, belay = saved(tmp_path / "average")
    plain = mlp(dtype, seed=1)
    tb.load_average(tmp_path / "average", plain)
    assert same(values(plain), {name: t.to(dtype) for name, t in belay.average_state_dict().items()})


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "data parallel": nn.DataParallel,
    "a compiled part": lambda model: nn.Sequential(torch.compile(model[0], backend="eager"), *model[1:]),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_wrappers_are_looked_through(tmp_path: Path, wrap: Callable[[nn.Module], nn.Module]) -> None:
    _, belay = saved(tmp_path / "average")
    wrapped = wrap(mlp(seed=1))
    kinds = [type(module) for module in wrapped.modules()]
    tb.load_average(tmp_path / "average", wrapped)
    assert [type(module) for module in wrapped.modules()] == kinds
    found = [p.detach().cpu() for p in wrapped.parameters()]  # a parallel one moves to the GPU
    assert all(map(torch.equal, found, belay.average_state_dict().values()))


def test_tied_and_frozen_weights_and_inference_mode(tmp_path: Path) -> None:
    def tied(seed: int) -> nn.Module:
        model = mlp(seed=seed)
        model.append(nn.Linear(5, 1))
        model[3].weight = model[2].weight
        model[0].weight.requires_grad_(False)
        return model

    model = tied(0)
    belay = tb.Belay(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), EMA)
    belay.save_average(tmp_path / "average")
    plain = tied(1)
    with torch.inference_mode():
        tb.load_average(tmp_path / "average", plain)
    assert same(values(plain), dict(belay.average_state_dict()))
    assert plain[3].weight is plain[2].weight
    assert not plain[0].weight.requires_grad
    plain[2].weight.sum().backward()  # no tensor of inference_mode is left behind


# What is refused ----------------------------------------------------------------------------------------------------


def narrower() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "other names": (lambda: nn.Sequential(mlp()), r"missing: '0\.0\.bias', .*unexpected: '0\.bias'"),
    "a part of it": (lambda: mlp()[:1], r"unexpected: '2\.bias', '2\.weight'"),
    "more than it": (lambda: nn.Sequential(*mlp(), nn.Linear(1, 1)), r"missing: '3\.bias', '3\.weight'"),
    "other shapes": (narrower, r"'0\.weight' has the shape \(5, 3\), and \(4, 3\) in the model"),
    "on the meta device": (lambda: mlp().to("meta"), "materialise the model first"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_a_model_that_does_not_fit_is_refused_and_unchanged(
    tmp_path: Path, make: Callable[[], nn.Module], message: str
) -> None:
    saved(tmp_path / "average")
    model = make()
    before = copy.deepcopy(values(model))
    with pytest.raises(ValueError, match=rf"path='.*average' does not fit the model: .*{message}"):
        tb.load_average(tmp_path / "average", model)
    assert all(t.is_meta for t in model.parameters()) or same(values(model), before)


def test_complex_numbers_are_not_made_real(tmp_path: Path) -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.complex64))])
    belay = tb.Belay(model, torch.optim.SGD(model.parameters(), lr=0.1), EMA)
    torch.save(belay.average_state_dict(), tmp_path / "average.pt")
    with pytest.raises(ValueError, match=r"'0' is torch.complex64, and torch.float32 in the model"):
        tb.load_average(tmp_path / "average.pt", nn.ParameterList([nn.Parameter(torch.ones(2))]))
    again = nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    tb.load_average(tmp_path / "average.pt", again)
    assert torch.equal(again[0], model[0])


def test_what_is_no_such_file_is_refused_with_the_cure(tmp_path: Path) -> None:
    model, belay = saved(tmp_path / "average")
    before = values(model)
    torch.save(belay.state_dict(), tmp_path / "belay.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    (tmp_path / "note").write_text("nothing of the kind")
    (tmp_path / "half").write_bytes((tmp_path / "average").read_bytes()[:-7])
    for name, error, message in (
        ("none", FileNotFoundError, r"path='.*none' is not a file; give the file that save_average\(\) wrote"),
        (".", FileNotFoundError, "is not a file"),
        ("belay.pt", ValueError, r"state of a Belay, which Belay\.load_state_dict\(\) takes"),
        ("list.pt", ValueError, "holds list, not a model's state"),
        ("note", ValueError, "neither a safetensors file nor one of torch.save, or it is damaged"),
        ("half", ValueError, "or it is damaged"),
    ):
        with pytest.raises(error, match=message):
            tb.load_average(tmp_path / name, model)
    with pytest.raises(TypeError, match=r"model=str is not a torch\.nn\.Module"):
        tb.load_average(tmp_path / "average", "model")  # type: ignore[arg-type]
    assert same(values(model), before)


def test_inside_averaged_it_is_refused(tmp_path: Path) -> None:
    model, optimizer, belay = attached(BELAY)
    train(model, optimizer, 2)
    belay.save_average(tmp_path / "average")
    train(model, optimizer, 2)
    average = belay.average_state_dict()
    with belay.averaged():
        with pytest.raises(RuntimeError, match=r"load_average\(\) inside averaged\(\): .*leave the block first"):
            tb.load_average(tmp_path / "average", model)
        other = mlp(seed=1)
        tb.load_average(tmp_path / "average", other)  # another model may be loaded
    assert same(belay.average_state_dict(), average)


def test_what_is_no_path_is_refused_by_name() -> None:
    _, _, belay = attached(EMA)
    with pytest.raises(TypeError, match=r"path=3 is not a path; give a text or a pathlib.Path"):
        belay.save_average(3)  # type: ignore[arg-type]
