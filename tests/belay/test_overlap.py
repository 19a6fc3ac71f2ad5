"""Two Parameters in one memory: a pull would count twice, and exports must be what `averaged()` computes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchbelay as tb
from helpers.small import BELAY, EMA, same, snapshot
from torchbelay.belay import overlap, validate
from torchbelay.belay.aliases import aliased
from torchbelay.belay.overlap import in_memory_of, overlapping, sharing_memory

TOKENS = torch.arange(7)
PULLING: dict[str, Callable[[], Any]] = {
    "belay": lambda: BELAY,
    "centred": lambda: tb.methods.centred(theta=-0.5, rate=0.05),
    "lookahead": lambda: tb.methods.lookahead(2, 0.5),
    "schedule_free": lambda: tb.methods.schedule_free(0.9),
}


class Tied(nn.Module):
    """An embedding and a head in one memory, of one shape or of transposed shapes."""

    def __init__(self, dtype: torch.dtype = torch.float32, *, turned: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 4, dtype=dtype)
        self.head = nn.Linear(*((7, 4) if turned else (4, 7)), bias=False, dtype=dtype)
        self.head.weight.data = self.embed.weight.data.t() if turned else self.embed.weight.data
        self.turned = turned

    def forward(self, tokens: Tensor) -> Tensor:
        w = self.head.weight
        return self.embed(tokens) @ (w if self.turned else w.t())


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(TOKENS).float().square().mean().backward()
    optimizer.step()


def held(model: Tied, which: str) -> list[nn.Parameter]:
    return {"both": list(model.parameters()), "embed": [model.embed.weight], "head": [model.head.weight]}[which]


# Pulls ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PULLING)
@pytest.mark.parametrize("turned", [False, True])
def test_two_parameters_of_one_memory_are_refused_if_both_would_be_pulled(kind: str, turned: bool) -> None:
    model, method = Tied(turned=turned), PULLING[kind]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said = r"'embed\.weight' and 'head\.weight' share memory.*pull these weights twice.*Tie the Parameter itself"
    with pytest.raises(ValueError, match=said):
        tb.Belay(model, optimizer, method)
    assert not optimizer._optimizer_step_pre_hooks
    two = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
    with pytest.raises(ValueError, match=said):
        tb.Belay(model, two, method)
    belay = tb.Belay(model, optimizer, EMA)
    before = snapshot(model, belay)
    with pytest.raises(ValueError, match=said):
        belay.change(method)
    after = snapshot(model, belay)
    assert torch.equal(after["model"]["embed.weight"], before["model"]["embed.weight"])
    assert belay.decay == 0.9


@pytest.mark.parametrize("several", [False, True])
def test_a_second_parameter_of_that_memory_that_joins_later_is_refused_before_anything_moves(several: bool) -> None:
    model = Tied()
    other = nn.Parameter(torch.ones(2))
    model.other = other
    optimizers = [torch.optim.SGD([model.embed.weight], lr=0.1), torch.optim.SGD([other], lr=0.1)]
    belay = tb.Belay(model, optimizers, PULLING["centred"]())
    step(model, optimizers[0])
    late = optimizers[several]
    late.add_param_group({"params": [model.head.weight]})
    before, other.grad = model.embed.weight.detach().clone(), torch.ones(2)
    with pytest.raises(ValueError, match="share memory"):
        late.step()
    assert torch.equal(model.embed.weight, before)
    assert torch.equal(other, torch.ones(2))
    assert belay.step == 1


@pytest.mark.parametrize("kind", PULLING)
def test_one_of_the_two_in_the_optimizer_is_pulled_once(kind: str) -> None:
    model, alone = Tied(), nn.Parameter(Tied().embed.weight.detach().clone())
    optimizer = torch.optim.SGD([model.embed.weight], lr=0.1)
    belay = tb.Belay(model, optimizer, PULLING[kind]())
    reference = torch.optim.SGD([alone], lr=0.1)
    theirs = tb.Belay.from_parameters([alone], reference, PULLING[kind]())
    for _ in range(6):
        optimizer.zero_grad()
        model(TOKENS).square().mean().backward()
        alone.grad = model.embed.weight.grad.clone()
        optimizer.step()
        reference.step()
    assert torch.equal(model.head.weight, alone)
    assert torch.equal(belay.average_state_dict()["head.weight"], theirs.average_state_dict()["0"])


def test_views_of_one_flat_memory_that_have_no_element_in_common_may_be_pulled() -> None:
    flat, wide = torch.arange(10.0), torch.arange(12.0).reshape(3, 4)
    pieces = [flat[:4].view(2, 2), flat[4:9], wide[:, :2], wide[:, 2:3], wide[:, 3]]  # the last ones lie in each other
    model = nn.ParameterList(nn.Parameter(piece) for piece in pieces)
    apart = nn.ParameterList(nn.Parameter(piece.clone()) for piece in pieces)
    runs = []
    for each in (model, apart):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        belay = tb.Belay(each, optimizer, PULLING["centred"]())
        for _ in range(4):
            optimizer.zero_grad()
            sum(p.square().sum() for p in each).backward()
            optimizer.step()
        runs.append((list(each), belay.average_state_dict()))
    (ours, average), (theirs, expected) = runs
    assert all(p.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr() for p in ours[:2])
    for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
        torch.testing.assert_close(p, q)
        torch.testing.assert_close(average[str(i)], expected[str(i)])


# Exports -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["both", "embed", "head"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float32, {"dtype": torch.float64}),
        (torch.float32, {"bits": 24}),
        (torch.bfloat16, {}),
    ],
    ids=str,
)
def test_exports_are_what_the_block_computes(
    tmp_path: Path, which: str, turned: bool, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    model = Tied(dtype, turned=turned)
    optimizer = torch.optim.SGD(held(model, which), lr=0.5)
    belay = tb.Belay(model, optimizer, EMA, **options)
    module = None if options.get("bits") else belay.module()
    expected = model.embed.weight.detach().double()
    for _ in range(5):
        step(model, optimizer)
        expected = 0.9 * expected + 0.1 * model.embed.weight.detach().double()
    own = {name: t.clone() for name, t in model.state_dict().items()}
    with torch.no_grad(), belay.averaged():
        inside = model(TOKENS)
        weights = belay.model_state_dict()
    assert all(torch.equal(weights[name], t) for name, t in own.items())
    exported = belay.average_state_dict()
    loose = 1e-6 if dtype == torch.float32 and not options.get("bits") else 1e-2
    for name in ("embed.weight", "head.weight"):
        value = exported[name].t() if turned and name.startswith("head") else exported[name]
        torch.testing.assert_close(value.double(), expected, rtol=loose, atol=loose)
    loaded, read = Tied(dtype, turned=turned), Tied(dtype, turned=turned)
    loaded.load_state_dict(exported)
    belay.save_average(tmp_path / "a.safetensors")
    tb.load_average(tmp_path / "a.safetensors", read)
    with torch.no_grad():
        for each in (loaded, read, *([] if module is None else [module])):
            assert torch.equal(each(TOKENS), inside)
        assert not torch.equal(model(TOKENS), inside)


def test_a_module_follows_the_second_of_two_optimizers_too() -> None:
    """The module has copies in 16 bits, which steps of either optimizer renew."""
    model = Tied(torch.bfloat16)
    model.other = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    first = torch.optim.SGD([model.other], lr=0.5)
    second = torch.optim.SGD([model.embed.weight], lr=0.5)
    belay = tb.Belay(model, [first, second], EMA)
    module = belay.module()
    for _ in range(3):
        step(model, second)
        exported = belay.average_state_dict()
        assert torch.equal(module.embed.weight, exported["embed.weight"])
        assert torch.equal(module.head.weight, exported["embed.weight"])


def test_a_buffer_in_the_memory_of_an_averaged_weight_is_exported_as_the_average() -> None:
    model = nn.Linear(3, 2, bias=False)
    model.register_buffer("row", model.weight.data[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    belay = tb.Belay(model, optimizer, EMA)
    start = model.weight.detach().clone()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    exported = belay.average_state_dict()
    torch.testing.assert_close(exported["weight"], 0.9 * start + 0.1 * model.weight.detach())
    assert torch.equal(exported["row"], exported["weight"][1])


def test_a_parameter_that_lies_only_in_part_in_an_averaged_one_keeps_its_own_value_elsewhere() -> None:
    flat = torch.arange(6.0)
    model = nn.ParameterDict({"all": nn.Parameter(flat), "part": nn.Parameter(flat[2:5])})
    optimizer = torch.optim.SGD([model["part"]], lr=0.5)
    belay = tb.Belay(model, optimizer, EMA)
    module = belay.module()
    model["part"].square().sum().backward()
    optimizer.step()
    expected = torch.tensor([0.0, 1.0, 1.8, 2.7, 3.6, 5.0])
    for state in (belay.average_state_dict(), module.state_dict()):
        torch.testing.assert_close(state["all"], expected)
        assert torch.equal(state["all"][2:5], state["part"])
    with belay.averaged():
        torch.testing.assert_close(model["all"].detach(), expected)
        assert torch.equal(belay.model_state_dict()["all"], torch.tensor([0.0, 1, 0, 0, 0, 5]))


class Flat(nn.Module):
    """Two weights in one flat buffer that is larger than both, and a complex view of one of them."""

    def __init__(self, dtype: torch.dtype = torch.float32, *, persistent: bool = True) -> None:
        super().__init__()
        flat = torch.arange(11.0).to(dtype)
        self.a, self.b = nn.Parameter(flat[:4]), nn.Parameter(flat[4:10].view(3, 2).t())
        self.register_buffer("flat", flat, persistent=persistent)
        if dtype == torch.float32:
            self.register_buffer("complex", torch.view_as_complex(self.a.detach().view(2, 2)), persistent=persistent)

    def fill(self, flat: Tensor, *, of: nn.Module) -> None:
        """Check that `flat` has the weights of a module, and this model's own element behind them."""
        assert torch.equal(flat, torch.cat([of.a.detach(), of.b.detach().t().reshape(-1), self.flat[10:]]).to(flat))


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("buffers", ["copy", "average", "ignore"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_buffer_that_is_larger_than_the_weights_in_it_has_their_averages(
    tmp_path: Path, dtype: torch.dtype, buffers: str, persistent: bool
) -> None:
    model = Flat(dtype, persistent=persistent)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, EMA, buffers=buffers)
    module = belay.module()
    for _ in range(3):
        optimizer.zero_grad()
        sum(p.square().sum() for p in model.parameters()).backward()
        optimizer.step()
        exported = belay.average_state_dict()
        assert list(exported) == list(model.state_dict())
        assert torch.equal(module.a, exported["a"])
        assert not torch.equal(module.a, model.a)
        model.fill(module.flat, of=module)
        if dtype == torch.float32:
            assert torch.equal(torch.view_as_real(module.complex).view(-1), module.a)
        for name in ("flat", "complex") if persistent and dtype == torch.float32 else ():
            assert torch.equal(exported[name], getattr(module, name))
    with belay.averaged():
        model.fill(module.flat, of=module)
        model.fill(belay.model_state_dict().get("flat", model.flat), of=model if not persistent else _own(belay))
    belay.save_average(tmp_path / "a.safetensors", dtype=torch.float32)
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "a.safetensors")
    if persistent:  # nothing was rounded to the dtype of the model
        assert torch.equal(saved["flat"][:4], saved["a"])


