// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Sets of byte strings. */
#include <stdlib.h>
#include <string.h>

#include "unwind.h"

struct entry {
	u64 hash;
	u32 bytes, number;
	const u8 *key;
};

static u64 hash_of(const u8 *key, u32 bytes)
{
	u64 hash = 14695981039346656037ULL; /* FNV-1a */

	for (u32 i = 0; i < bytes; i++)
		hash = (hash ^ key[i]) * 1099511628211ULL;
	return hash;
}

static struct entry *place(struct set *set, u64 hash, const u8 *key, u32 bytes)
{
	u32 at = hash & (set->room - 1);

	while (set->entries[at].key &&
	       (set->entries[at].hash != hash || set->entries[at].bytes != bytes || memcmp(set->entries[at].key, key, bytes)))
		at = (at + 1) & (set->room - 1);
	return &set->entries[at];
}

static void widen(struct set *set)
{
	struct set wide = {.room = set->room ? 2 * set->room : 1024, .count = set->count};

	wide.entries = calloc(wide.room, sizeof(*wide.entries));
	if (!wide.entries)
		fail("out of memory");
	for (u32 i = 0; i < set->room; i++) {
		struct entry *e = &set->entries[i];

		if (e->key)
			*place(&wide, e->hash, e->key, e->bytes) = *e;
	}
	free(set->entries);
	*set = wide;
}

u32 number_in(struct set *set, const void *key, u32 bytes, bool *is_new)
{
	u64 hash = hash_of(key, bytes);
	struct entry *e;

	if (2 * set->count >= set->room)
		widen(set);
	e = place(set, hash, key, bytes);
	*is_new = !e->key;
	if (!e->key) {
		u8 *copy = malloc(bytes ? bytes : 1);

		*e = (struct entry){hash, bytes, set->count++, memcpy(copy, key, bytes)};
	}
	return e->number;
}
