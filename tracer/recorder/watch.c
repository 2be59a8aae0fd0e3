// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Answers to the target: threads created and ended, programs executed, libraries opened, function tables returned. */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "recorder.h"

#define MOST_THREADS 65536
#define MOST_TASKS 4096
#define MOST_SITES 512
#define MOST_IO_FILES 65536

struct thread {
	pid_t pid, tid;
	char name[16];
};

bool answered[256];

static json_t *plan, *found_sites, *files, *logs;
static struct thread *list;
static int count;
static bool watches_files;
static u64 stops, held_ns, waking_ns, answer_began;

void watch_begin(const struct choice *choice)
{
	static const u8 kinds[] = {KIND_TASK_FORK, KIND_TASK_EXIT, KIND_TASK_EXEC, KIND_LIBRARY, KIND_QNN_TABLE, KIND_QNN_CALLBACK,
				   KIND_QNN_READER, KIND_QNN_LOG,	   KIND_API_TABLE, KIND_IO_FILE, KIND_SITE, KIND_MISFIT};
	size_t index;
	json_t *prefix, *number;
	const char *identity;

	plan = choice->plan;
	found_sites = json_object();
	files = json_object();
	logs = json_object();
	watches_files = lists(json_object_get(plan, "levels"), "io");
	list = calloc(MOST_THREADS, sizeof(*list));
	for (size_t i = 0; i < sizeof(kinds); i++)
		answered[kinds[i]] = true;
	json_array_foreach(json_object_get(plan, "patterns"), index, prefix) {
		struct pattern pattern = {0};
		u32 key = index;

		snprintf(pattern.text, sizeof(pattern.text), "%s", json_string_value(prefix));
		pattern.length = strlen(pattern.text);
		if (key < MAX_PATTERNS)
			set_map("patterns", &key, &pattern);
	}
	json_object_foreach(json_object_get(plan, "backends"), identity, number) {
		u8 head[8] = {0};
		u32 value = json_integer_value(number);

		for (int i = 0; i < 8 && identity[2 * i]; i++)
			sscanf(identity + 2 * i, "%2hhx", &head[i]);
		set_map("backends", head, &value);
	}
}

void note_thread(pid_t pid, pid_t tid, const char *name)
{
	int at = count - 1;

	while (at >= 0 && list[at].tid != tid)
		at--;
	if (at < 0 && count == MOST_THREADS)
		return;
	if (at < 0)
		at = count++;
	list[at].tid = tid;
	list[at].pid = pid;
	if (name && *name)
		snprintf(list[at].name, sizeof(list[at].name), "%s", name);
	else
		name_of(pid, tid, list[at].name, sizeof(list[at].name));
}

bool has_process(pid_t pid)
{
	int at = count - 1;

	while (at >= 0 && list[at].pid != pid)
		at--;
	return at >= 0;
}

void name_living_threads(void)
{
	for (int i = 0; i < count; i++)
		name_of(list[i].pid, list[i].tid, list[i].name, sizeof(list[i].name));
}

void forget_threads(void)
{
	for (int i = 0; i < count; i++)
		delete_from_map("threads", &list[i].tid);
}

void tell_survivors(pid_t target)
{
	for (int i = 0; i < count; i++) {
		char path[64], program[PATH_MOST];

		snprintf(path, sizeof(path), "/proc/%d/exe", list[i].pid);
		if (list[i].tid == list[i].pid && list[i].pid != target && readlink(path, program, sizeof(program)) > 0)
			warn("process %d was started by the target and outlives it; it is not recorded any more", list[i].pid);
	}
}

json_t *threads(void)
{
	json_t *answer = json_array();

	for (int i = 0; i < count; i++)
		json_array_append_new(answer, json_pack("{si so si}", "tid", list[i].tid, "name", plain_text(list[i].name),
							"pid", list[i].pid));
	return answer;
}

static void note_file(u32 dev, u64 ino, const char *path, bool replaces)
{
	char key[64];
	const char *known;

	snprintf(key, sizeof(key), "%u:%llu", dev, (unsigned long long)ino);
	known = text_of(files, key);
	if ((*known && !replaces) || strchr(known, '/') || json_object_size(files) >= MOST_IO_FILES)
		return;
	json_object_set_new(files, key, plain_text(path));
}

/* Notes all files that a process has mapped: some were mapped earlier, or not by a system call of its own. */
void note_mapped_files(pid_t pid)
{
	char path[64], line[PATH_MOST + 128];
	FILE *maps;

	snprintf(path, sizeof(path), "/proc/%d/maps", pid);
	maps = watches_files ? fopen(path, "re") : NULL;
	while (maps && fgets(line, sizeof(line), maps)) {
		u32 major, minor;
		unsigned long inode;
		int at = 0;

		line[strcspn(line, "\n")] = 0;
		if (sscanf(line, "%*s %*s %*s %x:%x %lu %n", &major, &minor, &inode, &at) >= 3 && inode && line[at])
			note_file(major << 20 | minor, inode, line + at, false);
	}
	if (maps)
		fclose(maps);
}