def _own(belay: tb.Belay) -> Any:
    """Return an object with the model's own weights."""
    return type("Own", (), belay.model_state_dict())


def test_steps_and_blocks_go_on_if_the_weights_become_parts_of_one_buffer_later() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, BELAY)
    module = belay.module()
    flat, first = torch.cat([p.detach().reshape(-1) for p in model.parameters()]), 0
    for p in model.parameters():
        p.data = flat[first : first + p.numel()].view_as(p)
        first += p.numel()
    model.register_buffer("flat", flat, persistent=False)
    for count in range(1, 4):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        assert belay.step == count
        assert torch.equal(module.flat, torch.cat([p.reshape(-1) for p in module.parameters()]))
    with belay.averaged():
        assert torch.equal(model.weight, module.weight)
    assert not torch.equal(model.weight, module.weight)


def test_lazily_conjugated_and_negated_views_have_the_values_that_they_show() -> None:
    model = nn.ParameterDict({"w": nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))})
    conj = model["w"].detach().conj()
    model.register_buffer("conj", conj)
    model.register_buffer("imag", conj.imag)
    model.register_buffer("one", conj[1:])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    belay = tb.Belay(model, optimizer, EMA)
    module = belay.module()
    model["w"].abs().square().sum().backward()
    optimizer.step()
    for state in (belay.average_state_dict(), module.state_dict()):
        torch.testing.assert_close(state["w"], torch.tensor([0.9 + 1.8j, 2.7 - 0.9j]))
        assert torch.equal(state["conj"], state["w"].conj())
        assert torch.equal(state["imag"], -state["w"].imag)
        assert torch.equal(state["one"], state["w"][1:].conj())


