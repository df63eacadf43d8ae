"""The hardware behind a port: `base` says what the connectors need of a device, `cpu` and `npu` give it."""

from __future__ import annotations

from collections.abc import Callable

from ascend_pd.errors import OperatorError
from connectors.device.base import Device


def _cpu() -> Device:
    from connectors.device.cpu import CpuDevice

    return CpuDevice()


DEVICES: dict[str, Callable[[], Device]] = {"cpu": _cpu}


def create_device(hardware: str) -> Device:
    """The device of this worker process.

    Raises:
        OperatorError: unknown hardware, or its library is missing.
    """
    factory = DEVICES.get(hardware)
    if factory is None:
        raise OperatorError(f"unknown hardware {hardware!r}", f"use one of {', '.join(DEVICES)}")
    return factory()
