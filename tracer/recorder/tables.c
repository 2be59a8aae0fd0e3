// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Function tables that libraries give to the target, QNN's and others: their slots get probes. */
#include <stdio.h>
#include <string.h>

#include "recorder.h"

#define MOST_SLOTS 512 /* QNN and ONNX Runtime have fewer */
#define MOST_PROVIDERS 16
#define MOST_TABLES 32
#define AT_TABLE "address from the function table; not inspected (licence), assumed cheap"
#define AT_ENTRY "the function's first instruction: code is not inspected on this machine"

struct table {
	pid_t pid;
	char name[16];
	u64 key;
	u64 slots[MOST_SLOTS]; /* addresses */
};

static json_t *plan, *seen_qnn;
static struct table tables[MOST_TABLES];

void tables_begin(const struct choice *choice)
{
	plan = choice->plan;
}

static struct table *table_of(pid_t pid, const char *name, u64 key)
{
	struct table *empty = &tables[0];

	for (int i = 0; i < MOST_TABLES; i++) {
		if (tables[i].pid == pid && tables[i].key == key && !strcmp(tables[i].name, name))
			return &tables[i];
		if (!tables[i].pid)
			empty = &tables[i];
	}
	memset(empty, 0, sizeof(*empty));
	empty->pid = pid;
	empty->key = key;
	snprintf(empty->name, sizeof(empty->name), "%s", name);
	return empty;
}

static void collect_slots(struct table *table, u32 first, const unsigned long long *slots, size_t bytes)
{
	size_t room = first < MOST_SLOTS ? (MOST_SLOTS - first) * sizeof(u64) : 0;

	if (room)
		memcpy(table->slots + first, slots, bytes < room ? bytes : room);
}

/* A backend often uses one function for everything that it does not support. */
static bool is_shared(const u64 *slots, s64 slot)
{
	for (int i = 0; i < QNN_SLOTS; i++)
		if (i != slot && slots[i] == slots[slot])
			return true;
	return false;
}

/* Whether these programs are attached in the same files, at least one: then they see all the calls. */
static bool stand_together(json_t *programs)
{
	json_t *all = attached(), *row, *program;
	size_t index, each;
	bool somewhere = false, together = true;

	json_array_foreach(all, index, row) {
		if (!lists(programs, text_of(row, "program")))
			continue;
		somewhere = true;
		json_array_foreach(programs, each, program) {
			together = together && stands_in(json_string_value(program), text_of(row, "library"));
		}
	}
	json_decref(all);
	return somewhere && together;
}

static void attach_slot(pid_t pid, json_t *probe, u64 address, const char *symbol, const char *why)
{
	char path[PATH_MOST];
	u64 offset;

	if (!place_of(pid, address, path, &offset))
		return;
	if (stand_together(json_object_get(probe, "spared_by")))
		spare(probe, path, offset, symbol);
	else
		attach_row(probe, path, offset, symbol, why);
}

/* Where a table of this minor version has a slot of today's; -1 if it lacks it, or its order is not known. */
static s64 slot_in_version(json_t *engine, u32 minor, s64 slot)
{
	char version[12];
	json_t *lacks, *other;
	size_t index;
	s64 at = slot;

	if (minor >= number_of(engine, "same_since"))
		return slot;
	snprintf(version, sizeof(version), "%u", minor);
	lacks = json_object_get(json_object_get(engine, "older_lack"), version);
	json_array_foreach(lacks, index, other) {
		if (json_integer_value(other) == slot)
			return -1;
		at -= json_integer_value(other) < slot;
	}
	return lacks ? at : -1;
}

static void probe_qnn_table(pid_t pid, u32 backend, const u32 *version, const u64 *slots)
{
	json_t *engine = json_object_get(json_object_get(plan, "engines"), "qnn"), *probe, *api = json_object_get(engine, "api");
	u32 major = json_integer_value(json_array_get(api, 0)), minor = json_integer_value(json_array_get(api, 1));
	size_t index;
	int left_out = 0;

	json_array_foreach(json_object_get(plan, "at_run_time"), index, probe) {
		s64 slot = number_of(probe, "slot"), at = slot_in_version(engine, version[1], slot);
		char symbol[64];

		if (strcmp(text_of(probe, "engine"), "qnn") || slot < 0 || slot >= QNN_SLOTS)
			continue;
		snprintf(symbol, sizeof(symbol), "table[%d] of backend %u", (int)at, backend);
		if (version[0] == major && version[1] >= number_of(probe, "since") && at >= 0 && slots[at] && !is_shared(slots, at))
			attach_slot(pid, probe, slots[at], symbol, AT_TABLE);
		else
			left_out++;
	}
	if (left_out || (version[0] == major && version[1] > minor))
		warn("qnn: backend %u has API %u.%u.%u%s (slots are those of %u.%u): %d probes omitted", backend, version[0], version[1],
		     version[2], slot_in_version(engine, version[1], 0) < 0 ? ", whose order of functions is not known" : "", major,
		     minor, left_out);
	if (seen_qnn && backend != QNN_HTP)
		return;
	json_decref(seen_qnn);
	seen_qnn = json_pack("{si s[iii] sb}", "backend", backend, "api", version[0], version[1], version[2], "emulator",
			     backend == QNN_HTP && !strcmp(text_of(plan, "arch"), "x86_64"));
}

