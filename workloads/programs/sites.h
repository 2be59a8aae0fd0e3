/* SPDX-License-Identifier: Apache-2.0 */
/* The runtime's USDT sites called from C. The extension that holds them names Python's data; nothing here reads it. */
#ifndef SITES_H
#define SITES_H
#include <stdint.h>

#define SITE(name, ...) extern void moescope_##name(__VA_ARGS__)
SITE(token__begin, uint64_t seq, uint32_t phase, uint32_t n_tokens, uint32_t position);
SITE(token__end, uint64_t seq, int64_t sampled, uint64_t ended_ns);
SITE(op__begin, uint32_t type, int32_t layer, uint32_t n_tokens, uint64_t result, const uint64_t *sources, uint32_t n_sources);
SITE(op__end, uint64_t result, uint64_t ended_ns);
SITE(graph__begin, uint64_t handle, uint32_t kind, int32_t layer, int32_t expert, uint32_t backend, uint64_t tier_tokens);
SITE(graph__end, uint64_t handle, int64_t status, uint64_t ended_ns);
SITE(expert__begin, int32_t layer, int32_t expert, uint32_t n_tokens, uint32_t cache, uint32_t backend, uint32_t tier);
SITE(expert__end, int32_t layer, int32_t expert);
SITE(route, int32_t layer, uint32_t n_tokens, uint32_t k, const uint16_t *experts, const float *weights);
SITE(load__begin, int32_t layer, int32_t expert, uint64_t bytes, uint32_t reason, uint32_t backend);
SITE(load__end, int32_t layer, int32_t expert, uint64_t bytes, uint64_t resident_bytes);
SITE(evict, int32_t layer, int32_t expert, uint64_t bytes, uint64_t resident_bytes);

void *PyExc_MemoryError, *PyExc_OSError, *PyExc_TypeError, *PyExc_ValueError, *_Py_FalseStruct, *_Py_NoneStruct, *_Py_TrueStruct;

#endif