class Saving(nn.Linear):
    """It saves what is in a buffer that is not persistent."""

    def __init__(self) -> None:
        super().__init__(3, 2, bias=False)
        self.register_buffer("row", self.weight.data[1], persistent=False)

    def get_extra_state(self) -> Tensor:
        return self.row.clone()

    def set_extra_state(self, state: Tensor) -> None:
        pass


def test_what_a_layer_saves_of_a_buffer_that_is_not_persistent_is_of_the_average() -> None:
    model = Saving()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    belay = tb.Belay(model, optimizer, EMA)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    exported = belay.average_state_dict()
    assert torch.equal(exported["_extra_state"], exported["weight"][1])
    assert not torch.equal(exported["weight"], model.weight)


def test_a_weight_that_is_in_a_buffer_slot_too_is_still_a_weight() -> None:
    model = Tied()
    model.register_buffer("same", model.embed.weight)  # it is visited before the layers
    optimizer = torch.optim.SGD([model.embed.weight], lr=0.5)
    belay = tb.Belay(model, optimizer, EMA)
    module = belay.module()
    model(TOKENS).sum().backward()
    optimizer.step()
    exported = belay.average_state_dict()
    assert not torch.equal(exported["embed.weight"], model.embed.weight)
    assert torch.equal(exported["head.weight"], exported["embed.weight"])
    assert torch.equal(module.head.weight, exported["embed.weight"])


