/* SPDX-License-Identifier: Apache-2.0 */
/* What the parts of the extension `_probes` share: the sites of its probes, and the types that `run` knows. */
#pragma once
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <time.h>

enum { DISPATCH = 3, EXPERT = 4, COMBINE = 5, MOST_CHOSEN = 64 }; /* kinds of runtime/telemetry/probes.py; experts of one token */
enum { HIT = 1, MISS = 2, PREFETCHED = 3 }; /* an expert's state, as in runtime/cache_rules/forms.py */
enum { DEMAND = 1, PREFETCH = 2 }; /* why an expert is read, as there */
enum { CPU = 1 };

#define SITE __attribute__((visibility("protected"))) extern void
SITE moescope_token__begin(uint64_t seq, uint32_t phase, uint32_t n_tokens, uint32_t position);
SITE moescope_token__end(uint64_t seq, int64_t sampled, uint64_t ended_ns);
SITE moescope_op__begin(uint32_t type, int32_t layer, uint32_t n_tokens, uint64_t result, const uint64_t *sources, uint32_t n_sources);
SITE moescope_op__end(uint64_t result, uint64_t ended_ns);
SITE moescope_graph__begin(uint64_t handle, uint32_t kind, int32_t layer, int32_t expert, uint32_t backend, uint64_t tier_tokens);
SITE moescope_graph__end(uint64_t handle, int64_t status, uint64_t ended_ns);
SITE moescope_expert__begin(int32_t layer, int32_t expert, uint32_t n_tokens, uint32_t cache, uint32_t backend, uint32_t tier);
SITE moescope_expert__end(int32_t layer, int32_t expert);
SITE moescope_route(int32_t layer, uint32_t n_tokens, uint32_t k, const uint16_t *experts, const float *weights);
SITE moescope_load__begin(int32_t layer, int32_t expert, uint64_t bytes, uint32_t reason, uint32_t backend);
SITE moescope_load__end(int32_t layer, int32_t expert, uint64_t bytes, uint64_t resident_bytes);
SITE moescope_evict(int32_t layer, int32_t expert, uint64_t bytes, uint64_t resident_bytes);

static inline uint64_t now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

/* Types of _slots.c and _foresight.c, and what one of their items does; `times`: begin and end of it. */
extern PyTypeObject *slots_type;
extern PyType_Spec slots_spec, slot_work_spec, foresight_spec;
int do_slot_work(PyObject *item, int64_t *times);
int do_foresight(PyObject *item, int64_t *times);
