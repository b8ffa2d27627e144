"""Config files with ensembles of the models in ``models/steps.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

STEPS = Path(__file__).resolve().parent / "models" / "steps.py"


def tensor(name: str, dtype: str = "float32", *shape: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "dtype": dtype, "shape": list(shape or (-1,)), **more}


def member(name: str, **more: Any) -> dict[str, Any]:
    """A model with x and y, unless it is said otherwise."""
    entry = {"callable": f"{STEPS}:{name}", "inputs": [tensor("x")], "outputs": [tensor("y")]}
    return {"name": name, **entry, "max_batch_size": 8, **more}


def step(model: str, outputs: dict[str, str] | str, **inputs: str) -> dict[str, Any]:
    """One step; an output that is a text is that of y."""
    named = {"y": outputs} if isinstance(outputs, str) else outputs
    return {"model": model, "inputs": inputs, "outputs": named}


def ensemble(name: str, *steps: dict[str, Any], **more: Any) -> dict[str, Any]:
    """From x to y, unless it is said otherwise."""
    tensors = {"inputs": [tensor("x")], "outputs": [tensor("y")]}
    return {"name": name, **tensors, "max_batch_size": 8, "ensemble": {"steps": list(steps)}, **more}


def members(fifo: str = "") -> list[dict[str, Any]]:
    """All models of ``steps.py``."""
    ab = [tensor("a"), tensor("b")]
    text = {"inputs": [tensor("text", "bytes")], "outputs": [tensor("loud", "bytes")]}
    controls = [{"name": "start", "kind": "start"}, {"name": "corrid", "kind": "corrid"}]
    seen = [tensor("seen", "bytes", 1), tensor("y")]
    return [
        member("doubled"),
        member("plus_one"),
        member("looked_at", read_only_inputs=True),
        member("added", inputs=ab),
        member("summed"),
        member("spread"),
        member("shouted", **text),
        member("picky"),
        member("told", outputs=seen),
        member("streamed", decoupled=True),
        member("who", outputs=[tensor("y"), tensor("pid", "int64", 1)]),
        member("asks_chain"),
        member(
            "passed_on",
            inputs=[tensor("a", optional=True), tensor("b", optional=True)],
            outputs=[tensor("a_out"), tensor("b_out")],
            strict=False,
        ),
        member("Counted", sequence_batching={"controls": controls, "max_sequence_idle_us": 60_000_000}),
        *([member("Gate", kwargs={"fifo": fifo})] if fifo else []),
    ]


def ensembles() -> list[dict[str, Any]]:
    """One for each way that steps may hang together."""
    texts = {"inputs": [tensor("text", "bytes")], "outputs": [tensor("loud", "bytes")]}
    shouted = {"model": "shouted", "outputs": {"loud": "once"}, "inputs": {"text": "text"}}
    again = {"model": "shouted", "outputs": {"loud": "loud"}, "inputs": {"text": "once"}}
    two_texts = [tensor("once", "bytes"), tensor("loud", "bytes")]
    seen = [tensor("first", "bytes", 1), tensor("second", "bytes", 1)]
    return [
        ensemble("chain", step("plus_one", "y", x="two"), step("doubled", "two", x="x")),
        ensemble(
            "fan", step("doubled", "a", x="x"), step("plus_one", "b", x="x"), step("added", "y", a="a", b="b")
        ),
        ensemble(
            "diamond",
            step("doubled", "d", x="x"),
            step("doubled", "e", x="d"),
            step("plus_one", "f", x="d"),
            step("added", "y", a="e", b="f"),
            outputs=[tensor("d"), tensor("y"), tensor("f")],
        ),
        ensemble("squared", step("doubled", "a", x="x"), step("added", "y", a="a", b="a")),
        ensemble(
            "read_only",
            step("doubled", "a", x="x"),
            step("looked_at", "b", x="a"),
            step("added", "y", a="a", b="b"),
        ),
        ensemble("nested", step("fan", "a", x="x"), step("chain", "y", x="a")),
        ensemble("texts", shouted, again, **{**texts, "outputs": two_texts}),
        ensemble(
            "careful",
            step("doubled", "a", x="x"),
            step("picky", "b", x="a"),
            step("looked_at", "c", x="a"),
            step("added", "y", a="b", b="c"),
        ),
        ensemble(
            "inside", step("spread", "a", x="x"), step("doubled", "b", x="a"), step("summed", "y", x="b")
        ),
        ensemble(
            "parameters",
            step("told", {"seen": "first", "y": "a"}, x="x"),
            step("told", {"seen": "second"}, x="a"),
            outputs=seen,
        ),
        ensemble(
            "partial",
            step("passed_on", {"a_out": "a_between", "b_out": "b_between"}, a="a", b="b"),
            step("passed_on", {"a_out": "a_out", "b_out": "b_out"}, a="a_between", b="b_between"),
            inputs=[tensor("a", optional=True), tensor("b", optional=True)],
            outputs=[tensor("a_out"), tensor("b_out")],
        ),
        ensemble(
            "demanding",
            step("passed_on", {"a_out": "a_between", "b_out": "b_between"}, a="a", b="b"),
            step("added", "y", a="a_between", b="b_between"),
            inputs=[tensor("a", optional=True), tensor("b", optional=True)],
        ),
        ensemble("sequences", step("doubled", "a", x="x"), step("Counted", "y", x="a")),
    ]
