// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Carries out the plan: attaches a file's probes when the target opens it, and keeps the rows of the manifest. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "collect.h"

#define MOST_PROBES 4096
#define MOST_FILES 1024
#define CLOSERS 16 /* threads: each close waits until no CPU can be inside the probe, and the waits can overlap */

struct file {
	dev_t dev;
	ino_t ino;
	char *path;
	char id[64];
	json_t *planned;
};

static struct row rows[MOST_PROBES];
static struct file files[MOST_FILES];
static int row_count, file_count;
static json_t *plan, *spared;
static struct settings settings;
static u64 learns_since, learnt_at;

static const struct {
	const char *name;
	size_t offset;
} named_settings[] = {
#define SETTING(name) {#name, offsetof(struct settings, name)}
	SETTING(mul_mat_id), SETTING(operators), SETTING(experts),	SETTING(learn),	   SETTING(blind),
	SETTING(node_at),    SETTING(node_more), SETTING(graph_at), SETTING(everyone), SETTING(files), SETTING(steps), SETTING(one_call),
};

static void take_settings(json_t *wanted)
{
	for (size_t i = 0; i < sizeof(named_settings) / sizeof(*named_settings); i++) {
		json_t *value = json_object_get(wanted, named_settings[i].name);

		if (value)
			*(u32 *)((u8 *)&settings + named_settings[i].offset) = json_integer_value(value);
	}
	if (settings.learn && !learns_since)
		learns_since = now_ns();
	if (!settings.learn && learns_since && !learnt_at)
		learnt_at = now_ns();
}

void set_settings(bool stop)
{
	u32 zero = 0;

	settings.stop = stop;
	settings.infer_faults = !has_tracepoint("filemap", "mm_filemap_fault");
	settings.spared = json_array_size(spared) > 0;
	settings.round++;
	set_map("chosen", &zero, &settings);
}

static void add_row(json_t *row, int fd)
{
	if (row_count == MOST_PROBES) {
		warn("%d probes are placed, which is the maximum: no more are added", MOST_PROBES);
		close(fd);
		return;
	}
	rows[row_count].row = row;
	rows[row_count++].fd = fd;
}

static json_t *row_of_kernel(const char *name, const char *level, const char *category, const char *at)
{
	char symbol[128];

	snprintf(symbol, sizeof(symbol), "%s:%s", category, name);
	return json_pack("{ss ss ss ss ss sI ss ss ss ss sI}", "program", name, "engine", "kernel", "level", level, "library", "", "symbol",
			 symbol, "offset", (json_int_t)0, "at", at, "instruction", "", "cost", "tracepoint", "why", "", "cookie",
			 (json_int_t)0);
}

/* Passes the offsets of a driver tracepoint's fields, from tracefs, to the BPF programs. */
static void set_driver_layout(const char *name, const char *category)
{
	struct driver_layout layout = {0};
	json_t *event;
	size_t number;

	json_array_foreach(json_object_get(plan, "driver"), number, event) {
		u32 key = number;

		if (strcmp(json_string_value(json_array_get(event, 0)), name))
			continue;
		for (int i = 0; i < DRIVER_FIELDS; i++)
			find_field(category, name, json_string_value(json_array_get(event, 1 + i)), &layout.fields[i]);
		set_map("driver_layouts", &key, &layout);
	}
}

static void attach_one_of_kernel(const char *name, const char *level, const char *category)
{
	bool is_software = !strcmp(category, "software");
	u32 event = number_of(json_object_get(plan, "software"), name);
	int fd;

	if (!is_loaded(name))
		return;
	set_driver_layout(name, category);
	fd = is_software ? attach_software(name, event) : attach_tracepoint(name, category, name);
	if (fd < 0)
		warn("cannot attach to %s:%s: %s", category, name, strerror(errno));
	else
		add_row(row_of_kernel(name, level, category, is_software ? "software" : "tracepoint"), fd);
}

/* Whether a category belongs to the NPU's driver, which hardly any kernel has. */
static bool is_of_driver(const char *category)
{
	return !strcmp(category, "fastrpc") || !strcmp(category, "qcom_glink");
}

/* System calls have individual tracepoints; where these are missing, those that every call passes replace them. */
void attach_kernel(const struct choice *choice)
{
	bool has_single = has_tracepoint("syscalls", "sys_enter_openat");
	size_t index;
	json_t *each;

	plan = choice->plan;
	spared = json_array();
	take_settings(json_object_get(plan, "settings"));
	json_array_foreach(json_object_get(plan, "kernel"), index, each) {
		const char *name, *level, *category;
		bool is_single, is_stand_in;

		if (json_unpack(each, "[sss]", &name, &level, &category))
			fail("the plan is damaged (kernel): write it again");
		is_single = !strcmp(category, "syscalls");
		is_stand_in = !strcmp(category, "raw_syscalls");
		if (is_stand_in ? has_single : is_single && !has_single)
			continue;
		if (!strcmp(category, "software") || has_tracepoint(category, name))
			attach_one_of_kernel(name, level, category);
		else if (strcmp(level, "heat") && !is_of_driver(category))
			warn("this kernel has no tracepoint %s:%s; level %s is recorded without it", category, name, level);
	}
	if (!row_count)
		fail("none of the kernel's tracepoints can be read: tracefs is not mounted or not readable");
}

