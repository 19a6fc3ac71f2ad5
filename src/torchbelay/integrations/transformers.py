"""Transformers: an average in `Trainer`, which evaluates it, saves it as the model, and resumes with the weights.

A Trainer makes its optimizer in `train()`, loads a checkpoint before it calls the first callback, and tells callbacks
neither which Trainer calls them nor the checkpoint. A callback alone would come too late for a resume. So `attach()`
puts a class before that of the Trainer, which adds to five of its methods (`_Averaging`). All else is in the callback.

In the folder `checkpoint-<n>`, `model.safetensors` is the average, and `optimizer.pt` holds the average as Belay keeps
it, and the weights w1, from which training goes on.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast
from weakref import WeakSet, ref

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import Trainer, TrainerCallback

from torchbelay.belay import Belay
from torchbelay.belay.optimizer_state import UnfitError
from torchbelay.belay.optimizers import unwrapped
from torchbelay.belay.options import OptionArguments, Options
from torchbelay.belay.rules import Rule, as_rule
from torchbelay.belay.signals import signals_held
from torchbelay.physics.method import Method
from torchbelay.physics.warnings import warn

_CALLBACK = "_torchbelay_callback"  # the attribute of a Trainer that holds its BelayCallback
_OF_BELAY = ("spectators", "replace")  # arguments of Belay that are not options
_OWN_STEPS = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
_HOW = "write trainer = Trainer(...), then attach(trainer, method)"


def attach(trainer: Trainer, method: Method | Rule, *, export: bool = True, **options: Any) -> "BelayCallback":
    """Let a Trainer average its weights, evaluate the average, save it as the model, and resume with it.

    Args:
        trainer: a `transformers.Trainer`, or one of a subclass, that has not begun to train.
        method: as for `torchbelay.Belay`.
        export: let what leaves training be the average: checkpoints, `save_model()`, pushes to the Hub, the best model
            that is loaded at the end, and the model after `train()`. With False all of them are the weights, and only
            evaluations and predictions have the average.
        **options: all other arguments of `torchbelay.Belay`, as `spectators`, `start` or `buffers`.

    Call it before `train()`. The Belay is `.belay` of what it returns, from the moment at which `train()` has prepared
    the optimizer. Its numbers are in the training logs, for every reporter.

    >>> import torch, tempfile
    >>> from torchbelay import methods
    >>> from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments
    >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=8))
    >>> data = [{"input_ids": x, "labels": x} for x in torch.randint(11, (8, 8))]
    >>> args = TrainingArguments(
    ...     tempfile.mkdtemp(), max_steps=3, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no"
    ... )
    >>> trainer = Trainer(model, args, train_dataset=data, eval_dataset=data)
    >>> callback = attach(trainer, methods.ema(0.999))
    >>> result = trainer.train()
    {...}
    >>> callback.belay.step
    3
    """
    return BelayCallback(method, export=export, **options).attach(trainer)


class BelayCallback(TrainerCallback):  # type: ignore[misc]  # Transformers has no types
    """What `attach()` adds to a Trainer: the averages of its model, and what it does with them.

    It needs more than callbacks are given, so it cannot be one of `callbacks=[...]`: call `.attach(trainer)`, or
    `attach(trainer, method, ...)`, which makes it.

    The model holds the average from an evaluation until the next step, and, with `export`, after `train()`. The next
    `train()` goes on from the weights; if the model was written to meanwhile, from what it holds. So does the `train()`
    of another Trainer. An exception in `train()` gives the model its weights back.
    """

    def __init__(self, method: Method | Rule, *, export: bool = True, **options: Any) -> None:
        if not isinstance(export, bool):
            raise TypeError(f"export={export!r} is neither True nor False")
        if "save_with_optimizer" in options:
            raise TypeError(
                "save_with_optimizer is always True with a Trainer, which saves the optimizer; leave it out"
            )
        as_rule(method)
        Options.given(cast(OptionArguments, {k: v for k, v in options.items() if k not in _OF_BELAY}))
        self._method, self._export, self._options = method, export, options
        self._belay: Belay | None = None
        self._follows: tuple[nn.Module, Optimizer] | None = None
        self._attached = False
        self._entered: list[int] = []  # versions of the parameters since they hold the average

    @property
    def belay(self) -> Belay:
        """The Belay of the model that is trained, or was trained last."""
        if self._belay is None:
            raise RuntimeError("there is no Belay yet: train() makes it when it has prepared the optimizer")
        return self._belay

    def attach(self, trainer: Trainer) -> "BelayCallback":
        """Let this Trainer use it; return it."""
        _check(trainer, self._export)
        if self._attached:
            raise ValueError("this BelayCallback has a Trainer already; make one for each Trainer")
        kind = type(trainer)
        trainer.__class__ = type(kind.__name__, (_Averaging, kind), {"__module__": kind.__module__})
        setattr(trainer, _CALLBACK, self)
        trainer.callback_handler.callbacks.insert(0, self)  # before the reporters, which it gives numbers
        self._attached = True
        return self

    # What the Trainer's methods call -------------------------------------------------------------------------------

    def _prepare(self, model: nn.Module, optimizer: Any) -> None:
        """Make the Belay of a model and its prepared optimizer, unless it is the one that exists."""
        inner = unwrapped(optimizer)
        if self._follows is not None and self._follows[0] is model and self._follows[1] is inner:
            return
        if self._belay is not None:  # that of another model, which `model_init` made for an earlier train()
            self.use_weights()
            self._belay.detach()
        parameters = {id(p) for p in model.parameters()}
        for other in [each for each in _finished if each is not self and each._holds_average_in(parameters)]:
            other._retire()
        belay = Belay(model, optimizer, self._method, save_with_optimizer=True, **self._options)
        belay._parts.weights_ride = self._export
        assert isinstance(inner, Optimizer)
        _add_modes(inner, ref(self))
        self._belay, self._follows = belay, (model, inner)

    def use_average(self) -> None:
        """Let the model hold the average, until `use_weights()`.

        This is no block of `averaged()`: such a block ends when nothing refers to it any more, and the model that a
        function returns after training would change.
        """
        if self._belay is None or self._follows is None:
            return
        with self._belay._parts.member.lock:
            if (swap := self._belay._swap()) is not None:
                with signals_held():
                    self._belay._parts.member.enter(swap, _UNTIL_IT_TRAINS)
                self._entered = self._versions()

    def use_weights(self, holder: object = None) -> None:
        """Let the model hold its weights; with a holder, unless another one, as a block, needs the average there."""
        if self._belay is not None and self._belay._parts.member.swap is not None:
            with self._belay._parts.member.lock, signals_held():
                self._belay._parts.member.leave(holder)

    def _continue(self) -> None:
        """Let the model hold its weights, to train them; what was written to it after `train()` are its weights now."""
        _finished.discard(self)
        if self._belay is None or self._belay._parts.member.swap is None or self._entered == self._versions():
            self.use_weights()
            return
        self._keep_what_it_holds()
        self._belay.reset()
        warn("the model was written to after train(): training goes on from what it holds, where the average begins")

    def _held(self) -> list[Tensor]:
        """Return the parameters that hold the average; FSDP2 may show others in their place."""
        swap = None if self._belay is None else self._belay._parts.member.swap
        return [] if swap is None else swap.parameters

    def _versions(self) -> list[int]:
        return [p._version for p in self._held()]

    def _holds_average_in(self, parameters: set[int]) -> bool:
        return any(id(p) in parameters for p in self._held())

    def _retire(self) -> None:
        """Leave the model as it is to the callback of another Trainer, which trains it from now on."""
        self._keep_what_it_holds()
        self.belay.detach()
        self._follows = None  # another train() of this Trainer begins an average of its own
        _finished.discard(self)

    @torch.no_grad()
    def _keep_what_it_holds(self) -> None:
        """Let what the model holds in place of its weights be its weights."""
        assert self._follows is not None
        held = [(t, t.detach().clone()) for t in (*self._held(), *self._follows[0].buffers())]
        self.use_weights()
        for tensor, value in held:
            tensor.copy_(value)

    @contextmanager
    def _exporting(self) -> Iterator[None]:
        """Let the model hold what is to be saved inside the block, and afterwards what it held before."""
        if self._belay is None or self._follows is None:
            yield
        elif self._export:
            with self._belay.averaged():
                yield
        else:
            self.use_weights(_UNTIL_IT_TRAINS)
            with self._belay._outside():
                yield

    @contextmanager
    def _loading(self, checkpoint: Any) -> Iterator[None]:
        """Warn if nothing was loaded into the optimizer in the block: then the average was not loaded either."""
        assert self._follows is not None
        seen: list[Optimizer] = []
        hook = self._follows[1].register_load_state_dict_post_hook(seen.append)
        try:
            yield
        except UnfitError as error:
            how = "attach() as before, and call callback.belay.change(method) in on_train_begin of a further callback"
            raise ValueError(f"{error}. Here: {how}") from error
        finally:
            hook.remove()
        if not seen:
            warn(
                f"resume_from_checkpoint={str(checkpoint)!r} has no state of the optimizer, which carries the average: "
                "training goes on from the weights of the model in it, and the average begins there. Save with "
                "save_only_model=False"
            )

    def _begin_again(self) -> None:
        """Begin the averages at the weights that were loaded."""
        if self._belay is not None:
            self._belay.reset()

    # What Trainer tells callbacks ----------------------------------------------------------------------------------

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse to be one of `callbacks=[...]`."""
        raise ValueError(
            "BelayCallback cannot be one of callbacks=[...]: a Trainer does not tell them when it resumes or saves; "
            f"{_HOW}"
        )

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make the Belay, unless a resume has needed it before."""
        if not self._attached:
            raise RuntimeError(f"this BelayCallback was added to a Trainer and not attached; {_HOW}")
        self._prepare(kwargs["model"], kwargs["optimizer"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let the model hold its weights, also if a `training_step` of a subclass does not call `optimizer.train()`."""
        self.use_weights()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add numbers to the logs of training; those of an evaluation are what `evaluate()` returns."""
        logs = kwargs["logs"]
        if "loss" in logs and self._belay is not None:
            logs.update(self._belay.stats(prefix="belay/"))
            if state.log_history:
                state.log_history[-1].update(logs)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Without `export`, give the model its weights back."""
        if not self._export:
            self.use_weights(_UNTIL_IT_TRAINS)

    on_predict = on_evaluate

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let the trained model be the average."""
        if self._export:
            self.use_average()
            _finished.add(self)


_UNTIL_IT_TRAINS = object()  # the holder of an average that stays in the model
_finished: WeakSet[BelayCallback] = WeakSet()  # whose models hold the average since their `train()`


class _Averaging(Trainer):  # type: ignore[misc]  # Transformers has no types
    """What comes before a Trainer's own class: methods whose moments no callback is told."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train from the weights: the model may hold the average, and a checkpoint is loaded into it soon."""
        callback: BelayCallback = getattr(self, _CALLBACK)
        callback._continue()
        try:
            return super().train(*args, **kwargs)
        except BaseException:
            callback.use_weights()
            raise

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        """Make the Belay first: optimizer and model are prepared, and the average is loaded with the optimizer."""
        callback: BelayCallback = getattr(self, _CALLBACK)
        callback._prepare(self.model, self.optimizer)
        with callback._loading(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_best_model(self) -> None:
        """Load it as the weights, at which the average begins again: else `evaluate()` would evaluate the last one."""
        callback: BelayCallback = getattr(self, _CALLBACK)
        callback.use_weights()
        super()._load_best_model()
        if os.path.isdir(self.state.best_model_checkpoint):  # else nothing was loaded, with a warning
            callback._begin_again()

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Save the average: checkpoints and pushes to the Hub call this too."""
        with getattr(self, _CALLBACK)._exporting():
            super().save_model(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, *args: Any, **kwargs: Any) -> None:
        """Save the optimizer; under FSDP, a Trainer saves here also the model from which it resumes."""
        with getattr(self, _CALLBACK)._exporting():
            super()._save_optimizer_and_scheduler(*args, **kwargs)


def _check(trainer: Any, export: bool) -> None:
    """Refuse a Trainer that cannot be averaged, before anything has changed."""
    if not isinstance(trainer, Trainer):
        raise TypeError(f"trainer={type(trainer).__name__} is not a transformers.Trainer")
    if isinstance(trainer, _Averaging):
        raise ValueError(
            "trainer has a BelayCallback already; give further averages to that one, as spectators={'short': ...}"
        )
    state = trainer.accelerator.state
    if state.distributed_type in _OWN_STEPS or getattr(trainer, "is_deepspeed_enabled", False):
        raise ValueError(
            "trainer uses DeepSpeed or Megatron-LM, which keep flat pieces of the weights and step without torch's "
            "hooks; use FSDP2 (fsdp_config={'version': 2}) or DDP"
        )
    if trainer.is_fsdp_enabled and getattr(state.fsdp_plugin, "fsdp_version", 1) != 2:
        raise ValueError(
            "trainer uses FSDP1, which keeps flat pieces of the weights, of which no average can be evaluated or "
            "saved; give fsdp_config={'version': 2}"
        )
    if trainer.is_in_train:
        raise RuntimeError("attach() inside train(): call it before")
    if trainer.args.load_best_model_at_end and not export:
        raise ValueError(
            "export=False does not go with load_best_model_at_end=True: metrics are those of the average, and the "
            "weights would be loaded; leave export out, or set load_best_model_at_end=False"
        )


def _add_modes(optimizer: Optimizer, callback: "ref[BelayCallback]") -> None:
    """Give an optimizer `eval()` and `train()`, which a Trainer calls before it evaluates and trains.

    Optimizers that have them already, as those of schedulefree, are called too: their own point is the weights.
    """

    def mode(name: str, own: Callable[[], Any] | None) -> Callable[[], None]:
        def switch() -> None:
            found = callback()
            if found is not None and (own is not None or name == "train"):
                found.use_weights()
            if own is not None:
                own()
            if found is not None and name == "eval":
                found.use_average()

        return switch

    for name in ("eval", "train"):
        setattr(optimizer, name, mode(name, getattr(optimizer, name, None)))
