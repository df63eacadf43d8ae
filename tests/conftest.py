"""Settings that hold for every test."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# A busy machine is slow, not wrong: an example that takes long fails nothing.
settings.register_profile("ascend-pd", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ascend-pd")
