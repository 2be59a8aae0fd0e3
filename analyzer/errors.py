"""What the analyzer cannot do with a recording, in one line."""

from moescope.errors import UserError


class AnalysisError(UserError):
    """A question that this recording cannot answer; the message says why and what to do."""


class PredictError(AnalysisError):
    """The input cannot be predicted from: unreadable model config, unknown device, trace without routes."""
