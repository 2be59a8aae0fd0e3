// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Finds function tables in the memory of a program that obtained them before it was followed. A QNN provider is recognised by its
 * structure (docs/qnn.md): backend, name, API version, then addresses in QNN's libraries; a QAIRT table by its size in bytes, then
 * as many such addresses. Only data that a library returned to the program is read, never code.
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
#define FEWEST_WORDS 5 /* of a QAIRT table */
#define LONGEST_NAME 64
#define LARGEST (64ULL << 20)	/* other mappings are searched up to this many bytes: malloc's arenas are no larger, models are */
#define MOST_READ (256ULL << 20) /* of all mappings together */
#define CHUNK_WORDS (1 << 17)
#define MOST_AREAS 8192
#define MOST_CODE 256

/* Where tables lie, likeliest first: addresses in a library's data are written when it is loaded. */
enum tier {
	DATA, /* writable data of the libraries, and what became read-only after it was written */
	HEAP,
	ANONYMOUS,
	CONSTANT, /* other data of the libraries */
	TIERS,
};

struct area {
	u64 start, end;
	enum tier tier;
};

struct search {
	pid_t pid;
	json_t *libraries;
	u32 major;
	struct area areas[MOST_AREAS], code[MOST_CODE];
	int area_count, code_count;
	void (*examine)(struct search *s, const u64 *words, size_t count, u64 address, u64 end);
	struct provider *found;
	struct qairt_table *tables;
	int most, count;
	u64 bytes; /* read */
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
	bool is_ours = m->path[0] == '/' && is_library(s->libraries, m->path), is_heap = !strcmp(m->path, "[heap]");
	struct area *area = &s->areas[s->area_count];

	if (m->is_code && is_ours && s->code_count < MOST_CODE)
		s->code[s->code_count++] = (struct area){m->start, m->end, CONSTANT};
	if (m->is_code || s->area_count == MOST_AREAS || !(is_ours || is_heap || (!m->path[0] && m->end - m->start <= LARGEST)))
		return;
	*area = (struct area){m->start, m->end, !is_ours ? is_heap ? HEAP : ANONYMOUS : m->is_writable ? DATA : CONSTANT};
	if (area->tier == DATA && s->area_count && area[-1].tier == CONSTANT && area[-1].end == area->start)
		area[-1].tier = DATA;
	s->area_count++;
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

/* A provider of the wanted major version? */
static void examine_provider(struct search *s, const u64 *seen, size_t left, u64 address, u64 end)
{
	u64 words[PROVIDER_WORDS], room = end - address < sizeof(words) ? end - address : sizeof(words);
	struct provider provider = {0};
	size_t count;

	if (left <= CREATES_AT || seen[0] - 1 >= MOST_BACKENDS || !is_in_code(s, seen[CREATES_AT]))
		return;
	count = read_memory(s->pid, address, words, room) / sizeof(*words);
	if (count <= CREATES_AT)
		return;
	provider.backend = words[0];
	memcpy(provider.api, words + API_AT, sizeof(provider.api));
	if (provider.api[0] != s->major || read_slots(s, words, count, provider.slots) < FEWEST || !is_name(s->pid, words[NAME_AT]))
		return;
	add_provider(s, &provider);
}

/* A table of QAIRT's? The programs' copies of it are the same table. */
static void examine_table(struct search *s, const u64 *seen, size_t left, u64 address, u64 end)
{
	u64 words = seen[0] / sizeof(u64);
	struct qairt_table table = {0};

	(void)address, (void)end;
	if (seen[0] % sizeof(u64) || words < FEWEST_WORDS || words > TABLE_SLOTS || words > left || !is_in_code(s, seen[1]))
		return;
	for (u64 i = 2; i < words; i++)
		if (seen[i] && !is_in_code(s, seen[i]))
			return;
	memcpy(table.words, seen, seen[0]);
	for (int i = 0; i < s->count; i++)
		if (!memcmp(&s->tables[i], &table, sizeof(table)))
			return;
	if (s->count < s->most)
		s->tables[s->count++] = table;
}

static void search_area(struct search *s, const struct area *area)
{
	static u64 words[CHUNK_WORDS];
	u64 step = CHUNK_WORDS - TABLE_SLOTS; /* chunks overlap by what a candidate shows */

	for (u64 at = area->start; at < area->end && s->bytes < MOST_READ; at += step * sizeof(*words)) {
		u64 left = area->end - at, bytes = left < sizeof(words) ? left : sizeof(words);
		size_t count = read_memory(s->pid, at, words, bytes) / sizeof(*words);

		s->bytes += count * sizeof(*words);
		for (size_t i = 0; i < count; i++)
			s->examine(s, words + i, count - i, at + i * sizeof(*words), area->end);
	}
}

/* Searches tier after tier, until one has tables. Returns how many; -1 if the process has mapped none of these libraries. */
static int search_memory(struct search *s, u64 *bytes)
{
	int count;

	each_mapping(s->pid, sort_out, s);
	for (enum tier tier = 0; tier < TIERS && !s->count && s->code_count; tier++)
		for (int i = 0; i < s->area_count; i++)
			if (s->areas[i].tier == tier)
				search_area(s, &s->areas[i]);
	*bytes = s->bytes;
	count = s->code_count ? s->count : -1;
	free(s);
	return count;
}

/* The QNN providers of a major API version: their addresses are in the libraries' code. */
int find_providers(pid_t pid, json_t *libraries, u32 major, struct provider *found, int most, u64 *bytes)
{
	struct search *s = calloc(1, sizeof(*s));

	*s = (struct search){.pid = pid, .libraries = libraries, .major = major, .examine = examine_provider, .found = found, .most = most};
	return search_memory(s, bytes);
}

int find_qairt_tables(pid_t pid, json_t *libraries, struct qairt_table *found, int most, u64 *bytes)
{
	struct search *s = calloc(1, sizeof(*s));

	*s = (struct search){.pid = pid, .libraries = libraries, .examine = examine_table, .tables = found, .most = most};
	return search_memory(s, bytes);
}
