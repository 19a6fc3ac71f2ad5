"""Bad input gets a clear error, and a refused call changes nothing."""

import copy
import functools
import pickle
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import torchbelay as tb
from helpers.small import BELAY, EMA, SWINGING, attached, mlp, same, snapshot, train, values


def unstable() -> tb.Spring:
    with pytest.warns(tb.UnstableSpringWarning):
        return tb.Spring(k=1.0, m1=10.0, m2=20.0, c1=0.01, c2=0.02)


class Pulls:
    """A method that begins to pull after a thousand steps."""

    def coupling(self, step: int, lr: float) -> tb.Coupling:
        return tb.Coupling(0.1 if step > 1000 else 0.0, 0.1, 0.9 if step > 1000 else 1.0, 0.1)


class NoCoupling:
    def coupling(self, step: int, lr: float) -> float:
        return 0.9


class Wrapper(torch.optim.Optimizer):
    """An optimizer in a wrapper, as some frameworks have it: a subclass by name only."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner


def rows() -> nn.Parameter:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says at the first that they are new
        return nn.Parameter(torch.eye(3).to_sparse_csr())


def meta() -> nn.Module:
    return nn.Linear(3, 1, device="meta")


def partitioned(model: nn.Module) -> nn.Module:
    """Return a model as DeepSpeed's ZeRO-3 leaves it between two uses."""
    for p in model.parameters():
        p.ds_numel, p.data = p.numel(), torch.empty(0)
    return model


