"""DeepSpeed's ZeRO-1, 2 and 3: an average of the float32 weights that each rank steps, which checkpoints carry.

ZeRO keeps the weights that are trained as flat float32 tensors, the masters, of which each rank has its own part. The
model computes with a copy of them (ZeRO-1 and 2), or with parts that it gathers (ZeRO-3). DeepSpeed lets its optimizer
step one master after the other, and renews the model from each at once. So each master is an optimizer for `Belay`,
whose steps are those of DeepSpeed's: springs pull right after them, and steps that DeepSpeed skips are not seen.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import partial, wraps
from pathlib import Path
from typing import Any, NamedTuple

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.partition_parameters import GatheredParameters, ZeroParamStatus
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor
from torch.optim import Optimizer

from torchbelay.belay import modules, pieces
from torchbelay.belay.agreement import agreement
from torchbelay.belay.pieces import Piece
from torchbelay.belay.piecewise import PiecewiseBelay
from torchbelay.belay.rules import Rule
from torchbelay.physics.method import Method
from torchbelay.physics.warnings import warn

_NAME = "_torchbelay_layout"  # the attribute of an engine that holds how its weights lie


def attach(engine: DeepSpeedEngine, method: Method | Rule, **options: Any) -> "ZeroBelay":
    """Attach an average to an engine of ZeRO-1, 2 or 3; the engine's checkpoints include it from then on.

    Args:
        engine: what `deepspeed.initialize()` returned first.
        method: as for `torchbelay.Belay`. A function (name, parameter) -> method gets a tensor on the device "meta",
            with the shape and dtype of the whole parameter.
        **options: all other arguments of `torchbelay.Belay`, as `spectators`, `start` or `buffers`, except
            `save_with_optimizer` and `on_nonfinite`.

    Call it on every rank with the same arguments, before `engine.load_checkpoint()`. Batches that are only accumulated
    and steps that DeepSpeed skips after an overflow do not count. With `offload_optimizer` to "cpu" the average is in
    host memory too. Other offloading, pipelines, MoE layers, model parallelism and quantized weights are refused.
    """
    if not isinstance(engine, DeepSpeedEngine):
        raise TypeError(f"engine={type(engine).__name__} is not the engine that deepspeed.initialize() returned first")
    return ZeroBelay(engine, method, **options)


class ZeroBelay(PiecewiseBelay):
    """The averages of an engine of ZeRO, with the ways of a `Belay`: what `attach()` returns.

    `averaged()`, `average_state_dict()`, `save_average()`, `stats()`, `change()`, `copy_to_model()`,
    `load_state_dict()`, `state_dict(full=True)` and the engine's checkpoints are collectives: call them on every rank.
    The block of `averaged()` gets the engine; `engine.step()` and `engine.save_checkpoint()` inside raise.

    `engine.save_checkpoint()` writes one file per rank into the checkpoint, and `engine.load_checkpoint()` reads them.
    With `load_module_only=True`, or if there are none, averages begin at the weights that were loaded.
    """

    def __init__(self, engine: DeepSpeedEngine, method: Method | Rule, **options: Any) -> None:
        self._engine = engine
        with agreement(engine.seq_data_parallel_group):
            _check(engine)
            layout = vars(engine).get(_NAME) or _Zero(engine)
        super().__init__(layout, method, options)
        setattr(engine, _NAME, layout)  # several Belays share the pieces, so that they know of each other
        self._file, layout.count = f"torchbelay_{layout.count}", layout.count + 1
        self._attached = True
        self._wrap("step", self._step)
        self._wrap("save_checkpoint", self._save)
        self._wrap("load_checkpoint", self._load)
        self._wrap("offload_states", self._move)
        self._wrap("reload_states", self._move)

    def _given(self) -> DeepSpeedEngine:
        return self._engine

    def detach(self) -> None:
        """Follow no more steps: the engine is as it was, and the average can still be used."""
        super().detach()
        self._attached = False

    def _wrap(self, name: str, around: Callable[..., Any]) -> None:
        """Let a method of the engine be called by another one, until `detach()`."""
        own = getattr(self._engine, name)

        @wraps(own)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return around(own, *args, **kwargs) if self._attached else own(*args, **kwargs)

        setattr(self._engine, name, wrapped)

    def _step(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Here, before DeepSpeed gives up gradients; the optimizer's hooks would refuse too late.
        self._belay._parts.refuse_inside("engine.step")
        return own(*args, **kwargs)

    def _move(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._belay._parts.refuse_inside("engine.offload_states or engine.reload_states")
        result = own(*args, **kwargs)
        self._layout.follow()  # at once: pieces keep the memory that the weights have left
        return result

    def _save(self, own: Callable[..., Any], save_dir: Any, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        self._belay._parts.refuse_inside("engine.save_checkpoint")  # it would save the average as the weights
        tag = f"global_step{self._engine.global_steps}" if tag is None else str(tag)
        state = self.state_dict()
        with agreement(self._group):
            if save_dir:  # without one, DeepSpeed refuses
                pieces.write(Path(save_dir, tag), self._file, *self._place(), state)
        # DeepSpeed's part comes last: it ends by naming this checkpoint the latest.
        return own(save_dir, tag, *args, **kwargs)

    def _load(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._belay._parts.refuse_inside("engine.load_checkpoint")
        path, client_state = own(*args, **kwargs)
        if path is None:
            return path, client_state
        given, state, folder = inspect.signature(own).bind(*args, **kwargs).arguments, None, Path(path).parent
        if not given.get("load_module_only"):
            with agreement(self._group) as facts:
                state = pieces.read(folder, self._file, *self._place(), self._layout.pieces)
                facts["the step of the average in the checkpoint"] = None if state is None else state["step"]
            if state is None:
                warn(f"{str(folder)!r} has no {self._file}_*.pt: the average begins at the weights that were loaded")
        if state is None:
            self.reset()
        else:
            self.load_state_dict(state)
        return path, client_state

    def _place(self) -> tuple[int, int]:
        return torch.distributed.get_rank(self._group), torch.distributed.get_world_size(self._group)


def _check(engine: DeepSpeedEngine) -> None:
    """Refuse an engine that keeps weights in another way."""
    if isinstance(engine, PipelineEngine):
        raise ValueError("engine is a PipelineEngine, whose ranks hold different layers; use ZeRO without a pipeline")
    zero = engine.optimizer
    if isinstance(zero, Optimizer):
        raise ValueError(
            "engine has ZeRO stage 0, whose optimizer steps the model's own weights; use "
            "torchbelay.Belay(engine.module, engine.optimizer, method)"
        )
    masters, model = engine.zero_offload_optimizer(), engine.zero_offload_param()
    if masters is not None and (masters.device not in ("none", "cpu") or masters.ratio < 1):
        raise ValueError(
            f"engine has offload_optimizer with device={_text(masters.device)!r} and ratio={masters.ratio}, and only "
            "device='cpu' and ratio=1.0 keep the weights in one place that can be averaged"
        )
    if model is not None and model.device != "none":
        raise ValueError(
            f"engine has offload_param with device={_text(model.device)!r}, and weights that the model computes with "
            "cannot be renewed there; leave offload_param out, or use offload_optimizer"
        )
    unknown = {
        "MoE layers": engine.has_moe_layers,
        "model parallelism": engine.mp_world_size > 1,
        "zero_hpz_partition_size": engine.zero_hpz_partition_size() > 1,
        "zero_quantized_weights": engine.zero_quantized_weights(),
        "zero_quantized_nontrainable_weights": engine.zero_quantized_nontrainable_weights(),
    }
    for what, is_used in unknown.items():
        if is_used:
            raise ValueError(f"engine uses {what}, under which weights cannot be averaged yet; train without it")
    if type(zero) not in (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3, BF16_Optimizer):
        raise ValueError(
            f"engine has the optimizer {type(zero).__name__}, whose weights are not known here; give "
            '"zero_optimization": {"stage": 1}, 2 or 3 to deepspeed.initialize()'
        )


def _text(device: Any) -> str:
    return str(getattr(device, "value", device))


# How ZeRO keeps weights -----------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """What a master has of a parameter: a piece, from `offset` on."""

    parameter: Any
    offset: int
    piece: Piece


class _Master(Optimizer):
    """The steps that DeepSpeed's optimizer takes with one master, as an optimizer of the pieces in it."""

    def __init__(self, optimizer: Optimizer, master: Tensor, group: int, parts: list[_Part]) -> None:
        self._optimizer, self._master, self._index, self._parts = optimizer, master, group, parts
        self._size, self._address = master.numel(), master.data_ptr()
        self.tensors = [master.detach().narrow(0, offset, piece.numel) for _, offset, piece in parts]
        super().__init__(self.tensors, {})
        self._refresh()

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Call a hook before the steps in which this master is stepped."""

        def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if self._is_stepped():
                self.follow()
                hook(self, args, kwargs)

        return self._optimizer.register_step_pre_hook(before)

    def register_step_post_hook(self, hook: Any) -> Any:
        """Call a hook after the steps in which this master is stepped."""

        def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if self._is_stepped():
                hook(self, args, kwargs)

        return self._optimizer.register_step_post_hook(after)

    def _is_stepped(self) -> bool:
        return any(p is self._master for group in self._optimizer.param_groups for p in group["params"])

    @property
    def found_inf(self) -> Any:
        """What GradScaler tells optimizers that skip by themselves."""
        return getattr(self._optimizer, "found_inf", None)

    def follow(self) -> None:
        """Let the pieces be parts of the master wherever it is, and have the learning rate of now."""
        if self._master.numel() != self._size:
            now = self._master.numel()
            raise RuntimeError(
                f"float32 weights have {now} elements now, not {self._size}: call engine.reload_states()"
            )
        if self._master.data_ptr() != self._address:  # it has been elsewhere
            for tensor, (_, offset, piece) in zip(self.tensors, self._parts, strict=True):
                tensor.data = self._master.detach().narrow(0, offset, piece.numel)
            self._address = self._master.data_ptr()
        self._refresh()

    def _refresh(self) -> None:
        groups = self._optimizer.param_groups
        # During a step DeepSpeed shows its optimizer one group, between steps of ZeRO-3 groups without parameters.
        held = [group for group in groups if any(p is self._master for p in group["params"])]
        found = held[0] if held else groups[self._index]
        self.param_groups[0].update({key: value for key, value in found.items() if key != "params"})


class _Zero:
    """The layout of an engine's weights: masters of one rank, and what the model computes with."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.model, self.group, self._zero = engine.module, engine.seq_data_parallel_group, engine.optimizer
        self.device = torch.device(engine.device)
        self.count = 0  # of Belays: the files of each have a number
        self._is_sharded = isinstance(self._zero, DeepSpeedZeroOptimizer_Stage3)
        names = modules.names_by_id(self.model)
        self.optimizers: list[Any] = []
        self.pieces: dict[str, Piece] = {}
        self.tensors: dict[str, Tensor] = {}
        self.shapes: dict[str, Tensor] = {}
        for master, group, parts in _sharded(self._zero) if self._is_sharded else _replicated(self._zero):
            self.optimizers.append(_Master(self._zero.optimizer, master, group, parts))
            for (p, _, piece), tensor in zip(parts, self.optimizers[-1].tensors, strict=True):
                if id(p) not in names:
                    raise ValueError(f"the optimizer holds a parameter of shape {piece.shape} that is not in the model")
                name = names[id(p)]
                self.pieces[name], self.tensors[name] = piece, tensor
                self.shapes[name] = torch.empty(piece.shape, dtype=p.dtype, device="meta")

    def follow(self) -> None:
        """Let the tensors be where the engine has the weights now."""
        for each in self.optimizers:
            each.follow()

    @torch.inference_mode(False)
    def set_aside(self) -> list[Callable[[], object]]:
        """Copy what the model computes with; return what puts it back."""
        if not self._is_sharded:
            return [partial(flat.copy_, flat.clone()) for flat in _flats(self._zero)]
        masters = {master.data_ptr() for master in self._zero.fp32_partitioned_groups_flat}
        flats = [flat for flat in self._zero.fp16_partitioned_groups_flat if flat.data_ptr() not in masters]
        # Small parameters, which every rank keeps whole, are there also between steps.
        kept = [p for p in self._zero.persistent_parameters if p.ds_status == ZeroParamStatus.AVAILABLE]
        return [
            self._zero.checkpoint_event_prologue,  # frees what was gathered of the average
            *(partial(flat.copy_, flat.clone()) for flat in flats),
            *(partial(_hold, p, p.data.clone()) for p in kept),
        ]

    @torch.inference_mode(False)
    @torch.no_grad()
    def renew(self) -> None:
        """Let the model compute with the masters as they are."""
        if not self._is_sharded:
            self._zero.update_lp_params()
            return
        self._zero.checkpoint_event_prologue()
        for i in range(len(self._zero.fp32_partitioned_groups_flat)):
            self._zero._reassign_or_swap_out_partitioned_parameters(i)
        self._zero.checkpoint_event_epilogue()  # gathers small parameters, which every rank keeps

    def gathered(self, parameter: Any) -> Tensor | None:
        """Return a whole parameter that is not averaged, in the first rank's host memory."""
        if not hasattr(parameter, "ds_id") or parameter.ds_status == ZeroParamStatus.AVAILABLE:
            return self._copied(parameter)
        with GatheredParameters([parameter]):
            return self._copied(parameter)

    def _copied(self, parameter: Tensor) -> Tensor | None:
        is_first = torch.distributed.get_rank(self.group) == 0
        return parameter.detach().to("cpu", copy=True) if is_first else None


