"""Train a score model: steps, reports, checkpoints. After any interruption the same command continues bit for bit."""

import math
import signal
import time
from contextlib import ExitStack

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from torchbelay.lab.part import LabError, Record
from torchbelay.lab.records import rounded, write_bytes
from torchbelay.lab.score import data
from torchbelay.lab.score.experiment import GRID, TRIPLES, ImageSampler, encode_png
from torchbelay.lab.versions import versions

from .budget import Plan, Speed
from .folder import Folder
from .learner import WARM, deterministic
from .ranks import Ranks, join_ranks, process_count
from .request import TrainingRequest, find_plan
from .signals import StopSignal
from .training_run import TrainingRun, is_finite
from .validation import Validation

AGREE = 20  # steps between two moments at which several processes agree whether to stop
MEASURE_S = 1.0  # for how long the speed is measured
COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())


def train(request: TrainingRequest, console: Console) -> int:
    """Train, or continue a training. Return the exit status: 0, or 128 plus the number of the stopping signal."""
    folder, preset = Folder(request.out), request.preset
    if preset.batch % (count := process_count()):  # before any communication: every process finds the same
        raise LabError(f"a batch of {preset.batch} cannot be shared by {count} processes; start another number")
    with join_ranks(request.device) as ranks, deterministic(), ExitStack() as stack:
        console = console if ranks.first else Console(quiet=True)
        ranks.from_first(lambda: stack.enter_context(folder.locked()))
        options = request.options(ranks)
        plan, done = ranks.from_first(lambda: find_plan(request, options, folder))
        if plan is not None and done == plan.steps and folder.samples.exists():
            console.print(f"{folder.path} is finished: {done:,} steps", highlight=False, markup=False, soft_wrap=True)
            return 0
        images = ranks.first_then_others(lambda: data.load(preset.dataset, request.data))
        on_device = images.train.to(ranks.device)
        validation = Validation.make(images, preset.objective, ranks.device, count=TRIPLES)
        if plan is None:
            assert request.budget is not None
            with console.status(f"measuring how many steps fit into {request.budget.text}"):  # a minute on a CPU
                plan = _measure_plan(request, on_device, validation, ranks)
        if ranks.first:
            folder.begin({**options, "resolved": plan.describe(), "versions": versions(ranks.device)})
        run = TrainingRun(plan, request.seed, on_device, request.mode, ranks)
        if done and (state := folder.load(ranks.device)) is not None:
            run.load_state_dict(state)
        if ranks.first:
            folder.tidy()
            folder.cut_reports(run.step)
        status = TrainingLoop(run, request, folder, validation, console).run_to_end()
        if status == 0 and ranks.first:
            _write_samples(run, request, folder, console)
        return status


def _measure_plan(request: TrainingRequest, images: Tensor, validation: Validation, ranks: Ranks) -> Plan:
    """Return the plan that fits the time, from the speed of a throwaway copy."""
    assert request.budget is not None
    assert request.budget.seconds is not None
    copy = TrainingRun(Plan.make(request.preset, lr=request.lr), request.seed, images, request.mode, ranks)

    def seconds(steps: int) -> float:
        begin = time.perf_counter()
        for _ in range(steps):
            copy.advance()
        copy.finish()
        return ranks.from_first(lambda: time.perf_counter() - begin) / steps

    seconds(WARM + 2)  # including the capture
    step_s = seconds(min(300, max(2, math.ceil(MEASURE_S / seconds(2)))))
    copy.losses(validation)  # once to warm up
    begin = time.perf_counter()
    copy.losses(validation)
    copy.finish()
    report_s = ranks.from_first(lambda: time.perf_counter() - begin)
    speed = Speed(step_s, report_s)
    return Plan.fit_time(request.budget.seconds, speed, request.preset, lr=request.lr, every=request.every)