def test_of_a_replaced_parameter_an_alias_is_a_view_wherever_the_value_lies() -> None:
    home = torch.arange(12.0)
    owner, alias = nn.Parameter(home[2:8].view(2, 3)), home[2:8].view(2, 3).t()[1:]
    both = [owner, alias]
    packed = torch.arange(100.0, 120.0)
    near, far = packed[5:11].view(2, 3), packed[:6].view(3, 2).t()
    for value in (near, far):
        (found,) = aliased(both, {id(owner): value}).values()
        assert torch.equal(found.value, value.t()[1:])
        assert found.is_view is (value is near)  # one that is laid out in another way cannot be seen through
    other = torch.zeros(3)
    assert aliased(both, {id(owner): other}) == {}  # of another shape: it is no value of this parameter


def test_where_two_dtypes_meet_values_are_rounded_to_that_of_the_weights() -> None:
    owner = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    alias = owner.detach().view(torch.int16)[1:3]
    value = torch.full((4,), 1.0 + 2**-12)
    (found,) = aliased([owner, alias], {id(owner): value}).values()
    assert torch.equal(found.value.view(torch.bfloat16), torch.ones(2, dtype=torch.bfloat16))


def test_an_expanded_buffer_and_one_between_the_weights() -> None:
    home = torch.zeros(4, 3)
    owner, beside = nn.Parameter(home[:, 0]), home[:, 1]
    wide = home[0].expand(5, 3)
    found = aliased([owner, beside, wide], {id(owner): torch.arange(1.0, 5.0)})
    assert list(found) == [id(wide)]
    assert torch.equal(found[id(wide)].value, torch.tensor([1.0, 0.0, 0.0]).expand(5, 3))


