"""The page: a thin client of the daemon's socket."""
