"""moescope serve: a model behind OpenAI's interface."""

import argparse
import ipaddress
import os
import sys
from pathlib import Path

from moescope.arguments import add_model
from runtime.commands import add_count, read_text
from runtime.commands.generate import add_placement, load_model
from runtime.errors import RequestError

KEY = "MOESCOPE_API_KEY"
CONNECTIONS = 64
"""Connections beside those of requests that run or wait."""
EXAMPLES = f"""examples:
  moescope serve /models/qwen3-moe.package --expert-cache 2GiB --threads 2
  curl http://127.0.0.1:8080/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"messages": [{{"role": "user", "content": "Hello"}}], "stream": true}}'

Paths: /v1/chat/completions, /v1/completions, /v1/models, /metrics (Prometheus), /health. Requests take turns. The key stands in
{KEY} or in a file; without one the server answers on loopback only. Put TLS and users in front of it."""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_model(parser)
    parser.add_argument("--name", help="name of the model in requests (default: of its folder)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1)")
    add_count(parser, "--port", default=8080, help="port; 0: any free one", metavar=None)
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help=f"file that holds the API key (default: {KEY}, if set)")
    limits = parser.add_argument_group("limits")
    add_count(limits, "--max-new-tokens", default=1024, help="tokens of an answer whose request gives no limit")
    add_count(limits, "--queue", default=64, help="requests that run or wait; more are refused with 429")
    add_count(limits, "--body-mib", default=8, help="largest body in MiB")
    add_count(limits, "--body-seconds", default=30, help="seconds that a client may take to send a body")
    add_count(limits, "--answer-seconds", default=600, help="seconds after which a request is ended")
    add_placement(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal ends it."""
    import uvicorn

    from runtime.server.app import Limits, Server

    if min(args.max_new_tokens, args.queue, args.body_mib, args.body_seconds, args.answer_seconds) < 1:
        raise RequestError("limits are 1 or more")
    key = read_text(args.api_key_file).strip() if args.api_key_file else os.environ.get(KEY, "")
    if not key and not is_loopback(args.host):
        raise RequestError(f"{args.host} can be reached from elsewhere: set {KEY} or give --api-key-file")
    hosts = ("localhost", "127.0.0.1", args.host)
    limits = Limits(args.body_mib << 20, args.body_seconds, args.max_new_tokens, args.answer_seconds, args.queue)
    with load_model(args)[0] as model:
        name = args.name or args.model.resolve().name
        server = Server(model, name, limits, key, hosts)
        most = args.queue + CONNECTIONS
        config = uvicorn.Config(
            server.app, args.host, args.port, log_level="warning", ws="none", http="h11", loop="asyncio", limit_concurrency=most
        )
        try:
            listening = config.bind_socket()
            listening.listen(config.backlog)
        except SystemExit:
            raise RequestError(f"{args.host}:{args.port} cannot be listened at: choose another --port") from None
        port = listening.getsockname()[1]
        print(f"moescope: serving {name} at http://{args.host}:{port}/v1; Ctrl-C ends it", file=sys.stderr, flush=True)
        uvicorn.Server(config).run(sockets=[listening])
    return 0


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
