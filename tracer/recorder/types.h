/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Short names of integers, the records' layouts, and how records lie in a ring: each in a slot, after eight bytes of the ring's. */
#ifndef MOESCOPE_TYPES_H
#define MOESCOPE_TYPES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int32_t s32;
typedef int64_t s64;

#include "records.h"

#define NS_PER_S 1000000000ULL
#define HEADER_BYTES 8 /* the ring's own: length and flags */
#define EVENT_SLOT (EVENT_BYTES + HEADER_BYTES)
#define DETAIL_SLOT (DETAIL_BYTES + HEADER_BYTES)

static inline const struct header *header_of(const u8 *slot)
{
	return (const void *)(slot + HEADER_BYTES);
}

#endif
