"""Accelerate: an average of what `accelerator.prepare()` returned, which `save_state()` and `load_state()` carry."""

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from functools import wraps
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as load_parts
from torch.distributed.checkpoint.state_dict_saver import save as save_parts
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torchbelay.belay import Belay
from torchbelay.belay.rules import Rule
from torchbelay.physics.method import Method

_PREPARE = "call accelerator.prepare(model, optimizer) first, and give attach() what it returns"
_OWN_STEPS = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)

# How many Belays each accelerator has: the folders of sharded ones have numbers, in the order of the calls.
_attached: WeakKeyDictionary[Accelerator, int] = WeakKeyDictionary()


def attach(
    accelerator: Accelerator,
    model: nn.Module | Iterable[nn.Module],
    optimizer: Optimizer | Iterable[Optimizer] | None,
    method: Method | Rule,
    **options: Any,
) -> Belay:
    """Attach an average to a prepared model and optimizer; `save_state()` and `load_state()` include it from then on.

    Args:
        accelerator: the Accelerator that prepared them.
        model: what `accelerator.prepare()` returned for the model, or the module inside it.
        optimizer: what `accelerator.prepare()` returned for the optimizer, or several of them; None to step by hand.
        method: as for `torchbelay.Belay`.
        **options: all other arguments of `torchbelay.Belay`, as `spectators`, `start` or `buffers`.

    Call it after `prepare()`, which replaces the optimizer's parameters under FSDP2, and before `load_state()`. Batches
    that are only accumulated and steps that a GradScaler skips do not count.

    The state is one of the registered objects (`custom_checkpoint_<n>.pkl`), which the main process writes. If the
    weights are sharded, or replicas share the average (`shard`), each process has another part of it:
    torch.distributed.checkpoint writes all parts, to the folder `torchbelay_<n>` of the checkpoint.

    >>> import torch
    >>> from torchbelay import methods
    >>> accelerator = Accelerator(cpu=True)
    >>> model = nn.Linear(3, 1)
    >>> model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    >>> belay = attach(accelerator, model, optimizer, methods.ema(0.999))
    >>> for _ in range(10):
    ...     optimizer.zero_grad()
    ...     accelerator.backward(model(torch.ones(4, 3)).square().mean())
    ...     optimizer.step()
    >>> with belay.averaged():
    ...     loss = model(torch.ones(4, 3)).square().mean()
    >>> belay.step
    10
    """
    if not isinstance(accelerator, Accelerator):
        raise TypeError(f"accelerator={type(accelerator).__name__} is not an accelerate.Accelerator")
    if accelerator.distributed_type in _OWN_STEPS:
        raise ValueError(
            f"accelerator has distributed_type={accelerator.distributed_type.value}, which keeps flat pieces of the "
            "weights in an engine of its own and steps without torch's hooks; for DeepSpeed call "
            "torchbelay.integrations.deepspeed.attach(engine, method) with the model that prepare() returned, else use "
            "FSDP2 (fsdp_version=2) or DDP"
        )
    given, stepping = _kept(model), _kept(optimizer)
    _refuse_unprepared(accelerator, _each(given), _each(stepping))
    belay = Belay(given, stepping, method, **options)
    sharded = belay._parts.slices is not None  # replicas that share one average
    sharded |= any(isinstance(p, DTensor) for each in _each(given) for p in each.parameters())
    _register(accelerator, belay, sharded=sharded)
    return belay


def _kept(given: Any) -> Any:
    """Return an iterator as a list, which can be looked at twice; anything else as it is."""
    return list(given) if isinstance(given, Iterator) else given


def _each(given: Any) -> list[Any]:
    """Return what was given as a list: one object, or several."""
    return list(given) if isinstance(given, Sequence | Set) else [given]


def _refuse_unprepared(accelerator: Accelerator, models: list[Any], optimizers: list[Any]) -> None:
    """Refuse what this accelerator has not prepared; `Belay` refuses what is neither a model nor an optimizer."""
    known = {id(p) for each in accelerator._models for p in each.parameters()}
    why = (
        "under FSDP2, prepare() gives the optimizer other parameters, and an average made before would follow the old"
        if accelerator.is_fsdp2
        else "save_state() would save the average without it, and under FSDP2 prepare() replaces the parameters"
    )
    for each in models:
        if isinstance(each, nn.Module) and not {id(p) for p in each.parameters()} <= known:
            raise ValueError(f"model={type(each).__name__} was not prepared by this accelerator: {why}; {_PREPARE}")
    inner = {id(wrapped) for each in accelerator._optimizers for wrapped in _layers(each)}
    for each in optimizers:
        if isinstance(each, Optimizer) and id(each) not in inner:
            raise ValueError(f"optimizer={type(each).__name__} was not prepared by this accelerator: {why}; {_PREPARE}")


def _layers(optimizer: Any) -> Iterator[Any]:
    """Yield a prepared optimizer and what it wraps."""
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "optimizer", None)


# Checkpoints ----------------------------------------------------------------------------------------------------------


def _register(accelerator: Accelerator, belay: Belay, *, sharded: bool) -> None:
    """Let `save_state()` and `load_state()` carry the average, and refuse both while the model holds it."""

    # A hook would come too late: save_state() removes old checkpoints before (total_limit), and under FSDP both have
    # written or read the weights by then.
    for name in ("save_state", "load_state"):
        setattr(accelerator, name, _outside(getattr(accelerator, name), belay))
    number = _attached.get(accelerator, 0)
    _attached[accelerator] = number + 1
    if not sharded:
        accelerator.register_for_checkpointing(belay)
        return
    shards = _Shards(belay, f"torchbelay_{number}")
    accelerator.register_save_state_pre_hook(shards.save)
    accelerator.register_load_state_pre_hook(shards.find)
    accelerator.register_for_checkpointing(shards)


def _outside(call: Callable[..., Any], belay: Belay) -> Callable[..., Any]:
    """Return a method of the accelerator that refuses to begin while the model holds the average."""

    @wraps(call)
    def checked(*args: Any, **options: Any) -> Any:
        belay._parts.refuse_inside(f"accelerator.{call.__name__}")
        return call(*args, **options)

    return checked


class _Shards:
    """The registered object of a sharded average.

    Accelerate writes a registered object on the main process alone, and tells it no folder; it tells hooks the folder,
    but may load the weights after them. So a hook saves, a hook remembers the folder, and the object, which comes last,
    loads.
    """

    def __init__(self, belay: Belay, name: str) -> None:
        self._belay, self._name = belay, name
        self._folder: Path | None = None

    def save(self, models: list[Any], weights: list[Any], folder: str) -> None:
        """Write all parts; every process calls it."""
        save_parts({"belay": self._belay}, checkpoint_id=Path(folder) / self._name)

    def find(self, models: list[Any], folder: str) -> None:
        """Remember the folder that is being loaded."""
        self._folder = Path(folder) / self._name

    def state_dict(self) -> dict[str, str]:
        """Return what the main process writes: where the parts are."""
        return {"folder": self._name}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Read all parts from the folder that is being loaded; every process calls it."""
        if state != self.state_dict() or self._folder is None or not self._folder.is_dir():
            raise ValueError(
                f"this checkpoint has no folder {self._name!r}: its registered object is not a sharded average. "
                "Attach averages in the order in which they were attached when it was saved"
            )
        for part in self._belay._parts.each:
            part.unseen.forget()  # load_state() may have loaded the weights already
        load_parts({"belay": self._belay}, checkpoint_id=self._folder)
