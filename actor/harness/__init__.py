"""Harnesses: how the conversation of an episode is kept, and what the next prompt is.

A harness never builds masks, rows or rewards: the recorder derives those from what was sent and sampled.
"""

from __future__ import annotations

from vagen.actor.config import HarnessConfig
from vagen.actor.harness.base import Harness
from vagen.actor.harness.concat import ConcatHarness
from vagen.actor.harness.no_concat import NoConcatHarness

__all__ = ["ConcatHarness", "Harness", "NoConcatHarness", "make_harness"]


def make_harness(config: HarnessConfig) -> Harness:
    """A harness for one episode at a time."""
    if config.name == "no_concat":
        return NoConcatHarness()
    return ConcatHarness(window=config.window)
