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

#include "recorder.h"
#include "event_format.h"

#define MOST_PROBES 4096
#define MOST_FILES 1024
#define CLOSERS 16 /* threads: each close waits until no CPU can be inside the probe, and the waits can overlap */

#define NOT_SUPPORTED 524 /* the kernel's ENOTSUPP, which errno.h lacks */

struct file {
	dev_t dev;
	ino_t ino;
	char *path;
	char id[64];
	off_t size;
	struct timespec changed;
	bool is_opened; /* by the target; others are probed beside one that is */
	json_t *planned;
};

static struct row rows[MOST_PROBES];
static struct file files[MOST_FILES];
static int row_count, file_count;
static json_t *plan, *spared, *shed_levels;
static struct settings settings;
static u64 learns_since, learnt_at;

/* A setting is a number of 32 bits or a list of them. */
static void take_setting(const char *name, json_t *value, size_t at)
{
	size_t count = json_is_array(value) ? json_array_size(value) : 1;

	if (at + 4 * count > sizeof(settings)) {
		warn("the setting %s is too long: the planner is of another release", name);
		return;
	}
	for (size_t i = 0; i < count; i++) {
		json_t *number = json_is_array(value) ? json_array_get(value, i) : value;

		memcpy((u8 *)&settings + at + 4 * i, &(u32){json_integer_value(number)}, sizeof(u32));
	}
}

void take_settings(json_t *wanted)
{
	const char *name;
	json_t *value;

	json_object_foreach(wanted, name, value) {
		s64 at = setting_offset(name);

		if (at < 0)
			warn("the programs have no setting %s: the planner is of another release", name);
		else
			take_setting(name, value, at);
	}
	if (settings.learn && !learns_since)
		learns_since = now_ns();
	if (!settings.learn && learns_since && !learnt_at)
		learnt_at = now_ns();
}

/* Passes the settings to the programs, which need not do anything for levels that are shed. */
void set_settings(bool stop)
{
	struct settings now;
	u32 zero = 0;

	settings.stop = stop;
	settings.infer_faults = !has_tracepoint("filemap", "mm_filemap_fault");
	settings.spared = json_array_size(spared) > 0;
	settings.n_counters = event_count();
	settings.round++;
	now = settings;
	now.operators &= !is_shed("operator");
	now.experts &= !is_shed("expert");
	now.files &= !is_shed("io");
	now.long_wait_us = is_shed(STACKS_LEVEL) ? NO_WAITS : now.long_wait_us;
	set_map("chosen", &zero, &now);
}

bool is_shed(const char *level)
{
	return json_object_get(shed_levels, level) != NULL;
}

/* Whether a row's probe is not to stand now; those that locate other probes' sites are hit once and never shed. */
static bool is_away(json_t *row)
{
	const char *program = text_of(row, "program");

	return is_shed(text_of(row, "level")) && strncmp(program, "qnn_providers_", 14) && strncmp(program, "qairt_get_interface_", 20);
}

static void add_row(json_t *row, int fd, int cpu)
{
	struct stat status = {0};

	if (row_count == MOST_PROBES) {
		warn("%d probes are placed, which is the maximum: no more are added", MOST_PROBES);
		close(fd);
		return;
	}
	if (*text_of(row, "library"))
		stat(opening_path(text_of(row, "library")), &status);
	rows[row_count++] = (struct row){.row = row, .fd = fd, .cpu = cpu, .dev = status.st_dev, .ino = status.st_ino};
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
	char format[256];
	json_t *event;
	size_t number;

	snprintf(format, sizeof(format), "%s/events/%s/%s/format", tracefs(), category, name);
	json_array_foreach(json_object_get(plan, "driver"), number, event) {
		u32 key = number;

		if (strcmp(json_string_value(json_array_get(event, 0)), name))
			continue;
		for (int i = 0; i < DRIVER_FIELDS; i++)
			read_field(format, json_string_value(json_array_get(event, 1 + i)), &layout.fields[i]);
		set_map("driver_layouts", &key, &layout);
	}
}

/* Attaches a row's probe; returns the descriptor that holds it, or -1 and errno. */
static int open_row(json_t *row, int cpu)
{
	const char *program = text_of(row, "program"), *at = text_of(row, "at");
	char category[64];

	if (!strcmp(at, "software"))
		return attach_software(program, number_of(json_object_get(plan, "software"), program), cpu);
	if (strcmp(at, "tracepoint"))
		return attach_uprobe(program, text_of(row, "library"), number_of(row, "offset"), !strcmp(at, "return"),
				     number_of(row, "cookie"), 0);
	snprintf(category, sizeof(category), "%s", text_of(row, "symbol"));
	category[strcspn(category, ":")] = 0;
	return attach_tracepoint(program, category, program);
}

