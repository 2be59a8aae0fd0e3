"""Lists the texts that differ between two commits, as CSV: docstrings, help texts, errors, terminal output, other sentences.

python -m scripts.list_rewordings BASE [HEAD] > rewordings.csv      totals by package and kind go to stderr

Texts are compared by syntax tree, so moved and re-wrapped lines do not count. Files are matched as `git diff -M` matches them,
texts by their qualified name and kind. What stands under a name that only one of the commits has was added or removed, not
reworded: it is counted, not listed.
"""

import argparse
import ast
import csv
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from difflib import SequenceMatcher
from pathlib import Path
from typing import NamedTuple

HELP = ("help", "description", "epilog")
OUTPUT = ("print", "write", "warn", "warning")
SENTENCE_WORDS = 2
"""Shorter strings are keys and formats rather than messages; a help text may be a single word."""
DEFINITION = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Key(NamedTuple):
    """Where a text stands in its file: qualified name and kind."""

    name: str
    kind: str


class Change(NamedTuple):
    """A reworded text: a row of the list."""

    file: str
    name: str
    kind: str
    before: str
    after: str


Texts = dict[Key, list[str]]


def literal(node: ast.AST) -> str | None:
    """The text of a string, an f-string (with placeholders as {expression}) or a sum of them; None for anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(part) or f"{{{ast.unparse(part.value)}}}" for part in node.values)  # type: ignore[attr-defined]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = literal(node.left), literal(node.right)
        return None if None in sides else "".join(side for side in sides if side)
    return None


def called(node: ast.Call) -> str:
    """The last part of a called function's name."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


class Collector(ast.NodeVisitor):
    """Collects the texts of a module; `kind` is that of the strings inside the node being visited."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.kind = "other"
        self.texts: Texts = defaultdict(list)

    def add(self, kind: str, text: str, *below: str) -> None:
        """Keep a text under the current name, or under one below it."""
        name = ".".join([*self.names, *below])
        self.texts[Key(name or "(module)", kind)].append(" ".join(text.split()))

    def visit_inside(self, node: ast.AST, kind: str) -> None:
        """Visit a node's children as texts of a kind."""
        before, self.kind = self.kind, kind
        self.generic_visit(node)
        self.kind = before

    def visit_scope(self, node: ast.Module | DEFINITION) -> None:
        """Visit a body, in which a string that stands alone describes the definition or the assignment before it."""
        subject = ""
        for statement in node.body:
            text = literal(statement.value) if isinstance(statement, ast.Expr) else None
            if text is None:
                self.visit(statement)
            elif not any(name.startswith("_") for name in [*self.names, subject]):
                self.add("docstring", text, *filter(None, [subject]))
            subject = assigned(statement)

    def visit_Module(self, node: ast.Module) -> None:
        """Collect a module's texts."""
        self.visit_scope(node)

    def visit_definition(self, node: DEFINITION) -> None:
        """Collect the texts of a class or function."""
        self.names.append(node.name)
        self.visit_scope(node)
        self.names.pop()

    visit_ClassDef = visit_FunctionDef = visit_AsyncFunctionDef = visit_definition

    def visit_Raise(self, node: ast.Raise) -> None:
        """Texts of a raised error."""
        self.visit_inside(node, "error")

    def visit_Call(self, node: ast.Call) -> None:
        """Texts of terminal output, and of argparse's arguments."""
        for keyword in node.keywords:
            if keyword.arg in HELP and (text := literal(keyword.value)):
                self.add("help", text, *filter(None, map(literal, node.args[:1])))
                keyword.value = ast.Constant(None)
        kind = "output" if called(node) in OUTPUT else "error" if called(node) == "error" else self.kind
        self.visit_inside(node, kind)

    def visit_text(self, node: ast.expr) -> None:
        """Collect a string that is long enough; a sum that is not one of strings alone is visited part by part."""
        text = literal(node)
        if text is None:
            self.generic_visit(node)
        elif len(text.split()) >= SENTENCE_WORDS:
            self.add(self.kind, text)

    visit_Constant = visit_JoinedStr = visit_BinOp = visit_text


def assigned(node: ast.stmt) -> str:
    """The name that a statement assigns, which a string on the next line describes."""
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
    return target.id if isinstance(target, ast.Name) else ""


def texts(source: str) -> Texts:
    """All texts of a module's source."""
    collector = Collector()
    collector.visit(ast.parse(source))
    return collector.texts


def git(*words: str) -> str:
    """What a git command prints."""
    return subprocess.run(["git", *words], check=True, stdout=subprocess.PIPE, text=True).stdout


def changed_files(base: str, head: str) -> Iterator[tuple[str, str]]:
    """(path before, path after) of Python files in both commits that differ; tests are no texts for users."""
    listing = git("diff", "-M", "--name-status", "--diff-filter=MR", base, head, "--", "*.py", ":!tests/")
    for line in listing.splitlines():
        _, *paths = line.split("\t")
        yield paths[0], paths[-1]


def pairs(before: list[str], after: list[str]) -> Iterator[tuple[str, str]]:
    """Texts that are in one list alone, each with the most similar one of the other."""
    kept = Counter(before) & Counter(after)
    old, new = list((Counter(before) - kept).elements()), list((Counter(after) - kept).elements())
    while old and new:
        pair = max(((a, b) for a in old for b in new), key=lambda pair: SequenceMatcher(None, *pair, autojunk=False).ratio())
        yield pair
        old.remove(pair[0])
        new.remove(pair[1])


def changes(base: str, head: str, unmatched: Counter[str]) -> Iterator[Change]:
    """Each reworded text; counts by kind the texts under names that only one of the commits has."""
    for old, new in changed_files(base, head):
        before, after = (texts(git("show", f"{commit}:{path}")) for commit, path in ((base, old), (head, new)))
        for key in sorted(before.keys() | after.keys()):
            if key in before and key in after:
                yield from (Change(new, *key, *pair) for pair in pairs(before[key], after[key]))
            else:
                unmatched[key.kind] += len(before.get(key) or after[key])


def totals(rows: Iterable[Change], unmatched: Counter[str]) -> Iterator[str]:
    """Lines with the number of rows by package and kind, and with what was not compared."""
    counts = Counter((Path(row.file).parts[0], row.kind) for row in rows)
    yield from (f"{package:12} {kind:10} {count:6,}" for (package, kind), count in sorted(counts.items()))
    kinds = Counter(kind for package, kind in counts.elements())
    yield from (f"{'all':12} {kind:10} {count:6,}" for kind, count in sorted(kinds.items()))
    yield from (f"{'unmatched':12} {kind:10} {count:6,}" for kind, count in sorted(unmatched.items()))


def main(words: list[str] | None = None) -> None:
    """Print the list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", metavar="BASE", help="commit with the texts before")
    parser.add_argument("head", metavar="HEAD", nargs="?", default="HEAD", help="commit with the texts after (default: HEAD)")
    args, unmatched = parser.parse_args(words), Counter[str]()
    rows = list(changes(args.base, args.head, unmatched))
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(Change._fields)
    out.writerows(rows)
    sys.stderr.writelines(f"{line}\n" for line in totals(rows, unmatched))


if __name__ == "__main__":
    main()
