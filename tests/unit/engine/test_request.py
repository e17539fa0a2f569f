"""Requests that cannot be are refused by name."""

from typing import Any

import pytest

from kvouch.engine.request import Request
from kvouch.errors import UsageError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", -1),
        ("max_new_tokens", 2.0),
        ("max_new_tokens", True),
        ("stop_texts", "abc"),
        ("stop_texts", ("a", "")),
        ("stop_texts", (1,)),
    ],
)
def test_a_wrong_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"^{field} is "):
        Request(ids=(1,), **{field: value})
