"""Decides where probes go: turns declarations and a file's symbols, notes and code into rows of a plan. Attaches nothing."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import islice

from tracer.engines import Engine, Probe
from tracer.errors import ProbeError
from tracer.probes import anchors, name_tables, reach
from tracer.probes.elf import STUB, Binary, Symbol, file_contains, read_binary
from tracer.probes.elf_headers import as_probe_error
from tracer.probes.fast_nop import has_fast_nop
from tracer.probes.function_ends import REMEDY, FunctionCode, uses_exceptions
from tracer.probes.functions import Function
from tracer.probes.named import USER, NamedFunctions, NamedSite
from tracer.probes.placement import (
    CALL_BYTES,
    NOP5,
    Placement,
    place_call,
    place_entry,
    place_exits,
    place_fixed,
    place_tail,
    place_usdt,
)
from tracer.probes.plan import FilePlan, Row

SYMBOL_SITE = place_fixed("", "emulated", "exported symbol; not inspected (licence), assumed cheap")

COMPARE_FRAMES = ("ggml_graph_end", "ggml_copy_end", "ggml_copy_async_end")
"""Programs that know their function's frame by the stack behind it, once it has returned."""
Site = tuple[int, str, Placement]
"""File offset of a function, its name, and the place in it."""


def cheapest_sites(sites: list[Site]) -> list[Site]:
    """The first of several suitable functions, or the first with a cheap instruction if that one has none."""
    cheap = [site for site in sites if site[2].cost != "stepped"]
    if not cheap or cheap[0] == sites[0]:
        return sites[:1]
    offset, name, place = cheap[0]
    why = f"{place.why}; instead of {sites[0][1]}, which has no cheap instruction while its arguments are in place"
    return [(offset, name, replace(place, why=why))]


def needs_anchors(engine: Engine, probe: Probe, binary: Binary) -> bool:
    """Whether a file contains an engine's code but none of its function names, not even as an import."""
    if "file" in probe.anchor:
        return os.path.basename(binary.path).startswith(probe.anchor["file"]) and not any(map(binary.find, probe.symbols))
    names = tuple(name for probe in engine.probes for name in (*probe.symbols, *probe.otherwise))
    return bool(engine.marker) and not mentions_any(binary, names) and file_contains(binary.path, engine.marker.encode())


@lru_cache(maxsize=256)
def mentions_any(binary: Binary, names: tuple[str, ...]) -> bool:
    """Whether a file defines or imports a symbol of one of these names."""
    return any(map(binary.mentions, names))


