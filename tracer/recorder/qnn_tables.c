// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Finds QNN's function tables in the memory of a program that obtained them before it was followed. A provider is recognised by its
 * structure (docs/qnn.md): backend, name, API version, then addresses in QNN's libraries. Only data that a library returned to the
 * program is read, never code.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

#include "recorder.h"

#define NAME_AT 1 /* words into a provider */
#define API_AT 2
#define SLOTS_AT 5
#define CREATES_AT (SLOTS_AT + 1) /* slot 1 creates a backend: every provider has it */
#define PROVIDER_WORDS (SLOTS_AT + QNN_SLOTS)
#define MOST_BACKENDS 64
#define FEWEST 20 /* the fewest addresses that count as a table */
#define LONGEST_NAME 64
#define LARGEST (64ULL << 20) /* other mappings are searched up to this many bytes: malloc's arenas are no larger, models are */
#define CHUNK_WORDS (1 << 17)
#define MOST_AREAS 8192
#define MOST_CODE 256

struct area {
	u64 start, end;
	bool is_near; /* a library's data, or the heap */
};

struct search {
	pid_t pid;
	json_t *libraries;
	u32 major;
	struct area areas[MOST_AREAS], code[MOST_CODE];
	int area_count, code_count;
	struct provider *found;
	int most, count;
};

static bool is_library(json_t *libraries, const char *path)
{
	size_t index;
	json_t *each;

	json_array_foreach(libraries, index, each) {
		if (!strcmp(text_of(each, "path"), path))
			return true;
	}
	return false;
}

static void sort_out(const struct mapping *m, void *context)
{
	struct search *s = context;
	bool is_ours = m->path[0] == '/' && is_library(s->libraries, m->path), is_near = is_ours || !strcmp(m->path, "[heap]");

	if (m->is_code && is_ours && s->code_count < MOST_CODE)
		s->code[s->code_count++] = (struct area){m->start, m->end, false};
	else if (!m->is_code && (is_near || (!m->path[0] && m->end - m->start <= LARGEST)) && s->area_count < MOST_AREAS)
		s->areas[s->area_count++] = (struct area){m->start, m->end, is_near};
}

/* Returns how many bytes were read. */
static size_t read_memory(pid_t pid, u64 address, void *to, size_t bytes)
{
	struct iovec here = {to, bytes}, there = {(void *)address, bytes};
	ssize_t done = process_vm_readv(pid, &here, 1, &there, 1, 0);

	return done > 0 ? done : 0;
}

static bool is_in_code(const struct search *s, u64 address)
{
	for (int i = 0; i < s->code_count; i++)
		if (address >= s->code[i].start && address < s->code[i].end)
			return true;
	return false;
}

/* Whether there is a short printable name at an address. */
static bool is_name(pid_t pid, u64 address)
{
	char text[LONGEST_NAME];
	size_t bytes = read_memory(pid, address, text, sizeof(text)), length = strnlen(text, bytes);

	if (length == bytes || length < 2 || !((text[0] | ' ') >= 'a' && (text[0] | ' ') <= 'z'))
		return false;
	for (size_t i = 1; i < length; i++)
		if (text[i] < ' ' || text[i] > '~')
			return false;
	return true;
}

/* Reads the slots at an address, up to the first that is neither empty nor an address of code; returns how many addresses. */
static int read_slots(const struct search *s, const u64 *words, size_t count, u64 *slots)
{
	int addresses = 0;

	memset(slots, 0, QNN_SLOTS * sizeof(*slots));
	for (size_t i = 0; i + SLOTS_AT < count; i++) {
		u64 word = words[SLOTS_AT + i];

		if (word && !is_in_code(s, word))
			break;
		slots[i] = word;
		addresses += word != 0;
	}
	return addresses;
}

static void add_provider(struct search *s, const struct provider *provider)
{
	for (int i = 0; i < s->count; i++)
		if (!memcmp(&s->found[i], provider, sizeof(*provider)))
			return;
	if (s->count < s->most)
		s->found[s->count++] = *provider;
}

static void examine(struct search *s, u64 address, u64 end)
{
	u64 words[PROVIDER_WORDS], room = end - address < sizeof(words) ? end - address : sizeof(words);
	size_t count = read_memory(s->pid, address, words, room) / sizeof(*words);
	struct provider provider = {0};

	if (count <= CREATES_AT)
		return;
	provider.backend = words[0];
	memcpy(provider.api, words + API_AT, sizeof(provider.api));
	if (provider.api[0] != s->major || read_slots(s, words, count, provider.slots) < FEWEST || !is_name(s->pid, words[NAME_AT]))
		return;
	add_provider(s, &provider);
}

static void search_area(struct search *s, const struct area *area)
{
	static u64 words[CHUNK_WORDS];
	u64 step = CHUNK_WORDS - CREATES_AT; /* chunks overlap by what a candidate shows */

	for (u64 at = area->start; at < area->end; at += step * sizeof(*words)) {
		u64 left = area->end - at, bytes = left < sizeof(words) ? left : sizeof(words);
		size_t count = read_memory(s->pid, at, words, bytes) / sizeof(*words);

		for (size_t i = 0; i + CREATES_AT < count; i++) {
			if (words[i] - 1 < MOST_BACKENDS && is_in_code(s, words[i + CREATES_AT]))
				examine(s, at + i * sizeof(*words), area->end);
		}
	}
}

/*
 * The providers of a major API version: first in these libraries' data and in the heap, else elsewhere. A provider's addresses are in
 * the libraries' code. Returns how many; -1 if the process has mapped none of these libraries.
 */
int find_providers(pid_t pid, json_t *libraries, u32 major, struct provider *found, int most)
{
	struct search *s = calloc(1, sizeof(*s));
	int count;

	*s = (struct search){.pid = pid, .libraries = libraries, .major = major, .found = found, .most = most};
	each_mapping(pid, sort_out, s);
	for (int is_near = 1; is_near >= 0 && !s->count && s->code_count; is_near--)
		for (int i = 0; i < s->area_count; i++)
			if (s->areas[i].is_near == is_near)
				search_area(s, &s->areas[i]);
	count = s->code_count ? s->count : -1;
	free(s);
	return count;
}
