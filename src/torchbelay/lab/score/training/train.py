"""A training: steps, reports, checkpoints. Stopped at any moment, the same command goes on there, bit for bit."""

import math
import signal
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from torchbelay.lab.part import LabError, Record
from torchbelay.lab.records import write_bytes
from torchbelay.lab.score import data
from torchbelay.lab.score.experiment import GRID, TRIPLES, Studio, png
from torchbelay.lab.versions import versions
from torchbelay.ops import arithmetic

from .batches import Batches
from .budget import Budget, Plan, Speed
from .folder import Folder
from .learner import WARM, Together, Trainee, deterministic
from .presets import Preset
from .ranks import Ranks, joined, started
from .speed import How, loss_of
from .validation import Yardstick, number

AHEAD = 2  # steps that the host may be ahead of a GPU: enough to keep it busy, few enough to stop at once
AGREE = 20  # steps after which several processes agree whether to stop
MEASURE_S = 1.0  # how long the speed is measured
COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())


@dataclass(frozen=True)
class Asked:
    """What the person asked for."""

    preset: Preset
    out: Path
    data: Path | None = None
    seed: int = 0
    budget: Budget | None = None
    lr: float | None = None
    every: int | None = None
    compile: bool = False
    device: str | None = None
    keep_going: bool = False  # even if loss or weights are no numbers
    checkpoint_s: float = 300.0

    def options(self, ranks: Ranks) -> Record:
        """That on which the numbers depend."""
        return {
            "preset": self.preset.name,
            "budget": None if self.budget is None else self.budget.text,
            "lr": self.lr,
            "seed": self.seed,
            "every": self.every,
            "compile": self.compile,
            "device": ranks.device.type,
            "processes": ranks.count,
        }

    @property
    def how(self) -> How:
        """How steps are taken; what cannot be captured is not."""
        return "compiled and captured" if self.compile else "captured"


def train(asked: Asked, console: Console) -> int:
    """Run it, or the rest of it. Returns the exit status: 0, or 128 and the number of the signal that stopped it."""
    folder, preset = Folder(asked.out), asked.preset
    if preset.batch % (count := started()):  # before they talk to each other: all see it alike
        raise LabError(f"a batch of {preset.batch} cannot be shared by {count} processes; start another number")
    with joined(asked.device) as ranks, deterministic(), ExitStack() as held:
        console = console if ranks.first else Console(quiet=True)
        ranks.firsts(lambda: held.enter_context(folder.held()))
        options = asked.options(ranks)
        plan, done = ranks.firsts(lambda: looked_up(asked, options, folder))
        if plan is not None and done == plan.steps and folder.samples.exists():
            console.print(f"{folder.path} is finished: {done:,} steps", highlight=False, markup=False, soft_wrap=True)
            return 0
        images = ranks.in_turn(lambda: data.load(preset.dataset, asked.data))
        on_device = images.train.to(ranks.device)
        yardstick = Yardstick.make(images, preset.objective, ranks.device, count=TRIPLES)
        if plan is None:
            plan = _measured(asked, on_device, yardstick, ranks)
        if ranks.first:
            folder.begin({**options, "resolved": plan.describe(), "versions": versions(ranks.device)})
        run = Run(plan, asked.seed, on_device, asked.how, ranks)
        if done and (state := folder.load(ranks.device)) is not None:
            run.load_state_dict(state)
        if ranks.first:
            folder.tidy()
            folder.cut(run.step)
        status = _loop(run, asked, folder, yardstick, console)
        if status == 0 and ranks.first:
            _picture(run, asked.how, folder, console)
        return status


def looked_up(asked: Asked, options: Record, folder: Folder) -> tuple[Plan | None, int]:
    """The plan, None if the machine's speed must be measured for it first, and how far the run has come."""
    before, budget = folder.asked(), asked.budget
    folder.refuse_others(options)
    images, every = None if budget is None else budget.images, asked.every
    if budget is not None and budget.seconds is not None:
        if before is None:
            return None, 0
        images, every = before["resolved"]["images"], before["resolved"]["every"]  # as measured then
    plan = Plan.of(asked.preset, images=images, lr=asked.lr, every=every)
    folder.refuse_changes(plan.describe())
    return plan, folder.step()


# A run ----------------------------------------------------------------------------------------------------------------


