"""Model families the learner can train: one file each, found by the `model_type` of a model's config.json.

Adding a family is one file with a `ModelFamily` and one line in `_FAMILIES`; the rest of the learner does not change.
"""

from __future__ import annotations

from vagen.common.errors import ConfigError
from vagen.common.model_types import why_unsupported
from vagen.learner.model.families.base import Layout, ModelFamily, WeightRule
from vagen.learner.model.families.glm4v import GLM4V, GLM46V
from vagen.learner.model.families.internvl import INTERNVL
from vagen.learner.model.families.qwen2 import QWEN2
from vagen.learner.model.families.qwen2_5_vl import QWEN2_5_VL
from vagen.learner.model.families.qwen3 import QWEN3
from vagen.learner.model.families.qwen3_vl import QWEN3_VL
from vagen.learner.model.families.qwen3_vl_moe import QWEN3_VL_MOE

__all__ = ["Layout", "ModelFamily", "WeightRule", "family_of"]

_FAMILIES = {
    family.model_type: family for family in (GLM4V, GLM46V, INTERNVL, QWEN2, QWEN2_5_VL, QWEN3, QWEN3_VL, QWEN3_VL_MOE)
}


def family_of(model_type: str) -> ModelFamily:
    """The family of a `model_type`. Raises ConfigError that says why, where that is known, and lists the supported
    ones."""
    family = _FAMILIES.get(model_type)
    if family is None:
        raise ConfigError(
            f"model_type {model_type!r} is not supported{why_unsupported(model_type)}; "
            f"supported: {', '.join(sorted(_FAMILIES))}"
        )
    return family
