"""A stand-in for Android's adbd: what `adb shell` speaks, over TCP on the loopback; its lines run on this machine.

The protocol is adb's own (messages, and within a shell's stream packets of the shell protocol, version 2); there is no daemon of
Android's in Debian's packages.
"""

import contextlib
import os
import socket
import struct
import subprocess
import threading
from typing import IO

HEADER, PACKET = struct.Struct("<4s5I"), struct.Struct("<BI")
STDIN, STDOUT, STDERR, EXIT, CLOSE_STDIN = range(5)
VERSION, MOST_BYTES = 0x01000001, 1 << 18


class Shell:
    """One line of shell, and its stream."""

    def __init__(self, phone: "Phone", here: int, there: int, line: str):
        self.phone, self.here, self.there, self.rest = phone, here, there, b""
        self.may_write = threading.Semaphore(1)
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([phone.shell, "-c", line], stdin=pipe, stdout=pipe, stderr=pipe)
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        """Send what the line prints, and how it ended."""
        files = ((STDOUT, self.process.stdout), (STDERR, self.process.stderr))
        pumps = [threading.Thread(target=self.pump, args=pair, daemon=True) for pair in files]
        for pump in pumps:
            pump.start()
        for pump in pumps:
            pump.join()
        self.write(EXIT, bytes([self.process.wait() & 255]))
        self.phone.send(b"CLSE", self.here, self.there)

    def pump(self, kind: int, file: IO[bytes]) -> None:
        """Send a file's bytes as they come."""
        while data := os.read(file.fileno(), 1 << 15):
            self.write(kind, data)

    def write(self, kind: int, data: bytes) -> None:
        """Send a packet, once the last has been taken."""
        self.may_write.acquire()
        self.phone.send(b"WRTE", self.here, self.there, PACKET.pack(kind, len(data)) + data)

    def take(self, data: bytes) -> None:
        """Hand what came to the line's input."""
        self.rest += data
        while len(self.rest) >= PACKET.size:
            kind, length = PACKET.unpack_from(self.rest)
            if len(self.rest) < PACKET.size + length:
                return
            content, self.rest = self.rest[PACKET.size : PACKET.size + length], self.rest[PACKET.size + length :]
            stdin = self.process.stdin
            assert stdin
            with contextlib.suppress(BrokenPipeError):
                if kind == STDIN:
                    stdin.write(content)
                    stdin.flush()
                elif kind == CLOSE_STDIN:
                    stdin.close()


class Phone:
    """A device for `adb connect 127.0.0.1:PORT`, whose shell is a program of ours."""

    def __init__(self, shell: str):
        self.shell, self.shells, self.lock = shell, dict[int, Shell](), threading.Lock()
        self.server = socket.create_server(("127.0.0.1", 0))
        self.serial = f"127.0.0.1:{self.server.getsockname()[1]}"
        threading.Thread(target=self.serve, daemon=True).start()

    def send(self, command: bytes, first: int, second: int, data: bytes = b"") -> None:
        """Send a message."""
        word = int.from_bytes(command, "little") ^ 0xFFFFFFFF
        with self.lock, contextlib.suppress(OSError):
            self.link.sendall(HEADER.pack(command, first, second, len(data), sum(data) & 0xFFFFFFFF, word) + data)

    def serve(self) -> None:
        """Answer one connection after another."""
        while True:
            self.link, _ = self.server.accept()
            with self.link, self.link.makefile("rb") as file, contextlib.suppress(OSError):
                while len(header := file.read(HEADER.size)) == HEADER.size:
                    command, first, second, length, _, _ = HEADER.unpack(header)
                    self.answer(command, first, second, file.read(length))

    def answer(self, command: bytes, first: int, second: int, data: bytes) -> None:
        """Answer a message."""
        if command == b"CNXN":
            self.send(b"CNXN", VERSION, MOST_BYTES, b"device::ro.product.name=stand_in;features=shell_v2")
        elif command == b"OPEN":
            number = len(self.shells) + 1
            self.send(b"OKAY", number, first)
            self.shells[number] = Shell(self, number, first, data.rstrip(b"\0").decode().partition("raw:")[2])
        elif command == b"WRTE" and second in self.shells:
            self.shells[second].take(data)
            self.send(b"OKAY", second, first)
        elif command == b"OKAY" and second in self.shells:
            self.shells[second].may_write.release()
