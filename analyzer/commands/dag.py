"""Write the ProfDAG of one token: its operators in execution order, with inputs, times and achieved performance.

examples:
  python -m analyzer dag RUN                             the middle decode token, as JSON on standard output
  python -m analyzer dag RUN --token 7 --format graphml --out token7.graphml
  python -m analyzer dag RUN --mean                      times averaged over all decode tokens of the same structure
  python -m analyzer dag RUN --fold --format dot | dot -Tsvg > layers.svg    equal layers as one
  python -m analyzer dag RUN --diff OTHER_RUN            how two models' graphs differ
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import pandas as pd

from analyzer.commands._show import show
from analyzer.jsonable import as_json
from analyzer.questions import structure
from analyzer.questions.profdag import as_text, build_profdag, decode_tokens, export, middle_token
from analyzer.tables.store import load
from moescope.arguments import add_out, add_run, add_token
from moescope.plain import for_output


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run(parser)
    add_token(parser)
    parser.add_argument("--mean", action="store_true", help="times averaged over the decode tokens of the same structure")
    parser.add_argument("--resolve", action="store_true", help="omit views: readers depend on the operator that wrote the memory")
    parser.add_argument("--fold", action="store_true", help="merge equal layers and sum their times; implies --resolve")
    parser.add_argument("--diff", metavar="OTHER", type=Path, help="compare with another recording's graph")
    parser.add_argument("--format", choices=("graphml", "dot", "json"), default="json", help="default: json")
    parser.add_argument("--json", action="store_const", const="json", dest="format", help="the same as --format json")
    parser.add_argument("--text", action="store_true", help="with --diff: print a table instead of JSON")
    add_out(parser, "standard output")


def run(args: argparse.Namespace) -> int:
    """Build and write the graph."""
    tables = load(args.run_dir)
    token = args.token if args.token is not None else middle_token(tables)
    graph = build_profdag(tables, token, decode_tokens(tables) if args.mean else None)
    if args.diff:
        other_tables = load(args.diff)
        return compare(structure.difference(graph, build_profdag(other_tables, middle_token(other_tables))), args.text)
    if args.fold or args.resolve:
        graph = structure.folded(graph) if args.fold else structure.resolved(graph)
    if args.out:
        export(graph, args.out, args.format)
    else:
        print(for_output(as_text(graph, args.format)))
    roles = [role for _, role in graph.nodes(data="role")]
    counts = ", ".join(f"{roles.count(role)} {role}s" for role in ("op", "view", "constant"))
    print(
        f"token {token}: {counts}, {graph.number_of_edges()} edges, {graph.graph['tokens_used']} token(s) averaged",
        file=sys.stderr,
    )
    return 0


def compare(difference: dict[str, Any], as_text: bool) -> int:
    """Print the differences between two graphs."""
    rows = [vars(row) for row in difference["operators"]]
    if not as_text:
        print(as_json(difference))
        return 0
    print(f"layers: {difference['layers'][0]} and {difference['layers'][1]}")
    if not rows:
        print("the same operators in the same order")
        return 0
    show(pd.DataFrame(rows), "operators in only one of them (-: the first, +: the second)", 60)
    for title in ("layer_types", "edges"):
        if difference[title]:
            pairs = [(name, *counts) for name, counts in difference[title].items()]
            show(pd.DataFrame(pairs, columns=[title.replace("_", " "), "first", "second"]), "", 60)
    return 0
