"""The release of this source: the only place that names it, read by the build and known without an installation."""

__all__ = ["VERSION"]

VERSION = "0.1.0"
