"""Failure of a transfer, with a reason that metrics count."""


class TransferError(Exception):
    """A record could not be transferred; the prompt is prefilled locally instead.

    Attributes:
      reason: Short name of the cause, the label of `kv_transfer_failures_total`.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


CANCELLED, TIMEOUT, UNREACHABLE, LOST = "cancelled", "timeout", "unreachable", "lost"
SECRET, EXPIRED, TOO_LARGE = "secret", "expired", "too_large"
"""Reasons: the request was aborted; the deadline passed; no connection; the connection closed;
another secret; an unknown or expired ticket; more bytes than the limit."""
