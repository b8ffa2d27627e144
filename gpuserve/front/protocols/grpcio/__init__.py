"""The gRPC protocol server on grpc.aio, an alternative to our own transport."""

from __future__ import annotations
