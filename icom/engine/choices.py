"""Which way attention is computed: measured at the shape in use, remembered for the machine, recorded in the run.

Two ways give the same numbers up to rounding, not the same bits. A run's checkpoints therefore record what it chose,
and a run that resumes keeps to that, whatever would be measured now.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.autograd.graph import saved_tensors_hooks

from icom import machine
from icom.engine import attention, operators
from icom.engine.precision import product_dtype
from icom.errors import IcomError
from icom.files import write_atomically

FILE = "attention.json"
"""In the cache folder: machine -> shape -> way -> milliseconds of a forward and, where needed, backward pass."""

BLOCK_ROWS = (1024, 2048)
"""Heights of blocks that are tried; with 4096 keys a block in bf16 has 8 or 16 MB."""
BLOCKS_FROM = 2**20
"""Queries x keys from which blocks are tried; below, one of the other ways is faster."""
WHOLE_UP_TO = 2**24
"""Batch x heads x queries x keys up to which all probabilities at once are tried: 32 MB in bf16."""
KEPT_SHARE = 0.5
"""Share of the free memory that kept exponentials may take."""

_KEPT = ", kept"


@dataclass(frozen=True)
class Shape:
    """What the fastest way depends on."""

    batch: int
    heads: int
    queries: int
    keys: int
    head_size: int
    dtype: torch.dtype
    gradient: bool

    def __str__(self) -> str:
        """For instance: 1x8x4096x4096x40 bfloat16 gradient."""
        sizes = "x".join(str(n) for n in (self.batch, self.heads, self.queries, self.keys, self.head_size))
        return f"{sizes} {str(self.dtype).removeprefix('torch.')}{' gradient' if self.gradient else ''}"

    @property
    def probabilities(self) -> int:
        """How many a layer has."""
        return self.batch * self.heads * self.queries * self.keys


class Choices:
    """Attention that picks its way by measuring."""

    def __init__(self, folder: Path, layers: int) -> None:
        """Args: the cache folder; how many layers may keep their exponentials at a time."""
        self.made: dict[str, str] = {}
        """Shape -> way, as used in this process: what checkpoints record. A resumed run fills it first."""
        self._folder, self._layers = folder, layers
        self._measured = _read(folder).get(machine_key(), {})
        self._decided: dict[Shape, attention.Attention] = {}

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention; (batch, tokens, heads, head size) each, and so is the result."""
        gradient = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        shape = Shape(q.shape[0], q.shape[2], q.shape[1], k.shape[1], q.shape[3], q.dtype, gradient)
        with torch.autocast(q.device.type, enabled=False):  # it would undo what a way converts to be faster
            if shape not in self._decided:
                with saved_tensors_hooks(_as_it_is, _as_it_is):  # gradient checkpointing would recompute what is tried
                    self._decided[shape] = self._decide(shape)
            return self._decided[shape](q, k, v)

    def forget(self) -> None:
        """What was chosen: as in a process that has computed nothing yet. What was measured stays known."""
        self.made.clear()
        self._decided.clear()

    def _decide(self, shape: Shape) -> attention.Attention:
        key, ways = str(shape), _ways(shape)
        if key not in self.made:
            if self._measured.get(key, {}).keys() != ways.keys():
                self._measured[key] = _measure(shape, ways)
                _remember(self._folder, key, self._measured[key])
            fitting = {way: ms for way, ms in self._measured[key].items() if self._fits(shape, way)}
            self.made[key] = min(fitting, key=fitting.__getitem__).removesuffix(_KEPT)
        way, known = self.made[key], self._measured.get(key, {})
        if way not in ways:
            raise IcomError(
                f"This run computed attention of shape {key} as `{way}`, which this PyTorch or this machine does not "
                "offer, so that it cannot go on to the same bits. Resume it where it ran, or start a new run."
            )
        # Keeping changes no bits, so that it may be decided anew in every process.
        kept = way + _KEPT
        keep = kept in known and known[kept] < known.get(way, 0.0) and self._fits(shape, kept)
        return ways[kept if keep else way]

    def _fits(self, shape: Shape, way: str) -> bool:
        needed = shape.probabilities * product_dtype(shape.dtype).itemsize * self._layers
        return not way.endswith(_KEPT) or needed <= KEPT_SHARE * machine.memory().available


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def measured(shapes: Iterable[str], folder: Path) -> dict[str, dict[str, float]]:
    """Shape -> way -> milliseconds of a forward and, where needed, backward pass, as far as it is remembered.

    Args:
        shapes: as `Choices.made` names them.
        folder: of the cache.
    """
    here = _read(folder).get(machine_key(), {})
    return {shape: here[shape] for shape in shapes if shape in here}


