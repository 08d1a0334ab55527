"""The version of the package, which its build reads and its files bear."""

__all__ = ["__version__"]

__version__ = "0.2.0"
