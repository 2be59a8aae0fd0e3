"""Write the ProfDAG of one token: its operators in execution order, what each reads, and how long each took.

examples:
  python -m analyzer dag RUN                             the middle decode token, as JSON on standard output
  python -m analyzer dag RUN --token 7 --format graphml --out token7.graphml
  python -m analyzer dag RUN --mean                      times averaged over all decode tokens of the same structure
"""

import argparse
import sys
from pathlib import Path

from analyzer.profdag import build, decode_tokens, export
from analyzer.tables import load


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="folder of the recording")
    parser.add_argument("--token", metavar="N", type=int, help="token_id; default: the middle decode token, else the first token")
    parser.add_argument("--mean", action="store_true", help="average times over the decode tokens")
    parser.add_argument("--format", choices=("graphml", "json"), default="json")
    parser.add_argument("--json", action="store_const", const="json", dest="format", help="same as --format json")
    parser.add_argument("--out", metavar="FILE", type=Path, help="default: standard output")


def run(args: argparse.Namespace) -> int:
    """Build and write."""
    tables = load(args.run_dir)
    decode = decode_tokens(tables)
    with_operators = tables["operators"].loc[tables["operators"]["token_id"] >= 0, "token_id"]
    first = int(with_operators.min()) if len(with_operators) else 0
    token = args.token if args.token is not None else (decode[len(decode) // 2] if decode else first)
    graph = build(tables, token, decode if args.mean else None)
    export(graph, args.out or Path("/dev/stdout"), args.format)
    roles = [role for _, role in graph.nodes(data="role")]
    counts = ", ".join(f"{roles.count(role)} {role}s" for role in ("op", "view", "constant"))
    print(
        f"token {token}: {counts}, {graph.number_of_edges()} edges, {graph.graph['tokens_used']} token(s) averaged",
        file=sys.stderr,
    )
    return 0
