"""What moved the weights and the averages of some tensors, from what the snapshots say: the profiles that follow."""

from collections.abc import Iterable

import torch
from torch import Tensor

from torchbelay.belay.cohort import inertias
from torchbelay.physics.method import Method

from .folder import Folder, Story
from .least_squares import Column, Life
from .profiles import Swings, couplings, following, lives_of_pair, pair, pulls, watching
from .targets import Aim, decay, parse, window

_NO_SWING: Swings = (None, None)


class Stories:
    """The couplings of every story of a run up to a step; looked up and parsed once."""

    def __init__(self, folder: Folder, at: int) -> None:
        self.folder, self.at = folder, at
        self._found: dict[Story, tuple[Tensor, Swings] | None] = {}

    def numbers(self, story: Story) -> tuple[Tensor, Swings] | None:
        """Return the couplings from the birth of a story on, (steps, 4), and its velocities; None if not known."""
        if story not in self._found:
            self._found[story] = self._numbers(story, max(0, self.at - story.born))
        return self._found[story]

    def pulls(self, story: Story) -> bool:
        """Whether an average changed the weights; taken for granted if its couplings are not known."""
        found = self.numbers(story)
        return found is None or pulls(*found)

    def _numbers(self, story: Story, steps: int) -> tuple[Tensor, Swings] | None:
        if story.table is None:
            method = method_of(story)
            return couplings(method, steps, every=story.every), inertias(method)
        if not steps:
            return torch.zeros(0, 4, dtype=torch.float64), _NO_SWING
        found = self.folder.couplings(story.table, story.born, self.at)
        return None if found is None else (found, _NO_SWING)


def method_of(story: Story) -> Method:
    """Return the method that a story tells by its text."""
    method = parse(story.method)
    assert not isinstance(method, window | decay)
    return method


class Dynamics:
    """What pulls the weights of some tensors, if anything does, and the profiles of averages of these weights.

    If the couplings of what pulls are not known, the weights count as if nothing pulled them, and an update is what
    they moved by. What is made of the snapshots stays right; only the predicted error is then that of such updates.
    """

    def __init__(self, stories: Stories, pulling: Iterable[Story]) -> None:
        self.stories = stories
        self._lives: dict[tuple[int, int], tuple[Tensor, Life]] = {}  # with the numbers, whose id must stay theirs
        self.run: Life | None = None
        self.pulling = sorted(filter(stories.pulls, set(pulling)), key=lambda story: story.born)
        found = [(story.born, stories.numbers(story)) for story in self.pulling]
        if found and all(numbers is not None for _, numbers in found):
            pairs = [(born, pair(*numbers)) for born, numbers in found if numbers is not None]
            size = max(each.size for _, each in pairs)
            if all(each.size == size for _, each in pairs):
                self.run = Life(lives_of_pair(pairs, stories.at), 0)

    def weights(self, step: int) -> Column:
        """Return the profile of the weights."""
        return Column(None, step) if self.run is None else Column(self.run, step, state=1)

    def average(self, story: Story, step: int) -> Column | None:
        """Return the profile of an average that was recorded; None if it is not known."""
        if story in self.pulling:
            return None if self.run is None else Column(self.run, step)
        found = self.stories.numbers(story)
        if found is None:
            return None
        life = self._watcher(*found, story.born)
        return None if life is None else Column(life, step)

    def target(self, aim: Aim, step: int) -> Column:
        """Return the profile of a target: of these weights if it only watches, else of weights of its own."""
        if not aim.pulls:
            life = self._watcher(aim.numbers, aim.swings, aim.born)
            if life is not None:
                return Column(life, step)
        return Column(aim.life, step)

    def _watcher(self, numbers: Tensor, swings: Swings, born: int) -> Life | None:
        """Return the life of an average that watches these weights; each once."""
        if self.run is not None and any(swings):
            return None
        key = (id(numbers), born)
        if key not in self._lives:
            if self.run is not None:
                life = Life(following(numbers, born, self.run.filter), 0)
            else:
                life = Life(pair(numbers, swings) if any(swings) else watching(numbers), born)
            self._lives[key] = (numbers, life)
        return self._lives[key][1]
