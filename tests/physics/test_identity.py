"""What a checkpoint says of a method: equal methods have one text, whatever numbers they were written with."""

import functools
import math
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import torchbelay as tb
from torchbelay.physics.coupling import Inertia
from torchbelay.physics.identity import (
    SAMPLED,
    describe,
    describe_or_sample,
    difference,
    same,
    sampled_steps,
    why_untold,
)

FINITE = st.floats(allow_nan=False, allow_infinity=False)


@dataclass(frozen=True)
class Cosine:
    """A schedule as it should be."""

    steps: float
    end: float = 0.0

    def __call__(self, step: int) -> float:
        return self.end + (1 - self.end) * math.cos(math.pi * step / self.steps / 2)


@dataclass(frozen=True)
class Mine:
    rate: Any
    every: int = 1
    cache: dict[str, int] = field(default_factory=dict, compare=False)

    def coupling(self, step: int, lr: float) -> tb.Coupling:
        return tb.Coupling(0.0, 0.1, 1.0, 0.1)


class Plain:
    """Neither a dataclass nor a repr of its own."""

    def __init__(self, rate: Any) -> None:
        self.rate, self._calls = rate, 0

    def coupling(self, step: int, lr: float) -> tb.Coupling:
        self._calls += 1
        return tb.Coupling(0.0, self.rate, 1.0, self.rate)


class Slotted(Plain):
    __slots__ = ("width",)


# Numbers ------------------------------------------------------------------------------------------------------------


@given(st.integers())
def test_a_whole_number_and_the_same_float_are_one(n: int) -> None:
    try:
        x = float(n)
    except OverflowError:
        x = math.inf
    assert (describe(Mine(n)) == describe(Mine(x))) is (n == x)


@given(FINITE, FINITE)
def test_floats_are_told_apart_exactly(x: float, y: float) -> None:
    assert (describe(Mine(x)) == describe(Mine(y))) is (x == y)
    assert describe(Mine(x)) != describe(Mine(math.nextafter(x, math.inf)))


@pytest.mark.parametrize("n", [2**53 + 1, 10**400, -(10**400)])
def test_a_number_that_no_float_holds_keeps_its_digits(n: int) -> None:
    assert f"rate={n}," in describe(Mine(n, every=2))
    assert describe(Mine(n)) != describe(Mine(n + 1))


def test_zero_has_one_sign_and_nan_is_itself() -> None:
    assert describe(Mine(-0.0)) == describe(Mine(0)) == describe(Mine(0.0))
    assert describe(Mine(math.nan)) == describe(Mine(float("nan")))
    assert len({describe(Mine(x)) for x in (math.inf, -math.inf, math.nan, 0, "inf")}) == 5


def test_true_is_not_one_and_a_text_is_not_a_number() -> None:
    assert len({describe(Mine(x)) for x in (True, 1, "1", "True", None, "None")}) == 6


def test_a_number_of_another_library_is_a_number() -> None:
    torch, numpy = pytest.importorskip("torch"), pytest.importorskip("numpy")
    assert describe(Mine(numpy.float64(0.5))) == describe(Mine(torch.tensor(0.5))) == describe(Mine(0.5))
    assert describe(Mine(numpy.int64(3))) == describe(Mine(3))


def test_a_field_declared_whole_is_written_whole() -> None:
    """Format 1 wrote it so: directories of torch.distributed.checkpoint have the text as a name."""
    assert describe(Mine(1, every=4)) == describe(Mine(1.0, every=4.0)) == "Mine(rate=1.0, every=4)"  # type: ignore[arg-type]


# Fields -------------------------------------------------------------------------------------------------------------


def test_only_fields_that_differ_from_their_defaults_count() -> None:
    assert describe(Mine(0.5)) == describe(Mine(0.5, every=1, cache={"a": 1})) == "Mine(rate=0.5)"


def test_a_schedule_counts_with_its_own_fields() -> None:
    assert describe(Mine(Cosine(100))) == "Mine(rate=Cosine(steps=100.0))"
    assert describe(Mine(Cosine(100, end=0.1))) != describe(Mine(Cosine(100)))
    assert describe(Mine([Cosine(1), (2, "x")])) == "Mine(rate=[Cosine(steps=1.0), (2.0, 'x')])"


