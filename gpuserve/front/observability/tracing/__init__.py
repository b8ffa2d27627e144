"""Request tracing: settings and sampling (``trace_settings``), the record of one request (``request_trace``),
and output (``trace_writers``, ``../otlp.py``). Traces are started in ``front/models``, and ``front/service``
connects the parts. No worker imports this package.
"""

from __future__ import annotations
