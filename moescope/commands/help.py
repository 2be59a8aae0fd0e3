"""Show the verbs, a verb's options and the fields of its JSON, or the page for programs that profile on behalf of a user.

examples:
  moescope help
  moescope help time threads
  moescope help agent        from "it is slow" to a cause; also a skill: copy the folder that its last line names
"""

import argparse
from difflib import get_close_matches
from importlib.resources import as_file, files

from moescope.answers import schema_of
from moescope.command_line import Program, parser_of
from moescope.errors import UserError
from moescope.schemas import declarations, fields, names_of
from moescope.verbs import ABOUT, FORMS, GROUPS

AGENT = "agent"
FOLDER = "skills/moescope"
"""The name of the innermost folder is that of the skill in the file's first lines, as the format wants it."""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("verb", metavar="VERB", nargs="*", help=f"a verb with its form, such as `time threads`; or `{AGENT}`")


def run(args: argparse.Namespace) -> int:
    """Print the page."""
    name = " ".join(args.verb)
    if not name:
        print(Program("moescope", "moescope", ABOUT, GROUPS).help())
    elif name == AGENT:
        with as_file(files("moescope").joinpath(FOLDER)) as folder:
            print(agent_page(), f"\nThis page as a skill: {folder}", sep="")
    elif name in FORMS:
        print(verb_page(name))
    else:
        near = get_close_matches(name, [*FORMS, AGENT], n=3)
        meant = f"did you mean {' or '.join(near)}?" if near else "`moescope help` lists the verbs"
        raise UserError(f"there is no page {name!r}; {meant}")
    return 0


def agent_page() -> str:
    """SKILL.md without the lines that are for a loader of skills."""
    text = files("moescope").joinpath(FOLDER, "SKILL.md").read_text(encoding="utf-8")
    return text.split("---\n", 2)[2].lstrip()


def verb_page(form: str) -> str:
    """A form's help, and the fields of its answers."""
    verb = FORMS[form]
    parts = [parser_of(verb.load(), f"moescope {form}", verb.help, verb.words).format_help()]
    for name in names_of(form):
        width = max(len(path) for path, *_ in fields(name))
        lines = [f"  {path:<{min(width, 60)}}  {kind}{': ' * bool(meaning)}{meaning}" for path, kind, meaning in fields(name)]
        parts.append("\n".join([f"JSON, schema {schema_of(name)}: {declarations()[name]['about']}", *lines]))
    return "\n\n".join(part.strip("\n") for part in parts)
