"""What every process shares: data types, wire codec, configuration, errors, metrics and logging.

Imports without torch, except `vagen.common.vision`, `deepstack`, `glm`, `tiles` and `towers`.
"""
