// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* The manifest: what a reader of the recording needs (docs/recording.md); replaced as a whole, with its own checksum. */
#include <bpf/bpf.h>
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "recorder.h"
#include "policy.h"

#define SCHEMA_VERSION 1
#define LARGEST_CONFIG (1 << 20)
#define SEAL ", \"checksum\": \"" /* before the digits that end the file: the checksum of all bytes before them */

static const struct choice *choice;
static const struct target *target;
static json_t *machine, *clocks, *model, *logs;
static char started[32];
static u64 began_ns;
static double cpu_before;

static s64 clock_ns(clockid_t clock)
{
	struct timespec now;

	clock_gettime(clock, &now);
	return now.tv_sec * (s64)NS_PER_S + now.tv_nsec;
}

static json_t *read_clocks(void)
{
	return json_pack("{sI sI sI}", "monotonic_ns", (json_int_t)clock_ns(CLOCK_MONOTONIC), "boottime_ns",
			 (json_int_t)clock_ns(CLOCK_BOOTTIME), "realtime_ns", (json_int_t)clock_ns(CLOCK_REALTIME));
}

/* The value of the first of these keys in a file of lines `key: value` or `key=value`; "" if it has none of them. */
static void value_in(const char *path, const char *const *keys, char *value, size_t bytes)
{
	char line[1024];
	FILE *file = fopen(path, "re");

	*value = 0;
	while (file && !*value && fgets(line, sizeof(line), file)) {
		for (int i = 0; keys[i]; i++) {
			size_t length = strlen(keys[i]);
			char *at = line + length;

			if (strncmp(line, keys[i], length) || !strchr("\t :=", *at))
				continue;
			at += strspn(at, "\t :=\"");
			at[strcspn(at, "\"\n")] = 0;
			snprintf(value, bytes, "%s", at);
		}
	}
	if (file)
		fclose(file);
}

static json_t *describe_machine(void)
{
	static const char *const os_keys[] = {"PRETTY_NAME", NULL}, *const cpu_keys[] = {"model name", "Hardware", "Model", NULL};
	char os[256], cpu[256], governor[512];
	struct utsname system;

	governors(governor, sizeof(governor));
	uname(&system);
	value_in("/etc/os-release", os_keys, os, sizeof(os));
	value_in("/proc/cpuinfo", cpu_keys, cpu, sizeof(cpu));
	return json_pack("{ss ss ss ss si ss sI}", "arch", system.machine, "kernel", system.release, "os", *os ? os : system.sysname,
			 "cpu_model", cpu, "cpus", (int)sysconf(_SC_NPROCESSORS_ONLN), "governor", governor, "memory_bytes",
			 (json_int_t)sysconf(_SC_PAGESIZE) * sysconf(_SC_PHYS_PAGES));
}

static json_t *small_object(const char *folder, const char *name)
{
	char path[PATH_MOST];
	json_t *value;
	int fd;

	snprintf(path, sizeof(path), "%s/%s", folder, name);
	fd = open_as_user(path, LARGEST_CONFIG);
	if (fd < 0)
		return NULL;
	value = json_loadfd(fd, 0, NULL);
	close(fd);
	if (!json_is_object(value)) {
		json_decref(value);
		return NULL;
	}
	return value;
}

/* The model whose folder the command names: config and storage in its package (tracer/traced_program/model_config.py). */
static json_t *model_of(char **command)
{
	static const char *const kept[] = {"precisions", "target", "model_type", "fingerprint"};

	for (char **word = command ? command + 1 : NULL; word && word[-1] && *word; word++) {
		json_t *config = small_object(*word, "config.json"), *stored, *package;

		if (!config)
			continue;
		stored = small_object(*word, ".moescope-package/manifest.json");
		stored = stored ? stored : small_object(*word, "manifest.json");
		package = json_object();
		for (int i = 0; i < 4; i++)
			if (json_object_get(stored, kept[i]))
				json_object_set(package, kept[i], json_object_get(stored, kept[i]));
		json_decref(stored);
		return json_pack("{so so so}", "path", plain_text(*word), "config", config, "package", package);
	}
	return json_null();
}

