"""Allocator settings for training on the CPU."""

from __future__ import annotations

import ctypes
import os

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # glibc's malloc.h


def keep_freed_memory() -> bool:
    """Tell glibc's malloc to keep large blocks that are freed, instead of giving them back to the kernel.

    By default every activation of more than 32 MB is a fresh mmap whose pages the kernel clears one by one at each
    step. What people preload tcmalloc for; this needs no preload. Call it early: it acts on later allocations.

    Returns:
        True if it took effect; False where the allocator is not glibc's (musl, a preloaded tcmalloc or jemalloc).
    """
    if any(name in os.environ.get("LD_PRELOAD", "") for name in ("tcmalloc", "jemalloc")):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_M_MMAP_THRESHOLD, 2**30), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 2**28))
    return all(mallopt(ctypes.c_int(name), ctypes.c_int(value)) == 1 for name, value in settings)
