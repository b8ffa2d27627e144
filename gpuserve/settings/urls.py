"""URLs as they may be shown: without the user name and the password that one may hold."""

from __future__ import annotations

import re
from typing import Final

#: What stands for a value that is not for a terminal or a log.
MASK: Final = "********"
_USERINFO: Final = re.compile(r"""(\b[a-zA-Z][a-zA-Z0-9+.-]*://)[^\s/?#"'<>]*@""")


def without_userinfo(text: str) -> str:
    """Mask the user name and the password in each URL of a text."""
    return _USERINFO.sub(rf"\1{MASK}@", text) if "://" in text else text
