"""Which engines are proven to have the frozen weights, so that these need not be sent to them again.

A proof is the checksum of everything after a publish. It holds for one start of an engine, and as long as that engine
says that it has the version of that publish: whoever changed its weights since gave them another. Between the begin of
an update and the next proof there is none.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vagen.common.engines import incarnation_of
from vagen.learner.frozen_weights import FrozenWeights

__all__ = ["Holdings"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Proof:
    incarnation: str
    version: str
    frozen: FrozenWeights
    adds: bool


class Holdings:
    """What is known of each engine, by URL. Used in the event loop of one publish at a time."""

    def __init__(self) -> None:
        self._proofs: dict[str, _Proof] = {}
        self._adds_otherwise: dict[str, str] = {}

    def prove(self, url: str, info: Mapping[str, Any], version: str, frozen: FrozenWeights, *, adds: bool) -> None:
        """The engine of this `/server_info` has all weights of a version; with `adds` it added updates itself, so that
        it has the weights without them as well.
        """
        self._proofs[url] = _Proof(incarnation_of(info), version, frozen, adds)

    def is_proven(self, url: str, info: Mapping[str, Any], version: str, frozen: FrozenWeights, *, adds: bool) -> bool:
        """Whether an engine that says that it has `version` was proven to have the frozen weights."""
        return self._proofs.get(url) == _Proof(incarnation_of(info), version, frozen, adds)

    def drop(self, url: str) -> None:
        """What the engine has is about to change."""
        self._proofs.pop(url, None)

    def note_other_sum(self, url: str, info: Mapping[str, Any]) -> None:
        """This start of an engine was proven to have the base, and got something else from adding updates to it, as
        another kind of processor may. It gets the sums from now on.
        """
        logger.warning("%s: adding updates to its weights gives others than here: it gets whole weights", url)
        self._adds_otherwise[url] = incarnation_of(info)

    def may_add(self, url: str, info: Mapping[str, Any]) -> bool:
        """Whether nothing speaks against having the engine add updates itself."""
        return self._adds_otherwise.get(url) != incarnation_of(info)