def test_a_buffer_follows_the_average_that_is_asked_for_inside_the_block_of_another() -> None:
    model = nn.Linear(3, 2, bias=False)
    model.register_buffer("row", model.weight.data[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    belay = tb.Belay(model, optimizer, EMA, spectators={"slow": tb.methods.ema(0.99)})
    module, slow = belay.module(), belay.module("slow")
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    expected = belay.average_state_dict("slow")
    for name in ("average", "slow"):
        with belay.averaged(name):
            assert torch.equal(belay.average_state_dict("slow")["row"], expected["row"])
            for each in (module, slow):
                assert torch.equal(each.row, each.weight[1])


def test_a_module_shows_weights_that_another_belay_has_swapped_as_they_are_under_every_name() -> None:
    model = nn.ParameterDict({"mine": nn.Parameter(torch.ones(2)), "theirs": nn.Parameter(torch.ones(3))})
    model["mirror"] = nn.Parameter(torch.zeros(3), requires_grad=False)
    model["mirror"].data = model["theirs"].data
    first, second = (torch.optim.SGD([model[name]], lr=0.5) for name in ("mine", "theirs"))
    module, other = tb.Belay(model, first, EMA).module(), tb.Belay(model, second, EMA)
    model["theirs"].square().sum().backward()
    second.step()
    with other.averaged():
        assert torch.equal(model["mirror"], torch.full((3,), 0.9))
        assert torch.equal(module["theirs"], torch.zeros(3))
        assert torch.equal(module["mirror"], torch.zeros(3))


def test_a_copy_of_an_alias_is_renewed_whoever_has_written_to_the_average() -> None:
    """Kernels write to tensors without torch, which counts writes."""
    model = Tied(torch.bfloat16)
    belay = tb.Belay(model, torch.optim.SGD([model.embed.weight], lr=0.5), EMA)
    module = belay.module()
    belay.tensors()["embed.weight"].data.fill_(3.0)  # `data` has a count of its own
    belay._parts.live.follow(moved=True)
    assert torch.equal(module.head.weight, torch.full((7, 4), 3.0, dtype=torch.bfloat16))


def test_a_parameter_that_is_composed_stays_where_it_is_in_a_module() -> None:
    flat = torch.arange(6.0)
    model = nn.ParameterDict({"all": nn.Parameter(flat), "part": nn.Parameter(flat[2:5])})
    optimizer = torch.optim.SGD([model["part"]], lr=0.5)
    module = tb.Belay(model, optimizer, EMA).module()
    places = set()
    for _ in range(3):
        model["part"].grad = torch.ones(3)
        optimizer.step()
        places.add(module["all"].data_ptr())
        assert torch.equal(module["all"][2:5], module["part"])
    assert len(places) == 1


# Memory --------------------------------------------------------------------------------------------------------------


def test_ranges_of_addresses_and_elements_that_overlap() -> None:
    flat = torch.zeros(12)
    matrix = flat.view(3, 4)
    cases = [
        (flat[:6], flat[6:], False, False),
        (flat[:7], flat[6:], True, True),
        (matrix[:, 0], matrix[:, 1], True, False),
        (matrix[:, :2], matrix[:, 1:], True, True),
        (matrix, matrix.t(), True, True),
        (matrix[1].expand(5, 4), matrix[0], False, False),
        (matrix[1].expand(5, 4), matrix[:, 2], True, True),
        (flat.view(torch.int32)[::2], flat[1::2], True, False),
        (flat.view(torch.int16)[3::4], flat[1::2], True, True),
        (flat, torch.zeros(12), False, False),
        (flat[:0], flat, False, False),
    ]
    for x, y, ranges, elements in cases:
        assert [sorted(keys) for keys in sharing_memory({1: x, 2: y})] == ([[1, 2]] if ranges else [])
        assert (overlapping([x, y]) is not None) is elements
        pair = overlapping([torch.ones(2), y, x])
        assert pair is None or (pair[0] is y and pair[1] is x)
    assert overlapping([flat, flat]) is None  # a tensor that is tied as it should be


def test_tensors_without_an_address_are_left_alone() -> None:
    odd = [
        torch.zeros(3, device="meta"),
        torch.eye(3).to_sparse(),
        nn.UninitializedParameter(),
        torch.empty(0),
        torch.zeros(3),
    ]
    freed = torch.zeros(3)
    freed.untyped_storage().resize_(0)
    everything = [*odd, freed, freed.view(3)]
    assert overlapping(everything) is None
    assert aliased(everything, {id(t): t for t in odd}) == {}
    assert in_memory_of(odd, [freed, freed.view(3), torch.zeros(3)]) == set()


def test_tensors_are_compared_only_with_those_of_their_cluster_and_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("mark", "has"):
        call = getattr(overlap._Map, name)
        monkeypatch.setattr(overlap._Map, name, lambda *of, call=call, name=name: calls.append(name) or call(*of))
    pairs = [(p := torch.zeros(2), p.view(2)) for _ in range(50)]
    tied = {id(t): t for pair in pairs for t in pair}
    assert sorted(map(sorted, sharing_memory(tied))) == sorted(sorted(map(id, pair)) for pair in pairs)
    found = aliased([t for pair in pairs for t in pair], {id(p): p + 1 for p, _ in pairs})
    assert list(found) == [id(q) for _, q in pairs]
    assert all(each.is_view for each in found.values())
    assert calls == []  # the place of each tells everything
    matrix = torch.zeros(8, 200)
    columns = [nn.Parameter(matrix[:, 4 * i : 4 * i + 4]) for i in range(50)]
    assert overlapping(columns) is None
    assert (calls.count("mark"), calls.count("has")) == (50, 50)
    calls.clear()
    halves = [matrix[:, 4 * i : 4 * i + 2] for i in range(50)]
    found = aliased([*columns, *halves], {id(t): torch.full((8, 4), float(i)) for i, t in enumerate(columns)})
    assert all(torch.equal(found[id(t)].value, torch.full((8, 2), float(i))) for i, t in enumerate(halves))
    assert (calls.count("mark"), calls.count("has")) == (50, 50)


def test_pulls_are_checked_once_when_a_belay_is_made_and_once_when_it_adopts(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(validate, "overlapping", lambda found: calls.append(1) or overlapping(found))
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    belay = tb.Belay(model, optimizer, BELAY)
    assert len(calls) == 1
    optimizer.add_param_group({"params": [model.bias]})
    with pytest.warns(UserWarning, match="were added"):
        optimizer.step()
    assert len(calls) == 2
    state = belay.state_dict()
    model.bias.data = model.weight.data[0, :2]
    for call in (lambda: belay.load_state_dict(state), lambda: belay.change(BELAY)):
        with pytest.raises(ValueError, match="share memory"):
            call()


def test_weights_of_two_optimizers_that_were_tied_before_the_average_begins_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    tb.Belay(model, optimizers, BELAY, start=2)
    for optimizer in optimizers:
        optimizer.step()
    model[1].weight.data = model[0].weight.data
    with pytest.raises(ValueError, match=r"'0\.weight' and '1\.weight' share memory"):
        optimizers[0].step()


@pytest.mark.parametrize("several", [False, True])
def test_weights_that_are_tied_later_are_refused_by_what_begins_or_changes_a_pull(several: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model if several else [model])]
    pulling = tb.Belay(model, optimizers, BELAY)
    for optimizer in optimizers:
        optimizer.step()
    state = pulling.state_dict()
    model[1].weight.data = model[0].weight.data
    for call in (pulling.reset, lambda: pulling.load_state_dict(state), lambda: pulling.change(BELAY)):
        before = snapshot(model, pulling)
        with pytest.raises(ValueError, match=r"'0\.weight' and '1\.weight' share memory"):
            call()
        assert same(before, snapshot(model, pulling))
    pulling.detach()
    watching = tb.Belay(model, optimizers, EMA)
    with pytest.raises(ValueError, match=r"'0\.weight' and '1\.weight' share memory"):
        watching.change(BELAY)
    watching.reset()


def test_weights_that_were_tied_before_the_average_begins_are_refused() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tb.Belay(model, optimizer, BELAY, start=2)
    optimizer.step()
    model.bias.data = model.weight.data[0, :2]
    with pytest.raises(ValueError, match="share memory"):
        optimizer.step()


# Moved inside a block -------------------------------------------------------------------------------------------------


def transposed() -> nn.Module:
    """A decoder whose weight is the encoder's, transposed; the optimizer has the encoder's alone."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    model[1].weight.data = model[0].weight.data.t()
    return model


@pytest.mark.parametrize("move", ["double", "half", "clone one", "clone both"])
def test_what_lies_in_the_memory_of_weights_has_its_own_values_after_a_block_in_which_it_was_moved(move: str) -> None:
    model = transposed()
    one, other = model[0].weight, model[1].weight
    optimizer = torch.optim.SGD([p for p in model.parameters() if p is not other], lr=0.1)
    belay = tb.Belay(model, optimizer, tb.methods.ema(0.9))
    for _ in range(3):
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.randn_like(p)
        optimizer.step()
    expected = other.detach().clone()
    with belay.averaged():
        if move in ("double", "half"):
            getattr(model, move)()
        else:
            other.data = other.data.clone()
            if move == "clone both":
                one.data = one.data.clone()
    assert torch.equal(other.float(), expected.to(other.dtype).float())
    assert torch.equal(one.float(), expected.t().to(one.dtype).float())


def test_a_buffer_that_is_ignored_has_its_own_values_after_a_block_in_which_it_was_moved() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(3, 3))
    model.register_buffer("row", model.weight.detach()[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, tb.methods.ema(0.9), buffers="ignore")
    model.weight.grad = torch.randn(3, 3)
    optimizer.step()
    expected = model.row.clone()
    with belay.averaged():
        model.double()
    assert torch.equal(model.row, expected.double())


def test_what_is_left_of_a_buffer_of_weights_has_its_own_values_if_one_of_them_was_moved_inside_a_block() -> None:
    model = nn.Module()
    model.register_buffer("flat", torch.randn(8))
    model.a, model.b = nn.Parameter(model.flat[:3]), nn.Parameter(model.flat[3:8])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    belay = tb.Belay(model, optimizer, tb.methods.ema(0.9))
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
    expected = model.flat.clone()
    with belay.averaged():
        assert not torch.equal(model.flat, expected)
        model.a.data = model.a.data.clone()
    assert torch.equal(model.flat, expected)
    assert torch.equal(torch.cat([model.a, model.b]), expected)