class Planner:
    """Plans files one by one: where a probe goes may depend on the probes in other files of the folder.

    `rows` are the planned rows that are or were attached; carrying out a plan adds to them. With `everywhere`, a probe that has
    alternatives is placed at all of them, for recorders that cannot move it when the program turns out to use another one.
    """

    def __init__(
        self,
        engines: list[Engine],
        levels: set[str],
        functions: list[Function] | None = None,
        fast_nop: Callable[[], bool] = has_fast_nop,
        everywhere: bool = False,
    ):
        self.engines, self.levels, self.fast_nop, self.everywhere = engines, levels, fast_nop, everywhere
        self.named = NamedFunctions(functions or [])
        self.rows: list[Row] = []
        self.warnings: list[str] = []
        self.operators = {engine.name: list(engine.operators) for engine in engines}

    def programs(self, late: bool = False) -> set[str]:
        """Names of the BPF programs that may be attached in the target's files: the late ones, or all others."""
        wanted = [(engine, probe) for engine in self.engines for probe in engine.probes if probe.wanted(self.levels)]
        names = {probe.program for engine, probe in wanted if (engine.late or probe.late) == late}
        return names if late else names | self.named.programs()

    @contextlib.contextmanager
    def reported(self) -> Iterator[None]:
        """Report and omit a probe that fails; the others stay."""
        try:
            yield
        except ProbeError as error:
            self.warnings.append(str(error))

    def file(self, path: str, is_executable: bool = False) -> FilePlan:
        """The plan of a file, which is `path` for the target."""
        real, names = reach.resolved_path(path), {os.path.basename(path), os.path.basename(reach.resolved_path(path))}
        plan = FilePlan(real, "")
        for engine in self.engines:
            wanted = any(map(engine.owns, names))
            if is_executable:
                wanted = bool(engine.marker) and file_contains(real, engine.marker.encode())
            if wanted and os.path.isfile(reach.opening_path(real)):
                with self.reported(), as_probe_error(real):
                    self._plan_engine(engine, plan)
        if self.named.wants(real, os.path.basename(path), is_executable):
            with self.reported(), as_probe_error(real):
                self._plan_named(plan, os.path.basename(path), is_executable)
        return plan

    def beside(self, path: str) -> list[str]:
        """All libraries of this one's engine in the same folder, itself included, if the engine opens them together."""
        folder, name = os.path.split(reach.resolved_path(path))
        together = [engine for engine in self.engines if engine.together and engine.owns(name)]
        there = sorted(os.listdir(folder)) if together and os.path.isdir(folder) else []
        names = [each for each in there if any(engine.owns(each) for engine in together)]
        return [os.path.join(folder, each) for each in names]

    def _plan_named(self, plan: FilePlan, file_name: str, is_executable: bool) -> None:
        """Add the probes on a user's functions in one file."""
        binary = read_binary(plan.path)
        plan.build_id = binary.build_id
        for site in self.named.sites(binary, file_name, is_executable, self.warnings):
            plan.specs |= site.specs
            for cookie in site.specs:
                plan.rows += [
                    probe_row(USER, probe, plan.path, site.offset, site.name, place, cookie)
                    for probe, place in self._named_places(binary, site, at_return=bool(cookie & 1))
                ]

    def _named_places(self, binary: Binary, site: NamedSite, at_return: bool) -> list[tuple[Probe, Placement]]:
        """The probes at one end of a user's function; where exceptions may pass, at its own returns."""
        if at_return and site.function.throws is not False and site.inspect:
            code = FunctionCode(binary, site.offset, site.name)
            if site.function.throws or (uses_exceptions(binary) and code.may_be_passed()):
                try:
                    return [(site.probe("exits"), place) for place in code.returns()]
                except ProbeError as error:
                    self.named.forgo_return(site)
                    self.warnings.append(f"{binary.path}: {site.name} is not recorded at its return: {error}: {REMEDY}")
                    return []
        place = self._entry(binary, site.offset, site.name) if site.inspect else SYMBOL_SITE
        return [(site.probe("return" if at_return else "entry"), place)]

    def _plan_engine(self, engine: Engine, plan: FilePlan) -> None:
        binary = read_binary(plan.path)
        plan.build_id = binary.build_id
        before = len(plan.rows)
        placed = [probe for probe in engine.probes if probe.slot < 0 and not probe.learnt and not self._is_displaced(probe)]
        wanted = [probe for probe in placed if probe.wanted(self.levels)]
        for probe in wanted if self._is_known(engine, binary, bool(wanted)) else ():
            with self.reported():
                plan.rows += [probe_row(engine, each, plan.path, *site) for each, site in self._placed(engine, probe, binary)]
        is_probed = len(plan.rows) > before
        if is_probed or engine.owns(os.path.basename(plan.path)):
            plan.engines.append(engine.name)
            if engine.operator_table and not self.operators[engine.name]:
                self.operators[engine.name] = name_tables.read_name_table(binary.path, engine.operator_table)
        plan.operators[engine.name] = self.operators[engine.name]

    def _is_known(self, engine: Engine, binary: Binary, wanted: bool) -> bool:
        """Whether the file is of a version whose layouts are known; adds a warning if probes are wanted and it is not."""
        known = not engine.needs or any(map(binary.find, engine.needs))
        if wanted and not known:
            named = any(binary.find(name) for probe in engine.probes for name in probe.symbols)
            why = "in a version that is not known" if named else "without its symbols (stripped)"
            self.warnings.append(f"{binary.path} holds {engine.name} {why}: that part is not recorded")
        return known

    def _placed(self, engine: Engine, probe: Probe, binary: Binary) -> Iterator[tuple[Probe, Site]]:
        """A probe at its sites; a return probe at the function's own returns where exceptions may pass it."""
        may_throw = probe.throws or (not engine.is_bundled and probe.program not in COMPARE_FRAMES)
        throws = probe.at == "return" and may_throw and engine.inspects(binary.path)
        for site in self._chosen_sites(engine, probe, binary):
            if throws and uses_exceptions(binary):
                yield from self._ends(probe, binary, site)
            else:
                yield probe, site

    def _ends(self, probe: Probe, binary: Binary, site: Site) -> list[tuple[Probe, Site]]:
        """The end of a function that exceptions may pass; a warning if not all of its returns are known."""
        offset, name, _ = site
        code = FunctionCode(binary, offset, name)
        try:
            ends = code.returns() if code.may_be_passed() else []
            return [(replace(probe, at="exits"), (offset, name, end)) for end in ends] or [(probe, site)]
        except ProbeError as error:
            outcome = "its end is not recorded" if probe.end_optional else "at its return probe they end the program"
            self.warnings.append(f"{binary.path}: {name}: {error}: {outcome}")
            return [] if probe.end_optional else [(probe, site)]

    def _chosen_sites(self, engine: Engine, probe: Probe, binary: Binary) -> list[Site]:
        """All sites in a binary at which a probe is placed."""
        every = probe.every or self._is_everywhere(probe)
        sites = list(islice(self._sites(engine, probe, binary), None if every else 1))
        if probe.needed and not sites:
            self.warnings.append(f"{binary.path} has no {probe.symbols[0]}: no {probe.program}")
        if probe.at != "exits":
            return sites
        return [
            (offset, name, place)
            for offset, name, _ in sites
            for place in place_exits(binary.function_bytes(offset), binary.machine)
        ]

    def _sites(self, engine: Engine, probe: Probe, binary: Binary) -> Iterator[Site]:
        """A probe's site in a binary, then its alternatives."""
        if probe.usdt:
            yield from self._usdt_sites(probe, binary)
        elif probe.every:
            named = binary.functions(lambda name: name.startswith(tuple(start.removesuffix("*") for start in probe.symbols)))
            yield from (self._symbol_site(engine, probe, binary, Symbol(name, offset)) for offset, name in named.items())
        elif not any(map(binary.find, probe.unless)) and not (probe.once and self._stands_beside(probe, binary.path)):
            yield from cheapest_sites(self._symbol_sites(engine, probe, binary, probe.symbols))
            for name in probe.otherwise:
                yield from self._symbol_sites(engine, probe, binary, (name,))
            if probe.anchor and engine.inspects(binary.path) and needs_anchors(engine, probe, binary):
                yield from self._anchored_sites(engine, probe, binary)

    def _is_displaced(self, probe: Probe) -> bool:
        return bool(probe.unless_engine) and any(row.engine == probe.unless_engine for row in self.rows)

    def displaced(self) -> list[Row]:
        """The standing rows whose probes another engine's have made superfluous; they count as removed from now on."""
        probes = {(engine.name, probe.program) for engine in self.engines for probe in engine.probes if self._is_displaced(probe)}
        rows = [row for row in self.rows if (row.engine, row.program) in probes and not row.retired_ns]
        for row in rows:
            row.retired_ns = 1
        return rows

    def _usdt_sites(self, probe: Probe, binary: Binary) -> Iterator[Site]:
        offset = binary.usdt.get(probe.usdt)
        if offset is not None:
            entry = offset - len(NOP5)
            before, is_entry = binary.bytes_at(entry, len(NOP5)), binary.begins_function(entry)
            yield offset, probe.usdt, place_usdt(before, is_entry, self.fast_nop(), binary.machine)

    def _anchored_sites(self, engine: Engine, probe: Probe, binary: Binary) -> Iterator[Site]:
        said, offset = anchors.describe_anchor(probe.anchor), anchors.find_offset(binary.path, probe.anchor)
        if offset is None:
            if probe.at == "entry":  # one warning for both ends
                self.warnings.append(f"{binary.path} is stripped, and none of its functions {said}: no {probe.program}")
            return
        _, name, place = self._symbol_site(engine, probe, binary, Symbol(probe.symbols[0], offset))
        yield offset, name, replace(place, why=f"{place.why}; stripped: found as the function that {said}")

    def _is_everywhere(self, probe: Probe) -> bool:
        return self.everywhere and bool(probe.otherwise)

    def _stands_beside(self, probe: Probe, path: str) -> bool:
        """Whether the program is attached in another file of the same folder, and once is enough."""
        if self._is_everywhere(probe):
            return False
        standing = {row.library for row in self.rows if row.program == probe.program and not row.retired_ns} - {path}
        return any(os.path.dirname(library) == os.path.dirname(path) for library in standing)

    def _symbol_sites(self, engine: Engine, probe: Probe, binary: Binary, names: tuple[str, ...]) -> list[Site]:
        symbols = [symbol for name in names if (symbol := binary.find(name))]
        imported = [name.removesuffix(STUB) for name in names if name.endswith(STUB) and not symbols]
        for name in filter(binary.mentions, imported):
            self.warnings.append(f"{binary.path} calls {name} without a stub (built with -fno-plt): no {probe.program}")
        return [self._symbol_site(engine, probe, binary, symbol) for symbol in symbols if self._usable(probe, symbol, binary)]

    def _symbol_site(self, engine: Engine, probe: Probe, binary: Binary, symbol: Symbol) -> Site:
        if not engine.inspects(binary.path):
            return symbol.offset, symbol.name, SYMBOL_SITE
        choose = place_tail if probe.at == "tail" else place_entry
        return symbol.offset, symbol.name, self._entry(binary, symbol.offset, symbol.name, choose)

    def _entry(self, binary: Binary, offset: int, name: str, choose: Callable[..., Placement] = place_entry) -> Placement:
        """The place of a probe in a function."""
        try:
            return choose(binary.bytes_at(offset), binary.machine, self.fast_nop())
        except ProbeError as error:
            raise ProbeError(f"{binary.path}: {name}: {error}") from None

    def _usable(self, probe: Probe, symbol: Symbol, binary: Binary) -> bool:
        """Whether a function can be probed: not at the entry of a clone that may lack arguments, which adds a warning."""
        if symbol.changed and probe.at == "entry":
            self.warnings.append(f"{binary.path}: {symbol.name} may have lost arguments to optimization: no {probe.program}")
            return False
        return True

    def callback(self, engine: Engine, name: str, path: str, offset: int) -> list[Row]:
        """Rows of the probes declared as learnt under `name`, at a function that the program passed."""
        rows = []
        for probe in engine.probes:
            if probe.learnt == name and probe.wanted(self.levels):
                with self.reported():
                    binary = read_binary(path)
                    function = binary.function_at(offset)
                    rows.append(probe_row(engine, probe, path, offset, function, self._entry(binary, offset, function)))
        return rows

    def learnt(self, engine: Engine, sites: dict[str, tuple[str, int]], why: str) -> list[Row]:
        """Rows of probes whose sites were learnt, given as name → (file, offset after a call); none if a site is expensive."""
        path = sites["loop"][0]
        binary = read_binary(path)
        probes = [probe for probe in engine.probes if probe.learnt in sites and probe.wanted(self.levels)]
        offsets = [sites[probe.learnt][1] for probe in probes]
        places = [place_call(binary.bytes_at(offset - CALL_BYTES, CALL_BYTES), binary.machine, why) for offset in offsets]
        placed = [place for place in places if place is not None]
        if len(placed) < len(probes):
            return []
        chosen = zip(probes, offsets, placed, strict=True)
        return [probe_row(engine, p, path, offset, f"{binary.function_at(offset)} call", place) for p, offset, place in chosen]

    def at_run_time(self, engines: set[str]) -> list[Row]:
        """Rows, with offset -1, of these engines' probes whose addresses are known only at run time: slots of tables."""
        why = "at run time: the program gets the table from the library"
        wanted = [(e, p) for e in self.engines for p in e.probes if e.name in engines and p.slot >= 0 and p.level in self.levels]
        return [
            Row(p.program, e.name, p.level, "", f"{p.table or 'function table'}[{p.slot}]", -1, p.at, "", "", why)
            for e, p in wanted
        ]

    def elsewhere(self, engine: Engine, probe: Probe, path: str) -> Row | None:
        """The row of a probe at its next site in a file that was not tried yet; None if there is none."""
        tried = {other.symbol for other in self.rows if (other.program, other.library) == (probe.program, path)}
        site = next((each for each in self._sites(engine, probe, read_binary(path)) if each[1] not in tried), None)
        return probe_row(engine, probe, path, *site) if site else None


def probe_row(engine: Engine, probe: Probe, path: str, offset: int, symbol: str, place: Placement, cookie: int = 0) -> Row:
    """The row of a probe at a place."""
    at, instruction = "return" if probe.at == "return" else "entry", place.instruction
    where = path, symbol, offset + place.delta
    return Row(probe.program, engine.name, probe.level, *where, at, instruction, place.cost, place.why, cookie=cookie)
