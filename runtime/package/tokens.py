"""The tokenizer, the end tokens and the chat template that come with a model."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from runtime.errors import ModelError, RequestError
from runtime.graphs.checkpoint import read_json

Message = dict[str, Any]
PLAIN = (
    "{% for m in messages %}{{ {'system': '', 'user': 'User: ', 'assistant': 'Assistant: '}[m['role']] }}{{ m['content'] }}\n"
    "{% endfor %}Assistant:"
)
"""Turns for a model that has no template."""
TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


def read_tokenizer(folder: Path) -> Tokenizer:
    """tokenizer.json; ModelError where it is missing or broken."""
    path = folder / "tokenizer.json"
    read_json(path, "copy tokenizer.json into the model folder and convert again")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:
        raise ModelError(f"{path} is no tokenizer ({error}): copy it again") from None


def further_end_ids(folder: Path) -> frozenset[int]:
    """Ids that end an answer by generation_config.json, beside those of config.json."""
    path = folder / "generation_config.json"
    ids = read_json(path, "copy it from the model").get("eos_token_id") if path.exists() else None
    further = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(isinstance(token, int) for token in further):
        raise ModelError(f"{path} has an eos_token_id that is no number: copy it from the model")
    return frozenset(further)


def chat_ids(folder: Path, messages: list[Message]) -> list[int]:
    """Ids of a conversation that the model shall continue with its answer, as transformers' apply_chat_template makes them."""
    from jinja2 import TemplateError
    from transformers import PreTrainedTokenizerFast

    settings = _settings(folder)
    special = {name: _text(settings[name]) for name in TOKENS if settings.get(name)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **special)
    try:
        ids = tokenizer.apply_chat_template(
            messages, chat_template=_template(folder, settings), add_generation_prompt=True, return_dict=False
        )
    except TemplateError as error:
        raise RequestError(f"the model's chat template refuses this conversation: {error}") from None
    return list(ids)  # type: ignore[arg-type]


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return read_json(path, "copy it from the model") if path.exists() else {}


def _template(folder: Path, settings: dict[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return str(template or PLAIN)


def _text(token: object) -> str:
    """A special token's text; configs hold it as such or in an object."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)