CONSTRUCTIONS: dict[str, tuple[Any, type[Exception], str]] = {
    "no module": (lambda m, o: tb.Belay(3, o, EMA), TypeError, "model=int is not a torch.nn.Module"),
    "no optimizer": (lambda m, o: tb.Belay(m, "adam", EMA), TypeError, "optimizer=str .* before_step"),
    "a class for an optimizer": (
        lambda m, o: tb.Belay(m, torch.optim.SGD, EMA),
        TypeError,
        r"optimizer=SGD was not called; give the optimizer that it makes, as SGD\(model\.parameters\(\), \.\.\.\)",
    ),
    "a class among optimizers": (
        lambda m, o: tb.Belay(m, [o, torch.optim.SGD], EMA),
        TypeError,
        r"optimizer\[1\]=SGD was not called",
    ),
    "a module for an optimizer": (
        lambda m, o: tb.Belay(m, m, EMA),
        TypeError,
        "optimizer=Sequential is a module, and the optimizer belongs there",
    ),
    "a state dict for a model": (
        lambda m, o: tb.Belay(m.state_dict(), o, EMA),
        TypeError,
        "model=OrderedDict is a state dict, .*; pass the model itself",
    ),
    "a model without parameters": (
        lambda m, o: tb.Belay(nn.ReLU(), o, EMA),
        ValueError,
        "the model, ReLU, has no parameters; pass the one that the optimizer trains",
    ),
    "a model without parameters, by hand": (
        lambda m, o: tb.Belay(nn.ReLU(), None, EMA),
        ValueError,
        "nothing to average for 'average': the model, ReLU, has no parameters; pass the module that is trained",
    ),
    "a number for a method": (
        lambda m, o: tb.Belay(m, o, 0.999),
        TypeError,
        r"method=0.999 is neither .*; give a method, as methods\.ema\(0\.999\)",
    ),
    "a decay beside the method": (
        lambda m, o: tb.Belay(m, o, EMA, decay=0.9),
        TypeError,
        r"decay=0\.9 is not an option of Belay; choose from dtype, bits, .* given to the method",
    ),
    "a class for a method": (
        lambda m, o: tb.Belay(m, o, tb.methods.lookahead),
        TypeError,
        r"method=lookahead was not called; .* as lookahead\(\.\.\.\)",
    ),
    "a constructor for a method": (
        lambda m, o: tb.Belay(m, o, tb.Spring.ema),
        TypeError,
        r"method=Spring\.ema was not called; .* as Spring\.ema\(\.\.\.\)",
    ),
    "a function of the library for a method": (
        lambda m, o: tb.Belay(m, o, tb.methods.belay),
        TypeError,
        r"method=belay was not called; .* as belay\(\.\.\.\)",
    ),
    "a half-made method": (
        lambda m, o: tb.Belay(m, o, functools.partial(tb.methods.ema, decay=0.9)),
        TypeError,
        "method=ema was not called",
    ),
    "a constructor for a spectator": (
        lambda m, o: tb.Belay(m, o, EMA, spectators={"s": tb.Spring.for_steps}),
        TypeError,
        r"Spring\.for_steps was not called",
    ),
    "a rule that returns a constructor": (
        lambda m, o: tb.Belay(m, o, lambda n, p: tb.Spring.ema),
        TypeError,
        r"the method for 'average', Spring\.ema, was not called",
    ),
    "a rule of one argument": (
        lambda m, o: tb.Belay(m, o, lambda name: EMA),
        TypeError,
        r"is a function of \(name\), and it is called with a name and a parameter",
    ),
    "a rule of three arguments": (
        lambda m, o: tb.Belay(m, o, lambda name, p, group: EMA),
        TypeError,
        r"is a function of \(name, p, group\), .*missing a required argument: 'group'",
    ),
    "a rule that returns none": (lambda m, o: tb.Belay(m, o, lambda n, p: 3), TypeError, r"no coupling\(step, lr\)"),
    "a method that returns a number": (lambda m, o: tb.Belay(m, o, NoCoupling()), TypeError, "not a Coupling"),
    "nothing to average": (
        lambda m, o: tb.Belay(m, o, lambda n, p: EMA if n.startswith("encoder.") else None),
        ValueError,
        r"nothing to average for 'average': .* a method; the first names of parameters are '0.weight', '0.bias', '2",
    ),
    "a frozen model": (
        lambda m, o: tb.Belay(copy.deepcopy(m).requires_grad_(False), None, EMA),
        ValueError,
        "nothing to average for 'average': no parameter of the model requires gradients",
    ),
    "a lazy model": (
        lambda m, o: tb.Belay(nn.Sequential(nn.LazyLinear(2)), None, EMA),
        ValueError,
        r"parameter '0\.weight' has no shape yet .*: call the model once",
    ),
    "8 bits": (
        lambda m, o: tb.Belay.from_parameters([torch.ones(2).to(torch.float8_e4m3fn)], None, EMA),
        ValueError,
        "parameter '0' is torch.float8_e4m3fn, which cannot be averaged; .*returns None for this parameter",
    ),
    "sparse": (
        lambda m, o: tb.Belay.from_parameters([("p", torch.eye(3).to_sparse())], None, EMA),
        ValueError,
        r"parameter 'p' is sparse \(torch\.sparse_coo\).*p\.to_dense\(\).*returns None for it",
    ),
    "sparse rows": (
        lambda m, o: tb.Belay(n := nn.ParameterList([rows()]), torch.optim.SGD(n.parameters()), EMA),
        ValueError,
        r"parameter '0' is sparse \(torch\.sparse_csr\).*p\.to_dense\(\)",
    ),
    "unstable": (lambda m, o: tb.Belay(m, o, unstable()), ValueError, "is unstable.*allow_unstable=True"),
    "a stranger's parameter": (
        lambda m, o: tb.Belay(mlp(seed=1), o, EMA),
        ValueError,
        r"parameter 0 of the optimizer's group 0, of shape \(5, 3\), is not in the model; pass the Sequential whose",
    ),
    "a tensor beside the model": (
        lambda m, o: tb.Belay(m, torch.optim.SGD([*m.parameters(), torch.ones(2, requires_grad=True)]), EMA),
        ValueError,
        r"parameter 4 .*of shape \(2,\), is not in the model; pass a list of this Sequential and all other modules .*, "
        r"with nn\.ParameterList\(\[tensor\]\) for a tensor that is in no module, or use Belay\.from_parameters",
    ),
    "meta device": (
        lambda m, o: tb.Belay(n := meta(), torch.optim.SGD(n.parameters()), EMA),
        ValueError,
        "meta device; materialise",
    ),
    "a model of ZeRO-3": (
        lambda m, o: tb.Belay(n := partitioned(mlp()), torch.optim.SGD(n.parameters()), EMA),
        ValueError,
        r"parameter '0.weight' holds 0 of its 15 weights.*torchbelay.integrations.deepspeed.attach",
    ),
    "unknown option": (lambda m, o: tb.Belay(m, o, EMA, evry=3), TypeError, "evry"),
    "every = 0": (lambda m, o: tb.Belay(m, o, EMA, every=0), ValueError, "every=0 .* every ≥ 1"),
    "every = 1.5": (lambda m, o: tb.Belay(m, o, EMA, every=1.5), TypeError, "every=1.5"),
    "start = -1": (lambda m, o: tb.Belay(m, o, EMA, start=-1), ValueError, "start=-1"),
    "an integer dtype": (lambda m, o: tb.Belay(m, o, EMA, dtype=torch.int32), ValueError, "dtype=torch.int32"),
    "a text for a dtype": (lambda m, o: tb.Belay(m, o, EMA, dtype="float32"), ValueError, "dtype='float32'"),
    "a dtype of 8 bits": (lambda m, o: tb.Belay(m, o, EMA, dtype=torch.float8_e4m3fn), ValueError, "float8_e4m3fn can"),
    "unknown buffers": (lambda m, o: tb.Belay(m, o, EMA, buffers="keep"), ValueError, "buffers='keep' .* 'copy'"),
    "unknown impl": (lambda m, o: tb.Belay(m, o, EMA, impl="cuda"), ValueError, "impl='cuda' .* 'foreach'"),
    "every with velocities": (lambda m, o: tb.Belay(m, o, SWINGING, every=2), ValueError, "every=2 .* velocities"),
    "every with momentum": (
        lambda m, o: tb.Belay(m, o, tb.methods.nesterov(0.9), every=2),
        ValueError,
        "every=2 .* force of its own",
    ),
    "every with a memory": (
        lambda m, o: tb.Belay(m, o, tb.methods.schedule_free(0.0), every=2),
        ValueError,
        "every=2 .* learning rate of every step",
    ),
    "every with a rhythm": (lambda m, o: tb.Belay(m, o, tb.methods.lookahead(), every=2), ValueError, "rhythm"),
    "a spectator that pulls": (
        lambda m, o: tb.Belay(m, o, EMA, spectators={"s": BELAY}),
        ValueError,
        "spectator 's' would pull",
    ),
    "a spectator that pulls later": (
        lambda m, o: tb.Belay(m, o, EMA, spectators={"s": tb.methods.lookahead(k=7)}),
        ValueError,
        "spectator 's' would pull",
    ),
    "a spectator that pulls much later": (
        lambda m, o: tb.Belay(m, o, EMA, spectators={"s": tb.methods.switch_ema(0.9, every=10_000)}),
        ValueError,
        "spectator 's' would pull",
    ),
    "spectators without names": (lambda m, o: tb.Belay(m, o, EMA, spectators=[EMA]), TypeError, "give each a name"),
    "a wrapper without hooks": (lambda m, o: tb.Belay(m, Wrapper(o), EMA), TypeError, "pass the optimizer inside it"),
    "a spectator called average": (
        lambda m, o: tb.Belay(m, o, EMA, spectators={"average": EMA}),
        ValueError,
        "name of its own",
    ),
    "a spectator without a name": (lambda m, o: tb.Belay(m, o, EMA, spectators={"": EMA}), ValueError, "name ''"),
}