json_t *io_files(void)
{
	json_t *answer, *path;
	const char *key;

	if (!watches_files)
		return json_null();
	answer = json_array();
	json_object_foreach(files, key, path) {
		u32 dev;
		unsigned long long ino;

		if (sscanf(key, "%u:%llu", &dev, &ino) == 2)
			json_array_append_new(answer, json_pack("{sI sI sO}", "dev", (json_int_t)dev, "ino", (json_int_t)ino, "path", path));
	}
	return json_pack("{si so}", "page_bytes", (int)sysconf(_SC_PAGESIZE), "files", answer);
}

/* Resumes the target after the BPF program stopped it for the record. */
static void go_on(const struct header *h)
{
	u64 now = now_ns();

	kill(h->pid, SIGCONT);
	stops++;
	held_ns += now - h->ts;
	waking_ns += answer_began - h->ts;
	disturbed_since(h->ts);
}

/* Without a barrier, as with a single thread, learning probes are not slower than the learnt ones. */
json_t *disturbances(void)
{
	json_t *answer = placing_times();
	u64 since, until;

	if (json_object_size(found_sites) && is_learning(&since, &until))
		json_array_append_new(answer, disturbance(since, until, "learning the graph loop"));
	return answer;
}

json_t *held(void)
{
	return json_pack("{sI sI sI}", "held_ns", (json_int_t)held_ns, "held_stops", (json_int_t)stops, "held_waking_ns",
			 (json_int_t)waking_ns);
}

static void on_fork(const struct rec_task_fork *r)
{
	char path[96];
	pid_t child = r->child_tid;

	count_thread(child);
	snprintf(path, sizeof(path), "/proc/%d/task/%d", r->h.pid, child);
	if (!access(path, F_OK)) {
		note_thread(r->h.pid, child, "");
		return;
	}
	snprintf(path, sizeof(path), "/proc/%d", child);
	if (access(path, F_OK)) {
		note_thread(r->h.pid, child, "");
		return;
	}
	note_thread(child, child, "");
	guard(child, true);
}

static void on_exit_of(const struct rec_task_exit *r)
{
	char name[16];

	snprintf(name, sizeof(name), "%.15s", r->comm);
	note_thread(r->h.pid, r->h.tid, name);
	uncount_thread(r->h.tid);
	if (r->h.tid == r->h.pid)
		guard(r->h.pid, false);
}

static void on_exec(const struct rec_task_exec *r)
{
	char path[PATH_MOST];

	note_thread(r->h.pid, r->h.tid, "");
	note_mapped_files(r->h.pid);
	if (program_of(r->h.pid, path) && probe_file(path, true))
		set_settings(true);
}

static void on_library(const struct rec_library *r)
{
	char path[PATH_MOST];
	struct stat status;

	if (opened_by(r->h.pid, r->path, path) && !stat(opening_path(path), &status) && S_ISREG(status.st_mode) && probe_file(path, false))
		set_settings(true);
}

/* A serialized profile of QNN's, to be copied whole at the end; it is opened again for every harvest. */
static void on_qnn_log(const struct rec_qnn_log *r)
{
	char path[PATH_MOST];

	if (opened_by(r->h.pid, r->path, path) || (r->path[0] == '/' && snprintf(path, sizeof(path), "%.207s", r->path)))
		json_object_set_new(logs, path, json_null());
}

