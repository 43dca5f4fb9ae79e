"""The learner's side of an engine's HTTP: administrative calls, and the probe that samples fixed prompts.

Knows SGLang's endpoints and how they fail; knows nothing of groups, buckets, or the order of a publish.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from vagen.common.errors import EngineError, EngineRefusedError, EngineUnavailableError
from vagen.common.vocabulary import forbidding_bias
from vagen.learner.config import BroadcastConfig

__all__ = ["EngineControl", "ProbeAnswer", "ProbePrompt", "open_session", "probe_engine"]

_PROBE_TOKENS = 16
_OPEN_TO_ACTORS = ("/generate", "/server_info", "/model_info")
"""Of the engine's paths, those that the generation key opens."""


@dataclass(frozen=True, kw_only=True)
class ProbePrompt:
    """A fixed prompt with one image placeholder for each of `images`, which are encoded files in base64."""

    token_ids: tuple[int, ...]
    images: tuple[str, ...] = ()
    forbidden_token_ids: tuple[int, ...] = ()
    """Never sampled."""
    temperature: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ProbeAnswer:
    """What an engine sampled for a probe."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    num_prompt_tokens: int = -1
    """As the engine counted them, images expanded; -1 where it does not say."""


class EngineControl:
    """One engine's HTTP. Has no time-outs: bound every call with `asyncio.timeout`."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, *, key: str | None = None, admin_key: str | None = None
    ) -> None:
        """`key` is for generation and information, `admin_key` for the rest: SGLang takes neither for the other."""
        self.url = url
        self._session = session
        self._key = key
        self._admin_key = admin_key if admin_key is not None else key

    async def get(self, path: str) -> dict[str, Any]:
        """The answer's body. Raises EngineRefusedError (4xx) or EngineUnavailableError."""
        return await self._request("GET", path, None)

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The answer's body. Raises EngineRefusedError (4xx) or EngineUnavailableError."""
        return await self._request("POST", path, dict(body or {}))

    async def _request(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        key = self._key if path in _OPEN_TO_ACTORS else self._admin_key
        headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
        try:
            async with self._session.request(method, self.url + path, json=body, headers=headers) as answer:
                if answer.status == 200:
                    # SGLang answers some of these with an empty body.
                    content = await answer.json(content_type=None) if answer.content_length != 0 else {}
                    return content if isinstance(content, dict) else {}
                text = (await answer.text())[:500]
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise EngineUnavailableError(f"{path}: {type(error).__name__}: {error}") from error
        if 400 <= answer.status < 500:
            raise EngineRefusedError(f"{path}: {answer.status} {text}")
        raise EngineUnavailableError(f"{path}: {answer.status} {text}")


def open_session() -> aiohttp.ClientSession:
    """A session without time-outs or limits of its own: the callers bound what they wait for."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0), trust_env=False
    )


def probe_engine(
    url: str, prompts: Sequence[ProbePrompt], version: int | str, config: BroadcastConfig
) -> list[ProbeAnswer]:
    """Sample every prompt once on the engine at `url`, all at the same time. Blocks, at most `broadcast_timeout_s`.

    Raises EngineRefusedError, EngineUnavailableError (also for the time-out), or EngineError when an answer is not
    entirely of `version`.
    """

    async def sample_all() -> list[ProbeAnswer]:
        async with open_session() as session:
            control = EngineControl(session, url, key=config.api_key)
            async with asyncio.timeout(config.broadcast_timeout_s):
                answers = await asyncio.gather(*(control.post("/generate", _probe_body(p)) for p in prompts))
        return [_parse_probe(url, answer, str(version)) for answer in answers]

    try:
        return asyncio.run(sample_all())
    except TimeoutError as error:
        raise EngineUnavailableError(f"{url}/generate: no answer within {config.broadcast_timeout_s} s") from error


def _probe_body(prompt: ProbePrompt) -> dict[str, Any]:
    return {
        "input_ids": list(prompt.token_ids),
        "image_data": list(prompt.images) or None,
        "sampling_params": {
            "temperature": prompt.temperature,
            "max_new_tokens": _PROBE_TOKENS,
            "logit_bias": forbidding_bias(prompt.forbidden_token_ids),
        },
        "return_logprob": True,
        "logprob_start_len": -1,
    }


def _parse_probe(url: str, answer: Mapping[str, Any], version: str) -> ProbeAnswer:
    try:
        meta = answer["meta_info"]
        ids = tuple(int(token) for token in answer["output_ids"])
        logprobs = tuple(float(entry[0]) for entry in meta["output_token_logprobs"])
        versions = {str(span["version"]) for span in meta["weight_versions"]}
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"{url}: unexpected answer to a probe: {type(error).__name__} {error}") from error
    if versions != {version} or len(ids) != len(logprobs):
        raise EngineError(
            f"{url}: probe of version {version} was sampled by {sorted(versions)}, "
            f"{len(ids)} tokens with {len(logprobs)} log-probabilities"
        )
    return ProbeAnswer(token_ids=ids, logprobs=logprobs, num_prompt_tokens=int(meta.get("prompt_tokens", -1)))
