"""Conversations as prompts: the template in tokenizer_config.json, or plain turns where there is none."""

from pathlib import Path

from runtime.errors import ModelError, RequestError
from runtime.graphs.checkpoint import read_json

NAMES = {"system": "", "user": "User: ", "assistant": "Assistant: "}


def prompt_of(folder: Path, messages: list[dict[str, str]]) -> str:
    """The text that the model shall continue with the assistant's next message."""
    path = folder / "tokenizer_config.json"
    settings = read_json(path, "copy it from the model") if path.exists() else {}
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    if (folder / "chat_template.jinja").exists():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if not template:
        turns = [NAMES.get(message["role"], "") + message["content"] for message in messages]
        return "\n".join([*turns, NAMES["assistant"].rstrip()])
    return _rendered(template, messages, {name: _text(settings.get(name)) for name in ("bos_token", "eos_token")})


def _rendered(template: str, messages: list[dict[str, str]], tokens: dict[str, str]) -> str:
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise RequestError(f"the model's chat template refuses this conversation: {message}")

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    try:
        return environment.from_string(template).render(messages=messages, add_generation_prompt=True, **tokens)
    except TemplateError as error:
        raise ModelError(f"the model's chat template is broken ({error}): copy tokenizer_config.json again") from None


def _text(token: object) -> str:
    """A special token's text; configs hold it as such or in an object."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")
