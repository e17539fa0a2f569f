"""How a family takes its tensors: by name and shape, each exactly once. Knows no file."""

from typing import Protocol

from torch import Tensor


class TensorSource(Protocol):
    """Checkpoint tensors by name, in the dtype and on the device that the model is loaded for."""

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor of that name; missing names and wrong shapes are collected and raised together at the end."""