void manifest_begin(const struct choice *chosen, const struct target *started_target)
{
	time_t now = time(NULL);

	choice = chosen;
	target = started_target;
	strftime(started, sizeof(started), "%Y-%m-%dT%H:%M:%SZ", gmtime(&now));
	machine = describe_machine();
	clocks = json_pack("[o]", read_clocks());
	model = model_of(choice->command);
	logs = json_array();
	began_ns = now_ns();
	cpu_before = cpu_s();
}

u64 losses(json_t *by_kind)
{
	const char *name;
	json_t *layout;
	u64 sum = 0;

	json_object_foreach(json_object_get(choice->plan, "layouts"), name, layout) {
		u32 kind = number_of(layout, "kind");
		u64 count = 0;

		bpf_map_lookup_elem(map_fd("lost"), &kind, &count);
		if (count && by_kind)
			json_object_set_new(by_kind, name, json_integer(count));
		sum += count;
	}
	return sum;
}

static json_t *counts(void)
{
	json_t *answer = json_object(), *layout;
	const char *name;

	json_object_foreach(json_object_get(choice->plan, "layouts"), name, layout) {
		u64 count = drained()->records[number_of(layout, "kind") & 255];

		if (count)
			json_object_set_new(answer, name, json_integer(count));
	}
	return answer;
}

static json_t *engines(void)
{
	json_t *answer = json_object(), *engine, *file, *operators;
	const char *name;
	size_t index;

	json_object_foreach(json_object_get(choice->plan, "engines"), name, engine) {
		json_t *libraries = libraries_of(name), *known = json_object_get(engine, "operators");

		json_array_foreach(json_object_get(choice->plan, "files"), index, file) {
			operators = json_object_get(json_object_get(file, "operators"), name);
			if (json_array_size(operators) > json_array_size(known))
				known = operators;
		}
		json_object_set_new(answer, name, json_pack("{sO sO sO so ss sO*}", "id", json_object_get(engine, "id"), "operators", known, "graphs",
							    json_object_get(engine, "graphs"), "libraries", libraries, "untold",
							    text_of(engine, "untold"), "not_language",
							    json_object_get(engine, "not_language")));
	}
	return answer;
}

static json_t *words(void)
{
	json_t *answer = json_array();

	for (char **word = choice->command; word && *word; word++)
		json_array_append_new(answer, plain_text(*word));
	return answer;
}

static json_t *target_row(void)
{
	json_t *code = json_null();

	if (target->over && target->started_here)
		code = json_integer(WIFSIGNALED(target->status) ? -WTERMSIG(target->status) : WEXITSTATUS(target->status));
	return json_pack("{si si so}", "pid", target->pid, "uid", (int)caller(), "exit_code", code);
}

static json_t *cost_row(json_t *rows)
{
	json_t *cost = json_object(), *given = json_pack("{sO sO}", "rows", rows, "programs", json_object_get(choice->plan, "programs"));
	u64 records = 0, wall = now_ns() - began_ns, planner = planner_cpu_ns(), cpu = (cpu_s() - cpu_before) * 1e9 + planner;

	account(given, cost);
	json_decref(given);
	for (int i = 0; i < 256; i++)
		records += drained()->records[i];
	json_object_update_new(cost, held());
	json_object_update_new(cost, json_pack("{sI sI sO sI sf sI sf}", "tracer_cpu_ns", (json_int_t)(cpu_s() * 1e9 + planner),
					       "tracer_recording_cpu_ns", (json_int_t)cpu, "calibration_ns", costs(),
					       "target_cpu_ns", (json_int_t)target->cpu_ns, "tracer_core_share",
					       wall ? (double)cpu / wall : 0.0, "written_bytes",
					       (json_int_t)drained()->bytes, "bytes_per_record",
					       records ? (double)drained()->bytes / records : 0.0));
	return cost;
}

