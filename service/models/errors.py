"""The one error of model loading. A leaf: imports nothing, so that a wrong path fails before torch is imported."""


class ModelError(Exception):
    """The model files or the options cannot work: one sentence that says what to do. A restart does not help."""
