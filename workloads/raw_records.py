"""A simple reader of a recording's records, for tests and benchmarks to compare the analyzer's reader with."""

import numpy as np

from tracer.recording.format import BUSY, DISCARD, FIRST_DETAIL, KIND_OFFSET, RING_HEADER_BYTES, Recording


class RawRecording(Recording):
    """A recording with all records of a kind read at once."""

    def slots(self, stream: str) -> np.ndarray:
        """All complete slots of a stream, in the form of `map_slots`."""
        return self.map_slots(stream, 0, self.slot_count(stream))

    def kinds(self, stream: str) -> np.ndarray:
        """The record kind of each slot, shape [n], uint16; 0 for slots that the kernel side discarded."""
        slots = self.slots(stream)
        kinds = slots[:, KIND_OFFSET : KIND_OFFSET + 2].copy().view("<u2")[:, 0]
        lengths = slots[:, :4].copy().view("<u4")[:, 0]
        return np.where(lengths & (BUSY | DISCARD), 0, kinds)

    def records(self, kind: str) -> np.ndarray:
        """The records of one kind as a structured array, in time order."""
        number, dtype = self.layouts[kind]
        stream = "details" if number >= FIRST_DETAIL else "events"
        rows = np.flatnonzero(self.kinds(stream) == number)
        body = self.slots(stream)[rows, RING_HEADER_BYTES : RING_HEADER_BYTES + dtype.itemsize]
        records = np.ascontiguousarray(body).view(dtype).reshape(-1)
        return records[np.argsort(records["ts"], kind="stable")]
