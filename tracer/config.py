"""`--config FILE`: a TOML file can set every option of a verb; the command line takes precedence."""

import argparse
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tracer.errors import TracerError
from tracer.recording.user_files import read_text

NOT_OPTIONS = ("help", "config")


class ConfigAction(argparse.Action):
    """Makes the file's values the parser's defaults; the command line is then parsed again on top of them."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Read the file; raises TracerError if it or one of its keys is wrong."""
        path = Path(str(values))
        setattr(namespace, self.dest, path)
        known = options_by_name(parser)
        for key, value in read_config(path).items():
            action = known.get(key)
            if action is None:
                raise TracerError(f"{path}: unknown key {key!r}; known: {', '.join(sorted(known))}")
            action.default, action.required = convert_option(action, value, f"{path}: {key}"), False


def add_config(parser: argparse.ArgumentParser) -> None:
    """Declare `--config`."""
    parser.add_argument("--config", action=ConfigAction, metavar="FILE", help="options from a TOML file: ring-mib = 64")


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Parse the words on top of the defaults from a configuration file among them."""
    args = parser.parse_args(words)
    return parser.parse_args(words) if args.config else args


def options_by_name(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """A parser's options by their long names without leading dashes."""
    rows = ((action, [name for name in action.option_strings if name.startswith("--")]) for action in parser._actions)
    actions = {names[0].removeprefix("--"): action for action, names in rows if names}
    return {name: action for name, action in actions.items() if name not in NOT_OPTIONS}


def read_config(path: Path) -> dict[str, Any]:
    """The file's keys and values."""
    try:
        return tomllib.loads(read_text(path))
    except OSError as error:
        raise TracerError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TracerError(f"{path} is not valid TOML: {error}") from None


def convert_option(action: argparse.Action, value: Any, where: str) -> Any:
    """A TOML value converted as from the command line; a list if the option can be repeated, otherwise joined by commas."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise TracerError(f"{where} = {value!r} must be true or false")
        return value
    if isinstance(value, (bool, dict)):
        raise TracerError(f"{where} = {value!r} is not a valid value for --{where.rpartition(' ')[2]}")
    if isinstance(value, list) and (action.nargs in ("+", "*") or isinstance(action, argparse._AppendAction)):
        return [convert_word(action, part, where) for part in value]
    return convert_word(action, ",".join(map(str, value)) if isinstance(value, list) else value, where)


def convert_word(action: argparse.Action, value: Any, where: str) -> Any:
    """One word, converted and checked as argparse does."""
    try:
        answer = action.type(str(value)) if callable(action.type) else str(value)
    except argparse.ArgumentTypeError as error:
        raise TracerError(f"{where} = {value!r}: {error}") from None
    except (ValueError, TypeError):
        raise TracerError(f"{where} = {value!r} is not a valid value for --{where.rpartition(' ')[2]}") from None
    if action.choices and answer not in action.choices:
        raise TracerError(f"{where} = {value!r} is not one of {', '.join(map(str, action.choices))}")
    return answer


def effective_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options in effect, for the manifest."""
    rows = {key.replace("_", "-"): value for key, value in vars(args).items() if key not in ("verb", "command")}
    return {key: to_json(value) for key, value in rows.items()}


def to_json(value: Any) -> Any:
    """A value converted for JSON."""
    if isinstance(value, list):
        return [to_json(item) for item in value]
    return str(value) if isinstance(value, Path) else value
