"""An S3 object store from the package moto, in memory and on the loopback only."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

PATIENCE_S = 60


@contextmanager
def object_store(bucket: str) -> Iterator[dict[str, str]]:
    """A server with an empty bucket; yields the environment for programs to access it as s3://BUCKET."""
    import s3fs

    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for(port)
        s3fs.S3FileSystem(key="key", secret="secret", endpoint_url=address, skip_instance_cache=True).mkdir(bucket)
        yield {**os.environ, **keys, "AWS_ENDPOINT_URL": address}
    finally:
        server.terminate()
        server.wait()


def wait_for(port: int) -> None:
    """Return once the port accepts connections. Raises TimeoutError."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with closing(socket.socket()) as trial:
            if trial.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise TimeoutError(f"no server on port {port} within {PATIENCE_S} s")