/* The engine's libraries whose code is not inspected: its tables lead there. */
static json_t *closed_libraries(json_t *engine)
{
	json_t *libraries = libraries_of("qnn"), *library, *prefix;
	size_t at, each;

	for (at = 0; (library = json_array_get(libraries, at));) {
		const char *name = strrchr(text_of(library, "path"), '/');
		bool is_open = false;

		json_array_foreach(json_object_get(engine, "inspectable"), each, prefix)
			is_open = is_open || !strncmp(name + 1, json_string_value(prefix), json_string_length(prefix));
		if (is_open)
			json_array_remove(libraries, at);
		else
			at++;
	}
	return libraries;
}

/* Probes the function tables that a process obtained before it was followed. */
void probe_earlier_tables(pid_t pid)
{
	json_t *engine = json_object_get(json_object_get(plan, "engines"), "qnn"), *libraries;
	static struct provider found[MOST_PROVIDERS];
	int number;

	if (!engine || !lists(json_object_get(plan, "levels"), "qnn"))
		return;
	libraries = closed_libraries(engine);
	number = find_providers(pid, libraries, json_integer_value(json_array_get(json_object_get(engine, "api"), 0)), found, MOST_PROVIDERS);
	for (int i = 0; i < number; i++)
		probe_qnn_table(pid, found[i].backend, found[i].api, found[i].slots);
	if (!number)
		warn("qnn: process %d has mapped QNN, but no function table was found in its memory: calls through an earlier one are "
		     "not recorded", pid);
	json_decref(libraries);
}

json_t *qnn(void)
{
	return seen_qnn ? json_incref(seen_qnn) : json_null();
}

bool on_qnn_table(const struct rec_qnn_table *r)
{
	struct table *table;

	if (r->provider == NO_PROVIDER) {
		warn("qnn: a library in process %u provided no function table: its calls are not recorded", r->h.pid);
		return false;
	}
	table = table_of(r->h.pid, "qnn", r->provider);
	if (!r->first)
		memset(table->slots, 0, sizeof(table->slots));
	collect_slots(table, r->first, r->slots, sizeof(r->slots));
	if (r->first < (TABLE_PARTS - 1) * TABLE_SLOTS)
		return false;
	probe_qnn_table(r->h.pid, r->backend, r->api, table->slots);
	set_settings(true);
	return r->last;
}

bool on_api_table(const struct rec_api_table *r)
{
	struct table *table;
	json_t *probe;
	size_t index;
	char name[17];

	snprintf(name, sizeof(name), "%.16s", r->table);
	table = table_of(r->h.pid, name, r->address);
	collect_slots(table, r->first, r->slots, sizeof(r->slots));
	if (!r->last)
		return false;
	json_array_foreach(json_object_get(plan, "at_run_time"), index, probe) {
		s64 slot = number_of(probe, "slot");
		char symbol[64];

		if (strcmp(text_of(probe, "table"), name) || slot < 0 || slot >= MOST_SLOTS || !table->slots[slot])
			continue;
		snprintf(symbol, sizeof(symbol), "%s[%d]", name, (int)slot);
		if (number_of(probe, "since") <= r->version)
			attach_slot(r->h.pid, probe, table->slots[slot], symbol, AT_ENTRY);
	}
	return true;
}

void on_qnn_callback(const struct rec_qnn_callback *r)
{
	json_t *probe;
	size_t index;
	char path[PATH_MOST];
	u64 offset;

	if (!place_of(r->h.pid, r->address, path, &offset))
		warn("qnn: the function that graphExecuteAsync notifies is not in a file: the end of these executions is not recorded");
	else
		json_array_foreach(json_object_get(plan, "at_run_time"), index, probe) {
			if (!strcmp(text_of(probe, "learnt"), "notify"))
				attach_row(probe, path, offset, "notify", AT_ENTRY);
		}
}

void on_qnn_reader(const struct rec_qnn_reader *r)
{
	char path[PATH_MOST];
	u64 offset;

	if (!place_of(r->h.pid, r->address, path, &offset) || !stands_in("qnn_stage_harvest_begin", path)) {
		attach_spared();
		set_settings(true);
	}
}
