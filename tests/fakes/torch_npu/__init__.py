"""A stand-in for torch_npu: `install` puts it, and `torch.npu`, in place for one test."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from tests.fakes.torch_npu.device import FakeNpu, Registrar, ascend_tensor

__all__ = ["FakeNpu", "Registrar", "ascend_tensor", "install"]


def install(monkeypatch: pytest.MonkeyPatch, npu: FakeNpu) -> None:
    """Make `import torch_npu` and `torch.npu` be this fake until the test ends."""
    module = ModuleType("torch_npu")
    module.get_npu_format = npu.get_npu_format  # type: ignore[attr-defined]
    module.npu = npu  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    real_empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **kwargs: npu.empty(real_empty, *size, **kwargs))
    # The driver binds the module's name at its first import: let every test import it anew.
    monkeypatch.delitem(sys.modules, "connectors.device.npu", raising=False)
