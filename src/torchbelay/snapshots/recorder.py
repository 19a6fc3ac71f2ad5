"""Record averages while they are trained: snapshots from which other averages can be made afterwards."""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from torchbelay._version import __version__
from torchbelay.belay import Belay
from torchbelay.belay.average import MAIN
from torchbelay.belay.plan import Work
from torchbelay.belay.shard import is_first_rank
from torchbelay.physics import arguments
from torchbelay.physics.warnings import warn

from .claims import claim, release
from .content import Content, Source
from .folder import Folder, history_name
from .history import History
from .rest import Rest
from .session import Session, agreed, read_sessions
from .spacing import Rhythm, Spacing
from .writer import Background, discard_leftovers, new_group, tidy, write, write_sharded, write_tensors

MOST_WAITING = 1 << 30  # bytes of snapshots that wait in memory; two snapshots may wait, however large they are


class Recorder:
    """Write snapshots of a Belay's averages to a folder, every so many steps, without holding up the training.

    A step copies the averages to host memory, and a thread writes them. If the disk is too slow, so that two snapshots
    and 1 GiB wait in memory, the next one is left out with a warning. `synthesize` knows which snapshots there are.

    Args:
        belay: the Belay whose averages are recorded. To resume a run, load its state first, and the Recorder's then.
        folder: where the snapshots go, and those of no other run; a resumed run goes on in the folder that it had.
        every: the steps between two snapshots.
        spacing: "even", or "log": as `every` says at first, and 16 snapshots while the number of steps doubles later.
        keep: how many steps have snapshots at most; older ones are removed. None keeps all.
        averages: the names of the averages to record; None for all.
        weights: record the weights themselves, too.

    The weights at the beginning are recorded in any case, and so are those at a `reset()`. Snapshots hold what is
    trained, and the model's buffers; what is not trained is written again when it has changed. Averages have their own
    dtype, float32 for 16-bit weights. A sharded model is written by torch.distributed.checkpoint: every rank makes a
    Recorder. `close()`, or the end of a `with` block, records the last step and waits for the disk.

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
        self.names = self._source.chosen(averages)
        self.weights = bool(weights)
        self.folder = Path(os.path.abspath(folder))  # where it is now, whatever the program's folder will be
        self._belay, self._background = belay, Background()
        slices = belay._parts.slices
        self._first = is_first_rank() if slices is None else slices.rank == 0
        self._group: Any = None  # of the ranks that write a sharded model, in the background
        self._step_group: Any = None  # of the same ranks, in the step
        self._open = True
        self._check_folder()
        self.sessions: tuple[Session, ...] = ()
        if self._source.sharded:
            self._group, self._step_group = new_group(slices), new_group(slices)
        self._rest = Rest(self._source, self._step_group)
        self.recorded: list[int] = []
        self._begin_session(belay.step)
        if self._first:
            discard_leftovers(self.folder)
        self._history = History(self._source.noted(self.names), self._known)
        if self._known == 0:
            self._record_first()
            if self._source.rest():
                self.wait()  # what no file can hold is refused now, not when the run has been trained
        for part in belay._parts.each:
            part.stepper.observers += (self._observe,)
        belay._reset_observers += (self._begin_again,)

    def _check_folder(self) -> None:
        """Refuse a folder that holds another run, before anything is written."""
        if self.folder.exists() and not self.folder.is_dir():
            raise NotADirectoryError(f"folder={str(self.folder)!r} is a file; give a folder")
        self.folder.mkdir(parents=True, exist_ok=True)
        found = Folder(self.folder)
        if found.last > 0 and self._belay.step == 0:
            raise ValueError(
                f"folder={str(self.folder)!r} holds snapshots up to step {found.last}, and this Belay is at step 0: to "
                "resume that run, load its state into the Belay before you make the Recorder; for a new run, give "
                "another folder"
            )
        claim(self, self.folder, self._belay, begins=self._belay.step == 0)

    def _begin_session(self, step: int, chain: Sequence[Session] | None = None, *, anew: bool = False) -> None:
        """Begin to record after a step, with the sessions that led there, if known; `anew` if averages begin again."""
        self._background.wait()  # the new session is to know what the old one wrote
        self._known, self._era = step, self._source.era
        self._calls: dict[int, int] = {}  # since then, by the clock of the optimizer
        self._most = self._belay.step  # then, of the optimizer that took the most
        self._due = self.rhythm.next(step)
        found = Folder.of_run(self.folder, self.sessions)
        following = found.following(step, None if anew else self._source.begins, chain)
        self.sessions = agreed(following, self._step_group)
        self._source.recall((each for each in found.snapshots if each.step <= step), self.sessions, anew=anew)
        self._rest.begin(found.rest_of(self.sessions))
        self.recorded = [each for each in self.recorded if each <= step]
        self._tidied = self._known_gaps = False

    # Steps -------------------------------------------------------------------------------------------------------

    def _observe(self, work: Work) -> None:
        """Count a step, and record it if it is due. The count is read, which may wait for a device, only if it may be.

        Steps that mixed precision skipped do not count, and only the device knows them.
        """
        if self._source.era != self._era:  # a state was loaded: this step came after it
            step, seen = self._belay.step - 1, self._most + max(self._calls.values(), default=0)
            # This session does not lead to a state from after all steps that it saw, perhaps of another run.
            self._begin_session(step, self.sessions[:-1] if seen < step else self.sessions)
            self._history.restart(self._known)
        if work.update is not None and work.update.rate is not None:
            self._note_given_rate()
        self._history.observe(work, self._belay)
        optimizer = id(work.count)
        self._calls[optimizer] = self._calls.get(optimizer, 0) + 1
        if self._calls[optimizer] < self._due - self._known:
            return
        self._known, self._most, self._calls = self._source.step, self._belay.step, {}
        if self._known >= self._due:
            self._due = self.rhythm.next(self._known)
            if self._source.began:
                self._record(self._known)

    def _begin_again(self) -> None:
        """Record the weights at which the averages have just begun again; nothing leads there from the steps before."""
        self._begin_session(self._source.step, self.sessions, anew=True)  # the last one may not have written yet
        self._history.restart(self._known)
        self._record_first()

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

    def _record_first(self) -> None:
        """Record the weights at which averages begin, and all that is not trained, which is written from its place."""
        self._record(self._known, [None], copy_rest=False)
        if self._source.rest():
            self._background.wait()

    def _record(self, step: int, names: Sequence[str | None] | None = None, *, copy_rest: bool = True) -> None:
        self._tell_problems()
        if names is None:
            names = (*self.names, None) if self.weights else self.names
        if self._left_out(step) or (self._group is None and not self._first):
            return
        contents = self._rest.take(step, self.sessions, copy=copy_rest)
        contents += [self._source.take(name, step, self.sessions) for name in names]
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
        for table in self._history.missing(Folder.of_run(self.folder, self.sessions), self.sessions):
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
            self._put(content)
        if self._first:
            self._tidy()

    def _put(self, content: Content) -> None:
        try:
            if self._group is not None:
                write_sharded(self.folder, content, self._group)
            else:
                write(self.folder, content)
        except BaseException:
            self._rest.lost |= bool(content.about.values)
            raise

    def _tidy(self) -> None:
        """Remove what is not needed any more; without `keep`, once per session."""
        if self._tidied and self.keep is None:
            return
        tidy(Folder(self.folder), self.keep)
        self._tidied = True

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
                part.stepper.observers = tuple(each for each in part.stepper.observers if each != self._observe)
            observers = self._belay._reset_observers
            self._belay._reset_observers = tuple(each for each in observers if each != self._begin_again)
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
        """Return the bytes that the folder of a run of so many steps takes, if only what is trained changes."""
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
        """Return which snapshots lead to the present step, and what no snapshot and no state of the Belay tells."""
        state = self._source.state_dict()
        if self._source.era != self._era:  # the Belay has loaded a state since: nothing that was noted leads to it
            return state | {"low": self._belay.step, "runs": {}}
        return state | self._history.state_dict() | {"sessions": [list(session) for session in self.sessions]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`, with the checkpoint that it was saved in, before the next step; on every rank."""
        if not self._open:
            raise RuntimeError("load_state_dict() after close(): make a new Recorder")
        self._source.check(state)
        step, sessions = self._belay.step, read_sessions(state.get("sessions", ()))
        if sessions and self._source.era == self._era and step != self.sessions[-1].start:
            raise RuntimeError(
                f"load_state_dict() at step {step}, and the Recorder began at step {self.sessions[-1].start}: load the "
                "states of the Belay and of the Recorder together, before the next step"
            )
        self._history.load_state_dict(state, step)
        if sessions and step > 0:
            self._begin_session(step, sessions)
        self._source.load_state_dict(state)

    def __repr__(self) -> str:
        what = ", ".join([*self.names, *(["weights"] if self.weights else [])])
        size = f"{self.bytes_per_snapshot / 1e6:,.1f} MB per snapshot"
        for steps in (10_000, 100_000):
            size += f", {self.disk_use(steps) / 1e9:,.2f} GB for {steps:,} steps"
        kept = "" if self.keep is None else f", the last {self.keep} kept"
        return f"Recorder({str(self.folder)!r}: {what} {self.rhythm}{kept}; {size})"