def test_a_class_without_a_repr_counts_with_its_public_attributes() -> None:
    once, often = Plain(1), Plain(1.0)
    often.coupling(1, 0.1)
    assert describe(once) == describe(often) == f"{Plain.__module__}.Plain(rate=1.0)"
    assert describe(Plain(0.5)) != describe(once)
    slotted = Slotted(1)
    slotted.width = 3
    assert describe(slotted) == f"{Plain.__module__}.Slotted(rate=1.0, width=3.0)"


def test_a_class_without_attributes_is_its_name() -> None:
    class Bare:
        def coupling(self, step: int, lr: float) -> tb.Coupling:
            return tb.Coupling(0.0, 0.1, 1.0, 0.1)

    assert describe(Bare()) == f"{Bare.__module__}.{Bare.__qualname__}"


def test_a_repr_of_its_own_is_taken_at_its_word() -> None:
    class Named(Plain):
        def __repr__(self) -> str:
            return f"Named({self.rate})"

    assert describe(Named(0.5)) == "Named(0.5)"


def test_a_subclass_is_another_method() -> None:
    class Louder(tb.Spring):
        def coupling(self, step: int = 1, lr: float = 0.0) -> tb.Coupling:
            return tb.Coupling(0.0, 0.5, 1.0, 0.5)

    class WithMore(tb.methods.ema):
        def __init__(self, decay: float, more: float) -> None:
            super().__init__(decay)
            object.__setattr__(self, "more", more)

    assert "Louder" in describe(Louder(k=1.0, m1=10.0, m2=20.0))
    assert describe(WithMore(0.9, 1)) == describe(WithMore(0.9, 1.0)) != describe(WithMore(0.9, 2))


# What cannot be told ------------------------------------------------------------------------------------------------


def bare(step: int) -> float:
    return 0.1


class Tangled:
    def __init__(self) -> None:
        self.rate = self


UNTOLD: dict[str, Callable[[], Any]] = {
    "a lambda": lambda: Mine(lambda step: 0.1),
    "a function": lambda: Mine(bare),
    "a lambda of a plain class": lambda: Plain(lambda step: 0.1),
    "a partial": lambda: Mine(functools.partial(bare, 1)),
    "a bound method": lambda: Mine(Plain(1).coupling),
    "an object without anything": lambda: Mine({"a": [object()]}),
    "a repr with an address": lambda: type("Leaky", (), {"__repr__": lambda self: f"Leaky<{id(self):#x}>"})(),
    "a tensor": lambda: Mine(pytest.importorskip("torch").ones(2)),
    "an array": lambda: Mine(pytest.importorskip("numpy").ones(2000)),
    "itself": Tangled,
    "a set": lambda: Mine({1, 2}),
}


@pytest.mark.parametrize("make", UNTOLD.values(), ids=UNTOLD)
def test_what_cannot_be_told_is_refused_with_the_cure(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r"no text can tell .* make it a dataclass"):
        describe(make())


def test_the_refusal_names_the_field() -> None:
    with pytest.raises(ValueError, match=r"Mine\.rate=<function bare at 0x"):
        describe(Mine(bare))


@pytest.mark.parametrize("make", UNTOLD.values(), ids=UNTOLD)
def test_a_checkpoint_has_a_text_for_it_all_the_same(make: Callable[[], Any]) -> None:
    method = make()
    assert "0x" not in describe_or_sample(method)
    assert describe_or_sample(method) == describe_or_sample(make())
    assert why_untold(method)


def test_what_can_be_told_of_it_is_in_that_text() -> None:
    assert describe_or_sample(Mine(bare, every=7)) == "Mine(rate=function, every=7)"
    assert describe_or_sample(Mine({1, 2})) != describe_or_sample(Mine(bare))


def test_functions_are_compared_by_their_couplings() -> None:
    ema = tb.methods.ema
    assert describe_or_sample(ema(lambda step: 1 - 1 / step)) == describe_or_sample(ema(lambda t: (t - 1) / t))
    others = [lambda step: 1 - 1 / (step + 1), lambda step: 0.5, lambda step: min(0.999, 1 - 1 / step)]
    assert len({describe_or_sample(ema(each)) for each in others}) == len(others)
    assert describe_or_sample(ema(bare)) != describe_or_sample(ema(bare, follow="before"))
    assert describe_or_sample(ema(bare)).count("at_") == len(SAMPLED)


