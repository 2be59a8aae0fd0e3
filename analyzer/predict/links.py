"""Communication of a layer, and its overlap with computation."""

from dataclasses import dataclass

from analyzer.errors import PredictError
from analyzer.model import Mixture
from analyzer.predict.devices import Device
from analyzer.predict.setup import Setup


@dataclass(frozen=True)
class Transfer:
    """Bytes that one device sends, and the time to send them."""

    name: str
    bytes: float
    seconds: float
    source: str


NOTHING = Transfer("", 0.0, 0.0, "")
NUMBER_BYTES = {"dispatch": 1.0, "combine": 2.0}
"""Bytes per number of a row, by transfer."""


def all_reduce(device: Device, setup: Setup, rows: float, hidden: int) -> Transfer:
    """Sum over `tp` devices in a ring: 2(tp-1)/tp of 16-bit rows, after attention and after the feed-forward."""
    if setup.tp == 1:
        return NOTHING
    size = 2 * 2.0 * rows * hidden * 2 * (setup.tp - 1) / setup.tp
    formula = "2 ring all-reduces of rows x hidden x 2 bytes x 2(tp-1)/tp over the node's links"
    return _transfer_over("all-reduce", device.link, size, formula, device)


def all_to_all(name: str, device: Device, mixture: Mixture, setup: Setup, rows: float, hidden: int) -> Transfer:
    """All-to-all within a group of `ep` devices: rows to their experts (`dispatch`), or their results back (`combine`).

    Decode (low latency): each row is sent to its k experts individually. Prefill: a row crosses the network once per other node
    with one of its experts and is forwarded within that node.
    """
    if setup.ep == 1:
        return NOTHING
    width = NUMBER_BYTES[name]
    row = hidden * width
    nodes = -(-setup.ep // device.node_size)
    if setup.phase == "decode" or nodes == 1:
        away = (setup.ep - 1) / setup.ep
        size = rows * mixture.top_k * row * away
        formula = f"rows x k x hidden x {width:.0f} byte x (ep-1)/ep"
        return _transfer_over(name, device.network if nodes > 1 else device.link, size, formula, device)
    reached = min(nodes - 1, mixture.top_k)
    far = _transfer_over(
        name, device.network, rows * row * reached, f"rows x hidden x {width:.0f} byte x {reached} other nodes", device
    )
    near = _transfer_over(name, device.link, rows * row, "then once inside the node", device)
    return Transfer(name, far.bytes + near.bytes, far.seconds + near.seconds, f"{far.source}; {near.source}")


def _transfer_over(name: str, bandwidth: float, size: float, formula: str, device: Device) -> Transfer:
    if not bandwidth:
        raise PredictError(f"{device.name}: its profile has no link between devices: use --ep 1 --tp 1, or add [link]")
    return Transfer(name, size, size / bandwidth, f"{formula} at {bandwidth / 1e9:.4g} GB/s")


def layer_time(attention: float, experts: float, sent: float, received: float, setup: Setup, share: float) -> tuple[float, str]:
    """(seconds of one layer for all micro-batches, formula).

    none: sequential. pipeline: one of two micro-batches communicates while the other computes, in four slots; computation
    has `share` of the unit. hidden: communication costs only the time by which it exceeds the concurrent computation.
    """
    if setup.overlap == "none":
        return attention + experts + sent + received, "attention + experts + dispatch + combine"
    if setup.overlap == "hidden":
        computing = setup.turns * (attention + experts)
        moving = setup.turns * (sent + received)
        return max(computing, moving), "max(computing, communicating) of all micro-batches"
    a, e = attention / share, experts / share
    four_slots = max(a, sent) + max(a, received) + max(e, sent) + max(e, received)
    return (
        four_slots * setup.turns / 2,
        f"four slots, each the longer of computing (on {share:.0%} of the unit) and communicating",
    )
