"""The error tree. Each class says who can act; HTTP statuses and exit codes are chosen at the edges.

AscendPdError
├── OperatorError      the operator can act: bad file, missing model, port in use, missing library
├── ProtocolError
│   ├── LocalProtocolError    we broke a contract: a bug of ours
│   └── RemoteProtocolError   the peer sent what it may not: another version, nonsense, a stale epoch
├── UnreachableError   the peer gave no answer in time; it may or may not have acted
├── PairingError       two healthy engines that may not work together (fingerprint or layout)
└── TransferError      a KV transfer did not succeed
"""

from __future__ import annotations


class AscendPdError(Exception):
    """Base of all errors raised by this project."""


class OperatorError(AscendPdError):
    """Something the operator can put right.

    Args:
        message: what is wrong and where, one line.
        fix: what to do about it, one line, or empty.
    """

    def __init__(self, message: str, fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.message} - {self.fix}" if self.fix else self.message


class ProtocolError(AscendPdError):
    """A message broke the protocol."""


class LocalProtocolError(ProtocolError):
    """We were about to break the protocol: a bug here."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the protocol."""


class UnreachableError(AscendPdError):
    """No answer by the deadline, or no room left to ask. The peer may have acted: only repeating is safe."""


class PairingError(AscendPdError):
    """These two engines may not exchange KV cache; both may go on serving others.

    `reason` is the stable name of why (`ascend_pd.layout.geometry.Reason`, or empty).
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class TransferError(AscendPdError):
    """A KV transfer failed.

    `quiesced` is False when bytes may still land in, or be read from, the memory involved.
    """

    def __init__(self, message: str, *, quiesced: bool) -> None:
        super().__init__(message)
        self.quiesced = quiesced
