"""Stored tensors as their kernels address them: whole words of payload and of scales, by token and by page."""

from __future__ import annotations

from typing import Protocol

import torch

from kvcore.contract import PoolView
from kvcore.layout import Field
from kvcore.memory.paged_attention import PageSource, Workspace
from kvcore_mxfp8.cpu.fast import PIECE, Dequantiser, Kept, Quantiser
from kvcore_mxfp8.elements import ELEMENTS, ScaleRule
from kvcore_mxfp8.regions import ORDERS, SCALES, TENSOR_SCALE, VALUES, scale_region

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def _word(nbytes: int) -> torch.dtype:
    """The widest integer that divides so many bytes: bytes are moved one element at a time."""
    return _WORDS[next(width for width in _WORDS if nbytes % width == 0)]


class _Scales:
    """Block scales of every layer. A token's are ``[H, stored]`` bytes in order of blocks, padding last."""

    def __init__(self, pool: PoolView, region: str) -> None:
        self.field: Field = pool.layout.region(region).field(SCALES)
        self.stored = self.field.axis("block").extent
        self.word = _word(self.field.shape[-1])
        self.views = {n: pool.field(n, region, SCALES).view(self.word) for n in pool.layout.layers}
        kinds = [term.axis for term in self.field.terms]

        def places(axis: str) -> list[int]:
            found = [n for n, kind in enumerate(kinds) if kind == axis]
            return [n + 1 for n in sorted(found, key=lambda n: -self.field.terms[n].divisor)]

        self._by_head = [*places("head"), 0, *places("slot"), *places("block")]
        self._by_token = [0, *places("slot"), *places("head"), *places("block")]

    def put(self, layer: int, units: torch.Tensor, offsets: torch.Tensor, words: torch.Tensor) -> None:
        """Write scales of slots, int64 ``[N]``: ``words`` as :meth:`words` shapes them."""
        # Indexed axes come first, so that what is left of the view is [N, H, …blocks].
        self.views[layer][self.field.index(units, slot=offsets)] = words

    def words(self, scales: torch.Tensor, heads: int) -> torch.Tensor:
        """``uint8 [N * H, stored]``, contiguous, as they are written: ``[N, H, …blocks]``, sharing memory."""
        sizes = [term.size for term in self.field.terms if term.axis == "block"]
        return scales.view(self.word).view(-1, heads, *sizes[:-1], sizes[-1] // self.word.itemsize)

    def take(self, layer: int, units: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Read ``uint8 [N, H, stored]``."""
        found = self.views[layer][self.field.index(units, slot=offsets)]
        return found.contiguous().view(torch.uint8).view(len(units), -1, self.stored)

    def pages(self, layer: int, pages: torch.Tensor, *, head_major: bool) -> torch.Tensor:
        """Read whole pages: ``uint8 [H * N * page size, stored]``, or with tokens before heads."""
        found = self.views[layer].index_select(0, pages)
        ordered = found.permute(self._by_head if head_major else self._by_token).contiguous()
        return ordered.view(torch.uint8).view(-1, self.stored)


class _Heads:
    """The heads of tokens, ``[unit, slot, head, words]``, of one layer.

    Where all strides are multiples of a head, which they nearly always are, heads are rows of one matrix: rows are copied
    several times as fast as elements are picked.
    """

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens
        width = tokens.shape[-1]
        steps, rest = zip(*(divmod(step, width) for step in tokens.stride()[:3]), strict=True)
        self._rows: torch.Tensor | None = None
        if not any(rest):
            last = sum((size - 1) * step for size, step in zip(tokens.shape, steps, strict=False))
            self._rows = tokens.as_strided((last + 1, width), (width, 1), tokens.storage_offset())
        self._steps: tuple[int, ...] = steps
        self._heads = torch.arange(tokens.shape[2]) * steps[2]

    def _ids(self, units: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        first = units * self._steps[0] + offsets * self._steps[1]
        return torch.add(first[:, None], self._heads).view(-1)

    def put(self, units: torch.Tensor, offsets: torch.Tensor, words: torch.Tensor) -> None:
        """Write ``words [N, H, …]`` to slots, no slot twice."""
        if self._rows is None:
            self.tokens[units, offsets] = words
        else:
            self._rows.index_copy_(0, self._ids(units, offsets), words.flatten(0, 1))

    def take(self, units: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Read ``[N * H, …]``, contiguous."""
        if self._rows is None:
            return self.tokens[units, offsets].contiguous().flatten(0, 1)
        return self._rows.index_select(0, self._ids(units, offsets))


class StoredTensor:
    """One stored tensor of every layer."""

    def __init__(self, pool: PoolView, region: str, rule: ScaleRule) -> None:
        field = pool.layout.region(region).field(VALUES)
        self.name = region
        self.heads, self.dim = field.axis("head").size, field.axis("dim").size
        self.head_major = field.order == ORDERS["head_major"]
        self.page_size = field.axis("slot").size
        word = _word(self.dim)
        self.stored = {n: pool.field(n, region, VALUES).view(word) for n in pool.layout.layers}
        self.tokens = {n: _Heads(v.permute(0, 2, 1, 3) if self.head_major else v) for n, v in self.stored.items()}
        self.scales = _Scales(pool, scale_region(region))
        self.tensor_scales = constants(pool, region)
        self.rows = max(1, PIECE // (self.heads * self.dim))
        """Tokens in a piece."""
        self._quantise = Quantiser(ELEMENTS[field.dtype], rule, self.dim)
        self._dequantise = Dequantiser(ELEMENTS[field.dtype], self.dim)
        self._word = word
        self._codes = Kept(torch.uint8, self.dim, self._code_words)
        self._scale_rows = Kept(torch.uint8, self.scales.stored, self._scale_words)
        self._space = Workspace()

    def _code_words(self, codes: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (codes.view(self._word).view(-1, self.heads, self.dim // self._word.itemsize),)

    def _scale_words(self, scales: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scales[:, self._quantise.blocks :] = 0  # padding of the field; nothing else writes there
        return (self.scales.words(scales, self.heads),)

    def put(self, layer: int, units: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor) -> None:
        """Quantise and write ``values [N, H, D]`` to slots, int64 ``[N]``, of at most a piece."""
        count = len(units) * self.heads
        codes, scales = self._codes.take(count), self._scale_rows.take(count)
        self._quantise(values.flatten(0, 1), codes.all, scales.all, self.tensor_scales.get(layer))
        self.tokens[layer].put(units, offsets, codes.parts[0])
        self.scales.put(layer, units, offsets, scales.parts[0])

    def take(self, layer: int, units: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor) -> None:
        """Read and dequantise slots, int64 ``[N]``, into ``out [N, H, D]``."""
        codes = self.tokens[layer].take(units, offsets).view(torch.uint8)
        scales = self.scales.take(layer, units, offsets)
        dense = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
        self._dequantise(codes, scales.flatten(0, 1), dense.flatten(0, 1), self.tensor_scales.get(layer))
        if dense is not out:
            out.copy_(dense)

    def gather(self, layer: int, pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Read and dequantise pages, int64 ``[N]``, into memory that is kept: ``[H, N * page size, D]``."""
        count, view = pages.shape[0], self.stored[layer]
        words = view.shape[-1]
        if self.head_major:
            # A gather along the second axis of the whole would copy slice by slice through an iterator.
            raw = self._space.take("pages", (self.heads, count, self.page_size, words), self._word)
            for head in range(self.heads):
                torch.index_select(view[:, head], 0, pages, out=raw[head])
        else:
            raw = self._space.take("pages", (count, self.page_size, self.heads, words), self._word)
            torch.index_select(view, 0, pages, out=raw)
        rows = raw.view(torch.uint8).view(-1, self.dim)
        out = self._space.take("rows", (rows.shape[0], self.dim), dtype)
        scales = self.scales.pages(layer, pages, head_major=self.head_major)
        self._dequantise(rows, scales, out, self.tensor_scales.get(layer))
        if self.head_major:
            return out.view(self.heads, count * self.page_size, self.dim)
        return out.view(count * self.page_size, self.heads, self.dim).permute(1, 0, 2)


class Gathers(Protocol):
    """A stored tensor whose pages can be read: as :class:`StoredTensor`, or as compiled kernels have it."""

    heads: int
    page_size: int
    tensor_scales: dict[int, torch.Tensor]

    def gather(self, layer: int, pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See :meth:`StoredTensor.gather`."""
        ...


class TensorPages(PageSource):
    """Pages of one tensor for attention."""

    def __init__(self, tensor: Gathers) -> None:
        self.tensor = tensor
        self.heads = tensor.heads
        # A power of two times three bits of mantissa is a bf16 number. Times a tensor scale it need not be.
        wide = frozenset((torch.float32,))
        self.exact = wide if tensor.tensor_scales else wide | {torch.bfloat16}

    def gather(self, layer: int, pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See :class:`kvcore.memory.paged_attention.PageSource`."""
        return self.tensor.gather(layer, pages, dtype)


def constants(pool: PoolView, tensor: str) -> dict[int, torch.Tensor]:
    """Tensor scales by layer, as views of the pool: they may be set after kernels are bound. Empty where there are none."""
    if not pool.layout.constant_regions:
        return {}
    ((_, first, _),) = pool.placement.ranges[TENSOR_SCALE]
    return {n: pool.field(n, TENSOR_SCALE, tensor)[first + 1] for n in pool.layout.layers}
