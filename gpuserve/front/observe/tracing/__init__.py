"""Tracing of requests: what is traced (``values``, ``scopes``), what is known of one request
(``trace``, ``reception``), and where it goes (``sink``, ``trace_file``, ``otlp``). Who begins a trace is in
``front/models``, and what puts all together in ``front/service``. Nothing of it is imported by a worker.
"""
