"""Every message that crosses a process: identities, kv_transfer_params, side-channel messages, reservation.

Pure: no I/O, clock, thread, torch or vllm. A change of any shape here is a new `WIRE_VERSION`.
"""

WIRE_VERSION = 1
