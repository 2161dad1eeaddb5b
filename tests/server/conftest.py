"""The browser's fixtures, for whichever file asks for them."""

from tests.server.desk import browser, desk

__all__ = ["browser", "desk"]