@pytest.mark.parametrize(("make", "error", "message"), CONSTRUCTIONS.values(), ids=CONSTRUCTIONS)
def test_a_refused_construction_attaches_nothing(make: Any, error: type[Exception], message: str) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weights = values(model)
    with pytest.raises(error, match=message):
        make(model, optimizer)
    assert same(values(model), weights)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_an_unstable_spring_is_accepted_when_it_was_asked_for() -> None:
    with pytest.warns(tb.UnstableSpringWarning):
        spring = tb.Spring(k=1.0, m1=10.0, m2=20.0, c1=0.01, c2=0.02, allow_unstable=True)
    model, optimizer, belay = attached(spring)
    train(model, optimizer, 3)
    assert belay.regime == "unstable"


@pytest.mark.parametrize("method", [BELAY, EMA, SWINGING, tb.methods.swa()], ids=str)
def test_a_step_inside_averaged_is_refused_before_any_weight_moves(method: tb.Method) -> None:
    model, optimizer, belay = attached(method)
    train(model, optimizer, 3)
    before = snapshot(model, belay)
    with belay.averaged():
        inside = values(model)
        with pytest.raises(RuntimeError, match=r"step inside averaged\('average'\)"):
            optimizer.step()
        assert same(values(model), inside)
    assert same(snapshot(model, belay), before)
    train(model, optimizer, 1, first=3)
    assert belay.step == 4


INSIDE = {
    "reset": lambda b: b.reset(),
    "copy_to_model": lambda b: b.copy_to_model(),
    "load_state_dict": lambda b: b.load_state_dict(b.state_dict()),
    "detach": lambda b: b.detach(),
}


