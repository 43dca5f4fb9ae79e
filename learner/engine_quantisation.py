"""Engines whose weights are quantised are refused before they are paused: what is published has no scales.

SGLang takes bfloat16 into a tensor of float8 without a word, and computes with the old scales. What tells of it: its
`--quantization`, and the names of scales or packed weights among its tensors. Its `/weights_checker` hides the scales
of float8 in blocks: an engine that has them from a folder that is quantised already, without `--quantization`, is told
by the probe alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vagen.common.engines import incarnation_of
from vagen.common.errors import EngineError
from vagen.learner.engine_control import EngineControl

__all__ = ["PlainEngines", "takes_block_fp8", "why_quantised"]

_QUANTISED = re.compile(r"weight_scale|input_scale|\.(qweight|qzeros|weight_packed)$")
"""In names of tensors: float8 and int8; GPTQ and AWQ; compressed-tensors."""
_ADVICE = "start it without --quantization, on the folder that the learner starts from"


def why_quantised(info: Mapping[str, Any], checksums: Mapping[str, Any]) -> str | None:
    """What shows that an engine's weights are quantised, and what to do about it; None where nothing does.

    `info` is its `/server_info`, `checksums` its answer of `/weights_checker`, empty where it was not asked.
    """
    method = info.get("quantization")
    if method:
        return (
            f"its quantization is {method}, and weights are published in {info.get('dtype')} without scales; {_ADVICE}"
        )
    names = sorted({name for rank in checksums.get("ranks", ()) for name in rank["checksums"]})
    found = next((name for name in names if _QUANTISED.search(name)), None)
    if found is not None:
        return f"it has {found}, whose weights are quantised, and what is published has no scales; {_ADVICE}"
    return None


def takes_block_fp8(info: Mapping[str, Any]) -> bool:
    """Whether an engine of this `/server_info` takes `vagen.common.block_fp8`: the local one, and SGLang with `fp8`."""
    return bool(info.get("block_fp8")) or info.get("quantization") == "fp8"


class PlainEngines:
    """Starts of engines that were found to take weights as they are published."""

    def __init__(self, *, takes_float8: bool = False) -> None:
        """`takes_float8`: weights go in blocks of float8 to those that take them so, which are no fault then."""
        self._takes_float8 = takes_float8
        self._incarnations: dict[str, str] = {}
        """By URL."""

    async def require(self, engine: EngineControl, info: Mapping[str, Any]) -> None:
        """Raise EngineError for an engine that is quantised; `info` is its `/server_info`. Each start is asked once."""
        incarnation = incarnation_of(info)
        if self._incarnations.get(engine.url) == incarnation:
            return
        if self._takes_float8 and takes_block_fp8(info):
            info = {**info, "quantization": None}
        reason = why_quantised(info, {})
        # The local engine has none: it refuses what is not of its own dtype.
        if reason is None and info.get("kind") != "local":
            reason = why_quantised(info, await engine.post("/weights_checker", {"action": "checksum"}))
        if reason is not None:
            raise EngineError(f"{engine.url}: {reason}")
        self._incarnations[engine.url] = incarnation

    def forget(self, engine: str) -> None:
        """The engine at a URL does not come back."""
        self._incarnations.pop(engine, None)
