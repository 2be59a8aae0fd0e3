"""All errors that a user can cause, each with the fact and the remedy in one line."""

from moescope.errors import UserError


class MoEError(UserError):
    """Base of the runtime's errors; its text is one line for the terminal."""


class ModelError(MoEError):
    """The model folder is not one that this runtime can load."""


class PackageError(MoEError):
    """A converted package cannot be read or written."""


class BudgetError(MoEError):
    """The expert cache's budget cannot work for this model."""


class BackendError(MoEError):
    """A backend is missing or refuses a graph."""


class RequestError(MoEError):
    """A generation request does not fit the model."""


class InterruptedStepError(MoEError):
    """Nobody waits for the step any more."""
