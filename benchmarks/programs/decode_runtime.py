"""Decodes with our runtime on the CPU until standard input closes: decode_runtime.py MODEL LOG, like programs/decode.py."""

import select
import struct
import sys
import time
from pathlib import Path

from runtime.moe import MoE

NEW_TOKENS = 200


def main() -> None:
    model, waiting = MoE.load(Path(sys.argv[1]), "all", prefill_backend="cpu", decode_backend="cpu"), select.poll()
    waiting.register(sys.stdin, select.POLLHUP | select.POLLIN)
    with open(sys.argv[2], "wb") as file:
        while not waiting.poll(0):
            begin = 0
            for number, _ in enumerate(model.generate("Experts sleep.", NEW_TOKENS, ignore_end=True)):
                end = time.monotonic_ns()
                if number > 1:  # after the prefill and the first decode
                    file.write(struct.pack("<QQ", begin, end))
                begin = time.monotonic_ns()
            file.flush()
    model.close()


if __name__ == "__main__":
    main()