static bool stands_already(json_t *row, const char *path)
{
	for (int i = 0; i < row_count; i++) {
		json_t *other = rows[i].row;

		if (!strcmp(text_of(other, "program"), text_of(row, "program")) && !strcmp(text_of(other, "library"), path) &&
		    number_of(other, "offset") == number_of(row, "offset") && number_of(other, "cookie") == number_of(row, "cookie"))
			return true;
	}
	return false;
}

static void stand(json_t *row, const char *path)
{
	const char *program = text_of(row, "program");
	u64 offset = number_of(row, "offset"), began = now_ns();
	int fd;

	json_object_set_new(row, "library", json_string(path));
	if (!is_loaded(program) || stands_already(row, path)) {
		json_decref(row);
		return;
	}
	fd = attach_uprobe(program, path, offset, !strcmp(text_of(row, "at"), "return"), number_of(row, "cookie"));
	disturbed_since(began);
	if (fd >= 0) {
		add_row(row, fd);
		return;
	}
	warn("cannot attach %s to %s+%#llx: %s", program, path, (unsigned long long)offset, strerror(errno));
	json_decref(row);
}

void attach_row(json_t *probe, const char *path, u64 offset, const char *symbol, const char *why)
{
	stand(json_pack("{ss ss ss ss sI ss ss ss ss sI}", "program", text_of(probe, "program"), "engine", text_of(probe, "engine"),
			"level", text_of(probe, "level"), "symbol", symbol, "offset", (json_int_t)offset, "at", text_of(probe, "at"),
			"instruction", "", "cost", "emulated", "why", why, "cookie", (json_int_t)0),
	      path);
}

bool stands_in(const char *program, const char *path)
{
	for (int i = 0; i < row_count; i++) {
		if (!rows[i].retired_ns && !strcmp(text_of(rows[i].row, "program"), program) && (!path || !strcmp(text_of(rows[i].row, "library"), path)))
			return true;
	}
	return false;
}

/* Keeps a probe back that others replace, until something occurs that these do not see. */
void spare(json_t *probe, const char *path, u64 offset, const char *symbol)
{
	json_array_append_new(spared, json_pack("{sO ss sI ss}", "probe", probe, "path", path, "offset", (json_int_t)offset, "symbol",
						symbol));
}

void attach_spared(void)
{
	json_t *now = spared, *each;
	size_t index;

	spared = json_array();
	json_array_foreach(now, index, each) {
		attach_row(json_object_get(each, "probe"), text_of(each, "path"), number_of(each, "offset"), text_of(each, "symbol"),
			   "address from the function table; not inspected (licence), assumed cheap");
	}
	json_decref(now);
}

static void set_specs(json_t *specs)
{
	const char *cookie;
	json_t *text;

	json_object_foreach(specs, cookie, text) {
		struct call_spec spec = {0};
		const char *digits = json_string_value(text);
		u32 key = strtoul(cookie, NULL, 10);

		for (size_t i = 0; i < sizeof(spec) && digits[2 * i]; i++)
			sscanf(digits + 2 * i, "%2hhx", (u8 *)&spec + i);
		set_map("call_specs", &key, &spec);
	}
}

static void carry_out(json_t *file, const char *path)
{
	size_t index;
	json_t *row;

	set_specs(json_object_get(file, "specs"));
	take_settings(json_object_get(file, "settings"));
	json_array_foreach(json_object_get(file, "rows"), index, row) {
		stand(json_deep_copy(row), path);
	}
}

bool is_learning(u64 *since_ns, u64 *until_ns)
{
	*since_ns = learns_since;
	*until_ns = learnt_at ? learnt_at : now_ns();
	return learns_since;
}

/* The entry for a file that was not examined before; NULL if it was, or cannot be examined. */
static struct file *new_file(const char *path)
{
	struct stat status;
	struct file *file = &files[file_count];

	if (stat(path, &status) || file_count == MOST_FILES)
		return NULL;
	for (int i = 0; i < file_count; i++) {
		if (files[i].dev == status.st_dev && files[i].ino == status.st_ino)
			return NULL;
	}
	if (!identify(path, file->id, sizeof(file->id)))
		return NULL;
	file->dev = status.st_dev;
	file->ino = status.st_ino;
	file->path = strdup(path);
	file->planned = planned_file(plan, file->id);
	file_count++;
	return file;
}

static void *close_some(void *first)
{
	for (int i = (int)(intptr_t)first; i < row_count; i += CLOSERS) {
		if (rows[i].leaves && rows[i].fd >= 0)
			close(rows[i].fd);
	}
	return NULL;
}

static void close_all(void)
{
	pthread_t closers[CLOSERS];

	for (int i = 0; i < CLOSERS; i++) {
		if (pthread_create(&closers[i], NULL, close_some, (void *)(intptr_t)i)) {
			close_some((void *)(intptr_t)i);
			closers[i] = 0;
		}
	}
	for (int i = 0; i < CLOSERS; i++)
		if (closers[i])
			pthread_join(closers[i], NULL);
}

