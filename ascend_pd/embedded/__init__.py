"""The embedded default: a small real model and the demo that serves it, all on one machine without an NPU."""
