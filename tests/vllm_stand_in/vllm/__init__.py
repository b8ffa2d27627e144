"""A stand-in for vLLM: the parts of its documented interface that gpuserve calls, without an engine.

A generation gives back the words of its prompt. ``$VLLM_RECORD`` is a file with a line for each event.
"""
