"""A Genie program: queries a dialog on HTP, made from a context binary. Arguments: libGenie.so, context binary, tokenizer."""

import ctypes
import json
import sys

CONTEXT = {"version": 1, "size": 128, "n-vocab": 512, "bos-token": 1, "eos-token": 2}
HTP: dict[str, object] = {"version": 1, "use-mmap": False, "spill-fill-bufsize": 0, "mmap-budget": 0, "poll": False}
HTP |= {"pos-id-dim": 32, "cpu-mask": "0x1", "kv-dim": 64, "rope-theta": 10000}


def dialog_config(binary: str, tokenizer: str) -> bytes:
    """Genie's config of a dialog."""
    backend = {"version": 1, "type": "QnnHtp", "QnnHtp": HTP}
    model = {"version": 1, "type": "binary", "binary": {"version": 1, "ctx-bins": [binary]}}
    dialog = {
        "version": 1,
        "type": "basic",
        "context": CONTEXT,
        "sampler": {"version": 1, "seed": 1, "temp": 1.0, "top-k": 1, "top-p": 1.0},
        "tokenizer": {"version": 1, "path": tokenizer},
        "engine": {"version": 1, "n-threads": 1, "backend": backend, "model": model},
    }
    return json.dumps({"dialog": dialog}).encode()


def main() -> None:
    genie, made, dialog = ctypes.CDLL(sys.argv[1]), ctypes.c_void_p(), ctypes.c_void_p()
    done = [["config", genie.GenieDialogConfig_createFromJson(dialog_config(*sys.argv[2:4]), ctypes.byref(made))]]
    done.append(["create", genie.GenieDialog_create(made, ctypes.byref(dialog))])
    if dialog.value:
        done.append(["query", genie.GenieDialog_query(dialog, b"hello", 0, ctypes.CFUNCTYPE(None)(lambda: None), None)])
        done.append(["free", genie.GenieDialog_free(dialog)])
    print(json.dumps(done))


if __name__ == "__main__":
    main()
