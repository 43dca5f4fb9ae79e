"""Takes passwords out of text that people will see: errors, log lines, reports, `ready.json`."""

from __future__ import annotations

import re

_USER_INFO = re.compile(r"(\w://[^\s:@/\"']*):[^\s\"']*@")
_QUERY = re.compile(r"([?&]password=)[^&\s\"']+")


def redact(text: str) -> str:
    """The text with `***` for the password of every URL in it.

    A password may hold any character but blanks and quotes, which a URL must write as `%20`, `%22` and `%27`.
    """
    return _QUERY.sub(r"\1***", _USER_INFO.sub(r"\1:***@", text))
