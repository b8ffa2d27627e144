"""A layer of a model's cache with a slot for each row. Needs transformers."""

from __future__ import annotations

from typing import Any, Final

from transformers.cache_utils import DynamicLayer

#: The length of the slots is a multiple of this number of tokens.
_BLOCK: Final = 256


class SlotLayer(DynamicLayer):  # type: ignore[misc]  # transformers has no types for it
    """The keys and values of one layer, [slots, heads, tokens, size]. The tokens of a row begin at the start
    of its slot. A step adds a token to each of the slots ``rows``, at ``places``, and sees ``width`` tokens.
    """

    rows: Any
    places: Any
    width = 0

    def update(self, key_states: Any, value_states: Any, *_args: Any, **_kwargs: Any) -> tuple[Any, Any]:
        self.keys[self.rows, :, self.places] = key_states[:, :, 0]
        self.values[self.rows, :, self.places] = value_states[:, :, 0]
        return self.keys[: len(self.rows), :, : self.width], self.values[: len(self.rows), :, : self.width]

    def get_seq_length(self) -> int:
        return self.width - 1

    def fit(self, count: int, width: int, like: DynamicLayer) -> None:
        """Make room for ``count`` rows of ``width`` tokens, or free room that is more than twice as large."""
        slots, _, length, _ = (0, 0, 0, 0) if self.keys is None else self.keys.shape
        if not (count <= slots <= 2 * count and width <= length <= 2 * width + _BLOCK):
            length = -(-width // _BLOCK) * _BLOCK
            for name in ("keys", "values"):
                tensor = getattr(like, name)
                made = tensor.new_zeros(count, tensor.shape[1], length, tensor.shape[3])
                if slots:
                    held = getattr(self, name)[:count, :, :length]
                    made[: held.shape[0], :, : held.shape[2]] = held
                setattr(self, name, made)
            self.is_initialized = True

    def copy(self, slot: int, source: DynamicLayer, row: int, tokens: slice) -> None:
        """Copy tokens of a row of a layer to the start of a slot."""
        for to, one in ((self.keys, source.keys), (self.values, source.values)):
            copied = one[row, :, tokens]
            to[slot, :, : copied.shape[1]] = copied
