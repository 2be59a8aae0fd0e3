"""A run's energy in the fields that others settled on: those proposed for MLPerf, and those of TensorRT-LLM's benchmark.

MLPerf's are of github.com/mlcommons/inference, pull request 2587 (schema 6.1), from the discussion in its issue 2558; a sensor of
the device itself is the "informative only" tier that issue 19 of github.com/mlcommons/mlperf_client asks for. TensorRT-LLM's
(pull requests 11397 and 11855) are total energy, mean power and output tokens per second and watt. What is not known is null.
"""

from typing import Any

import numpy as np

from analyzer.questions import figures
from analyzer.questions.energy import RailFit, energy_between, fitted_rails, phase_energy
from analyzer.questions.requests import request_concurrency, request_table
from analyzer.questions.steady import steady_state
from analyzer.records.schema import Tables

METHODS = {"powercap": "rapl", "meter.csv": "external_analyzer"}
"""Our source → MLPerf's method; it has none for others, which keep their name."""


def exported_energy(tables: Tables, manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """The fields for each rail whose readings can be fitted."""
    fits = fitted_rails(tables)
    rows, workload = phase_energy(tables, fits), exported_workload(tables)
    settled = steady_state(tables, manifest).get("since_s") if fits else None
    workload |= {"thermal_stabilization_seconds": settled}
    return [
        exported_rail(tables, each, rows[rows["rail_id"] == each.row["rail_id"]].set_index("phase").to_dict("index"), workload)
        for each in fits
    ]


def exported_workload(tables: Tables) -> dict[str, Any]:
    """What was computed: lengths are medians over requests, the batch is the most requests at once."""
    requests = request_table(tables)
    lengths = {"input_sequence_length": requests["prompt"], "output_sequence_length": requests["generated"]}
    medians = {name: int(values.median()) if len(values) else None for name, values in lengths.items()}
    return {"batch_size": request_concurrency(requests)["most"] if len(requests) else None, **medians}


def exported_rail(tables: Tables, each: RailFit, phases: dict[str, Any], workload: dict[str, Any]) -> dict[str, Any]:
    """One rail's fields; `energy_per_token_joules` is decode's, its `std` over requests that did not overlap."""
    steps, late = figures.complete_steps(tables), round(each.fit.delay_s * 1e9)
    begin, end = (np.array([ns + late]) for ns in (steps["begin_ns"].min(), steps["end_ns"].max()))
    total, seconds = known_number(energy_between(each.readings, begin, end)[0]), float(end[0] - begin[0]) * 1e-9
    inside = (each.readings.begin >= begin) & (each.readings.end <= end)
    decode, prefill = phases.get("decode", {}), phases.get("prefill", {})
    tokens, mean = decode.get("tokens", 0), known_number(decode.get("j_per_token"))
    spread = request_spread(tables, each) if workload["batch_size"] == 1 else []
    std = float(np.std(spread, ddof=1)) if len(spread) > 1 else None
    return {
        **{name: each.row[name] for name in ("source", "rail", "scope")},
        "informative_only": each.row["source"] != "meter.csv",
        "task_type": "llm",
        "total_energy_joules": total,
        "static_power_baseline_watts": each.floor[0] if each.floor else None,
        "inference_active_power_watts": {
            "mean": total / seconds if total else None,
            "peak": known_number(each.readings.watts[inside].max()) if inside.any() else None,
        },
        "measurement_method": METHODS.get(each.row["source"], each.row["source"]),
        "sampling_rate_hz": 1 / each.readings.period_s,
        "scenario": None,
        "accelerator_count": None,
        "energy_per_token_joules": {"mean": mean, "std": std},
        "prefill_energy_joules": known_number(prefill.get("joules")),
        "generation_energy_joules": known_number(decode.get("joules")),
        "output_token_count": tokens,
        **workload,
        "average_power_watts": total / seconds if total else None,
        "output_tokens_per_second_per_watt": tokens / total if total else None,
        "energy_per_token_interval_95": [known_number(decode.get(name)) for name in ("low_per_token", "high_per_token")],
        "requests_of_std": len(spread),
        "model_residual": each.fit.residual,
    }


def request_spread(tables: Tables, each: RailFit) -> list[float]:
    """Joules per decoded token of each request whose decode phase the readings resolve."""
    fed = figures.fed_sequences(tables)
    rows = fed[fed["phase"] == "decode"].assign(kept=fed["kept"].clip(lower=1)).groupby("request")
    begin, end = rows["begin_ns"].min().to_numpy(np.int64), rows["end_ns"].max().to_numpy(np.int64)
    late = round(each.fit.delay_s * 1e9)
    joules = energy_between(each.readings, begin + late, end + late) / rows["kept"].sum().to_numpy()
    return [float(value) for value in joules[np.isfinite(joules)]]


def known_number(value: float | None) -> float | None:
    """None instead of NaN."""
    return None if value is None or np.isnan(value) else float(value)
