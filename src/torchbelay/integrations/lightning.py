"""`BelayCallback`: a Belay for Lightning's Trainer, which validates, checkpoints and finishes with the average."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal, Unpack, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from torchbelay._version import __version__
from torchbelay.belay import Belay, shard
from torchbelay.belay.checks import without_strict
from torchbelay.belay.options import OptionArguments, Options
from torchbelay.belay.rules import Rule, as_rule
from torchbelay.physics import arguments
from torchbelay.physics.method import Method
from torchbelay.physics.warnings import warn

_AVERAGES, _WEIGHTS = "torchbelay", "current_model_state"  # keys of a checkpoint; the second is Lightning's own


class BelayArguments(OptionArguments, total=False):
    """The keyword arguments that the callback passes on to `Belay`."""

    spectators: Mapping[str, Method | Rule] | None


class BelayCallback(Callback):
    """Average the weights while Lightning trains; validation, checkpoints and the finished model are the average.

    A checkpoint's `state_dict` is the average, so that `test(ckpt_path="best")`, `load_from_checkpoint` and any program
    that knows nothing of torchbelay get the weights that were validated. The weights that are trained are beside it, as
    `current_model_state`, and the averages as `torchbelay`: `fit(ckpt_path=…)` goes on bit for bit.

    Args:
        method: a method of `torchbelay.methods`, a Spring, or a function (name, parameter) -> method, as for `Belay`.
        optimizer: the optimizer whose steps move the average, by its position in what `configure_optimizers` returns;
            several positions; or "all".
        validate: the average that the model holds during the validations of `fit`: "average", or a spectator's name.
            None: the weights.
        checkpoint: the average that is a checkpoint's `state_dict`. None: the weights.
        finish: the average that the model holds when `fit` returns. None: the weights.
        log_every_n_steps: log `belay.stats()` as "belay/step", "belay/tension", … each time that the trainer's count of
            optimizer steps has passed a multiple of N. None: never.
        **options: `spectators`, and the options of `Belay`: `dtype`, `buffers`, `every`, `start`, …

    `callback.belay` is the Belay of the last `fit`. Give several callbacks if optimizers need different methods.

    >>> import torchbelay as tb
    >>> callback = BelayCallback(tb.methods.ema(0.999))
    >>> trainer = Trainer(callbacks=[callback], accelerator="cpu", logger=False, enable_checkpointing=False)
    >>> callback.state_key
    "BelayCallback{'optimizer': 0}"
    """

    def __init__(
        self,
        method: Method | Rule,
        *,
        optimizer: int | Sequence[int] | Literal["all"] = 0,
        validate: str | None = "average",
        checkpoint: str | None = "average",
        finish: str | None = "average",
        log_every_n_steps: int | None = None,
        **options: Unpack[BelayArguments],
    ) -> None:
        super().__init__()
        self._method, self._options = method, options
        self._optimizer: int | list[int] | Literal["all"] = _positions(optimizer)
        self._validate, self._checkpoint, self._finish = validate, checkpoint, finish
        self._log_every = log_every_n_steps
        self._check_arguments()
        self.belay: Belay | None = None
        self._block = ExitStack()  # the block `averaged()` of a validation
        self._state: Mapping[str, Any] | None = None  # of a checkpoint, until the optimizers hold what it averages
        self._weights: dict[str, Any] | None = None  # those of the end of `fit`, if the model holds the average since
        self._logged = 0

    def _check_arguments(self) -> None:
        """Refuse what `Belay` would refuse when the optimizers have been made."""
        spectators = self._options.get("spectators") or {}
        for rule in (self._method, *spectators.values()):
            as_rule(rule)
        # A device is looked at when it is used: processes that are forked must not find CUDA at work.
        Options.given(
            cast(OptionArguments, {k: v for k, v in self._options.items() if k not in ("spectators", "device")})
        )
        places = {"validate": self._validate, "checkpoint": self._checkpoint, "finish": self._finish}
        for name, chosen in places.items():
            if chosen not in (None, "average", *spectators):
                known = ", ".join(map(repr, ("average", *spectators)))
                raise ValueError(f"{name}={chosen!r} is no average; choose one of {known}, or None for the weights")
        if self._log_every is not None:
            arguments.whole("log_every_n_steps", self._log_every, low=1)

    # From the beginning of a fit to its end --------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the last fit."""
        if stage == TrainerFn.FITTING:
            self._block.close()
            if self.belay is not None:
                self.belay.detach()
            self.belay = self._state = self._weights = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach to the optimizers, which have just been made of the weights on their device."""
        self.belay = Belay(pl_module, self._chosen_optimizers(trainer), self._method, **self._options)
        self._logged = trainer.global_step
        try:
            self._load_state()
        except ValueError:
            held = {id(p) for each in trainer.optimizers for group in each.param_groups for p in group["params"]}
            if all(id(p) in held for p in pl_module.parameters()):
                raise  # else a later callback may add parameters (BaseFinetuning): tried again before the first step
        if self._log_every is not None and not trainer.loggers:
            _warn(trainer, f"log_every_n_steps={self._log_every} has no effect: the Trainer has no logger")
        saving = trainer.checkpoint_callbacks
        if self._checkpoint is not None and any(getattr(each, "save_weights_only", False) for each in saving):
            _warn(
                trainer,
                "save_weights_only=True: Lightning asks no callback when it saves these checkpoints, so they hold the "
                "weights and not the average; save whole checkpoints, or call callback.belay.save_average(path)",
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go on from a checkpoint with parameters that the optimizers did not hold when the fit began."""
        self._load_state()

    def _load_state(self) -> None:
        """Give the Belay the averages of a checkpoint; if they do not fit, nothing changes."""
        if self.belay is None or not self._state:
            return
        self._take(self.belay, self._state)
        self._state = None

    @staticmethod
    def _take(belay: Belay, state: Mapping[str, Any]) -> None:
        """Load a state; an error has the cures that a user of the callback can reach."""
        try:
            belay.load_state_dict(state)
        except ValueError as error:
            raise ValueError(
                f"{without_strict(error)}. Here: make BelayCallback as it was, and call callback.belay.change(method) "
                f"in on_train_start of your module, or remove {_AVERAGES!r} from the checkpoint for a new average"
            ) from error

    def _chosen_optimizers(self, trainer: Trainer) -> list[Optimizer]:
        """Return the optimizers that the callback was given by position."""
        made = trainer.optimizers
        chosen = range(len(made)) if self._optimizer == "all" else self._optimizer
        positions = [chosen] if isinstance(chosen, int) else chosen
        for position in positions:
            if position not in range(len(made)):
                raise ValueError(
                    f"optimizer={self._optimizer!r} asks for position {position}, and configure_optimizers() returned "
                    f"{len(made)} optimizer(s); count from 0, or give 'all'"
                )
        return [made[position] for position in positions]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log numbers of the average, if asked to."""
        if self._log_every is None or self.belay is None or not trainer.loggers:
            return
        if trainer.global_step // self._log_every > self._logged // self._log_every:
            self._logged = trainer.global_step
            numbers = self.belay.stats("belay/")
            for logger in trainer.loggers:  # at the step that Lightning gives its own numbers
                logger.log_metrics(numbers, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the model hold the average, also in the sanity check; outside of `fit` it is used as it is."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._enter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the model its weights back: after its own `on_validation_epoch_end`, before checkpoints are saved."""
        self._block.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Give the model its weights back, whatever stopped the validation."""
        self._block.close()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the model hold the average for good. The last checkpoints of the fit have been saved before."""
        if self.belay is None:
            return
        self._load_state()
        if self._finish is not None:
            self._weights = _copied(trainer)  # for a checkpoint that is saved from now on
            self.belay.copy_to_model(self._finish)
        self.belay.detach()

    def _enter(self) -> None:
        self._load_state()
        if self.belay is not None and self._validate is not None:
            self._block.enter_context(self.belay.averaged(self._validate))

    # Checkpoints ---------------------------------------------------------------------------------------------------

    @property
    def state_key(self) -> str:
        """The name of this callback's state in a checkpoint; callbacks of different optimizers have different ones."""
        return self._generate_state_key(optimizer=self._optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return the version: with a state, Lightning warns if a training is resumed without this callback."""
        return {"version": __version__}

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Make the average the checkpoint's `state_dict`, with weights and averages beside it."""
        ours = _all_of(trainer)
        if self is not ours[0]:  # the first of several does it for all
            return
        if all(each.belay is None for each in ours):
            if trainer.state.fn == TrainerFn.FITTING:  # a tuner's, which is loaded again before the optimizers step
                checkpoint[_AVERAGES] = {each.state_key: each._state or {} for each in ours}
            return
        for each in ours:
            each._load_state()
        place = _Place(trainer, pl_module, checkpoint)
        if place.is_written:
            _save_model_states(trainer, ours, place)
            states = {each.state_key: each.belay.state_dict() for each in ours if each.belay is not None}
            checkpoint[_AVERAGES] = {key: place.put(state) for key, state in states.items()}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Give the model the weights that were trained, and the Belay its averages, if `fit` goes on from here."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        place = _Place(trainer, pl_module, checkpoint)
        if self is _all_of(trainer)[0] and _WEIGHTS in checkpoint:
            place.load_weights(checkpoint[_WEIGHTS])
        state = checkpoint.get(_AVERAGES, {}).get(self.state_key)
        if state is None:
            _warn(
                trainer,
                f"the checkpoint has no average of {self.state_key}: training goes on with its weights, and a new "
                "average begins at them",
            )
        if self.belay is None:
            self._state = state  # until there are optimizers
        elif state:
            self._take(self.belay, place.get(state, self.belay.state_dict))
        else:
            self.belay.reset()


def _save_model_states(trainer: Trainer, ours: list[BelayCallback], place: "_Place") -> None:
    """Give a checkpoint the average as its `state_dict`, and the weights."""
    checkpoint = place.checkpoint
    kept = [each._weights for each in ours if each._weights is not None]
    if kept:  # `fit` is over: the model is as it was left, whoever changed it since
        checkpoint[_WEIGHTS] = place.put(kept[0])
        return
    with ExitStack() as stack:
        belays = [each.belay for each in ours if each.belay is not None]
        if any(belay._parts.member.settled_swap() is not None for belay in belays):  # a validation, or a user's block
            for belay in belays:
                stack.enter_context(belay._outside())
            checkpoint["state_dict"] = _copied(trainer)
        weights = checkpoint["state_dict"]
        averages = [(each.belay, each._checkpoint) for each in ours]
        wanted = [(belay, name) for belay, name in averages if belay is not None and name is not None]
        if wanted:
            for belay, name in wanted:
                stack.enter_context(belay.averaged(name))
            checkpoint["state_dict"] = _copied(trainer)
            checkpoint[_WEIGHTS] = place.put(weights)


class _Place:
    """Where things are in a checkpoint: as they are in a file, or as shards in a directory.

    Of a directory, Lightning writes by torch.distributed.checkpoint the model's state and the optimizers' states alone.
    What else is sharded goes there as one more state of an optimizer, and in its place is the name that this gets.
    """

    def __init__(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.checkpoint, self._trainer, self._model = checkpoint, trainer, pl_module
        self._is_sharded = any(map(shard.is_sharded, pl_module.parameters()))
        states = checkpoint.get("state_dict", {}).values()
        self._is_directory = any(isinstance(t, Tensor) and shard.is_sharded(t) for t in states)

    @property
    def is_written(self) -> bool:
        """Whether this rank takes part in saving; with replicas the first one alone does."""
        return self._is_sharded or self._trainer.is_global_zero

    def put(self, state: Any) -> Any:
        """Return what a checkpoint gets at the place of a state: the state itself, or its name in the directory."""
        if not self._is_directory:
            return tree_map_only(Tensor, shard.gathered, state) if self._is_sharded else state
        others = self.checkpoint["optimizer_states"]
        others.append(state)
        return f"optimizer_{len(others) - 1}"

    def get(self, found: Any, like: Any) -> Any:
        """Return a state that `put` put here; `like` makes one of the same layout, to be filled."""
        if not isinstance(found, str):
            return found
        from torch.distributed.checkpoint.state_dict_loader import load

        state = {found: like()}
        load(state, checkpoint_id=self._trainer.strategy.broadcast(self._trainer.ckpt_path))
        return state[found]

    def load_weights(self, found: Any) -> None:
        """Give the model the weights of a checkpoint."""
        strict = self._model.strict_loading
        if not self._is_sharded:
            self._trainer.strategy.load_model_state_dict({"state_dict": found}, strict=strict)
            return
        from torch.distributed.checkpoint import state_dict as by_torch

        weights = self.get(found, lambda: by_torch.get_model_state_dict(self._model))
        options = by_torch.StateDictOptions(full_state_dict=weights is found, strict=strict)
        by_torch.set_model_state_dict(self._model, weights, options=options)


def _all_of(trainer: Trainer) -> list[BelayCallback]:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [each for each in callbacks if isinstance(each, BelayCallback)]


def _copied(trainer: Trainer) -> dict[str, Any]:
    """Return the model's state as the strategy saves it, with copies of its tensors in host memory."""
    state = trainer.strategy.lightning_module_state_dict()
    return {name: t.detach().to("cpu", copy=True) if isinstance(t, Tensor) else t for name, t in state.items()}


def _positions(optimizer: Any) -> int | list[int] | Literal["all"]:
    """Return the positions of optimizers, or "all"; refuse anything else."""
    several = [optimizer] if isinstance(optimizer, int) else optimizer
    if optimizer == "all":
        return "all"
    if isinstance(several, Sequence) and several and all(type(i) is int and i >= 0 for i in several):
        return optimizer if isinstance(optimizer, int) else list(several)
    raise ValueError(
        f"optimizer={optimizer!r} is no position; give that of an optimizer in what configure_optimizers() returns, as "
        "0, several, as [0, 1], or 'all'"
    )


def _warn(trainer: Trainer, message: str) -> None:
    """Warn once, whatever the number of ranks."""
    if trainer.is_global_zero:
        warn(message)
