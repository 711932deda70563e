"""What tests of guards and of graphed functions share."""

from __future__ import annotations

import types

import pytest
from text_cases import install, made_module


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module of the user's, in which the text of a case is run."""
    made = made_module()
    install(made, monkeypatch)
    return made