/* A software event is attached on each CPU. */
static void attach_one_of_kernel(const char *name, const char *level, const char *category)
{
	bool is_software = !strcmp(category, "software");
	int cpus = is_software ? sysconf(_SC_NPROCESSORS_CONF) : 1;
	json_t *row;

	if (!is_loaded(name))
		return;
	set_driver_layout(name, category);
	row = row_of_kernel(name, level, category, is_software ? "software" : "tracepoint");
	for (int cpu = 0; cpu < cpus; cpu++) {
		int fd = open_row(row, cpu);

		if (fd >= 0)
			add_row(json_incref(row), fd, cpu);
		else if (!cpu)
			warn("cannot attach to %s:%s: %s", category, name, strerror(errno));
	}
	json_decref(row);
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

	check_tracefs();
	plan = choice->plan;
	spared = json_array();
	shed_levels = json_object();
	take_settings(json_object_get(plan, "settings"));
	settings.everyone = choice->everyone;
	settings.long_wait_us = choice->long_wait_s * 1e6;
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
}

/* Whether the file of a row is still the one at this path: libraries are replaced, also while they are mapped. */
static bool is_same_file(const struct row *row, const char *path)
{
	struct stat status;

	return stat(opening_path(path), &status) || (status.st_dev == row->dev && status.st_ino == row->ino);
}

static bool stands_already(json_t *row, const char *path)
{
	for (int i = 0; i < row_count; i++) {
		json_t *other = rows[i].row;

		if (!strcmp(text_of(other, "program"), text_of(row, "program")) && !strcmp(text_of(other, "library"), path) &&
		    number_of(other, "offset") == number_of(row, "offset") && number_of(other, "cookie") == number_of(row, "cookie") &&
		    is_same_file(&rows[i], path))
			return true;
	}
	return false;
}

/* Whether a path leads through a process that has ended: nobody needs a probe there any more. */
static bool is_of_ended(const char *path)
{
	char program[PATH_MOST];
	int pid;

	return sscanf(path, "/proc/%d/", &pid) == 1 && !program_of(pid, program);
}

static void warn_of(json_t *row)
{
	const char *why = errno == NOT_SUPPORTED ? "the kernel cannot probe this instruction" : strerror(errno);

	if (!is_of_ended(text_of(row, "library")))
		warn("cannot attach %s to %s+%#llx: %s", text_of(row, "program"), text_of(row, "library"),
		     (unsigned long long)number_of(row, "offset"), why);
}

/* Attaches a new row's probe, unless its level is shed, and keeps the row. */
void attach_new_row(json_t *row, const char *path)
{
	bool is_waiting = is_away(row);
	u64 began = now_ns();
	int fd = -1;

	json_object_set_new(row, "library", json_string(path));
	if (!is_loaded(text_of(row, "program")) || stands_already(row, path)) {
		json_decref(row);
		return;
	}
	if (!is_waiting) {
		fd = open_row(row, 0);
		disturbed_since(began);
	}
	if (fd >= 0 || is_waiting) {
		add_row(row, fd, 0);
		return;
	}
	warn_of(row);
	json_decref(row);
}

