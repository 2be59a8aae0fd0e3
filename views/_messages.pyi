"""What the C extension offers; views/protobuf.py and views/slices.py are the ways in."""

from collections.abc import Buffer

from views.protobuf import Step

def encode(forms: list[list[Step]], form: Buffer, row: Buffer) -> bytes: ...
def nested(opening: Buffer, begin: Buffer, end: Buffer, instant: Buffer, events: Buffer, crossed: Buffer) -> int: ...