static json_t *options(void)
{
	return json_pack("{ss sf sI sf sf sf sI ss}", "output", choice->folder, "duration", choice->duration_s, "tokens",
			 (json_int_t)choice->tokens, "only-slower-than", choice->only_slower_s, "min-tps", choice->min_tps, "max-overhead",
			 choice->max_overhead, "ring-mib", (json_int_t)(choice->ring_bytes >> 20), "recorder", "moescope-recorder");
}

static json_t *compose(const char *state)
{
	json_t *lost = json_object(), *rows = attached(), *plan = choice->plan, *manifest = json_object();
	json_t *cost = cost_row(rows);

	losses(lost);
	json_object_update_new(manifest, json_pack("{si ss sO so so sO so so so sO sO so so so}", "schema_version", SCHEMA_VERSION, "program",
						   VERSION, "machine", machine, "engines", engines(), "qnn", qnn(), "qnn_logs", logs,
						   "pmc", counters(), "io", io_files(), "probes", rows, "functions", json_object_get(plan, "functions"),
						   "warnings", warnings(), "threads", threads(), "cost", cost, "disturbances",
						   disturbances()));
	json_object_update_new(manifest, json_pack("{ss ss ss sI so sO s[] so si}", "checksums", "xxh3_64", "state", state, "started_utc",
						   started, "duration_ns", (json_int_t)(now_ns() - target->began_ns), "command", words(),
						   "model", model, "models", "target", target_row(), "tracer_pid", (int)getpid()));
	json_object_update_new(manifest, json_pack("{ss ss so sO ss sO sO so so so so sO}", "loader",
						   choice->programs_fd < 0 ? "libbpf" : "bcc", "buffer",
						   choice->perf ? "perf" : "ring", "options", options(), "levels",
						   json_object_get(plan, "levels"), "sched", choice->everyone ? "all" : "target", "clocks",
						   clocks, "heat", heat_found(), "records", counts(), "lost", lost, "lost_by_cpu",
						   lost_by_cpu(), "sites", sites(), "layouts", json_object_get(plan, "layouts")));
	json_object_set_new(manifest, "power", power_found());
	json_object_set_new(manifest, "steady", steady_found(commands_begun()));
	json_object_set_new(manifest, "stacks", stacks(!strcmp(state, "complete")));
	json_object_update_new(manifest, policies());
	json_object_update(manifest, merged_entries());
	return manifest;
}

static bool replace(const char *body, const char *sum)
{
	char draft[PATH_MOST], place[PATH_MOST];
	FILE *file;
	int fd;
	bool good;

	snprintf(draft, sizeof(draft), "%s/manifest.json.new", choice->folder);
	snprintf(place, sizeof(place), "%s/manifest.json", choice->folder);
	unlink(draft);
	fd = open(draft, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
	file = fd < 0 ? NULL : fdopen(fd, "w");
	if (!file)
		return false;
	good = fprintf(file, "%s%s\"}\n", body, sum) > 0;
	good = !fclose(file) && good && !rename(draft, place);
	if (!good)
		unlink(draft);
	return good;
}

/* Fills in what is known only at the end. */
static void complete(void)
{
	json_array_append_new(clocks, read_clocks());
	json_decref(logs);
	logs = keep_qnn_logs(choice->folder, target->over);
}

void save_manifest(const char *state)
{
	static bool said; /* report once, and not if the disk was full before */
	char sum[DIGEST_BYTES], *text, *body;
	json_t *manifest;

	act_as_caller(true);
	seal();
	if (!strcmp(state, "complete"))
		complete();
	act_as_caller(false);
	manifest = compose(state);
	text = json_dumps(manifest, JSON_REAL_PRECISION(9));
	json_decref(manifest);
	if (text)
		text[strlen(text) - 1] = 0; /* the brace, which follows the checksum */
	if (!text || asprintf(&body, "%s" SEAL, text) < 0)
		fail("the manifest cannot be written: out of memory");
	digest(body, strlen(body), sum);
	act_as_caller(true);
	if (!replace(body, sum) && !said && !disk_failed()) {
		said = true;
		say("cannot write %s/manifest.json: %s; everything written before is readable", choice->folder, strerror(errno));
	}
	act_as_caller(false);
	free(body);
	free(text);
}