/*
 * Removes the leaving probes, in a separate process, which begins after ours has closed its descriptors: if SIGKILL hits a thread
 * that is removing a probe, Linux leaves its breakpoints in place.
 */
static void remove_leaving(void)
{
	int ours[2];
	char byte;
	pid_t child = pipe2(ours, O_CLOEXEC) ? -1 : fork();

	if (child < 0) {
		close_all();
		return;
	}
	if (!child) {
		setsid();
		close(ours[1]);
		if (read(ours[0], &byte, 1) < 0)
			_exit(1);
		close_all();
		_exit(0);
	}
	for (int i = 0; i < row_count; i++)
		if (rows[i].leaves) {
			close(rows[i].fd);
			rows[i].fd = -1;
		}
	close(ours[1]);
	close(ours[0]);
	waitpid(child, NULL, 0);
}

static void attach_planned(json_t *planned, const char *path)
{
	struct file *file = new_file(path);

	for (int i = 0; !file && i < file_count; i++)
		file = strcmp(files[i].path, path) ? NULL : &files[i];
	if (!file || strcmp(file->id, text_of(planned, "id")))
		return;
	file->planned = planned;
	carry_out(planned, file->path);
}

static bool is_named(json_t *all, json_t *row)
{
	size_t index;
	json_t *each;

	json_array_foreach(all, index, each) {
		const char *library = text_of(each, "library");

		if (!strcmp(text_of(each, "program"), text_of(row, "program")) && (!*library || !strcmp(library, text_of(row, "library"))))
			return true;
	}
	return false;
}

/* Removes probes for good, given as program and, unless it is all of the program's, library. */
static void retire(json_t *all)
{
	for (int i = 0; i < row_count; i++)
		rows[i].leaves = !rows[i].retired_ns && is_named(all, rows[i].row);
	if (!json_array_size(all))
		return;
	remove_leaving();
	for (int i = 0; i < row_count; i++)
		if (rows[i].leaves)
			rows[i].retired_ns = now_ns();
}

/* Carries out a planner's order or answer; every part may be absent. */
void carry_out_order(json_t *order)
{
	size_t index;
	json_t *each;

	bring(json_object_get(order, "programs"));
	take_settings(json_object_get(order, "settings")); /* before the programs that read them */
	if (json_object_get(order, "settings"))
		set_settings(true);
	json_array_extend(json_object_get(plan, "at_run_time"), json_object_get(order, "at_run_time"));
	json_array_foreach(json_object_get(order, "files"), index, each) {
		json_array_append(json_object_get(plan, "files"), each);
		attach_planned(each, text_of(each, "path"));
	}
	json_array_foreach(json_object_get(order, "rows"), index, each) {
		stand(json_deep_copy(each), text_of(each, "library"));
	}
	retire(json_object_get(order, "retire"));
	json_array_foreach(json_object_get(order, "warnings"), index, each) {
		warn("%s", json_string_value(each));
	}
	merge_into_manifest(json_object_get(order, "manifest"));
	if (row_count)
		set_settings(true);
	if (json_array_size(json_object_get(order, "rows")))
		tell_planner(json_pack("{s{sI}}", "placed", "ts", (json_int_t)now_ns()));
}

bool attach_file(const char *path, bool is_executable)
{
	int before = row_count;
	struct file *file = new_file(path);
	json_t *answer;

	if (!file)
		return false;
	if (file->planned) {
		carry_out(file->planned, file->path);
	} else if (asks_about(is_executable)) {
		answer = ask_planner(json_pack("{so ss sb}", "path", plain_text(path), "id", file->id, "executable", is_executable));
		carry_out_order(answer);
		json_decref(answer);
	} else if (!is_executable) {
		warn("%s (build %s) is not in the plan: nothing is probed in it", path, file->id);
	}
	return row_count > before;
}

const char *id_of(const char *path)
{
	for (int i = 0; i < file_count; i++) {
		if (!strcmp(files[i].path, path))
			return files[i].id;
	}
	return "";
}

json_t *libraries_of(const char *engine)
{
	json_t *answer = json_array();

	for (int i = 0; i < file_count; i++) {
		json_t *file = files[i].planned;

		if (file && lists(json_object_get(file, "engines"), engine))
			json_array_append_new(answer, json_pack("{ss ss}", "path", files[i].path, "build_id", text_of(file, "build_id")));
	}
	return answer;
}

void detach_all(void)
{
	for (int i = 0; i < row_count; i++)
		rows[i].leaves = rows[i].fd >= 0;
	remove_leaving();
}

json_t *attached(void)
{
	json_t *answer = json_array();

	for (int i = 0; i < row_count; i++) {
		json_t *row = json_deep_copy(rows[i].row);

		json_object_set_new(row, "retired_ns", json_integer(rows[i].retired_ns));
		json_array_append_new(answer, row);
	}
	return answer;
}
