"""How does text become tokens, and when is a token text again?

A tokenizer maps text to ids and back, but not token by token: a character outside ASCII is several
bytes in UTF-8, and those may be spread over several tokens. A stream that decodes each token alone
prints "\\ufffd" for every part. `Detokenizer` holds text back until the character is whole, and
also what may become a stop string.

A chat is turned into one text by the model's own template, a Jinja program that came with the
weights: it runs in a sandbox and can change nothing.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import tokenizers
from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minikv.weights import read_json

PROMPT_TAIL = 5  # tokens; vLLM 0.32.0 lets its decode stream begin with the whole prompt
REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no character (yet)


class Tokenizer:
    """Text to ids and back, from tokenizer.json, tokenizer_config.json and chat_template.jinja."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more precise
            raise ValueError(f"{path} cannot be read ({error}): fetch the model again") from None
        # A file may ask for padding or truncation, meant for training. A request is never cut.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        config = folder / "tokenizer_config.json"
        self._config = read_json(config) if config.exists() else {}
        template = folder / "chat_template.jinja"
        self._template = (
            template.read_text(encoding="utf-8")
            if template.exists()
            else _default_template(self._config.get("chat_template"))
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the tokens that the model expects around it (such as BOS).

        Raises ValueError for a text that is not valid Unicode (a lone surrogate)."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"the text is not valid Unicode: {error}") from None
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of some tokens; special tokens such as end-of-sequence give none."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], **variables: Any
    ) -> list[int]:
        """A conversation as the prompt whose continuation is the assistant's next message.

        messages: [{"role": "user", "content": "..."}, ...].
        variables: more names for the template, such as enable_thinking for Qwen3.
        Raises ValueError if messages are none, if the model has no template, or if the template
        refuses the messages.
        """
        if (
            not isinstance(messages, Sequence)
            or not messages
            or not all(isinstance(message, Mapping) and "role" in message for message in messages)
        ):
            raise ValueError(
                'messages must be a list such as [{"role": "user", "content": "..."}]; got '
                f"{reprlib.repr(messages)}"
            )
        if self._template is None:
            raise ValueError("this model has no chat template: use generate() with a plain prompt")
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        env.filters["tojson"] = _tojson
        env.globals["raise_exception"] = _raise_exception
        env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        special = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in self._config.items()
            if name.endswith("_token")
        }
        # What templates ask for is there: many test `tools is not none`.
        values = {**special, "tools": None, "documents": None, "add_generation_prompt": True}
        values |= {"messages": messages, **variables}
        try:
            text = env.from_string(self._template).render(values)
        except Exception as error:  # a program of the model's: it may fail in any way
            raise ValueError(f"the chat template refuses these messages: {error}") from None
        return self.encode(text, add_special_tokens=False)  # the template has written them


class Detokenizer:
    """The text of one output as it grows, one token at a time.

    Each call decodes the last tokens that gave text together with the new one, and takes what was
    not there before, up to a character that is not whole yet. The last ones are decoded again
    because some tokenizers write a token differently at the beginning of a text (they drop its
    leading space). For the same reason the prompt's last tokens stand before the first.

    stop: strings that end the text; it is cut before the first.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), prompt: Sequence[int] = ()
    ) -> None:
        self.text = ""  # whole characters only; all that was decided so far
        self._tokenizer = tokenizer
        self._stop = stop
        self._token_ids = list(prompt[-PROMPT_TAIL:])
        if tokenizer.decode(self._token_ids).endswith(REPLACEMENT):
            self._token_ids = []  # no telling which of its characters are whole
        self._last = 0  # tokens from here on are decoded again
        self._next = len(self._token_ids)  # from here on may still hold a part of a character
        # Characters of the decoded tokens that `text` has, or that belong to the prompt.
        self._taken = len(tokenizer.decode(self._token_ids))

    def append(self, token_id: int) -> bool:
        """Add one token. True if the text now contains a stop string (and was cut before it)."""
        self._token_ids.append(token_id)
        decoded = self._tokenizer.decode(self._token_ids[self._last :])
        whole = decoded.rstrip(REPLACEMENT)
        new = whole[self._taken :]
        if not new:
            return False
        self._taken = len(whole)
        if whole == decoded:  # every character is: the next call can begin later
            self._last, self._next = self._next, len(self._token_ids)
            self._taken = len(self._tokenizer.decode(self._token_ids[self._last :]))
        # A stop string that is complete only now can begin in the text before.
        search_from = max(0, len(self.text) - max(map(len, self._stop), default=1) + 1)
        self.text += new
        found = [i for s in self._stop if (i := self.text.find(s, search_from)) >= 0]
        if found:
            self.text = self.text[: min(found)]
        return bool(found)

    @property
    def num_safe(self) -> int:
        """Characters of `text` that can be shown while the output goes on: up to the earliest
        place where a stop string may have begun."""
        longest = max(map(len, self._stop), default=1)
        for start in range(max(0, len(self.text) - longest + 1), len(self.text)):
            if any(s.startswith(self.text[start:]) for s in self._stop):
                return start
        return len(self.text)


def _default_template(value: Any) -> str | None:
    """tokenizer_config.json holds one template, or a list of named ones."""
    if isinstance(value, list):
        named = {entry["name"]: entry["template"] for entry in value}
        return named.get("default")
    return value


def _tojson(value: Any, **options: Any) -> str:
    # Jinja's own filter escapes for HTML, which would change the prompt.
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
