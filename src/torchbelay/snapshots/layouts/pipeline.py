"""Folders of several models, each in a folder of its own: pipelines of diffusers, modules of sentence-transformers."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from torchbelay.snapshots.checkpoint import Checkpoint, Output

_INDEXES = ("model_index.json", "modules.json")


def parts(folder: Path) -> list[str]:
    """Return the subfolders that a folder's index names and that exist; none if the folder has no such index."""
    named: list[Any] = []
    for index in _INDEXES:
        if (folder / index).is_file():
            content = json.loads((folder / index).read_text(encoding="utf-8"))
            named += list(content) if isinstance(content, dict) else [module.get("path") for module in content]
    return [
        name
        for name in dict.fromkeys(named)
        if isinstance(name, str) and name and Path(name).name == name and (folder / name).is_dir()
    ]


class Pipeline(Checkpoint):
    """The tensors of several models, named `part/name`."""

    def __init__(self, path: Path, models: Mapping[str, Checkpoint], companions: tuple[Path, ...]) -> None:
        self.path = path
        self.models = dict(models)  # by subfolder; "" is the folder itself
        self.layout = f"{len(self.models)} models in one folder"
        self.files = tuple(file for model in models.values() for file in model.files)
        self.metadata: dict[str, str] = {}
        self.places = {_join(part, name): (part, name) for part, model in models.items() for name in model.tensors}
        self.tensors = {full: self.models[part].tensors[name] for full, (part, name) in self.places.items()}
        self.sliceable = all(model.sliceable for model in models.values())
        inner = [Path(part, file) for part, model in models.items() for file in model.companions]
        self.companions = tuple(dict.fromkeys([*companions, *inner]))

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        """Read `out.numel()` elements of a tensor, in row-major order from number `start`, into a flat tensor."""
        part, inner = self.places[name]
        self.models[part].read_into(inner, start, out)

    @property
    def tied(self) -> tuple[tuple[str, ...], ...]:
        """Groups of names that share one tensor."""
        return tuple(
            tuple(_join(part, name) for name in group) for part, model in self.models.items() for group in model.tied
        )

    def output(self, destination: Path, about: Mapping[str, str], apart: Collection[str] = ()) -> Output:
        """Begin a folder of the same models."""
        return _Folders(self, destination, about, apart)

    def close(self) -> None:
        """Close the files of all models."""
        for model in self.models.values():
            model.close()


def _join(part: str, name: str) -> str:
    return f"{part}/{name}" if part else name


class _Folders(Output):
    def __init__(self, like: Pipeline, destination: Path, about: Mapping[str, str], apart: Collection[str]) -> None:
        self.like = like
        self.outputs: dict[str, Output] = {}
        try:
            for part, model in like.models.items():
                (destination / part).mkdir(exist_ok=True)
                own = [like.places[name][1] for name in apart if like.places[name][0] == part]
                self.outputs[part] = model.output(destination / part, about, own)
        except BaseException:
            self.close()
            raise

    def write(self, name: str, values: Tensor, start: int = 0) -> None:
        part, inner = self.like.places[name]
        self.outputs[part].write(inner, values, start)

    def finish(self) -> None:
        for output in self.outputs.values():
            output.finish()

    def close(self) -> None:
        for output in self.outputs.values():
            output.close()
