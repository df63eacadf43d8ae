"""The hardware behind a port: `base` says what the connectors need of a device, `cpu` and `npu` give it."""

from __future__ import annotations

from collections.abc import Callable

from ascend_pd.errors import OperatorError
from connectors.device.base import Device


def _cpu() -> Device:
    from connectors.device.cpu import CpuDevice

    return CpuDevice()


def _npu() -> Device:
    try:
        from connectors.device.npu import NpuDevice
    except ImportError as error:
        raise OperatorError(
            f"torch_npu cannot be loaded: {error}", "use a vllm-ascend image, and source CANN's set_env.sh in it"
        ) from error
    return NpuDevice()


DEVICES: dict[str, Callable[[], Device]] = {"cpu": _cpu, "A2": _npu, "A3": _npu}


def create_device(hardware: str) -> Device:
    """The device of this worker process.

    Raises:
        OperatorError: unknown hardware, or its library is missing.
    """
    factory = DEVICES.get(hardware)
    if factory is None:
        raise OperatorError(f"unknown hardware {hardware!r}", f"use one of {', '.join(DEVICES)}")
    return factory()
