"""All verbs, by the groups of the help: name → module, help, and the words that select a verb of its own (`predict steps`)."""

from moescope.command_line import Program, Verb
from moescope.errors import FAILED

ABOUT = "See what a Mixture-of-Experts language model does while it runs on CPU and NPU."

GROUPS = {
    "Record": {
        "run": Verb("tracer.commands.run", "trace a command, from its first instruction to its end", failure=FAILED),
        "attach": Verb("tracer.commands.attach", "trace a process that is already running"),
        "plan": Verb("tracer.commands.plan", "write a plan of probes for a machine without Python"),
        "probes": Verb("tracer.commands.probes", "show every probe that would be placed, with the reason for its address"),
        "doctor": Verb("tracer.commands.doctor", "check the tracer's requirements, with a remedy for each missing one"),
    },
    "Read": {
        "summary": Verb("analyzer.commands.summary", "key figures of a recording on one screen"),
        "time": Verb(
            "analyzer.commands.time",
            "where the time of steps goes, by part and cause; of requests, of threads",
            {
                "requests": Verb(
                    "analyzer.commands.requests",
                    "TTFT, TPOT and tokens of each request, concurrency, throughput, accepted drafts",
                ),
                "threads": Verb("analyzer.commands.threads", "thread states, load balance, and which threads took the CPU"),
                "stacks": Verb("analyzer.commands.stacks", "where threads compute and wait, by their stacks"),
            },
        ),
        "findings": Verb("analyzer.commands.findings", "main costs, and the time that each remedy would save"),
        "experts": Verb("analyzer.commands.experts", "expert activation, hits, reuse"),
        "npu": Verb(
            "analyzer.commands.npu",
            "graphs, experts and nodes on the NPU, with consistency checks",
            {"backends": Verb("analyzer.commands.backends", "CPU and accelerator times for operators of equal type and shape")},
        ),
        "roofline": Verb("analyzer.commands.roofline", "whether operators are bound by compute, memory, disk or launch"),
        "trends": Verb("analyzer.commands.trends", "spread, drift, jumps and growth across steps"),
        "query": Verb(
            "analyzer.commands.query",
            "the tables, and SQL over them",
            {
                "perfetto": Verb(
                    "views.commands.queries", "PerfettoSQL for the timeline: steps, slow steps, NPU idle time, expert loads"
                )
            },
        ),
        "import": Verb("analyzer.commands.import_files", "import what other tools wrote: profiles of programs, QNN's logs"),
    },
    "Look": {
        "open": Verb("views.commands.open", "serve the timeline to the Perfetto UI in the browser"),
        "top": Verb("views.commands.top", "show live figures of a recording in progress"),
        "write": Verb("views.commands.write", "write timeline, report, ProfDAG; or tables, graphs, routes for other tools"),
    },
    "Compare": {
        "compare": Verb(
            "views.commands.compare",
            "what changed between two groups of runs, with confidence intervals",
            {
                "--": Verb(
                    "tracer.commands.compare", "record two commands alternately until it is clear which is faster, and where"
                )
            },
        ),
        "history": Verb("views.commands.history", "results of many builds, where they changed, and speed against energy"),
    },
    "Predict": {
        "predict": Verb(
            "analyzer.commands.predict",
            "predict the time of a step on a device from a model's config",
            {
                "steps": Verb("analyzer.commands.steps", "predict decode step times from preceding steps"),
                "kernels": Verb("analyzer.commands.kernels", "kernel cost models by shape: train, predict, find fusions"),
                "device": Verb("analyzer.commands.device", "device profiles: list, show, measure this machine"),
                "ceilings": Verb("analyzer.commands.ceilings", "measure this machine's peak bandwidth and compute"),
                "quantization": Verb("analyzer.commands.quantization", "speed gained by quantization against quality lost"),
                "fidelity": Verb("analyzer.commands.fidelity", "accuracy of the measured times against a reference"),
            },
        ),
        "simulate": Verb("views.commands.simulate", "replay recorded routes with other settings or on another device"),
    },
    "Run": {
        "generate": Verb("runtime.commands.generate", "generate text with a Mixture-of-Experts model on CPU and NPU"),
        "chat": Verb("runtime.commands.chat", "chat with a model"),
        "serve": Verb("runtime.commands.serve", "serve a model over HTTP, with OpenAI's interface"),
        "bench": Verb(
            "runtime.commands.bench",
            "measure prefill and decode speed, as llama-bench",
            {
                "perplexity": Verb("runtime.commands.perplexity", "measure how well a model predicts a text"),
                "prompts": Verb("analyzer.commands.prompts", "choose prompts with the same distribution of lengths as many"),
            },
        ),
        "convert": Verb(
            "runtime.commands.convert",
            "convert a Hugging Face model into a package of subgraphs",
            {"demo": Verb("runtime.commands.demo_model", "write a small demo model")},
        ),
        "tune": Verb(
            "runtime.commands.tune",
            "measure each subgraph on each backend, for automatic placement",
            {"predictor": Verb("runtime.commands.train_predictor", "train a predictor of expert choices, for prefetching")},
        ),
        "inspect": Verb("runtime.commands.inspect", "show the contents of a model or package"),
    },
    "Help": {
        "help": Verb("moescope.commands.help", "a verb's options and JSON; `help agent`: how a program finds a cause"),
    },
}
VERBS = {name: verb for group in GROUPS.values() for name, verb in group.items()}
FORMS = {
    **VERBS,
    **{f"{name} {word}": form for name, verb in VERBS.items() for word, form in verb.words.items()},
}
"""All that can be typed: verbs, and their other forms."""
TRACER = {"": {name: VERBS[name] for name in ("run", "attach", "plan", "probes", "doctor", "compare")}}
"""The verbs of `python -m tracer`, as programs are recorded from a checkout."""


def tracer_program() -> Program:
    """`python -m tracer VERB`: the same verbs under the name that needs no installation."""
    return Program("python -m tracer", "tracer", "Trace an inference engine from outside and record what it does.", TRACER)
