"""A checkpoint's tensors in the form the model runs with: from its files, or quantised matrices from an earlier start.

The engine thread's, while loading. At most one tensor of the files is in memory at a time, beside what is made of it.
Knows formats and files; no layers.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from service.models.head import Embedding, FileEmbedding, Head, LinearHead, RefinedHead, make_embedding
from service.models.linear import Linear, LinearFormat, NativeLinear
from service.models.nf4 import Nf4Linear, TiledNf4Linear
from service.models.quantized_cache import QuantizedCache
from service.models.tensor_files import TensorFiles


class Matrices:
    """`keeps_quantized`: use and write the file of quantised matrices beside the checkpoint."""

    def __init__(self, files: TensorFiles, form: LinearFormat, *, keeps_quantized: bool = False) -> None:
        self.files = files
        self.form = form
        self._cache: QuantizedCache | None = None
        if keeps_quantized and form.quantization == "nf4":
            dtype = str(form.dtype).removeprefix("torch.")
            self._cache = QuantizedCache(files.folder, files.paths, f"{_packing(form)}-{dtype}")

    def linear(self, name: str, rows: Tensor | None = None, *, form: LinearFormat | None = None) -> Linear:
        """The matrix `name`; with `rows`, its rows in that order, which must be the same at every start."""
        form = form or self.form
        kept = self._cache.find(name) if self._cache is not None else None
        if kept is not None:
            made: Linear = form.restore(kept)
        else:
            weight = self.files.fetch(name)
            made = form.make(weight if rows is None else weight[rows])
        if self._cache is not None and isinstance(made, NativeLinear | Nf4Linear | TiledNf4Linear):
            self._cache.add(name, made.parts(), is_new=kept is None)
        return made

    def vector(self, name: str) -> Tensor:
        return self.files.fetch(name).float().to(self.form.device)

    def embedding(self, name: str) -> Embedding:
        place = self.files.find(name)
        if place is not None and self._leaves_tables_on_file:
            return FileEmbedding(place)
        return make_embedding(self.files.fetch(name), self.form)

    def head(self, name: str) -> Head:
        few_rows = replace(self.form, keeps_dense=False)  # a prompt needs the last row's logits only
        head, place = LinearHead(self.linear(name, form=few_rows), self.form.dtype), self.files.find(name)
        return RefinedHead(head, FileEmbedding(place)) if place is not None and self._leaves_tables_on_file else head

    def finish(self) -> None:
        """The model is complete: keep what was quantised."""
        if self._cache is not None:
            self._cache.save()

    @property
    def _leaves_tables_on_file(self) -> bool:
        return self.form.quantization != "none" and self.form.device.type == "cpu"


def _packing(form: LinearFormat) -> str:
    if form.has_native:
        return "blocks"
    return "tiles" if form.device.type == "cpu" and TiledNf4Linear.has_kernel() else form.device.type