class TrainingLoop:
    """The steps, reports and checkpoints of a training, up to its end or to a signal."""

    def __init__(
        self, run: TrainingRun, request: TrainingRequest, folder: Folder, validation: Validation, console: Console
    ) -> None:
        self.run, self.request, self.folder, self.validation, self.console = run, request, folder, validation, console
        self._bars = Progress(*COLUMNS, TimeRemainingColumn(), console=console)
        self._begin = time.perf_counter() - run.wall_s
        self._reported = time.perf_counter(), run.step  # the end of the last report
        self._saved = time.perf_counter(), run.step  # the last checkpoint
        self._warned = False

    def run_to_end(self) -> int:
        """Take all steps that are left. Return the exit status."""
        run, plan, ranks = self.run, self.run.plan, self.run.ranks
        with self._bars, StopSignal(once=ranks.count == 1) as stop:
            bar = self._bars.add_task(plan.preset.name, total=plan.steps, completed=run.step)
            while run.step < plan.steps:
                run.advance()
                self._bars.update(bar, completed=run.step)
                last = run.step == plan.steps
                if last or run.step % plan.every == 0:
                    self._report()
                stopping = due = False
                if ranks.count == 1 or run.step % AGREE == 0:
                    old = time.perf_counter() - self._saved[0] > self.request.checkpoint_s
                    stopping, due = ranks.any(stop.signal is not None, old)
                if last or stopping or due:
                    self._save()
                if stopping and not last:
                    break
        if run.step == plan.steps:
            return 0
        text = f"stopped after step {run.step:,} of {plan.steps:,}; the same command goes on"
        self.console.print(text, highlight=False)
        return 128 + (stop.signal or signal.SIGTERM)  # as shells report it

    def _report(self) -> None:
        """Measure the losses, and write and print a report."""
        run, plan = self.run, self.run.plan
        run.finish()
        since, since_step = self._reported
        speed = (run.step - since_step) * plan.batch / (time.perf_counter() - since)
        losses = run.losses(self.validation)
        run.wall_s = time.perf_counter() - self._begin
        report = {
            "step": run.step,
            "images": run.step * plan.batch,
            "lr": rounded(plan.lr_scale(run.step) * plan.lane.actual_lr),
            **losses,
            "images_per_s": rounded(speed),
            "wall_s": round(run.wall_s, 2),
        }
        if run.ranks.first:
            self.folder.report(report)
            self._bars.console.print(_report_text(report, plan), highlight=False, markup=False, soft_wrap=True)
        if losses["loss"] is None:
            self._refuse_nan("the loss is not finite")
            if not self._warned:
                self._bars.console.print(
                    "the loss is not finite any more; going on, as --keep-going says", highlight=False
                )
            self._warned = True
        self._reported = time.perf_counter(), run.step

    def _save(self) -> None:
        """Write a checkpoint; refuse one that is not finite."""
        run = self.run
        run.wall_s = time.perf_counter() - self._begin
        state = run.state_dict()
        if not all(math.isfinite(float(own["total"])) for own in state["ranks"]):
            self._refuse_nan("the loss is not finite")
        if run.ranks.any(not is_finite(state["trainee"]))[0]:  # the last step can spoil weights after a finite loss
            self._refuse_nan("weights are not finite")
        if run.ranks.first:
            self.folder.save(state)
        self._saved = time.perf_counter(), run.step

    def _refuse_nan(self, what: str) -> None:
        """Raise an error that names the last good checkpoint, unless --keep-going was given."""
        if not self.request.keep_going:
            saved = self._saved[1]
            left = f"the checkpoint of step {saved:,} is kept" if saved else "there is no checkpoint yet"
            raise LabError(
                f"{what} after step {self.run.step:,}, and {left}; try a lower --lr with another --out, or let this "
                "one go on with --keep-going"
            )


def _report_text(report: Record, plan: Plan) -> str:
    """Return a report as one line of text."""

    def text(loss: float | None) -> str:
        return "nan" if loss is None else f"{loss:.4g}"

    validated = "  ".join(f"{w} {text(report[w]['train'])} / {text(report[w]['test'])}" for w in ("w1", "w2"))
    speed = f"{report['images_per_s']:,.0f} images/s"
    return f"step {report['step']:,} of {plan.steps:,}  loss {text(report['loss'])}  train / test: {validated}  {speed}"


def _write_samples(run: TrainingRun, request: TrainingRequest, folder: Folder, console: Console) -> None:
    """Write a grid of images made with the average."""
    with console.status("making images"):
        sampler = ImageSampler(run.objective, run.ranks.device, request.mode)
        sampler.network.load_state_dict(run.learner.belay.average_state_dict())
        write_bytes(folder.samples, encode_png(sampler.make(GRID * GRID), GRID))
    text = f"{folder.samples} shows images of the average; torchbelay sample and fid make more"
    console.print(text, highlight=False, markup=False, soft_wrap=True)
