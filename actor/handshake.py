"""What a failed handshake with the buffer means, and what to do about it, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import zmq

from vagen.common.curve import ActorKeys

FAILURES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
"""Events of a socket monitor that `explain_failure` knows."""


class HandshakeFailure(NamedTuple):
    """Why no connection came about."""

    problem: str
    is_final: bool
    """The other side answered and will answer the same again; ZeroMQ does not try again by itself."""


def explain_failure(event: Mapping[str, Any], keys: ActorKeys | None) -> HandshakeFailure | None:
    """The failure that a monitor's event reports; none for other events."""
    match event["event"]:
        case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            own = keys.own.public.decode() if keys is not None else "none"
            return HandshakeFailure(
                f"it does not allow this actor's key {own}; copy the public key file into the folder that"
                " $.buffer.security.allowed_dir names on its machine",
                is_final=True,
            )
        case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL if keys is None:
            return HandshakeFailure(
                "it takes encrypted connections only, or is no vagen-buffer; set $.actor.security.key_file and"
                " $.actor.security.server_key_file",
                is_final=True,
            )
        case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            return HandshakeFailure(
                "it takes no encrypted connections, or is no vagen-buffer; set $.buffer.security.key_file there, or"
                " remove $.actor.security here",
                is_final=True,
            )
        case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL if keys is None:
            return HandshakeFailure("it ended the handshake", is_final=False)
        case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL if keys is not None:
            return HandshakeFailure(
                f"it ended the handshake: it stops, or {keys.server.decode()} of $.actor.security.server_key_file is"
                " not its public key",
                is_final=False,
            )
    return None
