"""Allocator settings for training on the CPU, and what running out of memory looks like."""

from __future__ import annotations

import ctypes
import os
import re
import resource

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8  # glibc's malloc.h
_PIECE = 2**28
"""Bytes by which malloc asks the kernel for more than it needs."""


def keep_freed_memory() -> bool:
    """Tell glibc's malloc to keep large blocks that are freed, instead of giving them back to the kernel.

    By default every activation of more than 32 MB is a fresh mmap whose pages the kernel clears one by one at each
    step. What people preload tcmalloc for; this needs no preload. Call it early: it acts on later allocations.

    Where this process has a limit (ulimit), what malloc keeps in reserve would count, in the heap of each thread anew:
    all threads have one heap then, without a reserve.

    Returns:
        True if it took effect; False where the allocator is not glibc's (musl, a preloaded tcmalloc or jemalloc).
    """
    if any(name in os.environ.get("LD_PRELOAD", "") for name in ("tcmalloc", "jemalloc")):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = [(_M_MMAP_THRESHOLD, 2**30), (_M_TRIM_THRESHOLD, 2**31 - 1)]
    settings += [(_M_TOP_PAD, 0), (_M_ARENA_MAX, 1)] if limits() else [(_M_TOP_PAD, _PIECE)]
    return all(mallopt(ctypes.c_int(name), ctypes.c_int(value)) == 1 for name, value in settings)


def limits() -> dict[str, int]:
    """This process's own limits (ulimit), in bytes, by the line of /proc/self/status that they are about."""
    kinds = {"VmSize": resource.RLIMIT_AS, "VmData": resource.RLIMIT_DATA}
    soft = {what: resource.getrlimit(kind)[0] for what, kind in kinds.items()}
    return {what: limit for what, limit in soft.items() if limit != resource.RLIM_INFINITY}


_RAN_OUT = re.compile(
    r"can't allocate memory|not enough memory|[Oo]ut of memory|ALLOC_FAILED|bad_alloc|MemoryError|"
    r"could not create a primitive\s*$"
)
"""What PyTorch's allocators say (its OutOfMemoryError is a RuntimeError, too), cuBLAS, C++, and oneDNN."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error of PyTorch's, or of Python's, says that memory ran out."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and says_out_of_memory(str(error)))


def says_out_of_memory(text: str) -> bool:
    """Whether that is what a process that ended said: PyTorch, Python, or icom itself."""
    return _RAN_OUT.search(text) is not None
