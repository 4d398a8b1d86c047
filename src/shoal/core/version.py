"""The release of this source, which is known also where it is not installed as a package."""

__all__ = ["VERSION"]

VERSION = "0.1.0"
