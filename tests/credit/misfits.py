"""The check that every tensor argument of a function is checked."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch


def assert_misfits_refused(function: Callable, *names: str, **arguments) -> None:
    """A call is fine as it is, and refused with a message about every named tensor that has one row more."""
    function(**arguments)
    for name in names:
        longer = torch.cat([arguments[name], arguments[name][-1:]])
        with pytest.raises(ValueError, match=f"`{name}` must "):
            function(**{**arguments, name: longer})
