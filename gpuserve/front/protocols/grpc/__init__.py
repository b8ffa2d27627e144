"""The gRPC protocol server: decodes messages into requests and encodes responses into messages."""

from __future__ import annotations
