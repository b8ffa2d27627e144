"""The ConfigMap, or a Secret where it has a token, that brings the config and its files into the pods. Its
name ends in a hash of its content, so that config and pods are rolled out and back together.
"""

from __future__ import annotations

import base64
import hashlib
from typing import TYPE_CHECKING, Any, Final

from gpuserve.export.sizing.files import Bundle, map_key

if TYPE_CHECKING:
    from gpuserve.config.settings.server import ServerSettings

#: Where the pods have it.
_FOLDER: Final = "/etc/gpuserve"
_HASH_LENGTH: Final = 10


def holds_token(settings: ServerSettings) -> bool:
    """Whether the config holds a token that opens what it restricts."""
    return settings.access_token is not None or bool(settings.access_rules)


def places(name: str, bundle: Bundle, *, secret: bool) -> dict[str, Any]:
    """The places of the object, which is called ``NAME-config-HASH``, and of its volume."""
    digest = hashlib.sha256()
    for path, content in bundle.contents.items():
        digest.update(f"{len(path)} {path} {len(content)} ".encode() + content)
    texts, others = _split(bundle)
    parts = {"stringData": texts, "data": others} if secret else {"data": texts, "binaryData": others}
    return {
        "is_secret": secret,
        "config_kind": "Secret" if secret else "ConfigMap",
        "config_name": f"{name}-config-{digest.hexdigest()[:_HASH_LENGTH]}",
        "config_data": {key: contents for key, contents in parts.items() if contents},
        "config_items": [{"key": map_key(path), "path": path} for path in bundle.contents],
        "config_folder": _FOLDER,
        "config_file": bundle.config,
    }


def _split(bundle: Bundle) -> tuple[dict[str, str], dict[str, str]]:
    """Files that are text, and the others as base64."""
    texts: dict[str, str] = {}
    others: dict[str, str] = {}
    for path, content in bundle.contents.items():
        try:
            texts[map_key(path)] = content.decode()
        except UnicodeDecodeError:
            others[map_key(path)] = base64.b64encode(content).decode()
    return texts, others
