"""A stand-in for vLLM: the parts of its documented interface that gpuserve calls, without an engine.

A generation gives back the words of its prompt, or the schema of its structured outputs. ``$VLLM_RECORD`` is
a file with a line for each event.
"""