Found = Iterator[tuple[Tensor, int, list[_Part]]]  # a master, the optimizer's group that it belongs to, what it has


def _replicated(zero: Any) -> Found:
    """Yield the masters of ZeRO-1 and 2: a rank's share of all parameters of a group, one after the other."""
    is_bf16 = isinstance(zero, BF16_Optimizer)
    masters = zero.fp32_groups_flat_partition if is_bf16 else zero.single_partition_of_fp32_groups
    for i, (master, parameters) in enumerate(
        zip(masters, zero.bf16_groups if is_bf16 else zero.bit16_groups, strict=True)
    ):
        parts = []
        for p in parameters:
            offset, piece = 0, Piece(0, 0, tuple(p.shape))
            if p._hp_mapping is not None:  # some of it is in this rank's share
                offset, here = p._hp_mapping.hp_fragment_address.start, p._hp_mapping.lp_fragment_address
                piece = Piece(here.start, here.numel, tuple(p.shape))
            parts.append(_Part(p, offset, piece))
        yield master, i, parts


def _sharded(zero: Any) -> Found:
    """Yield the masters of ZeRO-3: a rank's share of each parameter of a group, one after the other."""
    for i, (master, parameters) in enumerate(zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True)):
        parts, offset = [], 0
        for p in parameters:
            size = p.partition_numel()
            start = min(size * torch.distributed.get_rank(p.ds_process_group), p.ds_numel)
            piece = Piece(start, min(size, p.ds_numel - start), tuple(p.ds_shape))  # the last shares may have padding
            parts.append(_Part(p, offset, piece))
            offset += size
        yield master, zero.sub_group_to_group_id[i], parts


def _hold(parameter: Any, data: Tensor) -> None:
    """Let a parameter of ZeRO-3 be whole."""
    parameter.data, parameter.ds_status = data, ZeroParamStatus.AVAILABLE


def _flats(zero: Any) -> list[Tensor]:
    """Return the memory of the weights that ZeRO-1 and 2 compute with."""
    flats: list[Tensor] = zero.bf16_groups_flat if isinstance(zero, BF16_Optimizer) else zero.bit16_groups_flat
    return flats
