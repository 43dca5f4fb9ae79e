"""Text of others on a terminal."""

from __future__ import annotations


def printable(text: str, max_length: int = 200) -> str:
    """The text on one line without control characters, cut off where it is too long to be read."""
    shown = "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text[: max_length + 1]
    )
    return shown if len(shown) <= max_length else shown[: max_length - 1] + "…"