def test_the_last_digits_of_a_function_do_not_count() -> None:
    """Another machine's cosine may differ in them."""
    near = [lambda step: 1 - 1e-5, lambda step: math.nextafter(1 - 1e-5, 1), lambda step: 1 - 1.001e-5]
    first, same_one, other = (describe_or_sample(tb.methods.ema(each)) for each in near)
    assert first == same_one != other


def test_a_step_at_which_a_function_raises_is_the_name_of_its_error() -> None:
    text = describe_or_sample(tb.methods.ema(lambda step: [0.5, 0.6, 0.7][step - 1]))
    assert "at_3=(0.0, 0.3, 1.0, 0.3), at_10=IndexError, at_30=IndexError" in text


def test_asking_for_couplings_changes_nothing_and_says_nothing() -> None:
    class Counting(tb.methods.schedule_free):
        def coupling(self, step: int, lr: float) -> tb.Coupling:
            warnings.warn("asked", stacklevel=1)
            return super().coupling(step, lr)

    method = Counting()
    object.__setattr__(method, "rate", bare)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        method.remember((4.0, 0.1))
        assert describe_or_sample(method).count("at_") == len(SAMPLED) + 2  # it varies with the learning rate
    assert method.memory == (4.0, 0.1)


def test_a_method_that_does_not_say_when_it_varies_is_not_asked() -> None:
    asked: list[int] = []

    class Unsaid(Plain):
        def coupling(self, step: int, lr: float) -> tb.Coupling:
            asked.append(step)
            return tb.Coupling(0.0, 0.1, 1.0, 0.1)

    assert describe_or_sample(Unsaid(bare)).endswith("Unsaid(rate=function)")
    assert not asked


# The methods of this library --------------------------------------------------------------------------------------

OURS = {
    "Spring(k=1.0, m1=10.0, m2=20.0)": tb.Spring(k=1, m1=10, m2=20),
    "Spring.ema(decay=0.9)": tb.Spring.ema(decay=0.9),
    "Spring(k=1.0, m1=2000.0, m2=500.0, follow='after')": tb.methods.belay(follow="after"),
    "ema(decay=None, half_life=50.0, half_life_samples=None, batch_size=None, warmup=None, power=0.6666666666666666, "
    "follow='after')": tb.methods.ema(half_life=50),
    "ema(decay=None, half_life=None, half_life_samples=5000.0, batch_size=64, warmup='ratio', "
    "power=0.6666666666666666, follow='after')": tb.methods.ema(half_life_samples=5000, batch_size=64, warmup="ratio"),
    "swa(every=1)": tb.methods.swa(),
    "power_ema(gamma=1.0, sigma_rel=None)": tb.methods.power_ema(1),
    "easgd(alpha=None, rho=2.0)": tb.methods.easgd(rho=2),
    "easgd(alpha=0.1, rho=None, every=4)": tb.methods.easgd(0.1, every=4),
    "diloco()": tb.methods.diloco(),
    "diloco(every=20, lr=0.5)": tb.methods.diloco(every=20, lr=0.5),
    "lookahead(k=6, alpha=0.5)": tb.methods.lookahead(),
    "switch_ema(decay=0.9, every=10)": tb.methods.switch_ema(0.9, 10),
    "heavy_ball(momentum=0.0)": tb.methods.heavy_ball(0),
    "nesterov(momentum=0.9)": tb.methods.nesterov(0.9),
    "schedule_free(beta=0.9, r=0.0, weight_lr_power=2.0)": tb.methods.schedule_free(weight_lr_power=2),
    "ema_nesterov(beta=0.5, gamma=0.9)": tb.methods.ema_nesterov(0.5, 0.9),
    "hard_sync(every=10)": tb.methods.hard_sync(10),
    "ema_nesterov(beta=linear(start=0.0, end=0.9, steps=40), gamma=0.9)": tb.methods.ema_nesterov(
        tb.schedules.linear(0, 0.9, 40), 0.9
    ),
    "centred(theta=cosine(start=0.0, end=-0.5, steps=40), rate=0.25, follow='after')": tb.methods.centred(
        tb.schedules.cosine(0, -0.5, 40), 0.25
    ),
    "primal_averaging(mu_x=0.9, mu_y=0.5)": tb.methods.primal_averaging(0.9, 0.5),
    "centred(theta=1.0, rate=0.25, follow='after')": tb.methods.centred(1, 0.25),
}


