"""Make an average after training, as a combination of snapshots of others, with an error that is known in advance.

Weights are read only when tensors are asked for, one tensor at a time.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from torch import Tensor

from torchbelay._version import __version__
from torchbelay.belay.files import check_safetensors_name
from torchbelay.physics import arguments

from .assembly import Assembly
from .folder import Folder, Snapshot
from .least_squares import Norm
from .solution import Solution, Solver
from .stream import Progress
from .targets import Target, check, label


@dataclass(frozen=True, eq=False)
class Synthesis:
    """An average that was not trained along: the weights of the snapshots that make it, and how good it is.

    `predicted_error` is the expected distance from the average that would have been trained along, relative to its
    distance from the weights, ‖w2 − w1‖, if the updates of the run are white: of equal size and uncorrelated. Rounding
    errors of the snapshots are part of it, with an update taken for a thousandth of a weight. It is known before any
    weight is read. If tensors have different solutions, it is that of the worst.

    >>> import tempfile, torch
    >>> import torchbelay as tb
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> belay = tb.Belay(model, optimizer, tb.methods.ema(0.9))
    >>> with tb.snapshots.Recorder(belay, tempfile.mkdtemp(), every=4) as recorder:
    ...     for x in torch.randn(8, 2, 3):
    ...         model(x).sum().backward()
    ...         optimizer.step()
    >>> found = tb.snapshots.synthesize(recorder.folder, tb.methods.ema(0.9))  # the average that was recorded
    >>> {key: abs(round(weight, 3)) for key, weight in found.weights.items()}
    {(None, 0): 0.0, ('average', 4): 0.0, ('average', 8): 1.0}
    """

    folder: Folder
    target: Target
    at: int
    norm: Norm
    solutions: tuple[Solution, ...]
    copied: Mapping[str, Snapshot] = field(repr=False)  # buffers, and the snapshot that they are taken from
    begin: int = 0  # the step of the last `reset()` before `at`, from which the target begins; 0 without one

    @property
    def weights(self) -> dict[tuple[str | None, int], float]:
        """The weight of each snapshot, by the name of its average (None: the weights) and its step.

        If tensors have different solutions, this is that of most tensors; `solutions` has all.
        """
        most = max(self.solutions, key=lambda each: len(each.names))
        pairs = zip(most.snapshots, most.weights.tolist(), strict=True)
        return {(snapshot.average, snapshot.step): weight for snapshot, weight in pairs}

    @property
    def predicted_error(self) -> float:
        """The expected error under white updates, relative to ‖w2 − w1‖."""
        return max(each.predicted_error for each in self.solutions)

    @property
    def condition(self) -> float:
        """The condition number of the system that was solved."""
        return max(each.condition for each in self.solutions)

    def profiles(self) -> tuple[Tensor, Tensor]:
        """Return P of the target and of what is made of the snapshots, for every update up to the step."""
        return max(self.solutions, key=lambda each: len(each.names)).profiles()

    # Tensors -----------------------------------------------------------------------------------------------------

    def assembly(self) -> Assembly:
        """Open the snapshots to read tensors; close it after use."""
        return Assembly(self.solutions, self.copied, self.folder.rest_files(self.at))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the state dict one by one; memory is needed for one of them and a few MB."""
        with self.assembly() as assembly:
            yield from assembly.tensors()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the average as the state dict of the plain model; the snapshots are read tensor by tensor.

        Keys have the order of the model's, if the snapshots are not of a version that did not record it.
        """
        found = dict(self.tensors())
        known = [name for name in self.solutions[0].snapshots[-1].order if name in found]
        return {name: found[name] for name in dict.fromkeys([*known, *found])}

    def save(self, path: str | os.PathLike[str], *, progress: Progress | None = None) -> None:
        """Write the average as a safetensors file, piece by piece, whole or not at all.

        `progress(done, total)` is called with the bytes that were read.
        """
        about = {
            "average": label(self.target),
            "step": str(self.at),
            **({"since": f"reset() at step {self.begin}"} if self.begin else {}),
            "predicted_error": f"{self.predicted_error:.3g}",
            "torchbelay": __version__,
        }
        self.check_place(path)
        with self.assembly() as assembly:
            assembly.write(Path(path), about, progress)

    def check_place(self, path: str | os.PathLike[str]) -> None:
        """Refuse a path at which `save` would overwrite a snapshot, or whose name says another kind of file."""
        if self.folder.owns(path):
            raise ValueError(f"path={os.fspath(path)!r} has the name of a snapshot among the others; give another name")
        check_safetensors_name(path)

    def __str__(self) -> str:
        count = len(self.solutions[0].snapshots)
        since = f" (begun again by reset() at step {self.begin:,})" if self.begin else ""
        return (
            f"{label(self.target)} at step {self.at:,}{since} from {count} snapshots: predicted error "
            f"{self.predicted_error:.2g} of ‖w2 − w1‖, condition number {self.condition:.2g}"
        )


def synthesize(
    folder: str | os.PathLike[str],
    target: Target | str,
    *,
    at: int | None = None,
    norm: Norm = "updates",
    max_error: float = 0.01,
) -> Synthesis:
    """Make an average of a run that was recorded, although it was not trained along.

    Args:
        folder: the folder that a `Recorder` wrote to.
        target: a method of `torchbelay.methods`, `window(n)`, `decay(n, shape)`, or a text such as
            "ema(half_life=2000)". Methods begin with the run, or with its last `reset()` before `at`, as averages that
            are trained along do; nothing from before it is used. A method that pulls the weights is the run's own if it
            was part of the run; else it gets the run's updates, with a warning: the gradients would have been others.
        at: the step whose average is made; None for the last one with snapshots. The step of a `reset()` is the last
            of what was before it.
        norm: "updates" minimises the predicted error; "profile" the distance of the profiles, as EDM2 does.
        max_error: refuse a target whose predicted error is larger.

    Buffers are those of the last snapshot: with BatchNorm, call `update_bn`.

    >>> import tempfile, torch
    >>> import torchbelay as tb
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> belay = tb.Belay(model, optimizer, tb.methods.ema(0.9), spectators=tb.snapshots.defaults())
    >>> with tb.snapshots.Recorder(belay, tempfile.mkdtemp(), every=5) as recorder:
    ...     for x in torch.randn(100, 8, 3):
    ...         optimizer.zero_grad()
    ...         model(x).square().mean().backward()
    ...         optimizer.step()
    >>> found = synthesize(recorder.folder, "window(30)")
    >>> found.at, found.predicted_error < 0.002, sorted(found.state_dict())
    (100, True, ['bias', 'weight'])
    """
    return synthesize_all(folder, [target], at=at, norm=norm, max_error=max_error)[0]


def synthesize_all(
    folder: str | os.PathLike[str],
    targets: Sequence[Target | str],
    *,
    at: int | None = None,
    norm: Norm = "updates",
    max_error: float | None = 0.01,
) -> list[Synthesis]:
    """Make several averages of a run; without a `max_error`, no target is refused."""
    arguments.one_of("norm", norm, get_args(Norm))
    if max_error is not None:
        arguments.number("max_error", max_error, low=0)
    found = Folder(folder)
    if found.last < 0:
        raise ValueError(f"folder={os.fspath(folder)!r} holds no snapshots; give the folder of a Recorder")
    step = found.last_average if at is None else arguments.whole("at", at, low=1)
    if not found.steps[0] <= step <= found.last:
        raise ValueError(
            f"at={step}: the snapshots in {os.fspath(folder)!r} are of the steps {found.steps[0]} to {found.last}; "
            "choose a step among them"
        )
    wanted = [check(target) for target in targets]
    solver = Solver(found, step)
    results = [
        Synthesis(found, target, step, norm, solver.solve(target, norm), solver.copied, solver.begin)
        for target in wanted
    ]
    for result in results:
        if max_error is not None and not result.predicted_error <= max_error:
            raise ValueError(refusal(result, max_error))
    return results


def refusal(result: Synthesis, max_error: float) -> str:
    """Return why a synthesis is refused, and the cure."""
    steps = result.folder.steps
    near = min(steps, key=lambda step: abs(step - result.at))
    cure = "record more snapshots, or averages whose memory is closer to the target's"
    if near != result.at:
        cure = f"choose at={near}, which has snapshots, or record more of them"
    return (
        f"the predicted error of {label(result.target)} at step {result.at} is {result.predicted_error:.2g} of the "
        f"distance ‖w2 − w1‖, and max_error={max_error:g}: {cure}; to take it as it is, raise max_error"
    )
