"""Transcribes noise with whisper.cpp's own Python module, and prints begin and end of each call: whisper_runs.py MODEL CALLS."""

import json
import sys
import time

import _pywhispercpp as whisper
import numpy as np

model, calls = sys.argv[1], int(sys.argv[2])
context = whisper.whisper_init_from_file_with_params(model, whisper.whisper_context_default_params())
params = whisper.whisper_full_default_params(whisper.whisper_sampling_strategy.WHISPER_SAMPLING_GREEDY)
params.n_threads, params.temperature_inc, params.max_tokens, params.single_segment, params.print_progress = 2, 0.0, 6, True, False
sound, spans = np.random.default_rng(0).standard_normal(32_000).astype(np.float32), []
for _ in range(calls):
    begin = time.monotonic_ns()
    whisper.whisper_full(context, params, sound, sound.size)
    spans.append((begin, time.monotonic_ns()))
print(json.dumps(spans))
