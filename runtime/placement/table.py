"""Resolves `auto` for attention and experts, by the package's cost table or, without one from this machine, by the default."""

import sys
from dataclasses import replace

from runtime.package.layout import Package
from runtime.placement.costs import DEFAULT, CostTable
from runtime.placement.options import AUTO, Options


def npu_missing(package: Package) -> str:
    """Empty if the package can run on an NPU here, otherwise the reason why not."""
    from runtime.backends import htp

    if not package.portable:
        return "the package was converted for the CPU only"
    return htp.why_unavailable()


def resolve_auto(options: Options, package: Package) -> tuple[Options, CostTable | None]:
    """(options without `auto`, the table used for them or None). Prints on standard error what `auto` became."""
    if AUTO not in (options.prefill_backend, options.decode_backend):
        return options, None
    missing = npu_missing(package)
    if missing:
        return _with_backends(options, "cpu", "cpu", f": {missing}"), None
    table, reason = CostTable.of(package, options)
    if table is None:
        return _with_backends(options, "htp", "cpu", f" ({reason}: {DEFAULT})"), None
    prefill, decode = (_show_backends(names) for names in (table.prefill(options.tiers), table.decode(options.tiers)))
    return _with_backends(options, prefill, decode, " (by the table of `tune`)"), table


def _with_backends(options: Options, prefill: str, decode: str, reason: str) -> Options:
    from runtime.backends import htp

    for phase, asked, chosen in (("prefill", options.prefill_backend, prefill), ("decode", options.decode_backend, decode)):
        if asked == AUTO:
            where = chosen.replace("htp", htp.LABEL) if chosen != "cpu" else "the CPU"
            print(f"moescope: {phase} runs on {where}{reason}", file=sys.stderr)
    return replace(
        options,
        prefill_backend=prefill if options.prefill_backend == AUTO else options.prefill_backend,
        decode_backend=decode if options.decode_backend == AUTO else options.decode_backend,
    )


def _show_backends(names: dict[str, str]) -> str:
    """The names as text: a single backend's name if both kinds run on it."""
    if len(set(names.values())) == 1:
        return names["expert"]
    return ",".join(f"{kind}={backend}" for kind, backend in names.items())
