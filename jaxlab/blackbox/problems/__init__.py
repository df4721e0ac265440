"""Problems to search on: the BBOB functions and paths over a terrain."""

from jaxlab.blackbox.problems import bbob, uav

__all__ = ["bbob", "uav"]
