"""The interface: load a model, generate text."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from numbers import Integral
from operator import index
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from runtime.backends.instruction_sets import instruction_set
from runtime.backends.kv_cache import Scales
from runtime.cache_rules.forms import HTP
from runtime.errors import ModelError, RequestError
from runtime.package.convert import Progress, open_or_convert
from runtime.package.demo_model import TEXT
from runtime.package.layout import EXPERTS, Package
from runtime.package.tokens import ChatTemplate, Message, check_text, further_end_ids, read_tokenizer
from runtime.placement.options import Options
from runtime.placement.table import resolve_auto
from runtime.prepare.scoring import Score, score_text
from runtime.step.attention import Sequence
from runtime.step.engine import Engine
from runtime.step.sampling import Sampler, Sampling, log_probabilities
from runtime.telemetry import probes, profile
from runtime.telemetry.log import LOG_BYTES, RunLog, Step
from runtime.telemetry.probes import Phase
from runtime.telemetry.profile import Timers
from runtime.units import parse_budget

CALIBRATED_ON = 256
"""Tokens of the shipped text from which the scales of 8-bit keys and values are measured."""


@dataclass(frozen=True)
class Token:
    """A generated token: its id, the text it completes, and the step that chose it.

    logprob: its natural log probability by the model's own logits, before any sampling setting; top: (id, log probability) of
    the most likely tokens. Both only on request.
    """

    id: int
    text: str
    step: Step
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class TextStream:
    """Turns ids into text as soon as whole characters are known."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self._ids: list[int] = []
        self._text = ""

    def add(self, token: int) -> str:
        """The text that this id completes; empty in the middle of a character."""
        self._ids.append(token)
        text = self.tokenizer.decode(self._ids)
        if text.endswith("\ufffd"):
            return ""
        new = text[len(self._text) :]
        self._ids, self._text = self._ids[-8:], self.tokenizer.decode(self._ids[-8:])
        return str(new)


