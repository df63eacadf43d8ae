"""ascend-pd: prefill/decode disaggregated serving for vLLM on Ascend NPUs, and whole on a CPU."""

__version__ = "0.1.0"
