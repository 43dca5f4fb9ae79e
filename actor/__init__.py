"""The actor: plays episodes with a policy served by an engine, and sends what came of them to the buffer.

Knows neither Redis nor Megatron, and imports no torch outside `local_engine`.
"""
