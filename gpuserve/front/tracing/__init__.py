"""Tracing of requests: what is traced (``values``, ``sampler``, ``scopes``), what is known of one request
(``trace``, ``reception``, ``model_tracer``), where it goes (``sink``, ``json_events``, ``trace_file``,
``otlp``), and ``control``, which puts them together. Nothing of it is imported by a worker.
"""
