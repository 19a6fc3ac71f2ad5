"""A change of mind on a live Belay: an average goes on with another method, in the memory that it has."""

from collections.abc import Mapping
from typing import Any

import torch

from torchbelay.physics.method import Remembers

from . import company, replicas
from .agreement import agreement
from .average import MAIN, Average, Entry, Wanted, key_of
from .buffers import follower
from .cohort import Cohort, inertias
from .part import Part
from .parts import Parts
from .rules import Rule
from .validate import pulled_by, refuse_pulled_twice, warn_of_feedback, warn_of_narrow, warn_of_rounding


@torch.inference_mode(False)
@torch.no_grad()
def change(parts: Parts, name: str, rule: Rule) -> None:
    """Let an average go on by another rule; refuses before anything has changed.

    Values and ages stay. Velocities that are new begin at 0, and methods without memory of past learning rates.
    """
    if parts.team is not None:
        raise RuntimeError(
            "change() of an average that several workers share: make a new Belay with the other method on every "
            "worker, and load_state_dict(state, strict=False)"
        )
    with agreement(parts.group) as facts:
        wanted = [_wanted(part, name, rule) for part in parts.each]
        everything = [each for some in wanted for each in some]
        if not everything:
            raise ValueError(f"nothing to average for {name!r}: no floating-point parameter has a method")
        if name == MAIN:
            refuse_pulled_twice(everything)
            company.refuse_second_pull(parts.member, pulled_by(everything))
        facts |= replicas.methods([{name: some} for some in wanted])
    options = parts.first.options
    warn_of_narrow(everything, dtype=options.dtype, bits=options.bits, every=options.every)
    if name == MAIN:
        warn_of_rounding(everything, rounding=options.rounding)
        for part, some in zip(parts.each, wanted, strict=True):
            warn_of_feedback(some, part.optimizer)
    for part, some in zip(parts.each, wanted, strict=True):
        _apply(part, name, rule, some)
    parts.live.follow(moved=True)


def _wanted(part: Part, name: str, rule: Rule) -> list[Wanted]:
    """Return what an average would follow by another rule; refuses what cannot be averaged, and changes nothing."""
    averages = part.averages
    trial = averages.each[name].like(rule)
    wanted = averages.wanted_by(trial)
    averages.new_followers(trial)
    new = [(each.name, each.parameter) for each in _unknown(averages.each[name], wanted)]
    if averages.guard is not None and averages.began and new:
        averages.guard.check(new)
    return wanted


def _unknown(average: Average, wanted: list[Wanted]) -> list[Wanted]:
    known = {id(e.w1) for e in average.entries.values()}
    return [each for each in wanted if id(each.parameter) not in known]


def _apply(part: Part, name: str, rule: Rule, wanted: list[Wanted]) -> None:
    averages, average = part.averages, part.averages.each[name]
    if averages.began:
        new, followers = _unknown(average, wanted), averages.new_followers(average.like(rule))
        before = list(average.entries.values())
        average.entries = _changed(average, wanted)
        for entry in average.entries.values():
            average.tell(entry.method)
        average.adopt(new, born=part.clock.count, dtype=part.options.dtype)
        average.followers, average.changed = _changed_followers(average, followers), True
        kept = {id(e.w1) for e in averages.entries()}
        for e in before:
            if id(e.w1) not in kept:
                average.initial.forget(e.w1)
    average.rule = rule
    averages.wanted()


def _changed(average: Average, wanted: list[Wanted]) -> dict[str, Entry]:
    """Return the entries that an average goes on with: their tensors stay where they are."""
    known = {id(e.w1): e for e in average.entries.values()}
    own: dict[tuple[int, int, int], Any] = {}
    entries: dict[str, Entry] = {}
    for each in wanted:
        if id(each.parameter) not in known:
            continue
        old, method = known[id(each.parameter)], each.method
        key = (id(method), each.group, old.born)  # a memory is that of one age
        fresh = own.setdefault(key, method.fresh() if isinstance(method, Remembers) else method)
        v1, v2 = (
            None if inertia is None else average.at_rest(old) if v is None else v
            for inertia, v in zip(inertias(method), (old.v1, old.v2), strict=True)
        )
        entries[each.name] = Entry(each.name, old.w1, old.w2, v1, v2, old.low, fresh, each.group, old.born, old.memory)
    return entries


def _changed_followers(average: Average, made: Mapping[str, Cohort]) -> dict[str, Cohort]:
    """Return what moves averaged buffers by other methods, each buffer at the age that it has."""
    found: dict[str, Cohort] = {}
    alike: dict[tuple[Any, ...], Cohort] = {}
    for name, cohort in made.items():
        born = average.followers[name].born if name in average.followers else cohort.born
        key = (key_of(cohort.method), born)
        if key not in alike:
            method = cohort.method.fresh() if isinstance(cohort.method, Remembers) else cohort.method
            alike[key] = follower(method, born, average.every)
        found[name] = alike[key]
    return found
