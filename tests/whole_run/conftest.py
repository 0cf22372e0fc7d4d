"""A machine of another size, for the tests of what a run plans."""
from pathlib import Path

import pytest
import torch


@pytest.fixture
def machine(monkeypatch):
    """Make this machine one with so many GB free on its device, and in host memory."""
    def make(device, free, host=1e6, capability=(8, 0)):
        ones, read_text = torch.ones, Path.read_text
        if device != "cuda":                              # its memory is the host's
            host = min(free, host)

        def read(path, **how):
            if str(path) == "/proc/meminfo":
                return f"MemAvailable: {host * 1e9 / 1024:.0f} kB"
            return read_text(path, **how)

        monkeypatch.setattr(Path, "read_text", read)
        monkeypatch.setattr(torch, "ones", lambda size, device=None: ones(size))  # not on a card
        for name, found in dict(
                is_available=device == "cuda", device_count=1, mem_get_info=2 * (free * 1e9,),
                is_bf16_supported=capability >= (8, 0), get_device_capability=capability).items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, found=found, **how: found)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: device == "mps")
    return make
