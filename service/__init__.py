"""The daemon: a supervised process that owns the model and serves it on a Unix socket."""

__version__ = "0.1.0"
