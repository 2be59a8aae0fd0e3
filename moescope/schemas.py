"""The schemas of answers: answers.toml, which declares every field once, as JSON Schema.

A key is the path of a field, or of several of the same object and type (`ttft_ms ttft_p90_ms`): `name[]` is a list, `{name}`
stands for keys that the data gives, `name?` or `name?[]` may be absent. The value is a type and what the field means.
"""

import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Any

from moescope.answers import EMULATOR, schema_of
from moescope.verbs import FORMS

TYPES: dict[str, dict[str, Any]] = {
    "count": {"type": "integer", "minimum": 0},
    "integer": {"type": "integer"},
    "number": {"type": ["number", "null"]},
    "text": {"type": ["string", "null"]},
    "flag": {"type": "boolean"},
    "row": {"type": "object"},
    "any": {},
}
"""Type → JSON Schema. A number or text that is unknown is null; a row has the columns of a table or of the statement."""
LIKE = "as "
"""Begins the type of fields that have the same declaration elsewhere: `as time phases`."""
Tree = dict[str, Any]
"""Segment of a path → tree, or the name of a type."""


@cache
def declarations() -> dict[str, dict[str, str]]:
    """Name of an answer (`time.step`) → path → `type: meaning`; at `about`, what the answer is."""
    text = files("moescope").joinpath("answers.toml").read_text(encoding="utf-8")
    return dict(tomllib.loads(text))


def names_of(form: str) -> list[str]:
    """The answers of a verb: of `time` its own and `time.step`, without those of its other forms, as `time.threads`."""
    known = {name: name.replace(".", " ") for name in declarations()}
    owners = {name: max((one for one in FORMS if f"{words} ".startswith(f"{one} ")), key=len) for name, words in known.items()}
    return [name for name, owner in owners.items() if owner == form]


def fields(name: str) -> Iterator[tuple[str, str, str]]:
    """(path, type, meaning) of each line of an answer's declaration."""
    for path, text in declarations()[name].items():
        if path != "about":
            kind, _, meaning = text.partition(": ")
            yield path, kind, meaning


def path_segments(path: str) -> list[str]:
    """`a.b[].c` → a, b, [], c."""
    return [part for part in path.replace("[]", ".[]").split(".") if part]


def answer_tree(name: str) -> Tree:
    """All fields of an answer as nested objects."""
    root: Tree = {}
    for path, kind, _ in fields(name):
        first, *more = path.split(" ")
        outer, _, leaf = first.rpartition(".")
        for one in (leaf, *more):
            *within, last = path_segments(f"{outer}.{one}")
            at = root
            for segment in within:
                at = at.setdefault(segment, {})
            at[last] = referred_tree(kind) if kind.startswith(LIKE) else kind
    return root


def referred_tree(kind: str) -> Any:
    """The tree at `as ANSWER [PATH]`."""
    name, *path = kind.removeprefix(LIKE).split()
    at = answer_tree(name)
    for segment in path_segments(".".join(path)):
        at = at[segment]
    return at


def schema_at(at: Any) -> dict[str, Any]:
    """The JSON Schema of a tree; an object that has nothing to say is {} or null."""
    if isinstance(at, str):
        return TYPES[at]
    if "[]" in at:
        return {"type": ["array", "null"], "items": schema_at(at["[]"])}
    free = next((key for key in at if key.startswith("{")), "")
    named = {key.removesuffix("?"): schema_at(below) for key, below in at.items() if key != free}
    required = [key for key in at if key != free and not key.endswith("?")]
    rest = schema_at(at[free]) if free else False
    whole = {"type": "object", "properties": named, "required": required, "additionalProperties": rest}
    return {"anyOf": [whole, {"type": "object", "maxProperties": 0}, {"type": "null"}]}


def json_schema(name: str) -> dict[str, Any]:
    """The JSON Schema of an answer."""
    whole: dict[str, Any] = schema_at(answer_tree(name))["anyOf"][0]
    whole["properties"] |= {"schema": {"const": schema_of(name)}, "emulator": {"enum": [None, EMULATOR]}}
    return whole | {"required": ["schema", "emulator", *whole["required"]]}
