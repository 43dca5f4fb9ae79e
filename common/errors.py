"""The exception tree of the whole product.

VagenError
├── ConfigError (ValueError)            a setting, an option or a combination of them
├── ObservationError (ValueError)       an environment's observation contradicts itself
├── TrajectoryError (ValueError)        a trajectory that may not be trained on; names the field
├── WireError (ValueError)              bytes that are not a message of ours
├── ArchiveError (ValueError)           a saved buffer that cannot be read, written or combined
├── InfrastructureError (RuntimeError)  something outside the policy failed; never becomes reward 0
│   ├── EnvironmentFailure
│   ├── EngineError
│   │   ├── EngineUnavailableError      not reachable within the time-out
│   │   ├── EngineAbortedError          the generation was cut off by the engine
│   │   └── EngineRefusedError          the engine answered 4xx: the request was wrong
│   └── BufferUnavailableError          Redis or the ingest did not answer within the time-out
├── BroadcastError (RuntimeError)       a publish could not reach any engine
├── CheckpointError (RuntimeError)      a checkpoint that cannot be written or does not match
└── RankLostError (RuntimeError)        another process of the same learner does not answer any more
"""

from __future__ import annotations

from vagen.common.redaction import redact


class VagenError(Exception):
    """Root of everything that this project raises on purpose; its text never shows the password of a URL."""

    def __str__(self) -> str:
        return redact(super().__str__())


class ConfigError(VagenError, ValueError):
    """A setting that cannot work: the message names the path, the value and the bound."""


class ObservationError(VagenError, ValueError):
    """Text and images of an observation do not fit together."""


class TrajectoryError(VagenError, ValueError):
    """A trajectory that may not be trained on.

    `field` is the path of the offending field, for example `rows[0].behaviour_logprobs`; it is also the
    label under which a refusal is counted.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class WireError(VagenError, ValueError):
    """Bytes that do not decode to a message within the limits."""


class ArchiveError(VagenError, ValueError):
    """A saved buffer that cannot be read, written or combined: the message names the path."""


class InfrastructureError(VagenError, RuntimeError):
    """A failure outside the policy: counted, logged and retried, never trained on as reward 0."""


class EnvironmentFailure(InfrastructureError):
    """The simulator raised, timed out or died."""


class EngineError(InfrastructureError):
    """The inference engine did not produce a usable answer."""


class EngineUnavailableError(EngineError):
    """The engine could not be reached, or did not answer within the time-out."""


class EngineAbortedError(EngineError):
    """The engine gave up a generation that it had started."""


class EngineRefusedError(EngineError):
    """The engine refused the request itself (HTTP 4xx)."""


class BufferUnavailableError(InfrastructureError):
    """Redis or the ingest did not answer within the time-out."""


class BroadcastError(VagenError, RuntimeError):
    """A publish reached no engine."""


class CheckpointError(VagenError, RuntimeError):
    """A checkpoint that cannot be written, read or matched to the model."""


class RankLostError(VagenError, RuntimeError):
    """Another process of this learner ended, or did not answer within the time-out of a collective."""