@pytest.mark.parametrize("text", OURS)
def test_the_methods_of_this_library_are_written_as_in_format_1(text: str) -> None:
    """The texts are written out: they are names in distributed checkpoints, and a changed default would change them."""
    assert describe(OURS[text]) == describe_or_sample(OURS[text]) == text
    assert why_untold(OURS[text]) is None


def test_every_method_of_this_library_is_among_them() -> None:
    made = {type(method).__name__ for method in OURS.values()}
    assert made == {*tb.methods.__all__} - {"Method", "belay"} | {"Spring"}


def grown(name: str) -> Any:
    """A method as a later version may have it: with one more field."""
    kind = getattr(tb.methods, name, tb.Spring)
    new = make_dataclass(name, [("extra", float, field(default=2.0))], bases=(kind,), frozen=True, repr=False)
    new.__module__ = kind.__module__
    return new


@pytest.mark.parametrize("name", ["ema", "swa", "schedule_free", "lookahead"])
def test_a_field_that_a_later_version_adds_changes_nothing_at_its_default(name: str) -> None:
    given = {"decay": 0.9} if name == "ema" else {}
    old = getattr(tb.methods, name)(**given)
    assert describe(grown(name)(**given)) == describe(old)
    assert describe(grown(name)(**given, extra=2)) == describe(old)
    assert describe(grown(name)(**given, extra=3)) == describe(old)[:-1] + ", extra=3.0)"


def test_what_a_method_remembers_or_has_computed_is_not_what_it_is() -> None:
    free, power = tb.methods.schedule_free(), tb.methods.power_ema(sigma_rel=0.1)
    before = describe(free), describe(power)
    free.coupling(1, 0.1)
    power.coupling(2, 0.1)
    assert (describe(free), describe(power)) == before


# Comparison of two texts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved", "here", "equal"),
    [
        ("ema(half_life=50)", "ema(half_life=50.0)", True),
        ("ema(half_life=50)", "ema(half_life=50.5)", False),
        ("f(a=-1, b=[2, 3e2])", "f(a=-1.0, b=[2.0, 300])", True),
        ("f(x='5')", "f(x='5.0')", False),
        ("f(x='it\\'s 5')", "f(x='it\\'s 5.0')", False),
        ("f5(x=1)", "f5.0(x=1)", False),
        ("f(x=9007199254740993)", "f(x=9007199254740992.0)", False),
        ("f(x=inf)", "f(x=inf)", True),
        ("f(x=1)", "f(x=True)", False),
        ("f(x=-0.0)", "f(x=0)", True),
        (f"f(x={10**400})", f"f(x={10**400 + 1})", False),
    ],
)
def test_two_texts_are_compared_with_their_numbers_as_numbers(saved: str, here: str, equal: bool) -> None:
    assert same(saved, here) is equal
    assert same(here, saved) is equal


@given(st.text(), st.text())
def test_the_comparison_takes_any_text(one: str, other: str) -> None:
    assert same(one, one)
    assert same(one, other) is same(other, one)


@given(FINITE)
def test_a_number_survives_as_a_text(x: float) -> None:
    assert same(f"f(x={x!r})", describe(Mine(x)).replace("Mine(rate", "f(x"))


