"""Fixtures: model folders and the reference for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import CHAT_TEMPLATE, Reference, make_model, make_tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """folder(kind): a model folder as it would come from the hub, made once."""
    root = tmp_path_factory.mktemp("models")

    def get(kind: str) -> Path:
        path = root / kind
        if not path.exists():
            make_model(kind).save_pretrained(path)
            make_tokenizer().save(str(path / "tokenizer.json"))
            (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
            (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
        return path

    return get


@pytest.fixture(scope="session")
def reference(folder: Callable[[str], Path]) -> Callable[[str], Reference]:
    """reference(kind): the same weights in transformers; remembers what it has computed."""
    made: dict[str, Reference] = {}

    def get(kind: str) -> Reference:
        if kind not in made:
            made[kind] = Reference(folder(kind))
        return made[kind]

    return get