class MoE:
    """A Mixture-of-Experts model on CPU and NPU."""

    def __init__(self, package: Package, options: Options):
        probes.warn_if_missing()
        # Reentrant: garbage collection within a step may end an abandoned generator.
        self._stepping = RLock()
        self._kept: Sequence | None = None
        self._closed = False
        self.package, self.log = package, RunLog(timers=Timers() if options.profile else None)
        self.options, costs = resolve_auto(options, package)
        self.tokenizer = read_tokenizer(package.folder)
        self.end_ids = further_end_ids(package.folder, package.family.vocabulary).union(package.family.end_ids)
        scales = self._kv_scales() if self.options.kv_bits == 8 else None
        self.engine = Engine(package, self.options, self.log, costs, scales)

    @classmethod
    def load(
        cls,
        path: str | Path,
        expert_cache: str | int | None = "all",
        package: str | Path | None = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> "MoE":
        """Open the model folder or package at `path`, converting it first if needed.

        `expert_cache`: bytes, `1.5MiB`, `25%` of all experts, or `all` (same as None).
        `options`: fields of Options; tiers, chunk and soc default to those that the package was compiled for.
        """

        if unknown := sorted(options.keys() - {field.name for field in fields(Options)}):
            raise RequestError(f"{unknown[0]!r} is not an option: see runtime.placement.options.Options")

        def budget(whole_bytes: int) -> int | None:
            return parse_budget(expert_cache, whole_bytes) if isinstance(expert_cache, str) else expert_cache

        Options(expert_cache=budget(0), **options)  # report a wrong option before any conversion
        opened = open_or_convert(Path(path), Path(package) if package else None, progress)
        return cls(opened, Options(expert_cache=budget(opened.all_experts_bytes), **(opened.compiled_for | options)))

    def encode(self, prompt: str) -> list[int]:
        """Token ids of a prompt."""
        check_text(prompt, "the prompt")
        ids: list[int] = self.tokenizer.encode(prompt).ids
        if not ids:
            raise RequestError("the prompt is empty: give at least one character")
        return ids

    def apply_chat_template(self, messages: list[Message], **options: Any) -> list[int]:
        """Token ids of the prompt to answer messages {role, content}; `options` as in transformers' method of the same name."""
        return self._chat_template.ids(messages, **options)

    def template_variables(
        self, thinking: bool | None = None, effort: str | None = None, tools: list[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        """`options` of apply_chat_template that switch thinking, and name its effort and the tools, as this model calls them."""
        return self._chat_template.variables(thinking, effort, tools)

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        return ChatTemplate(self.package.folder)

    def generate(
        self,
        prompt: str | Iterable[int] | list[Message],
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        ignore_end: bool = False,
        stop: str | Iterable[str] = (),
        keep_kv: bool = False,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        logprobs: int | None = None,
        unwanted: Callable[[], bool] = lambda: False,
    ) -> Iterator[Token]:
        """Yield tokens until the end token or a text of `stop`, both of which are omitted, or the limit.

        prompt: text, ids, or messages {role, content} for the model's chat template. Generators may run in several threads:
        their steps take turns. keep_kv: keys and values are kept for the next call with keep_kv, which computes only the part of
        its prompt after the common beginning. logprobs: give each token its log probability, and those of this many most likely
        tokens. unwanted: asked before each chunk of the prompt; if so, the iterator raises InterruptedStepError.
        Sampling settings are those of transformers.
        """
        if self._closed:
            raise RequestError("this model is closed: load it again")
        sampling = Sampling(temperature, top_k, top_p, seed, min_p, repetition_penalty)
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        check_request(max_new_tokens, stops, logprobs)
        ids = self.prompt_ids(prompt)
        if min(ids) < 0 or max(ids) >= self.package.family.vocabulary:
            raise ModelError(
                "the prompt has ids outside the model's vocabulary: tokenizer.json and config.json are from different models"
            )
        context = self.package.family.context
        if len(ids) + max_new_tokens > context:
            length = f"a prompt of {len(ids)} tokens plus {max_new_tokens} new ones"
            raise RequestError(f"{length} exceeds the model's context of {context}: shorten it")
        tokens = self._steps(ids, max_new_tokens, Sampler(sampling, ids), ignore_end, keep_kv, logprobs, unwanted)
        return until_stop(tokens, stops) if stops else tokens

    def prompt_ids(self, prompt: str | Iterable[int] | list[Message]) -> list[int]:
        """Token ids of a prompt in any form that `generate` takes."""
        if isinstance(prompt, str):
            return self.encode(prompt)
        try:
            parts: list[Any] = list(prompt)
            if parts and isinstance(parts[0], dict):
                return self.apply_chat_template(parts)
            if isinstance(prompt, bytes) or any(isinstance(part, bool) for part in parts):
                raise TypeError
            ids = [index(part) for part in parts]
        except TypeError:
            raise RequestError("a prompt is text, a sequence of token ids, or messages {role, content}") from None
        if not ids:
            raise RequestError("the prompt is empty: give at least one token")
        last = self.package.family.vocabulary - 1
        if wrong := [token for token in ids if not 0 <= token <= last]:
            raise RequestError(f"the prompt has the token id {wrong[0]}: ids are from 0 to {last}")
        return ids

    def score(self, prompt: str | Iterable[int] | list[Message], states: bool = False) -> Score:
        """Log probabilities of a text's tokens, and the routes of each layer, where prefill is placed."""
        if self._closed:
            raise RequestError("this model is closed: load it again")
        ids = self.prompt_ids(prompt)
        with self._stepping:
            return score_text(self.engine, ids, states)

    def __enter__(self) -> "MoE":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def describe(self) -> dict[str, Any]:
        """Description of this engine: sizes, placement, budget."""
        family, o = self.package.family, self.options
        labels = {phase.name.lower(): place.label for phase, place in self.engine.placements.items()}
        return {
            "layers": family.layers,
            "experts": family.experts,
            "top_k": family.top_k,
            "hidden": family.hidden,
            "backends": labels,
            "expert_cache_bytes": o.expert_cache,
            "memory_bytes": self._memory_bytes(),
            "chunk": o.chunk,
            "tiers": list(o.tiers),
            "threads": o.threads,
            "instruction_set": instruction_set() if self.package.manifest["precisions"]["experts"]["bits"] < 16 else None,
            "qnn_profile": o.qnn_profile,
            "probes": probes.built,
        }

    def _memory_bytes(self) -> dict[str, int]:
        """Bytes by use: budgets of experts and log, which grow, the largest sequence's keys and values, and other weights."""
        all_bytes, files = self.package.all_experts_bytes, self.package.manifest["files"]
        others = sum(entry["bytes"] for name, entry in files.items() if name.endswith(".bin") and not name.startswith(EXPERTS))
        budget = self.options.expert_cache
        experts = all_bytes if budget is None else min(budget, all_bytes)
        return {"experts": experts, "weights": others, "kv": self.log.kv_bytes, "log": LOG_BYTES}

    def close(self) -> None:
        """Release threads, keys and values; write the profile if one was requested."""
        self.engine.close()
        self._kept, self._closed = None, True
        if self.options.profile and self.log.timers:
            npu = self.engine.backends.get(HTP)
            profile.write_profile(self.log.timers, self.options.profile, npu.label if npu else "no NPU")
            self.log.timers = None

    def _steps(
        self,
        ids: list[int],
        limit: int,
        sampler: Sampler,
        ignore_end: bool,
        keep_kv: bool,
        logprobs: int | None,
        unwanted: Callable[[], bool],
    ) -> Iterator[Token]:
        stream, sequence, room = TextStream(self.tokenizer), None, len(ids) + limit
        try:
            for i in range(limit):
                with self._stepping:
                    running, sequence = sequence or self._begin(ids, room, keep_kv), None
                    rest = ids[running.length :] if i == 0 else ids
                    step, logits = self.engine.step(running, rest, sampler, i == 0, unwanted)
                    sequence = running  # an interrupted step leaves no sequence to continue
                if step.sampled in self.end_ids and not ignore_end:
                    return
                likely = () if logprobs is None else likely_tokens(logits, step.sampled, logprobs)
                yield Token(step.sampled, stream.add(step.sampled), step, *likely)
                ids = [step.sampled]
        finally:
            if keep_kv:
                self._kept = sequence
            elif sequence:
                with self._stepping:
                    self.engine.release(sequence)

    def _begin(self, ids: list[int], room: int, keep_kv: bool) -> Sequence:
        if not keep_kv or self._kept is None:
            return self.engine.begin_sequence(room)
        kept, self._kept = self._kept, None
        return self.engine.resume_sequence(kept, ids, room)

    def _kv_scales(self) -> Scales:
        """Scales of 8-bit keys and values: the package's, or measured once on the shipped text."""
        scales = Scales.stored(self.package)
        if scales is None:
            plain = replace(self.options, kv_bits=32, prefill_backend="cpu", decode_backend="cpu", prefetch="off")
            ids = self.encode(TEXT.read_text(encoding="utf-8"))[: min(CALIBRATED_ON, self.package.family.context)]
            engine = Engine(self.package, plain, RunLog())
            sequence = engine.begin_sequence(len(ids))
            engine.hidden(sequence, ids, Step(0, Phase.PREFILL, len(ids), 0, 0))
            engine.close()
            scales = Scales.of_rows(sequence.keys, sequence.values)
            scales.save(self.package)
        return scales


def likely_tokens(logits: np.ndarray, token: int, count: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """(log probability of a token by logits [V], the `count` most likely tokens with theirs)."""
    logs = log_probabilities(logits)
    return float(logs[token]), tuple((int(i), float(logs[i])) for i in np.argsort(-logs, kind="stable")[:count])


def check_request(max_new_tokens: int, stop: tuple[str, ...] = (), logprobs: int | None = None) -> None:
    """Raise RequestError for a limit, stop texts or a number of log probabilities with which nothing can be generated."""
    if not isinstance(max_new_tokens, Integral) or max_new_tokens < 1:
        raise RequestError(f"max_new_tokens is {max_new_tokens!r}: give a whole number of 1 or more")
    if not all(isinstance(text, str) and text for text in stop):
        raise RequestError("a stop text is empty or no text: give at least one character")
    if logprobs is not None and (not isinstance(logprobs, Integral) or logprobs < 0):
        raise RequestError(f"logprobs is {logprobs!r}: give a whole number of 0 or more")


def until_stop(tokens: Iterator[Token], stop: tuple[str, ...]) -> Iterator[Token]:
    """Tokens up to the first text of `stop`. A possible beginning of it is held back until it is ruled out."""
    held: list[Token] = []
    text = ""
    for token in tokens:
        held.append(token)
        text += token.text
        offsets = [offset for offset in map(text.find, stop) if offset >= 0]
        if offsets:
            yield from _cut_tokens(held, min(offsets))
            return
        if not any(text[-size:] == end[:size] for end in stop for size in range(1, min(len(end), len(text) + 1))):
            yield from held
            held, text = [], ""
    yield from held


def _cut_tokens(tokens: list[Token], characters: int) -> Iterator[Token]:
    """The tokens that make up the first `characters` characters, the last one shortened."""
    for token in tokens:
        if characters <= 0:
            return
        yield replace(token, text=token.text[:characters])
        characters -= len(token.text)