def choices_for(unet: torch.nn.Module, folder: Path) -> Choices:
    """For a UNet: each of its transformers has one layer of long self-attention."""
    return Choices(folder, sum(hasattr(module, "transformer_blocks") for module in unet.modules()))


def machine_key() -> str:
    """What the fastest way depends on beside the shape: CPU, its flags and the limits on them, PyTorch, threads."""
    flags = hashlib.sha256(" ".join(sorted(machine.cpu_flags())).encode()).hexdigest()[:8]
    limit = f"{os.environ.get('ONEDNN_MAX_CPU_ISA', 'all')} {torch.backends.cpu.get_cpu_capability()}"
    threads = torch.get_num_threads()
    return f"{machine.cpu_model()}, flags {flags}, {limit}, PyTorch {torch.__version__}, {threads} threads"


def _ways(shape: Shape) -> dict[str, attention.Attention]:
    """Name -> attention, of all ways that come into question for the shape."""
    ways: dict[str, attention.Attention] = {"stock": attention.stock}
    if shape.probabilities <= WHOLE_UP_TO:
        ways["whole"] = attention.whole
    dtype = product_dtype(shape.dtype)
    blocks = operators.why_not("epilogues", dtype) is None
    if blocks and shape.queries * shape.keys >= BLOCKS_FROM:
        for rows in sorted({min(rows, shape.queries) for rows in BLOCK_ROWS}):
            ways[f"blocks of {rows}"] = attention.blocks(rows)
            if shape.gradient:
                ways[f"blocks of {rows}{_KEPT}"] = attention.blocks(rows, keep=True)
                if operators.why_not("flash", dtype) is None:
                    ways[f"stock, then blocks of {rows}"] = attention.blocks(rows, stock_forward=True)
    return ways


def _measure(shape: Shape, ways: dict[str, attention.Attention]) -> dict[str, float]:
    """Way -> milliseconds, the best of two runs after a first one that fills caches."""
    if shape.probabilities > WHOLE_UP_TO:
        print(f"icom: measuring {len(ways)} ways to compute attention of {shape}, once per machine", file=sys.stderr)
    generator = torch.Generator().manual_seed(0)
    sizes = [(shape.batch, tokens, shape.heads, shape.head_size) for tokens in (shape.queries, shape.keys, shape.keys)]
    inputs = [torch.randn(size, generator=generator).to(shape.dtype) for size in sizes]
    found: dict[str, float] = {}
    for name, way in ways.items():
        _milliseconds(shape, way, inputs)
        found[name] = min(_milliseconds(shape, way, inputs) for _ in range(2))
    return found


def _milliseconds(shape: Shape, way: attention.Attention, inputs: list[torch.Tensor]) -> float:
    q, k, v = (t.detach().requires_grad_(shape.gradient) for t in inputs)
    with torch.set_grad_enabled(shape.gradient):
        began = time.perf_counter()
        result = way(q, k, v)
        if shape.gradient:
            result.backward(inputs[0])
        return round(1e3 * (time.perf_counter() - began), 3)


def _read(folder: Path) -> dict[str, dict[str, dict[str, float]]]:
    """The file's content; nothing where it is absent or damaged: it only saves measuring again."""
    try:
        content = json.loads((folder / FILE).read_text())
        return {
            key: {shape: {way: float(ms) for way, ms in ways.items()} for shape, ways in shapes.items()}
            for key, shapes in content.items()
        }
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _remember(folder: Path, shape: str, ways: dict[str, float]) -> None:
    content = _read(folder)
    content.setdefault(machine_key(), {})[shape] = ways
    with contextlib.suppress(OSError, IcomError):  # a cache that cannot be written costs time only
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / FILE, json.dumps(content, indent=1).encode(), "--cache_dir")
