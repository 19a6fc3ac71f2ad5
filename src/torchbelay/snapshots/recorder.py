"""Record averages while they are trained: snapshots from which other averages can be made afterwards."""

import os
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from torchbelay._version import __version__
from torchbelay.belay import Belay
from torchbelay.belay.average import MAIN, Average
from torchbelay.belay.plan import Work
from torchbelay.belay.shard import is_first_rank
from torchbelay.physics import arguments
from torchbelay.physics.warnings import warn

from .claims import claim, release
from .content import CHANGED, GIVEN, Content, Source, text_of
from .folder import Folder, Session, history_name, rest_name
from .history import History
from .spacing import Rhythm, Spacing
from .writer import Background, discard, discard_leftovers, new_group, save_sharded, write, write_sharded, write_tensors

MOST_WAITING = 1 << 30  # bytes of snapshots that wait in memory; two snapshots may wait, however large they are


class Recorder:
    """Write snapshots of a Belay's averages to a folder, every so many steps, without holding up the training.

    A step copies the averages to host memory, and a thread writes them. If the disk is too slow, so that two snapshots
    and 1 GiB wait in memory, the next one is left out with a warning. `synthesize` knows which snapshots there are.

    Args:
        belay: the Belay whose averages are recorded. To resume a run, load its state first.
        folder: where the snapshots go, and those of no other run; a resumed run goes on in the folder that it had.
        every: the steps between two snapshots.
        spacing: "even", or "log": as `every` says at first, and 16 snapshots while the number of steps doubles later.
        keep: how many steps have snapshots at most; older ones are removed. None keeps all.
        averages: the names of the averages to record; None for all.
        weights: record the weights themselves, too.

    The weights at the beginning are recorded in any case. Snapshots hold what is trained, and the model's buffers; what
    is not trained is written once. Averages have their own dtype, float32 for 16-bit weights. A sharded model is
    written by torch.distributed.checkpoint: every rank makes a Recorder. `close()`, or the end of a `with` block,
    records the last step and waits for the disk.

    >>> import tempfile
    >>> import torchbelay as tb
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> belay = tb.Belay(model, optimizer, tb.methods.ema(0.9), spectators=tb.snapshots.defaults())
    >>> with Recorder(belay, tempfile.mkdtemp(), every=5) as recorder:
    ...     for _ in range(12):
    ...         model(torch.ones(2, 3)).sum().backward()
    ...         optimizer.step()
    >>> recorder.recorded
    [0, 5, 10, 12]
    """

    def __init__(
        self,
        belay: Belay,
        folder: str | os.PathLike[str],
        *,
        every: int,
        spacing: Spacing = "even",
        keep: int | None = None,
        averages: Sequence[str] | None = None,
        weights: bool = False,
    ) -> None:
        if not isinstance(belay, Belay):
            raise TypeError(f"belay={belay!r} is not a Belay; give the one whose averages are to be recorded")
        if belay._parts.team is not None:
            raise ValueError(
                "belay has an average that several workers share, and snapshots of it tell nothing of the others' "
                "updates; record a second Belay, without workers="
            )
        self.rhythm = Rhythm(every, spacing)
        self.keep = None if keep is None else arguments.whole("keep", keep, low=1)
        self._source = Source(belay)
        self.names = self._chosen(averages)
        self.weights = bool(weights)
        self.folder = Path(os.path.abspath(folder))  # where it is now, whatever the program's folder will be
        self._belay, self._background = belay, Background()
        slices = belay._parts.slices
        self._first = is_first_rank() if slices is None else slices.rank == 0
        self._group: Any = None  # of the ranks that write a sharded model, in the background
        self._step_group: Any = None  # of the same ranks, in the step
        self._open = True
        self._check_folder()
        self.recorded: list[int] = []
        self._begin_session(belay.step)
        if self._first:
            discard_leftovers(self.folder)
        self._history = History(self._noted(), self._known)
        if self._source.sharded:
            self._group, self._step_group = new_group(slices), new_group(slices)
        self._write_rest()
        if self._known == 0:
            self._record(0, [None])
        for part in belay._parts.each:
            part.stepper.observers += (self._observe,)

    def _chosen(self, averages: Sequence[str] | None) -> tuple[str, ...]:
        known = self._source.parts.averages
        if isinstance(averages, str):
            raise TypeError(f"averages={averages!r} is a text; give a list of names, as [{averages!r}]")
        chosen = tuple(known) if averages is None else tuple(dict.fromkeys(averages))
        if unknown := [name for name in chosen if name not in known]:
            raise ValueError(f"averages has {unknown[0]!r}, which is no average; choose from {', '.join(known)}")
        if not chosen:
            raise ValueError("averages is empty; give at least one name, or None for all")
        return chosen

    def _noted(self) -> list[Average]:
        """Return the averages whose couplings may have to be noted: those recorded, and the one that pulls."""
        names = dict.fromkeys([*self.names, *([MAIN] if self._source.pulls else [])])
        if len(self._source.parts.each) == 1:
            return [self._source.parts.first.averages.each[name] for name in names]
        told = (text_of(e.method) for name in names for e in self._source.parts.averages[name].entries.values())
        if not all(known for _, known in told):
            warn(
                "with several optimizers, couplings that depend on learning rates or are of your own making are not "
                "recorded: synthesize() cannot use the snapshots of such averages"
            )
        return []

    def _check_folder(self) -> None:
        """Refuse a folder that holds another run, before anything is written."""
        if self.folder.exists() and not self.folder.is_dir():
            raise NotADirectoryError(f"folder={str(self.folder)!r} is a file; give a folder")
        self.folder.mkdir(parents=True, exist_ok=True)
        found = Folder(self.folder)
        tables = {(each.average, story.table) for each in found.snapshots for story in each.told.stories}
        self._source.given = any(table == GIVEN for _, table in tables)
        self._source.changed = {name for name, table in tables if name is not None and table == CHANGED}
        if found.last > 0 and self._belay.step == 0:
            raise ValueError(
                f"folder={str(self.folder)!r} holds snapshots up to step {found.last}, and this Belay is at step 0: to "
                "resume that run, load its state into the Belay before you make the Recorder; for a new run, give "
                "another folder"
            )
        claim(self, self.folder, self._belay, begins=self._belay.step == 0)

    def _begin_session(self, step: int) -> None:
        """Begin to record after a step that this or another process has come to."""
        self._known, self._era = step, self._source.era
        self._calls: dict[int, int] = {}  # since then, by the clock of the optimizer
        self._due = self.rhythm.next(step)
        past = Folder(self.folder).sessions
        generation = 1 + max((session.generation for session in past), default=-1)
        new = Session(f"{generation}-{uuid.uuid4().hex[:8]}", step)
        self.sessions = (*takewhile(lambda session: session.start < step, past), new)
        self.recorded = [each for each in self.recorded if each <= step]
        self._tidied = self._known_gaps = False

    def _write_rest(self) -> None:
        """Write what is not trained, once."""
        rest = self._source.rest()
        if self._group is not None and rest:
            save_sharded(self.folder / rest_name(sharded=True), rest, self._group, {})
        elif self._first and rest:
            write_tensors(self.folder / rest_name(), rest, {"torchbelay": __version__})

    # Steps -------------------------------------------------------------------------------------------------------

    def _observe(self, work: Work) -> None:
        """Count a step, and record it if it is due. The count is read, which may wait for a device, only if it may be.

        Steps that mixed precision skipped do not count, and only the device knows them.
        """
        if self._source.era != self._era:  # a state was loaded: this step came after it
            self._background.wait()  # the new session is to know what the old one wrote
            self._begin_session(self._belay.step - 1)
            self._history.restart(self._known)
        if work.update is not None and work.update.rate is not None:
            self._note_given_rate()
        self._history.observe(work, self._belay)
        optimizer = id(work.count)
        self._calls[optimizer] = self._calls.get(optimizer, 0) + 1
        if self._calls[optimizer] < self._due - self._known:
            return
        self._known, self._calls = self._source.step, {}
        if self._known >= self._due:
            self._due = self.rhythm.next(self._known)
            if self._source.began:
                self._record(self._known)

    def _note_given_rate(self) -> None:
        """Note that the main average is not what its method makes it."""
        if not self._source.given:
            self._source.given = True
            if MAIN in self.names:
                warn(
                    f"update(rate=...) moves {MAIN!r} in a way that its method does not tell: synthesize() cannot use "
                    "the snapshots of it from now on; record spectators, which follow their own methods"
                )

    def record(self) -> None:
        """Record the present step, whether it is due or not."""
        if not self._open:
            raise RuntimeError("record() after close(): make a new Recorder")
        if self._source.inside:
            raise RuntimeError("record() inside averaged(): leave the block first")
        self._record(self._source.step)

    def _record(self, step: int, names: Sequence[str | None] | None = None) -> None:
        self._tell_problems()
        if names is None:
            names = (*self.names, None) if self.weights else self.names
        if self._left_out(step) or (self._group is None and not self._first):
            return
        contents = [self._source.take(name, step, self.sessions) for name in names]
        self._warn_of_gaps()
        history = self._history.cut(step)
        self._background.add(partial(self._write, contents, history), sum(content.nbytes for content in contents))
        if step not in self.recorded:
            self.recorded.append(step)

    def _left_out(self, step: int) -> bool:
        """Whether the disk is too slow for this snapshot, on any rank."""
        waiting = self._background.waiting
        full = len(waiting) >= 2 and sum(waiting) >= MOST_WAITING
        if self._group is not None:
            flag = torch.tensor(int(full), device="cpu")
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=self._step_group)
            full = bool(flag)
        if full:
            warn(
                f"the snapshots of step {step} are left out: those of {len(waiting)} other steps still wait for the "
                f"disk of {str(self.folder)!r}; raise every={self.rhythm.every}, record fewer averages, or use a "
                "faster disk"
            )
        return full

    def _warn_of_gaps(self) -> None:
        """Warn once per session if an average depends on learning rates that nobody has noted."""
        if self._known_gaps:
            return
        self._known_gaps = True
        for table in self._history.missing(Folder(self.folder)):
            warn(
                f"the couplings of steps before {self._history.low} of {table} are not known: synthesize() cannot use "
                "these snapshots. Save the Recorder's state_dict() in your checkpoints, and load it after a resume"
            )

    def _tell_problems(self) -> None:
        for problem in self._background.problems():
            warn(f"a snapshot was not written: {type(problem).__name__}: {problem}")

    # Writing, in the background ----------------------------------------------------------------------------------

    def _write(self, contents: Sequence[Content], history: Mapping[tuple[int, int], Mapping[str, Tensor]]) -> None:
        """Write the history that a step needs, then the step; then remove what is not needed any more."""
        if self._first:
            for (low, high), tables in history.items():
                name = history_name(contents[0].about.sessions[-1].name, low, high)
                write_tensors(self.folder / name, tables, {"torchbelay": __version__})
        for content in contents:
            if self._group is not None:
                write_sharded(self.folder, content, self._group)
            else:
                write(self.folder, content)
        if self._first:
            self._tidy()

    def _tidy(self) -> None:
        """Remove snapshots of sessions that were given up, and those that are too old."""
        if self._tidied and self.keep is None:
            return
        found = Folder(self.folder)
        for path in found.stale:
            discard(path)
        self._tidied = True
        if self.keep is not None:
            old = [step for step in found.steps if step > 0][: -self.keep]
            for each in found.snapshots:
                if each.step in old:
                    discard(each.path)

    # Ending ------------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait until everything that was recorded is on the disk; raise the first error of writing, if any."""
        self._background.wait()
        for problem in self._background.problems():
            raise problem

    def close(self) -> None:
        """Record the last step, follow no more steps, and wait for the disk."""
        self._end(record=True)

    def _end(self, *, record: bool) -> None:
        if not self._open:
            return
        try:
            self._background.wait()
            step = self._source.step
            whole = self._source.began and not self._source.inside and not self._source.torn
            if record and whole and step > 0 and step not in self.recorded:
                self._record(step)
            elif record and self._source.inside and step not in self.recorded:
                warn(f"close() inside averaged(): step {step}, the last one, is not recorded; leave the block first")
        finally:
            self._open = False
            for part in self._source.parts.each:
                others = (each for each in part.stepper.observers if each != self._observe)
                part.stepper.observers = tuple(others)
            try:
                self._background.wait()
            finally:
                release(self)
        self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(record=kind is None)

    # Numbers -----------------------------------------------------------------------------------------------------

    def disk_use(self, steps: int) -> int:
        """Return the bytes that the folder of a run of so many steps takes."""
        count = self.rhythm.count(arguments.whole("steps", steps, low=1))
        count = count if self.keep is None else min(count, self.keep)
        rest = sum(t.numel() * t.element_size() for t in self._source.rest().values())
        return count * self.bytes_per_snapshot + self._source.nbytes(None) + rest

    @property
    def bytes_per_snapshot(self) -> int:
        """The bytes of one snapshot of all averages that are recorded."""
        names = (*self.names, None) if self.weights else self.names
        return sum(self._source.nbytes(name) for name in names)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resume needs if an average depends on learning rates; empty for all others."""
        return self._history.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`, with the checkpoint that it was saved in."""
        self._history.load_state_dict(state, self._known)

    def __repr__(self) -> str:
        what = ", ".join([*self.names, *(["weights"] if self.weights else [])])
        size = f"{self.bytes_per_snapshot / 1e6:,.1f} MB per snapshot"
        for steps in (10_000, 100_000):
            size += f", {self.disk_use(steps) / 1e9:,.2f} GB for {steps:,} steps"
        kept = "" if self.keep is None else f", the last {self.keep} kept"
        return f"Recorder({str(self.folder)!r}: {what} {self.rhythm}{kept}; {size})"