@pytest.mark.parametrize(("name", "call"), INSIDE.items(), ids=INSIDE)
def test_what_would_lose_the_weights_inside_averaged_is_refused(name: str, call: Any) -> None:
    model, optimizer, belay = attached(EMA, spectators={"short": EMA})
    train(model, optimizer, 3)
    before = snapshot(model, belay)
    with belay.averaged("short"), pytest.raises(RuntimeError, match=rf"{name}\(\) inside averaged\('short'\)"):
        call(belay)
    assert same(snapshot(model, belay), before)


def test_after_step_inside_averaged_is_refused() -> None:
    belay = tb.Belay(mlp(), None, BELAY)
    belay.before_step()
    with belay.averaged(), pytest.raises(RuntimeError, match=r"after_step\(\) inside averaged"):
        belay.after_step()


@pytest.mark.parametrize("lr", [-1.0, float("nan"), float("inf"), "0.1"], ids=str)
def test_a_learning_rate_by_hand_that_is_none_is_refused(lr: Any) -> None:
    belay = tb.Belay(mlp(), None, EMA)
    with pytest.raises((ValueError, TypeError), match=f"lr={lr!r}"):
        belay.before_step(lr=lr)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
def test_a_copy_of_a_belay_is_refused_with_the_cure(duplicate: Any) -> None:
    _, _, belay = attached(EMA)
    with pytest.raises(TypeError, match=r"save its state_dict\(\)"):
        duplicate(belay)


def test_a_strong_easgd_at_a_small_learning_rate_is_accepted() -> None:
    model = mlp()
    belay = tb.Belay(model, torch.optim.SGD(model.parameters(), lr=1e-4), tb.methods.easgd(rho=2000.0))
    assert belay.step == 0


def test_another_average_inside_averaged_is_refused() -> None:
    model, optimizer, belay = attached(EMA, spectators={"short": tb.Spring.ema(decay=0.5)})
    train(model, optimizer, 3)
    before = snapshot(model, belay)
    with belay.averaged(), pytest.raises(RuntimeError, match="leave that block first"), belay.averaged("short"):
        pass
    assert same(snapshot(model, belay), before)


@pytest.mark.parametrize(
    "call",
    [
        lambda b: b.averaged("long").__enter__(),
        lambda b: b.average_state_dict("long"),
        lambda b: b.copy_to_model("long"),
    ],
    ids=["averaged", "average_state_dict", "copy_to_model"],
)
def test_an_unknown_average_is_named_with_the_known_ones(call: Any) -> None:
    _, _, belay = attached(EMA, spectators={"short": EMA})
    with pytest.raises(ValueError, match="name='long' is no average; choose one of 'average', 'short'"):
        call(belay)


@pytest.mark.parametrize("name", [["average"], None, 0])
def test_what_is_no_name_is_refused_like_an_unknown_average(name: Any) -> None:
    _, _, belay = attached(EMA)
    message = re.escape(f"name={name!r} is no average; choose one of 'average'")
    for call in (belay.averaged(name).__enter__, functools.partial(belay.average_state_dict, name)):
        with pytest.raises(ValueError, match=message):
            call()


def test_steps_by_hand_are_refused_where_hooks_do_them() -> None:
    model, _, belay = attached(EMA)
    before = snapshot(model, belay)
    for call in (belay.before_step, belay.after_step):
        with pytest.raises(RuntimeError, match="the optimizer's own hooks do it"):
            call()
    assert same(snapshot(model, belay), before)


def test_steps_by_hand_come_in_pairs_and_end_with_detach() -> None:
    model = mlp()
    belay = tb.Belay(model, None, EMA)
    before = snapshot(model, belay)
    with pytest.raises(RuntimeError, match=r"after_step\(\) without before_step"):
        belay.after_step()
    belay.detach()
    with pytest.raises(RuntimeError, match=r"before_step\(\) after detach\(\)"):
        belay.before_step()
    assert same(snapshot(model, belay), before)


def test_a_method_that_needs_the_learning_rate_says_so_by_hand() -> None:
    model = mlp()
    belay = tb.Belay(model, None, tb.methods.easgd(rho=1.0))
    before = snapshot(model, belay)
    with pytest.raises(ValueError, match=r"needs the learning rate: give it as before_step\(lr=...\)"):
        belay.before_step()
    assert same(snapshot(model, belay), before)


def test_a_stranger_added_to_the_optimizer_is_refused_before_any_weight_moves() -> None:
    model, optimizer, belay = attached(EMA)
    train(model, optimizer, 2)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})
    before = snapshot(model, belay)
    with pytest.raises(ValueError, match=r"parameter 0 of the optimizer's group 1, of shape \(2, 2\)"):
        train(model, optimizer, 1)
    assert same(snapshot(model, belay), before)


