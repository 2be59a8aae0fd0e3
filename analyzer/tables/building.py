"""Builds the tables from records, one time range after the other, so that only one is in memory."""

from collections.abc import Iterator

import numpy as np
import pyarrow

from analyzer.records.contents import RANGE
from analyzer.records.reading import Source
from analyzer.records.schema import TABLES, Columns, arrow_table, frame_of
from analyzer.tables import calls, clocks, driver, found_steps, genie, hexagon, io, moe, nodes, operators, pmc, power, sched
from analyzer.tables.complexity import context_lengths
from analyzer.tables.qnn import busy, events
from analyzer.tables.qnn.executes import EnclosingGraphs
from analyzer.tables.sessions import session_columns
from analyzer.tables.stacks import build_stacks
from analyzer.tables.steps import Steps, range_graphs, recorded_steps
from analyzer.tables.subgraph_work import model_subgraphs

Piece = dict[str, pyarrow.Table]
"""Arrow tables by name."""
LONG = ("graphs", "operators", "op_threads", "routes", "experts", "thread_states", "sched", "pmc", "counters")
"""Tables that grow with every time range; the others are made at the end, from rare kinds of records."""


class TableBuilder:
    """Builds the tables of one recording."""

    def __init__(self, source: Source):
        self.source = source
        self.recurrences = found_steps.recurrences(source) if found_steps.is_undeclared(source) else []
        self.steps = self._recorded_or_found()
        self.step_begins = self.steps.begins_alone()
        self.known: list[Steps] = []
        """The steps with what only their stretch of time shows: tokens fed, and waits behind them."""
        self.definitions = operators.Definitions(source)
        self.loads = moe.load_columns(source, self.steps)
        self.first = operators.FirstNumbers()
        self.scheduling, self.counters, self.readings = sched.SchedulingTables(source), moe.CounterTable(), pmc.CounterReadings()
        self.subgraphs = model_subgraphs(source.manifest)
        self.executes, self.events = EnclosingGraphs(source), io.IoEvents(source)

    def _recorded_or_found(self) -> Steps:
        """The steps that an engine or a user declared, else those found from outside."""
        best = self.recurrences[:1]
        return found_steps.steps_between(self.source, best[0]) if best and best[0].is_step else recorded_steps(self.source)

    def pieces(self, most: int = RANGE) -> Iterator[Piece]:
        """The rows of the tables in LONG, for consecutive time ranges of about `most` records each."""
        stretches = list(self.source.contents.stretches(self.step_begins, most))
        for number, (begin_ns, end_ns) in enumerate(stretches):
            yield self._piece(self.source.between(begin_ns, end_ns, self.step_begins), number == len(stretches) - 1)

    def _piece(self, source: Source, final: bool) -> Piece:
        announced, readings = nodes.operator_records(source), self.readings.of(source)
        first, definitions = self.first, self.definitions
        runs = range_graphs(source, first.graph)
        steps = self.steps.begun_in(source).awaited(*runs.waits())
        self.known.append(steps)
        columns, threads, operator = operators.build_operators(source, announced, steps, runs, definitions, first)
        spans = source.spans("expert", ("layer", "expert"))
        enclosing = operators.finish_operators(columns, definitions, threads, operator, source.rows("expert_begin"))
        experts = moe.expert_columns(source, steps, spans, enclosing, first)
        routes = moe.route_columns(source, steps, definitions)
        self.executes.note(source, runs)
        self.events.note(source, io.RangeActivity(threads, operator, columns["expert"], first.operator, experts))
        tables = {
            "graphs": arrow_table("graphs", runs.table(source, steps)),
            "operators": arrow_table("operators", columns | self._work(columns, routes, steps)),
            "op_threads": operators.thread_table(threads, first.operator + operator),
            "routes": arrow_table("routes", routes),
            "experts": arrow_table("experts", experts),
            **self.scheduling.piece(source, final),
            "pmc": pmc.build_pmc(source, readings, threads, first.operator + operator),
            "counters": self.counters.of(source, announced, experts, self.loads),
        }
        loose = int(np.count_nonzero(columns["token_id"] < 0))
        self.first = operators.FirstNumbers(
            first.operator + len(columns["op_id"]),
            first.graph + len(runs.begin),
            first.run + len(experts["run_id"]),
            first.loose + loose,
        )
        return tables

    def _work(self, columns: Columns, routes: Columns, steps: Steps) -> dict[str, np.ndarray]:
        """The columns flops, read_bytes and written_bytes of `operators`."""
        figures = self.definitions.work.columns(columns, routes, steps.lengths())
        if self.subgraphs is not None:
            self.subgraphs.fill(columns, context_lengths(columns["token_id"], steps.lengths()), figures)
        return figures

    def last_tables(self) -> Piece:
        """The other tables except `qnn_gaps`; valid only after all pieces."""
        source, steps = self.source, self.steps.joined(self.known)
        rails, readings = power.build_power(source)
        tables = {
            **steps.tables(source),
            "tensors": self.definitions.table,
            "loads": self.loads,
            **events.build_qnn_tables(source, steps, self.executes),
            "sessions": session_columns(source),
            "genie_events": genie.genie_columns(source),
            "calls": calls.build_calls(source, steps),
            **hexagon.build_npu_tables(source, steps),
            "driver_events": driver.build_driver_events(source, steps),
            "threads": self.scheduling.threads(),
            "clocks": clocks.build_clocks(source),
            "cpus": clocks.build_cpus(source),
            "rails": rails,
            "power": readings,
            **self.events.tables(steps, self.loads),
            "writes": found_steps.write_columns(source, steps),
            "recurrences": found_steps.recurrence_columns(source, self.recurrences),
            **build_stacks(source, steps),
            "unpaired": unpaired_table(source),
        }
        return {name: arrow_table(name, columns) for name, columns in tables.items()}


def unpaired_table(source: Source) -> Columns:
    """The table `unpaired`: ends without a recorded begin, in time order."""
    parts = [part | {"kind": np.full(len(part["tid"]), kind, object)} for kind, rows in source.unpaired.items() for part in rows]
    columns = {c.name: np.concatenate([np.empty(0, c.dtype), *(part[c.name] for part in parts)]) for c in TABLES["unpaired"]}
    order = np.argsort(columns["ts_ns"], kind="stable")
    return {name: column[order] for name, column in columns.items()}


def gap_table(tables: Piece) -> Piece:
    """The table `qnn_gaps`, made from `qnn_executes` and, if that has rows, from the tables in GAPS_NEED."""
    if not tables["qnn_executes"].num_rows:
        return {"qnn_gaps": arrow_table("qnn_gaps", {})}
    frames = {name: frame_of(tables[name].select(columns)) for name, columns in GAPS_NEED.items()}
    return {"qnn_gaps": arrow_table("qnn_gaps", busy.gap_table({"qnn_executes": frame_of(tables["qnn_executes"]), **frames}))}


GAPS_NEED = {
    "operators": ("tid", "type", "begin_ns", "end_ns"),
    "thread_states": ("tid", "pid", "state", "begin_ns", "end_ns"),
}
"""Tables in LONG that the gaps between executions are made from, and their columns."""
