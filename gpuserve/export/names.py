"""Names that Kubernetes takes, and the one that everything of an export has."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from gpuserve.export.options import DEFAULT_NAME, ExportOptions

if TYPE_CHECKING:
    from gpuserve.config.load import Configuration

#: Names end in up to 13 more characters: -config-<10 digits of a hash>, and of a pod a hash and five more.
MAX_NAME_LENGTH: Final = 45
MAX_LABEL_LENGTH: Final = 63
_LABEL: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LABEL_VALUE: Final = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_SUBDOMAIN: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_MAX_SUBDOMAIN_LENGTH: Final = 253
LABEL_FORM: Final = (
    f"lower-case letters, digits and dashes, at most {MAX_NAME_LENGTH}, a letter first and no dash at the end"
)


def is_object_name(text: str) -> bool:
    """Whether a Service, and all else of an export, may have this name."""
    return len(text) <= MAX_NAME_LENGTH and _LABEL.fullmatch(text) is not None


def is_namespace(text: str) -> bool:
    """Whether a namespace may have this name."""
    return len(text) <= MAX_LABEL_LENGTH and _LABEL.fullmatch(text) is not None


def is_label_value(text: str) -> bool:
    """Whether a label may have this value."""
    return _LABEL_VALUE.fullmatch(text) is not None


def is_secret_name(text: str) -> bool:
    """Whether a Secret may have this name."""
    return len(text) <= _MAX_SUBDOMAIN_LENGTH and _SUBDOMAIN.fullmatch(text) is not None


def is_resource_name(text: str) -> bool:
    """Whether devices may be called this: a domain, and a name in it."""
    domain, _, name = text.partition("/")
    return is_secret_name(domain) and "." in domain and is_label_value(name)


def model_names(configuration: Configuration) -> list[str]:
    """Every model once, whatever versions it has."""
    return list(dict.fromkeys(model.name for model in configuration.models))


def export_name(configuration: Configuration, options: ExportOptions) -> str:
    """``--name``, or the name of the only model, or the default."""
    names = model_names(configuration)
    return options.name or (names[0] if len(names) == 1 else DEFAULT_NAME)
