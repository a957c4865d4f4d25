"""How many tokens the KV pool should hold when nobody says."""

import os
from pathlib import Path

import torch

__all__ = ["default_kv_tokens", "free_memory"]

_CPU_SHARE = 0.25  # two workers and their weights share the machine's memory
_CUDA_SHARE = 0.8
_DEFAULT_TOKENS = 65_536
"""Enough for a batch of ordinary jobs; more is asked for by name."""


def default_kv_tokens(bytes_per_token: int, context_length: int, device: torch.device) -> int:
    """Tokens for the pool: one full context or the default, within a share of free memory."""
    share = _CUDA_SHARE if device.type == "cuda" else _CPU_SHARE
    affordable = int(free_memory(device) * share) // bytes_per_token
    return max(1, min(max(_DEFAULT_TOKENS, context_length), affordable))


def free_memory(device: torch.device) -> int:
    """Bytes that can be taken on `device` now, within the container's limit if there is one."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = _meminfo_available()
    limit = _read_number(Path("/sys/fs/cgroup/memory.max"))
    used = _read_number(Path("/sys/fs/cgroup/memory.current"))
    if limit is not None and used is not None:
        free = min(free, max(0, limit - used))
    return free


def _meminfo_available() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such limit, or the word "max"
        return None