@pytest.mark.parametrize(
    ("saved", "here", "shown"),
    [
        (tb.methods.ema(0.9), tb.methods.ema(0.99), ("ema(decay=0.9, …)", "ema(decay=0.99, …)")),
        (tb.methods.ema(0.9), tb.methods.ema(0.9, warmup="ratio"), ("ema(warmup=None, …)", "ema(warmup='ratio', …)")),
        (tb.Spring.ema(decay=0.9), tb.Spring.ema(decay=0.5), ("Spring.ema(decay=0.9)", "Spring.ema(decay=0.5)")),
        (
            tb.Spring(k=1.0, m1=2.0, m2=3.0),
            tb.Spring(k=1.0, m1=2.0, m2=4.0, follow="after"),
            ("Spring(m2=3.0, …)", "Spring(m2=4.0, follow='after', …)"),
        ),
        (tb.methods.swa(), tb.methods.hard_sync(every=1), ("swa(every=1)", "hard_sync(every=1)")),
        (Mine(Cosine(5.0)), Mine(Cosine(6.0)), ("Mine(rate=Cosine(steps=5.0))", "Mine(rate=Cosine(steps=6.0))")),
    ],
)
def test_a_message_has_what_differs_between_two_methods(saved: Any, here: Any, shown: tuple[str, str]) -> None:
    assert difference(describe(saved), describe(here)) == shown


def test_a_message_has_the_first_coupling_that_differs() -> None:
    saved, here = tb.methods.ema(lambda step: 1 - 1 / step), tb.methods.ema(lambda step: 1 - 2 / (step + 1))
    assert difference(describe_or_sample(saved), describe_or_sample(here)) == (
        "ema(at_3=(0.0, 0.333333333333, 1.0, 0.333333333333), …)",
        "ema(at_3=(0.0, 0.5, 1.0, 0.5), …)",
    )


@pytest.mark.parametrize("damaged", ["ema(decay=", "<Mine at noon>", "ema(0.9)", "", "\0", 7, None])
def test_a_message_has_a_damaged_method_as_it_is(damaged: Any) -> None:
    assert difference(damaged, "ema(decay=0.9)") == (damaged, "ema(decay=0.9)")


class Asked:
    """A method with a function in it, that keeps what it was asked."""

    varies = "step"

    def __init__(self, rate: Callable[[int], float]) -> None:
        self.rate = rate
        self._log: list[int] = []
        self._dice = random.Random(0)

    def coupling(self, step: int, lr: float) -> tb.Coupling:
        self._log.append(step)
        return tb.Coupling(0.0, self.rate(step) * (1 + 0 * self._dice.random()), 1.0, 0.0)


def test_a_method_that_is_asked_out_of_turn_does_not_notice() -> None:
    method = Asked(lambda step: 0.1)
    state = method._dice.getstate()
    assert "at_1000000=(0.0, 0.1, 1.0, 0.0)" in describe_or_sample(method)
    assert method._log == []
    assert method._dice.getstate() == state


def test_only_steps_with_a_coupling_are_counted() -> None:
    table = [0.1] * 9
    assert sampled_steps(Asked(lambda step: table[step - 1])) == [1, 3]
    assert "at_10=IndexError" in describe_or_sample(Asked(lambda step: table[step - 1]))

    class Single(Asked):
        def __copy__(self) -> "Single":
            raise RuntimeError("there is one of me")

    assert sampled_steps(Single(lambda step: 0.1)) == []
    assert "at_" not in describe_or_sample(Single(lambda step: 0.1))


def test_a_method_that_depends_on_the_learning_rate_is_asked_at_several() -> None:
    class Paced(Asked):
        varies = "lr"

        def coupling(self, step: int, lr: float) -> tb.Coupling:
            return tb.Coupling(0.0, self.rate(lr), 1.0, 0.0)  # type: ignore[arg-type]

    one, other = (describe_or_sample(Paced(rate)) for rate in (lambda lr: 0.1 * lr, lambda lr: 1e-4))  # equal at 1e-3
    assert one != other


def test_inertias_count() -> None:
    class Heavy(Asked):
        inertia2 = Inertia(1.0, 0.9, 0.1, 0.1)

    first = describe_or_sample(Heavy(lambda step: 0.1))
    Heavy.inertia2 = Inertia(1.0, 0.1, 0.1, 0.1)
    assert describe_or_sample(Heavy(lambda step: 0.1)) != first


def test_the_first_difference_of_a_class_in_a_function_is_shown_alone() -> None:
    class Local(Asked):
        pass

    one, other = (describe_or_sample(Local(rate)) for rate in (lambda step: 0.1, lambda step: 0.2))
    was, now = difference(one, other)
    assert was.count("at_") == now.count("at_") == 1