def test_a_spectator_that_begins_to_pull_is_stopped_before_any_weight_moves() -> None:
    model, optimizer, belay = attached(EMA, spectators={"s": Pulls()})
    train(model, optimizer, 1)
    state = copy.deepcopy(belay.state_dict())
    state["step"] = 1000
    for average in state["averages"].values():
        average["ages"] = dict.fromkeys(average["ages"], 1000)
    belay.load_state_dict(state)
    before = snapshot(model, belay)
    with pytest.raises(ValueError, match="spectator 's' may only watch"):
        train(model, optimizer, 1)
    assert same(snapshot(model, belay), before)


def test_a_coupling_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="a=nan of a Coupling"):
        tb.Coupling(float("nan"), 0.1, 1.0, 0.0)


def test_easgd_whose_learning_rate_grew_too_large_is_stopped_before_any_weight_moves() -> None:
    model, optimizer, belay = attached(tb.methods.easgd(rho=10.0))
    train(model, optimizer, 2)
    optimizer.param_groups[0]["lr"] = 0.2
    before = snapshot(model, belay)
    with pytest.raises(ValueError, match=r"rho=10\.0 at lr=0\.2"):
        train(model, optimizer, 1)
    assert same(snapshot(model, belay), before)


@pytest.mark.parametrize("every", [1, 2])
def test_a_method_that_returns_no_coupling_at_a_later_step_is_named_and_nothing_has_moved(every: int) -> None:
    class Ending:
        def coupling(self, step: int, lr: float) -> Any:
            return tb.Coupling(0.0, 0.1, 1.0, 0.1) if step < 3 else None

    model, optimizer, belay = attached(Ending(), every=every)
    train(model, optimizer, 2)
    if every == 2:
        train(model, optimizer, 1, first=2)  # it is asked at the next one
    weights, average, step = values(model), belay.average_state_dict(), belay.step
    with pytest.raises(TypeError, match=r"Ending.*\.coupling\(3, .*\) returned None, not a Coupling"):
        train(model, optimizer, 1, first=3)
    assert same(values(model), weights)
    assert same(belay.average_state_dict(), average)
    assert belay.step == step


@pytest.mark.parametrize(
    ("dtype", "method"),
    [
        (torch.bfloat16, tb.methods.ema(0.9999)),
        (torch.bfloat16, tb.methods.ema(0.999, warmup="ratio")),
        (torch.bfloat16, tb.methods.swa()),
        (torch.float16, tb.methods.ema(0.9999)),
        (torch.float16, tb.Spring.ema(decay=0.9999)),
    ],
    ids=str,
)
def test_an_average_of_16_bits_that_would_hardly_move_is_warned_of(dtype: torch.dtype, method: tb.Method) -> None:
    which = "a step" if getattr(method, "varies", "") == "never" else "step 10,000"
    message = rf"'0\.weight' has {dtype}, and {which} of .*rounds away.* Leave dtype={dtype} out, or give bits=24"
    with pytest.warns(tb.BelayWarning, match=message):
        attached(method, dtype=dtype)
    with pytest.warns(tb.BelayWarning, match=message):
        attached(EMA, spectators={"long": method}, dtype=dtype)
    _, _, belay = attached(EMA, dtype=dtype)
    with pytest.warns(tb.BelayWarning, match=message):
        belay.change(method)


class Table:
    """A method with numbers for ten steps only."""

    varies = "step"

    def __repr__(self) -> str:
        return "Table()"

    def coupling(self, step: int, lr: float) -> tb.Coupling:
        b = ([1e-5] * 10)[step - 1]
        return tb.Coupling(0.0, b, 1.0, b)


@pytest.mark.parametrize(
    ("options", "method"),
    [
        ({"dtype": torch.bfloat16}, tb.methods.ema(0.99)),
        ({"dtype": torch.float16}, tb.methods.ema(0.999)),
        ({"dtype": torch.bfloat16, "every": 100}, tb.methods.ema(0.9999)),  # one step has the strength of 100
        ({"dtype": torch.bfloat16}, tb.methods.ema(1.0)),  # it is to stand still
        ({"dtype": torch.bfloat16}, tb.methods.hard_sync(every=1000)),
        ({"dtype": torch.bfloat16}, Table()),
        ({"bits": 24}, tb.methods.ema(0.9999)),
        ({}, tb.methods.ema(0.9999)),
    ],
    ids=str,
)
def test_an_average_that_moves_is_not_warned_of(options: Any, method: tb.Method) -> None:
    attached(method, **options)  # warnings are errors here