void attach_row(json_t *probe, const char *path, u64 offset, const char *symbol, const char *why)
{
	attach_new_row(json_pack("{ss ss ss ss sI ss ss ss ss sI}", "program", text_of(probe, "program"), "engine", text_of(probe, "engine"),
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
		attach_new_row(json_deep_copy(row), path);
	}
}

bool is_learning(u64 *since_ns, u64 *until_ns)
{
	*since_ns = learns_since;
	*until_ns = learnt_at ? learnt_at : now_ns();
	return learns_since;
}

bool awaits_learning(void)
{
	return settings.learn && has_planner();
}

/* The entry for a file that was not examined before; NULL if it was, or cannot be examined, as one that is yet to be written. */
static struct file *new_file(const char *path, bool is_opened)
{
	struct stat status;
	struct file *file = &files[file_count];

	if (stat(opening_path(path), &status) || !status.st_size || file_count == MOST_FILES)
		return NULL;
	for (int i = 0; i < file_count; i++) {
		if (files[i].dev == status.st_dev && files[i].ino == status.st_ino && files[i].size == status.st_size &&
		    !memcmp(&files[i].changed, &status.st_mtim, sizeof(status.st_mtim))) { /* inode numbers are used again */
			files[i].is_opened |= is_opened;
			return NULL;
		}
	}
	if (!identify(path, file->id, sizeof(file->id)))
		*file->id = 0;
	file->dev = status.st_dev;
	file->ino = status.st_ino;
	file->size = status.st_size;
	file->changed = status.st_mtim;
	file->is_opened = is_opened;
	file->path = strdup(path);
	file->planned = planned_file(plan, file->id);
	file_count++;
	return file;
}

/* Each of the threads takes the next row, so that begin and end of a call go at nearly the same time. */
static void *close_some(void *next)
{
	int i;

	while ((i = __atomic_fetch_add((int *)next, 1, __ATOMIC_RELAXED)) < row_count) {
		if (!rows[i].leaves || rows[i].fd < 0)
			continue;
		close(rows[i].fd);
		rows[i].fd = -1;
	}
	return NULL;
}

static void close_leaving(int threads)
{
	pthread_t closers[CLOSERS];
	int next = 0, begun = 0;

	while (begun < threads && !pthread_create(&closers[begun], NULL, close_some, &next))
		begun++;
	close_some(&next);
	for (int i = 0; i < begun; i++)
		pthread_join(closers[i], NULL);
}

/*
 * Removes the leaving probes, in a separate process, which begins after ours has closed its descriptors: if SIGKILL hits a thread
 * that is removing a probe, Linux leaves its breakpoints in place. They are gone when that process has ended; -1: already.
 */
static pid_t remove_leaving(void)
{
	int ours[2];
	char byte;
	pid_t child = pipe2(ours, O_CLOEXEC) ? -1 : fork();

	if (child < 0) {
		close_leaving(CLOSERS);
		return -1;
	}
	if (!child) {
		setsid();
		close(ours[1]);
		if (read(ours[0], &byte, 1) < 0)
			_exit(1);
		close_leaving(CLOSERS);
		_exit(0);
	}
	close_leaving(0);
	close(ours[1]);
	close(ours[0]);
	return child;
}

static void wait_for(pid_t remover)
{
	if (remover > 0)
		waitpid(remover, NULL, 0);
}

void attach_planned(json_t *planned, const char *path)
{
	struct file *file = new_file(path, false);

	for (int i = file_count - 1; !file && i >= 0; i--) /* the newest: files are replaced */
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

void retire(json_t *all)
{
	for (int i = 0; i < row_count; i++)
		rows[i].leaves = !rows[i].retired_ns && is_named(all, rows[i].row);
	if (!json_array_size(all))
		return;
	wait_for(remove_leaving());
	for (int i = 0; i < row_count; i++)
		if (rows[i].leaves)
			rows[i].retired_ns = now_ns();
}

enum known attach_known(const char *path, const char **id)
{
	struct file *file = new_file(path, true);

	if (!file)
		return SEEN;
	*id = file->id;
	if (!*file->id)
		return UNREADABLE;
	if (!file->planned)
		return UNKNOWN;
	carry_out(file->planned, file->path);
	return SEEN;
}

const char *id_of(const char *path)
{
	for (int i = file_count - 1; i >= 0; i--) {
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

		if (file && files[i].is_opened && lists(json_object_get(file, "engines"), engine))
			json_array_append_new(answer, json_pack("{ss ss}", "path", files[i].path, "build_id", text_of(file, "build_id")));
	}
	return answer;
}

void detach_all(void)
{
	for (int i = 0; i < row_count; i++)
		rows[i].leaves = true;
	wait_for(remove_leaving());
}

pid_t remove_levels(const char *const *levels, int count)
{
	for (int i = 0; i < count; i++)
		json_object_set_new(shed_levels, levels[i], json_true());
	for (int i = 0; i < row_count; i++)
		rows[i].leaves = is_away(rows[i].row);
	return remove_leaving();
}

void restore_levels(const char *const *levels, int count)
{
	for (int i = 0; i < count; i++)
		json_object_del(shed_levels, levels[i]);
}

static void restore_row(struct row *r)
{
	u64 began = now_ns();

	r->fd = open_row(r->row, r->cpu);
	r->failed = r->fd < 0;
	if (*text_of(r->row, "library"))
		disturbed_since(began);
	if (r->failed)
		warn_of(r->row);
}

/* Ends before begins: a begin without its end would be an open span. */
bool restore_some(u64 until_ns)
{
	for (int i = row_count - 1; i >= 0; i--) {
		struct row *r = &rows[i];

		if (r->fd >= 0 || r->failed || r->retired_ns || is_away(r->row))
			continue;
		if (now_ns() >= until_ns)
			return false;
		restore_row(r);
	}
	return true;
}

int placed(void)
{
	return row_count;
}

json_t *attached_row(int index)
{
	return index < row_count ? rows[index].row : NULL;
}

/* Whether the target has opened a file: those beside one that it opened are probed together with that. */
static bool is_opened(const char *library)
{
	for (int i = 0; i < file_count; i++) {
		if (!strcmp(files[i].path, library))
			return files[i].is_opened;
	}
	return true;
}

json_t *attached(void)
{
	json_t *answer = json_array();

	for (int i = 0; i < row_count; i++) {
		json_t *row;

		if (rows[i].cpu || !is_opened(text_of(rows[i].row, "library")))
			continue;
		row = json_deep_copy(rows[i].row);
		json_object_set_new(row, "retired_ns", json_integer(rows[i].retired_ns));
		json_array_append_new(answer, row);
	}
	return answer;
}