class Run:
    """A network in training with all that its next step depends on."""

    def __init__(self, plan: Plan, seed: int, images: Tensor, how: How, ranks: Ranks) -> None:
        self.plan, self.ranks, self.objective = plan, ranks, plan.preset.objective
        torch.manual_seed(seed)
        network = self.objective.network().to(device=ranks.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        loss = loss_of(self.objective, how)
        self.trainee = Trainee(ranks.spread(network), plan.lane, loss, capture=ranks.count == 1)
        self._together = Together([self.trainee])
        self._batches = Batches(
            images, self.objective, plan.batch, seed=1000 + seed, rank=ranks.rank, ranks=ranks.count
        )
        torch.manual_seed((seed + 1) * 1_000_003 + ranks.rank)  # of dropout: another one on each rank
        self._marks: deque[torch.cuda.Event] = deque()
        self._lr_scale = math.nan
        self.step = self.reported = 0
        self.wall_s = 0.0  # of all its lives

    def advance(self) -> None:
        """Take a step."""
        self.step += 1
        if (scale := self.plan.lr_scale(self.step)) != self._lr_scale:
            self.trainee.set_lr_scale(scale)
            self._lr_scale = scale
        self._together.step(*self._batches.next())
        if self.ranks.device.type == "cuda":
            self._marks.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
            self._marks[-1].record()  # reached when the step before this one is done
            if len(self._marks) > AHEAD:
                self._marks.popleft().synchronize()

    def finish(self) -> None:
        """Wait until all steps are taken."""
        self._together.wait()
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize(self.ranks.device)

    def losses(self, yardstick: Yardstick) -> Record:
        """The mean loss of the steps since the last report, and, on the first rank, what the weights are worth."""
        self.finish()
        totals = self.ranks.gathered(self.trainee.total_loss())
        mean = math.fsum(totals) / len(totals) / max(1, self.step - self.reported)
        self.reported = self.step
        worth = yardstick.of(self.objective.loss, self.trainee) if self.ranks.first else {}
        return {"loss": number(mean), **worth}

    def state_dict(self) -> dict[str, Any]:
        """Everything; on several ranks, all of them must ask."""
        self.finish()
        trainee, device = self.trainee.state_dict(), self.ranks.device
        own = {"total": trainee["total"].cpu(), "dice": torch.get_rng_state()}
        if device.type == "cuda":
            own["device_dice"] = torch.cuda.get_rng_state(device)
        return {
            "step": self.step,
            "reported": self.reported,
            "wall_s": self.wall_s,
            "trainee": trainee,
            "batches": self._batches.generator.get_state(),
            "ranks": self.ranks.gathered(own),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        own = state["ranks"][self.ranks.rank]
        self.trainee.load_state_dict({**state["trainee"], "total": own["total"]})
        self._batches.generator.set_state(state["batches"].cpu())
        torch.set_rng_state(own["dice"].cpu())
        if self.ranks.device.type == "cuda":
            torch.cuda.set_rng_state(own["device_dice"].cpu(), self.ranks.device)
        self.step, self.reported, self.wall_s = state["step"], state["reported"], state["wall_s"]


def _is_finite(trainee: Mapping[str, Any]) -> bool:
    """Whether the weights of a trainee's state and their average are numbers."""
    averages = (average["weights"] for average in trainee["belay"]["averages"].values())
    weights = [w for some in (trainee["network"], *averages) for w in some.values()]
    return bool(arithmetic.finite([w for w in weights if w.is_floating_point()]))


def _measured(asked: Asked, images: Tensor, yardstick: Yardstick, ranks: Ranks) -> Plan:
    """The plan that fits the time, from the speed of a throwaway copy."""
    assert asked.budget is not None
    assert asked.budget.seconds is not None
    copy = Run(Plan.of(asked.preset, lr=asked.lr), asked.seed, images, asked.how, ranks)

    def seconds(steps: int) -> float:
        begin = time.perf_counter()
        for _ in range(steps):
            copy.advance()
        copy.finish()
        return ranks.firsts(lambda: time.perf_counter() - begin) / steps

    seconds(WARM + 2)  # the capture is among them
    step_s = seconds(min(300, max(2, math.ceil(MEASURE_S / seconds(2)))))
    copy.losses(yardstick)  # once to warm up
    begin = time.perf_counter()
    copy.losses(yardstick)
    copy.finish()
    report_s = ranks.firsts(lambda: time.perf_counter() - begin)
    return Plan.within(asked.budget.seconds, Speed(step_s, report_s), asked.preset, lr=asked.lr, every=asked.every)


# The loop -------------------------------------------------------------------------------------------------------------


class Stop:
    """Notices SIGINT and SIGTERM, to stop after the step; a second one ends the process at once.

    Not so under torchrun, which passes signals on, perhaps twice, and itself ends what does not stop in time.
    """

    def __init__(self, *, once: bool) -> None:
        self.signal: int | None = None
        self._once = once
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            for which in (signal.SIGINT, signal.SIGTERM):
                self._before[which] = signal.signal(which, self._notice)
        return self

    def _notice(self, which: int, frame: FrameType | None) -> None:
        self.signal = which
        if self._once:
            self._restore()

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def __exit__(self, *exception: object) -> None:
        self._restore()


def _loop(run: Run, asked: Asked, folder: Folder, yardstick: Yardstick, console: Console) -> int:
    """Steps to the end, or to a signal."""
    plan, ranks = run.plan, run.ranks
    clock = time.perf_counter
    before, begin, saved = run.wall_s, clock(), clock()
    since, since_step = clock(), run.step  # the last report's end
    kept, warned = run.step, False  # the checkpoint's step
    bars = Progress(*COLUMNS, TimeRemainingColumn(), console=console)

    def report() -> None:
        nonlocal since, since_step, warned
        run.finish()
        speed = (run.step - since_step) * plan.batch / (clock() - since)
        found = run.losses(yardstick)
        run.wall_s = before + clock() - begin
        line = {
            "step": run.step,
            "images": run.step * plan.batch,
            "lr": number(plan.lr_scale(run.step) * plan.lane.actual_lr),
            **found,
            "images_per_s": number(speed),
            "wall_s": round(run.wall_s, 2),
        }
        if ranks.first:
            folder.report(line)
            bars.console.print(_told(line, plan), highlight=False, markup=False, soft_wrap=True)
        if found["loss"] is None:
            refuse_nan("the loss is no number")
            if not warned:
                bars.console.print("the loss is no number any more; going on, as --keep-going says", highlight=False)
            warned = True
        since, since_step = clock(), run.step

    def refuse_nan(what: str) -> None:
        if not asked.keep_going:
            left = f"the checkpoint of step {kept:,} is kept" if kept else "there is no checkpoint yet"
            raise LabError(
                f"{what} after step {run.step:,}, and {left}; try a lower --lr with another --out, or let this one "
                "go on with --keep-going"
            )

    def save() -> None:
        nonlocal saved, kept
        run.wall_s = before + clock() - begin
        state = run.state_dict()
        if not all(math.isfinite(float(own["total"])) for own in state["ranks"]):
            refuse_nan("the loss is no number")
        if ranks.any(not _is_finite(state["trainee"]))[0]:  # of a last step, whose own loss was still a number
            refuse_nan("weights are no numbers")
        if ranks.first:
            folder.save(state)
        saved, kept = clock(), run.step

    with bars, Stop(once=ranks.count == 1) as stop:
        bar = bars.add_task(plan.preset.name, total=plan.steps, completed=run.step)
        while run.step < plan.steps:
            run.advance()
            bars.update(bar, completed=run.step)
            last = run.step == plan.steps
            if last or run.step % plan.every == 0:
                report()
            stopping = due = False
            if ranks.count == 1 or run.step % AGREE == 0:
                stopping, due = ranks.any(stop.signal is not None, clock() - saved > asked.checkpoint_s)
            if last or stopping or due:
                save()
            if stopping and not last:
                break
    if run.step == plan.steps:
        return 0
    console.print(f"stopped after step {run.step:,} of {plan.steps:,}; the same command goes on", highlight=False)
    return 128 + (stop.signal or signal.SIGTERM)  # as shells report it


def _told(line: Record, plan: Plan) -> str:
    """A report for a person."""

    def loss(value: float | None) -> str:
        return "nan" if value is None else f"{value:.4g}"

    worth = "  ".join(f"{w} {loss(line[w]['train'])} / {loss(line[w]['test'])}" for w in ("w1", "w2"))
    speed = f"{line['images_per_s']:,.0f} images/s"
    return f"step {line['step']:,} of {plan.steps:,}  loss {loss(line['loss'])}  train / test: {worth}  {speed}"


def _picture(run: Run, how: How, folder: Folder, console: Console) -> None:
    """Some images of the average."""
    with console.status("making images"):
        studio = Studio(run.objective, run.ranks.device, how)
        studio.network.load_state_dict(run.trainee.belay.average_state_dict())
        write_bytes(folder.samples, png(studio.make(GRID * GRID), GRID))
    told = f"{folder.samples} shows images of the average; torchbelay sample and fid make more"
    console.print(told, highlight=False, markup=False, soft_wrap=True)
