"""The tokenizer, the end tokens and the chat template that come with a model."""

import os
import re
import sys
from operator import itemgetter
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from runtime.errors import ModelError, RequestError
from runtime.graphs.checkpoint import read_json

Message = dict[str, Any]
PLAIN = (
    "{% for m in messages %}{{ {'system': '', 'user': 'User: ', 'assistant': 'Assistant: '}[m['role']] }}{{ m['content'] }}\n"
    "{% endfor %}Assistant:"
)
"""The chat template for models without one."""
THINKING = {"enable_thinking", "thinking"}
"""Variables by which templates of published models switch thinking; a template may read both."""
GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""transformers' own tag, which Jinja does not know."""
UNBOUNDED = 10**30
"""Token limit for the tokenizer: the engine itself reports a conversation that does not fit."""


def read_tokenizer(folder: Path) -> Tokenizer:
    """Read tokenizer.json; raises ModelError if it is missing or broken."""
    path = folder / "tokenizer.json"
    read_json(path, "copy tokenizer.json into the model folder and convert again")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        raise ModelError(f"{path} is not a tokenizer ({error}): copy it again") from None
    _add_tokens(tokenizer, folder / "tokenizer_config.json")
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, settings: Path) -> None:
    """Add the tokens that tokenizer_config.json alone has, as transformers does; raises ModelError if one has another id."""
    added = read_json(settings, "copy it from the model").get("added_tokens_decoder") if settings.exists() else None
    try:
        tokens = sorted(((int(number), AddedToken(**token)) for number, token in (added or {}).items()), key=itemgetter(0))
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelError(f"{settings} has an added_tokens_decoder that cannot be read ({error}): copy it again") from None
    for number, token in tokens:
        if tokenizer.token_to_id(token.content) is None:
            (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
        if (found := tokenizer.token_to_id(token.content)) != number:
            problem = f"{settings} gives {token.content!r} the id {number}, tokenizer.json {found}"
            raise ModelError(f"{problem}: the files are from different models")


def further_end_ids(folder: Path, vocabulary: int) -> frozenset[int]:
    """Ids that end an answer by generation_config.json, in addition to those of config.json; all below `vocabulary`."""
    path = folder / "generation_config.json"
    ids = read_json(path, "copy it from the model").get("eos_token_id") if path.exists() else None
    further = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if wrong := [token for token in further if type(token) is not int or not 0 <= token < vocabulary]:
        raise ModelError(f"{path} has the eos_token_id {wrong[0]!r}, not a token id of the model: copy it from the model")
    return frozenset(further)


def check_text(text: Any, what: str) -> None:
    """Raise RequestError if a text holds bytes that are not UTF-8, which Python keeps as lone surrogates."""
    try:
        if isinstance(text, str):
            text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{what} is not UTF-8 text: convert it, for example with iconv") from None


class ChatTemplate:
    """A model's chat template and special tokens, read and rendered by transformers."""

    def __init__(self, folder: Path):
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # PyTorch is absent, and a tokenizer needs none
        from transformers import PreTrainedTokenizerFast

        try:
            self._tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        except Exception as error:
            raise ModelError(f"{folder} has tokenizer settings that transformers rejects ({error}): copy them again") from None
        self._tokenizer.model_max_length = UNBOUNDED
        if not self._tokenizer.chat_template:
            print("moescope: this model has no chat template: turns begin with `User:` and `Assistant:`", file=sys.stderr)
            self._tokenizer.chat_template = PLAIN

    def variables(self, thinking: bool | None, effort: str | None, tools: list[Message] | None) -> dict[str, Any]:
        """The template's variables that say this; None says nothing. Raises RequestError for what the template does not read."""
        read = self._read_variables(tools)
        thinks, given = THINKING & read, {"reasoning_effort": effort, "tools": tools}
        variables: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        missing = sorted(variables.keys() - read)
        if missing or (thinking is not None and not thinks):
            raise RequestError(f"the model's chat template does not read {(missing or ['enable_thinking'])[0]}: leave it out")
        return variables | (dict.fromkeys(thinks, thinking) if thinking is not None else {})

    def _read_variables(self, tools: list[Message] | None) -> set[str]:
        from jinja2 import Environment, meta

        text = GENERATION.sub("", self._tokenizer.get_chat_template(None, tools))
        return meta.find_undeclared_variables(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text))

    def ids(self, messages: list[Message], **options: Any) -> list[int]:
        """Token ids of a conversation up to the model's answer, like transformers' apply_chat_template.

        options: further variables of the template, such as `tools` or `enable_thinking`.
        """
        from jinja2 import TemplateError

        if unknown := {"tokenize", "return_tensors", "return_dict", "padding"} & options.keys():
            raise RequestError(f"{', '.join(sorted(unknown))}: the answer is always a list of token ids, leave this out")
        for message in messages:
            check_text(message.get("content"), "a message")
        asked = {"add_generation_prompt": True} | options
        try:
            ids: Any = self._tokenizer.apply_chat_template(messages, return_dict=False, **asked)
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise RequestError(f"the model's chat template rejects this conversation: {error}") from None
        return list(ids)
