"""Fails where C files of a folder call each other in a circle: python -m scripts.c_circles FOLDER."""

import re
import sys
from pathlib import Path

import networkx as nx

DEFINED = re.compile(r"^(?!static\b)[a-z][\w *]*?(\w+)\([^;{}]*\)\n\{", re.M)
"""A function that other files can call, in the kernel's style: its brace begins a line."""
CALLED = re.compile(r"(?<![>.\w])(\w+)\(")
COMMENT = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', re.S)


def call_graph(folder: Path) -> nx.DiGraph:
    """File → file whose functions it calls."""
    texts = {path.name: COMMENT.sub(" ", path.read_text()) for path in sorted(folder.glob("*.c"))}
    owner = {name: file for file, text in texts.items() for name in DEFINED.findall(text)}
    graph = nx.DiGraph()
    for file, text in texts.items():
        for name in set(CALLED.findall(text)) & owner.keys():
            if owner[name] != file:
                graph.add_edge(file, owner[name])
    return graph


def main(words: list[str]) -> int:
    """Print each circle; returns 1 if there is one."""
    circles = [sorted(part) for part in nx.strongly_connected_components(call_graph(Path(words[0]))) if len(part) > 1]
    for circle in circles:
        print(f"{words[0]}: {', '.join(circle)} call each other in a circle: move what they share into a file of its own")
    return int(bool(circles))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
