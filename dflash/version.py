"""Version of the package, in a module of its own so that all others can import it."""

__version__ = "0.1.0"
