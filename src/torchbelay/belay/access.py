"""The ways to an average: in the model for a block, as a live module, as tensors, as a state, a file or a folder."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchbelay.physics.readouts import Readout

from . import company, export, files, folders, modules, pretrained, replicas, shard
from .average import MAIN, WholeAverage
from .blocks import Block
from .live_module import make
from .models import as_given
from .options import Options, check_dtype
from .parts import Parts
from .readout import Reading
from .signals import signals_held
from .swap import Swap, overwrite
from .teacher import check_teacher
from .threads import Exports
from .unentered import must_enter


class Access:
    """What a `Belay` has to evaluate, hold and save its averages."""

    _model: nn.Module
    _options: Options
    _parts: Parts
    _exports: Exports

    @must_enter
    def averaged(self, name: str = MAIN, *, readout: Readout | None = None) -> Iterator[Any]:
        """Let the model hold the average inside the block, and its own weights again after it, also after an exception.

        The block gets the model; a list if Belay was given several models, or tensors without a model. Evaluate inside,
        do not train: an optimizer step inside raises, and gradients from inside are those of the average. Buffers that
        are changed inside (by `update_bn`) stay with the average. FSDP2 modules free their gathered weights on entering
        and on leaving, and autocast its copies. Signals that have a Python handler wait while weights and average trade
        places. While somebody holds `module()`, `tensors()` or a `state_dict()` of the average, they do not trade: the
        weights are set aside. With `shard`, every rank must enter, and each sets its weights aside. Blocks may be
        nested, and may overlap, also those of several threads: the weights come back when the last one is left.

        With a `readout` of `torchbelay.readouts` the model holds that mixture of weights and average, and a copy of the
        weights is kept meanwhile. Buffers are the average's, and those that are changed inside are dropped on leaving.
        """
        member, block = self._parts.member, Block()
        # Twice, for an exception may come at any line, also of leaving; what is done is not done again.
        try:
            try:
                with member.lock:
                    swap = self._swap(name, readout)
                    with signals_held():
                        member.enter(swap, block)
                yield as_given(self._model)
            finally:
                with member.lock, signals_held():
                    member.leave(block)
        finally:
            with member.lock:
                member.leave(block)

    def _swap(self, name: str = MAIN, readout: Readout | None = None) -> Swap | None:
        """Return what puts the average into the model; None if the program is in a block in which the model has it."""
        average, member = self._average(name), self._parts.member
        if member.swap is not None:
            if member.swap.average.name != name or member.swap.readout != readout:
                inside = _block(member.swap.average.name, member.swap.readout)
                raise RuntimeError(f"{_block(name, readout)} inside {inside}: leave that block first")
            return None
        company.refuse_among(member, self._parts.parameters(), f"averaged({name!r})")
        self._parts.follow_model()
        buffers = self._parts.first.averages.began and self._options.buffers != "ignore"
        self._parts.live.prepare()
        reading, held = self._parts.reading(average, readout), self._parts.live.holds(average)
        backend = self._parts.first.stepper.backend
        return Swap(self._model, average, backend, buffers=buffers, held=held, reading=reading)

    @contextmanager
    def _outside(self) -> Iterator[None]:
        """Let the model hold its weights inside this block, also in blocks of `averaged()`, which go on after it."""
        member = self._parts.member
        with member.lock:
            swap, holders = member.settled_swap(), member.holders
            if swap is None:
                yield
                return
            buffers = modules.named_buffers(self._model)  # under a readout, what was written to them would be dropped
            written = {name: buffer.clone() for name, buffer in buffers.items()} if swap.readout is not None else {}
            with signals_held():
                member.leave()
            try:
                yield
            finally:
                again = self._swap(swap.average.name, swap.readout)
                with signals_held():
                    member.enter(again, *holders)
                    for name, value in written.items():
                        modules.named_buffers(self._model)[name].copy_(value)

    @torch.inference_mode(False)
    @torch.no_grad()
    def module(self, name: str = MAIN, *, into: nn.Module | Iterable[nn.Module] | None = None) -> Any:
        """Return a module of the model's class that is the average: its parameters share the average's memory.

        It follows every step, `reset()`, `load_state_dict()` and late parameters, for as long as you hold it. It is in
        eval mode, has no gradients, and pickles and copies as any other module. Parameters that are not averaged share
        the model's memory. If the average has another dtype than the weights, the module has copies in theirs, which
        every step renews. Its buffers are its own: with buffers="copy" and "average" every step renews them, with
        "ignore" they are copied once. Until the average begins (`start`), the module has the model's weights.

        Args:
            name: of the average.
            into: a module of your own, built like the model, that becomes the average instead. A sharded model (FSDP2,
                tensor parallel) needs one, sharded by the same calls.

        If Belay was given several models, this is a list of modules, and so is `into`.

        >>> from torchbelay import Belay, Spring
        >>> model = nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> belay = Belay(model, optimizer, Spring.ema(decay=0.99))
        >>> teacher, x = belay.module(), torch.ones(4, 3)
        >>> (model(x) - teacher(x)).square().mean().backward()
        >>> optimizer.step()
        >>> torch.equal(teacher.weight, belay.average_state_dict()["weight"])
        True
        """
        self._refuse_planes("module")
        with self._parts.member.lock:
            self._average(name)
            if self._parts.slices is not None:
                replicas.refuse_live("module")
            origin = self._parts.origin(name, self)
            if into is None:
                module = make(origin)
            else:
                self._parts.refuse_now("module")
                module = check_teacher(into, origin)
            self._parts.live.add_module(origin, module)
        return as_given(module)

    def tensors(self, name: str = MAIN) -> Mapping[str, Tensor]:
        """Return the average as a live mapping of names to tensors, which are looked up at each access, not copied.

        The tensors share the average's memory and have its dtype: do not write to them. They go with
        `torch.func.functional_call(model, dict(belay.tensors()), x)`.

        >>> from torchbelay import Belay, Spring
        >>> belay = Belay(nn.Linear(3, 1), None, Spring.ema(decay=0.99))
        >>> {name: tuple(tensor.shape) for name, tensor in belay.tensors().items()}
        {'weight': (1, 3), 'bias': (1,)}
        """
        self._refuse_planes("tensors")
        with self._parts.member.lock:
            self._average(name)
            if self._parts.slices is not None:
                replicas.refuse_live("tensors")
            return self._parts.tensors(name)

    def _refuse_planes(self, what: str) -> None:
        if self._options.bits is not None:
            raise ValueError(
                f"{what}() shares the average's memory, and with bits={self._options.bits} no tensor has the average: "
                "evaluate inside averaged(), take a copy by average_state_dict(), or make the Belay without bits"
            )

    def _average(self, name: str) -> WholeAverage:
        if not isinstance(name, str) or name not in self._parts.averages:
            known = ", ".join(map(repr, self._parts.averages))
            raise ValueError(f"name={name!r} is no average; choose one of {known}")
        self._parts.wait()
        self._parts.member.settled_swap()
        self._parts.warn_before_use()
        return self._parts.averages[name]

    def average_state_dict(
        self, name: str = MAIN, *, full: bool = False, readout: Readout | None = None
    ) -> dict[str, Any]:
        """Return copies of the average and of the rest of the model, laid out like the plain model's `state_dict()`.

        With a `readout` it is that mixture of weights and average. The result loads into an unwrapped model with
        `load_state_dict(strict=True)`. Tensors have the parameters' dtypes; `state_dict()` has averages in their own.

        Sharded tensors stay sharded, unless `full`: then they are gathered in the first rank's host memory, one tensor
        at a time. Every rank must call; the other ranks get {}. With `shard` every rank must call in any case, and gets
        the whole average unless `full`; the first rank is then that of the group.
        """
        state = self._exported(name, readout, self._parts.taking(full=full))
        return state if not full or self._parts.is_first_rank() else {}

    @torch.inference_mode(False)
    @torch.no_grad()
    def model_state_dict(self, *, full: bool = False) -> dict[str, Any]:
        """Return copies of the model's own weights and buffers, also inside `averaged()`, as the plain model has them.

        Sharded tensors stay sharded, unless `full`: see `average_state_dict`.
        """
        self._parts.wait()
        take = self._parts.taking(full=True) if full else modules.copied
        with self._exports.one("model_state_dict"):
            state = modules.state_dict_with(self._model, company.own_tensors(), take)
        return state if not full or self._parts.is_first_rank() else {}

    def save_average(
        self,
        path: str | os.PathLike[str],
        name: str = MAIN,
        *,
        dtype: torch.dtype | None = None,
        readout: Readout | None = None,
    ) -> None:
        """Write the average as a safetensors file, whole or not at all: a crash leaves the old file as it was.

        The file holds `average_state_dict(name, full=True, readout=readout)`; its metadata name method, readout, step
        and the version of torchbelay. With a sharded or replicated model every rank must call; the first rank writes.
        `torchbelay.load_average` reads the file.

        `dtype` is that of the floating-point tensors in the file; None: each has the model's. With torch.float32, the
        average of a 16-bit model is saved as it is kept, unrounded.
        """
        export.require("save_average()", "torch.save(belay.average_state_dict(full=True), path)")
        check_dtype(dtype)
        files.check_safetensors_name(path)
        average = self._average(name)
        if self._parts.is_first_rank() and not self._is_spread():
            files.destination(path)
        state = self._exported(name, readout, self._parts.taking(full=True), dtype)
        if self._parts.is_first_rank():
            about = export.about(average, readout, step=self._parts.step, start=self._options.start)
            export.write(path, state, about)

    @torch.inference_mode(False)
    @torch.no_grad()
    def save_pretrained(
        self, folder: str | os.PathLike[str], name: str = MAIN, *, readout: Readout | None = None, **how: Any
    ) -> None:
        """Write the average by the model's own `save_pretrained` (Transformers, diffusers, PEFT), whole or not at all.

        The folder loads with `from_pretrained`. Other files in it stay. `how` is passed on, as `max_shard_size="2GB"`.
        With a sharded or replicated model every rank must call; the first rank writes.
        """
        pretrained.check(self._model, how)
        average = self._average(name)
        if not self._is_spread():
            folders.destination(folder)
        with self._exports.one("save_pretrained"):
            replaced = export.replacement(self._model, average, self._parts.member, self._reading(average, readout))
            replaced = pretrained.gathered(self._model, replaced, self._parts.taking(full=True))
            if self._parts.is_first_rank():
                pretrained.save(self._model, folder, replaced, how)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _exported(
        self, name: str, readout: Readout | None, take: Callable[[Tensor], Any], dtype: torch.dtype | None = None
    ) -> dict[str, Any]:
        average = self._average(name)
        with self._exports.one("average_state_dict() or save_average"):
            reading = self._reading(average, readout)
            return export.with_average(self._model, average, self._parts.member, take, reading, dtype)

    def _reading(self, average: WholeAverage, readout: Readout | None) -> Reading | None:
        """Return what a readout takes of an average, once the average is where the model is."""
        if self._parts.member.swap is None:
            self._parts.follow_model()
        return self._parts.reading(average, readout)

    def _is_spread(self) -> bool:
        """Whether ranks gather together: a path that one of them refused before would let the others wait."""
        parameters = modules.named_parameters(self._model).values()
        return self._parts.slices is not None or any(map(shard.is_sharded, parameters))

    def copy_to_model(self, name: str = MAIN) -> None:
        """Overwrite the model's weights with the average, for good."""
        self._parts.refuse_now("copy_to_model")
        average = self._average(name)
        self._parts.follow_model()
        overwrite(self._model, average)
        self._parts.remember_weights()


def _block(name: str, readout: Readout | None) -> str:
    return f"averaged({name!r})" if readout is None else f"averaged({name!r}, readout={readout!r})"
