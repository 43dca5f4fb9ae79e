"""Takes passwords out of what people will see: errors, log lines, reports, `ready.json`, recipes that are published."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_USER_INFO = re.compile(r"(\w://[^\s:@/\"']*):[^\s\"']*@")
_QUERY = re.compile(r"([?&]password=)[^&\s\"']+")
_SECRET_NAMES = ("api_key", "secret", "password", "token")


def redact(text: str) -> str:
    """The text with `***` for the password of every URL in it.

    A password may hold any character but blanks and quotes, which a URL must write as `%20`, `%22` and `%27`.
    """
    return _QUERY.sub(r"\1***", _USER_INFO.sub(r"\1:***@", text))


def redact_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe, or a part of one, with `***` for keys of engines and passwords, in URLs as well."""
    return {name: _redacted(name, value) for name, value in settings.items()}


def _redacted(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return redact_settings(value)
    if isinstance(value, list):
        return [_redacted(name, item) for item in value]
    if isinstance(value, str):
        return "***" if value and name.endswith(_SECRET_NAMES) else redact(value)
    return value