static s64 copy_file(const char *from, const char *to)
{
	int in = open_as_user(from, INT64_MAX), out = -1;
	s64 bytes = -1;

	act_as_caller(true);
	if (in >= 0)
		out = open(to, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
	act_as_caller(false);
	if (out >= 0) {
		ssize_t part;

		for (bytes = 0; (part = sendfile(out, in, NULL, 1 << 20)) > 0;)
			bytes += part;
		bytes = part < 0 ? -1 : bytes;
		close(out);
	}
	if (in >= 0)
		close(in);
	return bytes;
}

/* Copies the profiles into the recording; returns rows for its manifest. `whole`: the target has written its last byte. */
json_t *keep_qnn_logs(const char *folder, bool whole)
{
	char place[PATH_MOST], name[PATH_MOST];
	json_t *rows = json_array(), *none;
	const char *path;
	int number = 0;

	snprintf(place, sizeof(place), "%s/qnn-logs", folder);
	if (json_object_size(logs))
		mkdir(place, 0755);
	json_object_foreach(logs, path, none) {
		const char *base = strrchr(path, '/');
		s64 bytes;

		snprintf(name, sizeof(name), "qnn-logs/%03d_%.200s", number++, base ? base + 1 : path);
		snprintf(place, sizeof(place), "%s/%s", folder, name);
		bytes = copy_file(path, place);
		if (bytes < 0)
			warn("qnn: the serialized log %s could not be kept", path);
		else
			json_array_append_new(rows, json_pack("{so so sI sb}", "from", plain_text(path), "file", plain_text(name), "bytes",
							      (json_int_t)bytes, "whole", whole));
	}
	return rows;
}

/* Copies what processes wrote for perf about the code that they generated. A file from before the recording is of another process. */
void keep_code_maps(const char *folder, time_t since)
{
	char path[64], place[PATH_MOST];
	struct statx status;

	for (int i = 0; i < count; i++) {
		snprintf(path, sizeof(path), "/tmp/perf-%d.map", list[i].pid);
		if (list[i].tid != list[i].pid || statx(AT_FDCWD, path, AT_SYMLINK_NOFOLLOW, STATX_BTIME | STATX_MTIME, &status))
			continue;
		snprintf(place, sizeof(place), "%s/perf-%d.map", folder, list[i].pid);
		if ((status.stx_mask & STATX_BTIME ? status.stx_btime.tv_sec : status.stx_mtime.tv_sec) < since)
			warn("%s is older than process %d: its names are not used", path, list[i].pid);
		else if (copy_file(path, place) < 0)
			warn("%s could not be kept: generated code has no names", path);
	}
}

static void on_io_file(const struct rec_io_file *r)
{
	char link[64], path[PATH_MOST];
	ssize_t length;
	struct stat status;

	snprintf(link, sizeof(link), "/proc/%d/fd/%u", r->h.pid, r->fd);
	length = stat(link, &status) || status.st_ino != r->ino ? -1 : readlink(link, path, sizeof(path) - 1);
	if (length < 0)
		length = snprintf(path, sizeof(path), "%.207s", r->name);
	path[length] = 0;
	note_file(r->dev, r->ino, path, true);
}

/* Notes the file that contains a site's address. */
static void note_site(const struct rec_site *r, const char *key)
{
	char path[PATH_MOST];
	u64 offset;

	if (!r->address || json_object_size(found_sites) >= MOST_SITES || json_object_get(found_sites, key))
		return;
	if (place_of(r->h.pid, r->address, path, &offset))
		json_object_set_new(found_sites, key, json_pack("{sI ss ss sI}", "address", (json_int_t)r->address, "path", path, "id",
								id_of(path), "offset", (json_int_t)offset));
}

/* From these records the planner, or later the host, learns where this build has its graph loop. */
static void on_site(const struct rec_site *r)
{
	char key[32];

	snprintf(key, sizeof(key), "%llu", r->address);
	note_site(r, key);
	if (has_planner())
		tell_planner(json_pack("{s{sI si sI sI sI sI sI sb sb sO*}}", "site", "ts", (json_int_t)r->h.ts, "pid", r->h.pid, "address",
				       (json_int_t)r->address, "here", (json_int_t)r->here, "before", (json_int_t)r->before, "graph",
				       (json_int_t)r->graph, "last_but_one", (json_int_t)r->last_but_one, "last", r->last, "blind", r->blind,
				       "place", json_object_get(found_sites, key)));
}

static void on_misfit(const struct rec_misfit *r)
{
	tell_planner(json_pack("{s{si}}", "misfit", "what", r->what));
}

json_t *sites(void)
{
	json_t *answer = json_array(), *site;
	const char *key;

	json_object_foreach(found_sites, key, site) {
		json_array_append(answer, site);
	}
	return answer;
}

/* Whether the target may wait for the answer. */
static bool is_held_for(u8 kind)
{
	return kind == KIND_TASK_EXEC || kind == KIND_LIBRARY || kind == KIND_API_TABLE || kind == KIND_QNN_TABLE ||
	       kind == KIND_QNN_CALLBACK || kind == KIND_QNN_READER;
}

void answer(const u8 *record)
{
	const void *r = record;
	u8 kind = ((const struct header *)r)->kind;
	bool waits = is_held_for(kind);

	answer_began = now_ns();
	if (waits)
		be_urgent(getpid(), true);
	switch (kind) {
	case KIND_TASK_FORK: on_fork(r); break;
	case KIND_TASK_EXIT: on_exit_of(r); break;
	case KIND_TASK_EXEC: on_exec(r); break;
	case KIND_LIBRARY: on_library(r); break;
	case KIND_QNN_TABLE: waits = on_qnn_table(r); break;
	case KIND_QNN_CALLBACK: on_qnn_callback(r); break;
	case KIND_QNN_READER: on_qnn_reader(r); break;
	case KIND_QNN_LOG: on_qnn_log(r); break;
	case KIND_API_TABLE: waits = on_api_table(r); break;
	case KIND_IO_FILE: on_io_file(r); break;
	case KIND_SITE: on_site(r); break;
	case KIND_MISFIT: on_misfit(r); break;
	}
	if (waits)
		go_on(r);
	if (is_held_for(kind))
		be_urgent(getpid(), false);
}
