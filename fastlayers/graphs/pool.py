"""The memory of captured graphs, and whose it is at present."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeAlias
from weakref import ReferenceType, WeakSet, ref

import torch
from torch import Tensor

__all__ = ["Call", "Pool", "Range", "in_memory", "in_one_segment"]

#: The address and the size of memory in bytes.
Range: TypeAlias = tuple[int, int]

#: The setting of torch's allocator for segments that grow.
GROWING = "expandable_segments"
#: Of the CUDA driver: whether a device has virtual memory, which such segments are made of.
VIRTUAL_MEMORY = 102


class Call:
    """A replayed forward whose backward may come.

    Args:
        pattern: of the arguments.
        random: the states of the generators before.
        kept: the memory in which the forward left what its backward needs.
        buffers: of the module, that the forward changes.
        read: other tensors of the module that the backward or another forward reads.

    Attributes:
        old: the values of ``buffers`` before the call.
        versions: of ``read``.
        copies: of what is in ``kept``, if another graph has written there.
        done: whether its backward was replayed, and nobody asked to keep what it needs.
    """

    def __init__(
        self,
        pattern: Any,
        random: list[Tensor],
        kept: Sequence[Tensor] = (),
        buffers: Sequence[Tensor] = (),
        read: Sequence[Tensor] = (),
    ) -> None:
        self.pattern, self.random, self.kept = pattern, random, kept
        self.old = [t.detach().clone() for t in buffers]
        self.versions = [t._version for t in read]
        self.copies: list[Tensor] | None = None
        self.done = False

    @property
    def pending(self) -> bool:
        """Whether its backward needs what is in the memory of the graphs now."""
        return not self.done and self.copies is None

    def save(self) -> None:
        """Copy what the backward needs, on the present stream, before it is overwritten."""
        self.copies = [t.clone() for t in self.kept]

    def restore(self) -> None:
        """Put back what was copied."""
        for t, copy in zip(self.kept, self.copies or (), strict=True):
            copy.record_stream(torch.cuda.current_stream(copy.device))
            t.copy_(copy)


class Pool:
    """Memory that graphs are captured into.

    Where several share it, the layers of one model, each keeps what its forward leaves for its backward, and the rest
    is free for those that are captured later. So a graph writes only over what graphs that were captured later keep:
    in a backward, which runs from the last layer to the first, over nothing that is needed. In another order what a
    backward needs is copied before.

    Args:
        shared: whether graphs of several modules or signatures are captured into it.
    """

    def __init__(self, shared: bool) -> None:
        self.shared = shared
        self.lock = threading.RLock()
        self._graphs = 0
        self._handle: Any = None
        self._users: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self._calls: list[tuple[int, ReferenceType[Call]]] = []
        self._stream: torch.cuda.Stream | None = None

    @property
    def handle(self) -> Any:
        """What torch knows it by, if it has a GPU; another one if no graph uses it any more, since torch has closed
        that pool."""
        if not self._users:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle

    def use(self, graph: torch.cuda.CUDAGraph) -> None:
        """Note that a graph was captured into it."""
        self._users.add(graph)

    def number(self) -> int:
        """The number of a new capture."""
        self._graphs += 1
        return self._graphs

    def expect(self, number: int, call: Call) -> None:
        """Note that what a graph has just left is needed until the backward of its call."""
        self._calls.append((number, ref(call)))

    def write(self, number: int, device: torch.device) -> None:
        """Note that a graph is about to be replayed, on the present stream."""
        stream = torch.cuda.current_stream(device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream
        self.overwrite(number)

    def overwrite(self, number: int) -> None:
        """Save what a graph with this number is about to write over."""
        calls = [(other, each, each()) for other, each in self._calls]
        for other, _, call in calls:
            if call is not None and call.pending and other > number:
                call.save()
        self._calls = [(other, each) for other, each, call in calls if call is not None and call.pending]

    def pending(self) -> list[Call]:
        """The calls whose backward needs what is in this memory."""
        return [call for _, each in self._calls if (call := each()) is not None and call.pending]

    def blocks(self, used: bool) -> list[Range]:
        """The memory that tensors have, or that which none has."""
        segments = [each for each in torch.cuda.memory_snapshot() if each["segment_pool_id"] == self.handle]
        blocks = (block for segment in segments for block in segment["blocks"])
        return [(block["address"], block["size"]) for block in blocks if (block["state"] != "inactive") == used]


def in_memory(memory: Range, device: torch.device, dtype: torch.dtype = torch.uint8) -> Tensor:
    """A tensor of memory that it does not keep."""
    address, size = memory
    storage = torch._C._construct_storage_from_data_pointer(address, device, size)
    return torch.empty(0, dtype=dtype, device=device).set_(storage)


@contextmanager
def in_one_segment(device: torch.device) -> Iterator[None]:
    """Let torch take new memory for a pool from one segment that grows, and not from one for each large tensor.

    What is freed there becomes one block with its neighbours, which a tensor of any size may use. The graphs of a
    ResNet-50 reserve 1.02x of what a step without graphs allocates at its peak, with segments 1.16x; those of a 3-D
    U-Net 1.15x and 1.37x. Where the user has chosen, or the device cannot, nothing changes.
    """
    before = settings()
    if GROWING in before or torch.cuda.get_allocator_backend() != "native" or not has_virtual_memory(device):
        yield
        return
    set_settings(",".join(filter(None, (before, f"{GROWING}:True"))))
    try:
        yield
    finally:
        set_settings(f"{GROWING}:False")  # It stays as it is where a setting does not mention it.
        set_settings(before)


def settings() -> str:
    """The settings of torch's allocator, as PYTORCH_ALLOC_CONF spells them."""
    get = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if get is not None:
        return str(get())
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""


def set_settings(text: str) -> None:
    put = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (put or torch.cuda.memory._set_allocator_settings)(text)


@cache
def has_virtual_memory(device: torch.device) -> bool:
    found = ctypes.c_int(0)
    failed = ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(ctypes.byref(found), VIRTUAL_MEMORY, device.index)
    return not failed and bool(found.value)
