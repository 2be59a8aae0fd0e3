// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Function tables that libraries give to the target, QNN's and others: their slots get probes. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "recorder.h"

#define MOST_SLOTS 512 /* QNN and ONNX Runtime have fewer */
#define MOST_PROVIDERS 16
#define MOST_TABLES 32
#define API_BASE "ort_get_api_base_end"
#define QAIRT "qairt" /* the engine, and the name of its tables in records */
#define QAIRT_HTP "libQairtHtp"
#define MOST_QAIRT_TABLES 256
#define COMPONENT_IDS 1000 /* a component's interfaces are numbered from a multiple of it */
#define AT_TABLE "address from the function table; not inspected (licence), assumed cheap"
#define AT_ENTRY "the function's first instruction: code is not inspected on this machine"

struct table {
	pid_t pid;
	char name[16];
	u64 key;
	u64 slots[MOST_SLOTS]; /* addresses */
};

static json_t *plan, *seen_qnn;
static u64 began_ns;
static int asked_interfaces; /* of QAIRT, by the target */
static bool has_qairt_graph; /* a table with executions was understood, or refused by name */
static struct table tables[MOST_TABLES];

void tables_begin(const struct choice *choice)
{
	plan = choice->plan;
	began_ns = now_ns();
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
static bool is_shared(const u64 *slots, int count, s64 slot)
{
	for (int i = 0; i < count; i++)
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

/* The backend that the manifest names: HTP if any is. */
static void note_backend(u32 backend, json_t *api)
{
	if (seen_qnn && backend != QNN_HTP) {
		json_decref(api);
		return;
	}
	json_decref(seen_qnn);
	seen_qnn = json_pack("{si so sb}", "backend", backend, "api", api, "emulator",
			     backend == QNN_HTP && !strcmp(text_of(plan, "arch"), "x86_64"));
}

static bool contains(json_t *numbers, s64 number)
{
	size_t index;
	json_t *each;

	json_array_foreach(numbers, index, each) {
		if (json_integer_value(each) == number)
			return true;
	}
	return false;
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
		if (version[0] == major && at >= 0 && version[1] < number_of(probe, "since")) {
			left_out += version[1] < number_of(engine, "same_since"); /* it may have the function, with other structs */
			continue;
		}
		snprintf(symbol, sizeof(symbol), "table[%d] of backend %u", (int)at, backend);
		if (version[0] == major && at >= 0 && slots[at] && !is_shared(slots, QNN_SLOTS, at))
			attach_slot(pid, probe, slots[at], symbol, AT_TABLE);
		else
			left_out++;
	}
	if (left_out || (version[0] == major && version[1] > minor))
		warn("qnn: backend %u has API %u.%u.%u%s (slots are those of %u.%u): %d probes omitted", backend, version[0], version[1],
		     version[2], slot_in_version(engine, version[1], 0) < 0 ? ", whose order of functions is not known" : "", major,
		     minor, left_out);
	note_backend(backend, json_pack("[iii]", version[0], version[1], version[2]));
}

/* Whether an address is in a library whose file name begins so. */
static bool is_of_library(pid_t pid, u64 address, const char *prefix)
{
	char path[PATH_MOST], *name;
	u64 offset;

	if (!place_of(pid, address, path, &offset))
		return false;
	name = strrchr(path, '/');
	return name && !strncmp(name + 1, prefix, strlen(prefix));
}

/* Probes a component's table {size in bytes, getInterface, functions}; its slots are counted from its size. */
static void probe_component(pid_t pid, const char *name, json_t *known, const u64 *words)
{
	json_t *probe;
	size_t index;
	u32 bytes = json_integer_value(json_array_get(known, 1)), count = bytes / sizeof(u64);
	bool is_known = words[0] >= bytes && count <= TABLE_SLOTS;
	int left_out = 0;

	json_array_foreach(json_object_get(plan, "at_run_time"), index, probe) {
		s64 slot = number_of(probe, "slot");
		char symbol[64];

		if (strcmp(text_of(probe, "engine"), QAIRT) || strcmp(text_of(probe, "table"), name))
			continue;
		snprintf(symbol, sizeof(symbol), "interface %.32s[%d]", name, (int)slot);
		if (is_known && slot >= 0 && slot < count && words[slot] && !is_shared(words, count, slot))
			attach_slot(pid, probe, words[slot], symbol, AT_TABLE);
		else
			left_out++;
	}
	has_qairt_graph = has_qairt_graph || !strcmp(name, "graph");
	if (left_out || words[0] != bytes)
		warn("qairt: the table of interface %s has %llu bytes%s (slots are those of %u bytes): %d probes omitted", name,
		     (unsigned long long)words[0], is_known ? "" : ", whose order of functions is not known", bytes, left_out);
	if (is_known && !strcmp(name, "graph"))
		note_backend(is_of_library(pid, words[count - 1], QAIRT_HTP) ? QNN_HTP : 0, json_string("QAIRT V1"));
}

static json_t *interfaces(void)
{
	return json_object_get(json_object_get(json_object_get(plan, "engines"), QAIRT), "interfaces");
}

/* An interface that a program got, by its number: of those of the component with executions, an unknown one is said. */
static void probe_interface(pid_t pid, u32 id, const u64 *words)
{
	json_t *known;
	const char *name;

	asked_interfaces++;
	json_object_foreach(interfaces(), name, known) {
		u32 first = json_integer_value(json_array_get(known, 0));

		if (id == first)
			probe_component(pid, name, known, words);
		else if (!strcmp(name, "graph") && id / COMPONENT_IDS == first / COMPONENT_IDS && !contains(known, id)) {
			has_qairt_graph = true;
			warn("qairt: interface %u of component graph (a table of %llu bytes) is not known: calls through it are not recorded",
			     id, (unsigned long long)words[0]);
		}
	}
}

void tables_end(void)
{
	if (asked_interfaces && !has_qairt_graph)
		warn("qairt: the program got %d interfaces, none of them with executions in an order that is known: its work on the "
		     "NPU is not recorded", asked_interfaces);
}

/* The engine's libraries whose code is not inspected: its tables lead there. */
static json_t *closed_libraries(const char *name)
{
	json_t *engine = json_object_get(json_object_get(plan, "engines"), name);
	json_t *libraries = libraries_of(name), *library, *prefix;
	size_t at, each;

	for (at = 0; (library = json_array_get(libraries, at));) {
		const char *base = strrchr(text_of(library, "path"), '/');
		bool is_open = false;

		json_array_foreach(json_object_get(engine, "inspectable"), each, prefix)
			is_open = is_open || !strncmp(base + 1, json_string_value(prefix), json_string_length(prefix));
		if (is_open)
			json_array_remove(libraries, at);
		else
			at++;
	}
	return libraries;
}

struct began {
	u64 ns;
	double cpu_s;
};

/* Why nothing of a process can be read: ENOENT, it has ended; EACCES, it is another user's; 0 otherwise. */
static int unreadable(pid_t pid)
{
	char program[PATH_MOST];

	return program_of(pid, program) ? 0 : errno;
}

/* Tells how long the search took, and which calls it missed; or why there is none. A process may have mapped no such library. */
static void tell_search(pid_t pid, const char *engine, int found, const struct began *began, u64 bytes)
{
	double took = (now_ns() - began->ns) * 1e-9;
	int reason = unreadable(pid);

	if (found < 0 && !reason)
		return;
	if (found > 0) {
		say("%s: function table found after %.3f s (%.3f s of CPU), %.1f MB read", engine, took, cpu_s() - began->cpu_s, bytes * 1e-6);
		warn("%s: process %d ran %.3f s of the recording before its function table was found%s and probed: calls in them are not "
		     "recorded", engine, pid, (now_ns() - began_ns) * 1e-9, strcmp(engine, QAIRT) ? "" : " (by its size alone)");
	} else if (reason == EACCES) {
		warn("%s: the memory of process %d cannot be read without CAP_SYS_PTRACE: calls through its function tables are not recorded",
		     engine, pid);
	} else if (reason) {
		warn("%s: process %d ended before its function table was found (%.3f s): its calls are not recorded", engine, pid, took);
	} else {
		warn("%s: process %d has mapped %s, but no function table was found in its memory (%.1f MB read): calls through an "
		     "earlier one are not recorded", engine, pid, engine, bytes * 1e-6);
	}
}

static void probe_earlier_qnn(pid_t pid)
{
	json_t *engine = json_object_get(json_object_get(plan, "engines"), "qnn"), *libraries = closed_libraries("qnn");
	static struct provider found[MOST_PROVIDERS];
	struct began began = {now_ns(), cpu_s()};
	u64 bytes = 0;
	s64 major = json_integer_value(json_array_get(json_object_get(engine, "api"), 0));
	int number = find_providers(pid, libraries, major, found, MOST_PROVIDERS, &bytes);

	for (int i = 0; i < number; i++)
		probe_qnn_table(pid, found[i].backend, found[i].api, found[i].slots);
	if (json_array_size(libraries))
		tell_search(pid, "qnn", number, &began, bytes);
	json_decref(libraries);
}

/* In memory a table of QAIRT has its size, not its interface's number: it is one's if no other has that size. */
static int probe_found_interface(pid_t pid, const char *name, json_t *known, const struct qairt_table *found, int count)
{
	const struct qairt_table *same = NULL;
	int number = 0;

	for (int i = 0; i < count; i++) {
		if (found[i].words[0] == (u64)json_integer_value(json_array_get(known, 1))) {
			same = &found[i];
			number++;
		}
	}
	if (number == 1)
		probe_component(pid, name, known, same->words);
	else if (number || !strcmp(name, "graph"))
		warn("qairt: %d tables in process %d have the size of interface %s: its calls are not recorded", number, pid, name);
	return number == 1;
}

static void probe_earlier_qairt(pid_t pid)
{
	json_t *libraries = closed_libraries(QAIRT), *known;
	static struct qairt_table found[MOST_QAIRT_TABLES];
	struct began began = {now_ns(), cpu_s()};
	u64 bytes = 0;
	int number = find_qairt_tables(pid, libraries, found, MOST_QAIRT_TABLES, &bytes), probed = 0;
	const char *name;

	json_object_foreach(number > 0 ? interfaces() : NULL, name, known) {
		probed += probe_found_interface(pid, name, known, found, number);
	}
	if (json_array_size(libraries) && (probed || number <= 0)) /* else what was found was refused by name */
		tell_search(pid, QAIRT, number > 0 ? probed : number, &began, bytes);
	json_decref(libraries);
}

struct mapped {
	const char *path;
	bool found;
};

static void match_path(const struct mapping *m, void *context)
{
	struct mapped *sought = context;

	sought->found = sought->found || !strcmp(m->path, sought->path);
}

/* ONNX Runtime's tables have nothing by which they could be found. */
static void tell_earlier_api(pid_t pid)
{
	json_t *all = attached(), *row;
	size_t index;

	json_array_foreach(all, index, row) {
		struct mapped sought = {text_of(row, "library"), false};

		if (strcmp(text_of(row, "program"), API_BASE))
			continue;
		each_mapping(pid, match_path, &sought);
		if (sought.found)
			warn("%s: process %d had mapped %s before: calls through function tables that it has are not recorded",
			     text_of(row, "engine"), pid, sought.path);
	}
	json_decref(all);
}

/* Probes the function tables that a process obtained before it was followed. */
void probe_earlier_tables(pid_t pid)
{
	json_t *engines = json_object_get(plan, "engines");

	tell_earlier_api(pid);
	if (!lists(json_object_get(plan, "levels"), "qnn"))
		return;
	be_urgent(getpid(), true); /* calls are missed meanwhile */
	if (json_object_get(engines, "qnn"))
		probe_earlier_qnn(pid);
	if (json_object_get(engines, QAIRT))
		probe_earlier_qairt(pid);
	be_urgent(getpid(), false);
}

json_t *qnn(void)
{
	return seen_qnn ? json_incref(seen_qnn) : json_null();
}

bool on_qnn_table(const struct rec_qnn_table *r)
{
	struct table *table;
	int before = placed();

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
	if (placed() > before) /* a table that was probed before changes nothing */
		set_settings(true);
	return r->last;
}

bool on_api_table(const struct rec_api_table *r)
{
	struct table *table;
	json_t *probe;
	size_t index;
	int before = placed();
	char name[17];

	snprintf(name, sizeof(name), "%.16s", r->table);
	table = table_of(r->h.pid, name, r->address);
	collect_slots(table, r->first, r->slots, sizeof(r->slots));
	if (!r->last)
		return false;
	if (!strcmp(name, QAIRT)) {
		probe_interface(r->h.pid, r->version, table->slots);
		if (placed() > before)
			set_settings(true);
		return true;
	}
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
			if (strcmp(text_of(probe, "learnt"), "notify"))
				continue;
			attach_row(probe, path, offset, "notify", AT_ENTRY);
			return; /* QNN and QAIRT have the same */
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
