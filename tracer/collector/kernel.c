// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* The kernel: its features, loading programs, and attaching the probes that run them. A descriptor holds a probe. */
#include <bpf/bpf.h>
#include <bpf/btf.h>
#include <bpf/libbpf.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/perf_event.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>
#include <zlib.h>

#include "collect.h"

#define UPROBE_MULTI 48 /* enum bpf_attach_type, since Linux 6.6 */
#define PERF_EVENT_LINK 41
#define AT_RETURN 1
#define HIGH_FD 512
#define MESSAGE_BYTES (1 << 16)
#define COOKIE_MARK 0x0C00C1E5 /* placeholder for the cookie in programs for kernels without cookies (bpf/custom.bpf.c) */
#define UPROBES "/sys/bus/event_source/devices/uprobe/"
#define VMLINUX "/sys/kernel/btf/vmlinux"
#define MOVE_NUMBER 0xB7

/* object.S: the size of the programs in 8 bytes, then the programs, deflated */
extern const u8 packed_for_ring[], packed_for_ring_end[], packed_for_perf[], packed_for_perf_end[];

#define MOST_OBJECTS 16

static struct bpf_object *objects[MOST_OBJECTS]; /* the first has the maps, which the later ones share */
static int object_count;
static const struct choice *chosen;
static json_t *refused; /* program → reason */
static char messages[MESSAGE_BYTES];

static int keep_message(enum libbpf_print_level level, const char *format, va_list arguments)
{
	size_t used = strlen(messages);

	if (level == LIBBPF_WARN && used + 1 < sizeof(messages))
		vsnprintf(messages + used, sizeof(messages) - used, format, arguments);
	return 0;
}

static const char *tracefs(void)
{
	static const char *const places[] = {"/sys/kernel/tracing", "/sys/kernel/debug/tracing"};

	for (int turn = 0; turn < 2; turn++) {
		for (int i = 0; i < 2; i++) {
			char path[64];

			snprintf(path, sizeof(path), "%s/events", places[i]);
			if (!access(path, X_OK))
				return places[i];
		}
		mount("tracefs", places[0], "tracefs", 0, NULL);
	}
	return places[0];
}

static s64 number_in(const char *path, const char *before)
{
	char text[64] = "";
	FILE *file = fopen(path, "re");
	char *at;

	if (!file)
		return -1;
	at = fgets(text, sizeof(text), file);
	fclose(file);
	at = at ? strstr(text, before) : NULL;
	return at ? strtoll(at + strlen(before), NULL, 10) : -1;
}

static s64 tracepoint_number(const char *category, const char *name)
{
	char path[256];

	snprintf(path, sizeof(path), "%s/events/%s/%s/id", tracefs(), category, name);
	return number_in(path, "");
}

bool has_tracepoint(const char *category, const char *name)
{
	return tracepoint_number(category, name) >= 0;
}

/* Offset and width of a field in a tracepoint's record; width 0 if there is no such field. */
void find_field(const char *category, const char *event, const char *name, struct driver_field *field)
{
	char path[256], line[256], wanted[64];
	FILE *file;

	snprintf(path, sizeof(path), "%s/events/%s/%s/format", tracefs(), category, event);
	snprintf(wanted, sizeof(wanted), " %s;", name);
	file = *name ? fopen(path, "re") : NULL;
	while (file && fgets(line, sizeof(line), file)) {
		char *place = strstr(line, wanted), *offset = place ? strstr(place, "offset:") : NULL;
		char *size = offset ? strstr(offset, "size:") : NULL;

		if (!size)
			continue;
		field->is_text = strstr(line, "__data_loc") != NULL;
		field->offset = atoi(offset + strlen("offset:"));
		field->width = field->is_text ? (int)sizeof(u64) : atoi(size + strlen("size:"));
	}
	if (file)
		fclose(file);
}

/* Attaches by a uprobe_multi link: union bpf_attr as in Linux 6.6, which older headers lack. */
static int multi_link(int program, const char *path, u64 offset, bool at_return, u64 cookie)
{
	struct {
		u32 program, target, type, flags;
		u64 path, offsets, references, cookies;
		u32 count, kind, pid, pad;
	} link = {program, 0, UPROBE_MULTI, 0, (u64)path, (u64)&offset, 0, (u64)&cookie, 1, at_return ? AT_RETURN : 0, 0, 0};

	return syscall(SYS_bpf, BPF_LINK_CREATE, &link, sizeof(link));
}

static int load_bare(const struct bpf_insn *code, size_t count, bool multi)
{
	LIBBPF_OPTS(bpf_prog_load_opts, options, .expected_attach_type = multi ? UPROBE_MULTI : 0);

	return bpf_prog_load(BPF_PROG_TYPE_KPROBE, NULL, "GPL", code, count, &options);
}

/* Linux 6.6: 89ae89f53d20 "bpf: Add multi uprobe link". Such probes are removed in a fraction of the time. */
static bool has_multi_links(void)
{
	static const struct bpf_insn nothing[] = {{.code = MOVE_NUMBER}, {.code = 0x95}};
	static int answer = -1;
	int program;

	if (answer >= 0)
		return answer;
	program = load_bare(nothing, 2, true);
	answer = program >= 0 && multi_link(program, "/", 0, false, 0) < 0 && errno == EBADF;
	if (program >= 0)
		close(program);
	return answer;
}

static bool has_helper(int number)
{
	return libbpf_probe_bpf_helper(BPF_PROG_TYPE_KPROBE, number, NULL) == 1;
}

static bool has_cookies(void)
{
	return has_helper(BPF_FUNC_get_attach_cookie);
}

static bool has_task_btf(void)
{
	return !access(VMLINUX, R_OK) && has_helper(BPF_FUNC_get_current_task_btf);
}

/* Whether a probed nop runs without a single step; tracer/probes/fast_nop.py explains the test. */
static bool has_fast_nop(void)
{
#if defined(__x86_64__)
	return syscall(336) < 0 && errno != ENOSYS;
#else
	char line[256];
	bool found = false;
	FILE *file = fopen("/proc/kallsyms", "re");

	while (file && !found && fgets(line, sizeof(line), file))
		found = strstr(line, " simulate_nop\n") != NULL;
	if (file)
		fclose(file);
	return found;
#endif
}

bool has_ring_buffers(void)
{
	return libbpf_probe_bpf_map_type(BPF_MAP_TYPE_RINGBUF, NULL) == 1;
}

json_t *features(void)
{
	struct utsname system;
	bool has_uprobes = !access(UPROBES "type", R_OK) || has_multi_links();

	uname(&system);
	libbpf_set_print(keep_message);
	return json_pack("{ss ss ss sb sb sb sb sb sb sb sb}", "arch", system.machine, "kernel", system.release, "sources", SOURCES,
			 "fast_nop", has_fast_nop(), "uprobes", has_uprobes, "uprobe_multi", has_multi_links(), "btf",
			 !access(VMLINUX, R_OK), "ring_buffers", has_ring_buffers(),
			 "task_btf", has_task_btf(), "cookies", has_cookies(), "syscall_tracepoints",
			 has_tracepoint("syscalls", "sys_enter_openat"));
}

static void *unpack(const u8 *packed, const u8 *end, size_t *size)
{
	uLongf bytes = *(const u64 *)packed;
	void *data = malloc(bytes);

	packed += sizeof(u64);
	if (!data || uncompress(data, &bytes, packed, end - packed) != Z_OK)
		fail("the programs inside this collector are damaged");
	*size = bytes;
	return data;
}

/* Sets the constants that adapt the programs to this kernel; their offsets come from the object's own types. */
static void tell_offered(struct bpf_object *object)
{
	struct bpf_map *map = bpf_object__find_map_by_name(object, ".rodata");
	const struct btf *btf = bpf_object__btf(object);
	size_t size;
	u8 *data = map ? (u8 *)bpf_map__initial_value(map, &size) : NULL;
	s32 section = btf ? btf__find_by_name_kind(btf, ".rodata", BTF_KIND_DATASEC) : -1;
	const struct btf_type *type = section > 0 ? btf__type_by_id(btf, section) : NULL;

	for (int i = 0; data && type && i < btf_vlen(type); i++) {
		const struct btf_var_secinfo *place = btf_var_secinfos(type) + i;
		const char *name = btf__name_by_offset(btf, btf__type_by_id(btf, place->type)->name_off);

		if (!strcmp(name, "has_task_btf"))
			data[place->offset] = has_task_btf();
		else if (!strcmp(name, "has_cookies"))
			data[place->offset] = has_cookies();
	}
}

/* Length of a program's name without the suffix for the begin or end of a call. */
static size_t stem(const char *name)
{
	size_t length = strlen(name);

	if (length > 6 && !strcmp(name + length - 6, "_begin"))
		return length - 6;
	return length > 4 && !strcmp(name + length - 4, "_end") ? length - 4 : length;
}

/* Whether a program, or the other end of its call, was refused. */
static bool is_refused(const char *name)
{
	const char *other;
	json_t *why;

	json_object_foreach(refused, other, why) {
		if (stem(other) == stem(name) && !strncmp(other, name, stem(name)))
			return true;
	}
	return false;
}

/* The last line of the verifier's log, which gives the reason for the refusal. */
static void last_line(char *said, size_t bytes)
{
	strcpy(said, "the kernel gives no reason");
	for (char *rest = messages, *line; (line = strsep(&rest, "\n"));) {
		if (*line && strncmp(line, "libbpf:", 7) && strncmp(line, "processed ", 10) && strncmp(line, "-- ", 3))
			snprintf(said, bytes, "%.200s", line);
	}
}

/* Notes the program that the kernel refused; false if libbpf names none. */
static bool note_refusal(void)
{
	char name[128], said[256];
	char *at = messages;

	while ((at = strstr(at, "libbpf: prog '"))) {
		const char *rest;

		if (sscanf(at, "libbpf: prog '%127[^']'", name) != 1)
			return false;
		rest = at + strlen("libbpf: prog ''") + strlen(name);
		if (!strncmp(rest, ": BPF program load failed", 25) || !strncmp(rest, ": failed to", 11) || !strncmp(rest, ": relo #", 8))
			break;
		at++;
	}
	if (!at || json_object_get(refused, name))
		return false;
	last_line(said, sizeof(said));
	json_object_set_new(refused, name, json_string(said));
	warn("the kernel refused %s: %s", name, said);
	return true;
}

static char btf_path[64];

static void size_or_share_maps(struct bpf_object *object)
{
	struct bpf_map *map;

	if (!object_count) {
		if (!chosen->perf) {
			bpf_map__set_max_entries(bpf_object__find_map_by_name(object, "events"), chosen->ring_bytes);
			bpf_map__set_max_entries(bpf_object__find_map_by_name(object, "details"), chosen->ring_bytes);
		}
		return;
	}
	bpf_object__for_each_map(map, object) {
		if (!bpf_map__is_internal(map))
			bpf_map__reuse_fd(map, map_fd(bpf_map__name(map)));
	}
}

static struct bpf_object *open_object(json_t *programs, void *data, size_t size)
{
	LIBBPF_OPTS(bpf_object_open_opts, options, .object_name = "moescope", .btf_custom_path = *btf_path ? btf_path : NULL);
	struct bpf_object *object = bpf_object__open_mem(data, size, &options);
	struct bpf_program *program;

	if (!object)
		fail("the programs inside this collector cannot be opened: %s", strerror(errno));
	tell_offered(object);
	size_or_share_maps(object);
	bpf_object__for_each_program(program, object) {
		const char *name = bpf_program__name(program);

		bpf_program__set_autoload(program, json_object_get(programs, name) && !is_refused(name));
		if (bpf_program__type(program) == BPF_PROG_TYPE_KPROBE && has_multi_links())
			bpf_program__set_expected_attach_type(program, UPROBE_MULTI);
	}
	return object;
}

/* Loads an object with these programs, but for those that the kernel refuses. */
static void load(json_t *programs)
{
	size_t size;
	void *data = chosen->perf ? unpack(packed_for_perf, packed_for_perf_end, &size)
				  : unpack(packed_for_ring, packed_for_ring_end, &size);
	struct bpf_object *object;

	for (;;) {
		int error;

		object = open_object(programs, data, size);
		messages[0] = 0;
		error = bpf_object__load(object);
		if (!error)
			break;
		bpf_object__close(object);
		if (error == -EMFILE)
			check_descriptors(UINT64_MAX);
		if (!note_refusal())
			fail("the kernel refused the BPF programs: %s: %.300s", strerror(-error), messages);
	}
	objects[object_count++] = object;
	free(data);
}

/* The object in which a program is loaded; NULL if it is in none. */
static struct bpf_program *loaded_program(const char *name)
{
	for (int i = 0; i < object_count; i++) {
		struct bpf_program *found = bpf_object__find_program_by_name(objects[i], name);

		if (found && bpf_program__fd(found) >= 0)
			return found;
	}
	return NULL;
}

void bring(json_t *programs)
{
	json_t *known = json_object_get(chosen->plan, "programs"), *missing = json_object(), *number;
	const char *name;

	json_object_foreach(programs, name, number) {
		if (!loaded_program(name) && !is_refused(name))
			json_object_set(missing, name, number);
	}
	json_object_update(known, missing);
	if (json_object_size(missing) && object_count < MOST_OBJECTS)
		load(missing);
	json_decref(missing);
}

/* libbpf opens the file by the descriptor's name: it is a regular one, opened with the user's rights. */
static void open_btf(const struct choice *choice)
{
	int fd = open_as_user(choice->btf, INT64_MAX);

	if (fd < 0)
		fail("--btf %s cannot be read: %s", choice->btf, strerror(errno));
	snprintf(btf_path, sizeof(btf_path), "/proc/self/fd/%d", fd);
}

void load_programs(const struct choice *choice)
{
	json_t *wanted = json_copy(json_object_get(choice->plan, "programs"));

	chosen = choice;
	json_object_set_new(wanted, "empty", json_true());
	refused = json_object();
	libbpf_set_print(keep_message);
	if (access(UPROBES "type", R_OK) && !has_multi_links())
		fail("this kernel has no uprobes (CONFIG_UPROBE_EVENTS)");
	if (choice->btf)
		open_btf(choice);
	else if (access(VMLINUX, R_OK))
		fail("this kernel has no BTF (%s): give --btf FILE with its types", VMLINUX);
	load(wanted);
	json_decref(wanted);
}

bool is_loaded(const char *program)
{
	return loaded_program(program);
}

int program_fd(const char *name)
{
	return bpf_program__fd(loaded_program(name));
}

int map_fd(const char *name)
{
	return bpf_object__find_map_fd_by_name(objects[0], name);
}

void set_map(const char *name, const void *key, const void *value)
{
	if (bpf_map_update_elem(map_fd(name), key, value, BPF_ANY))
		warn("cannot write the BPF map %s: %s", name, strerror(errno));
}

void delete_from_map(const char *name, const void *key)
{
	bpf_map_delete_elem(map_fd(name), key);
}

int open_event(struct perf_event_attr *attributes, pid_t tid, int cpu)
{
	attributes->size = sizeof(*attributes);
	return syscall(SYS_perf_event_open, attributes, tid, cpu, -1, PERF_FLAG_FD_CLOEXEC);
}

/* Attaches a program to an event; returns the event's descriptor, or -1. */
static int connect(int event, int program)
{
	int error;

	if (event < 0 || (!ioctl(event, PERF_EVENT_IOC_SET_BPF, program) && !ioctl(event, PERF_EVENT_IOC_ENABLE, 0)))
		return event;
	error = errno;
	close(event);
	errno = error;
	return -1;
}

static bool is_raw(const char *program)
{
	return bpf_program__type(loaded_program(program)) == BPF_PROG_TYPE_RAW_TRACEPOINT;
}

int attach_tracepoint(const char *program, const char *category, const char *name)
{
	struct perf_event_attr attributes = {.type = PERF_TYPE_TRACEPOINT, .sample_period = 1};
	int low, high;

	attributes.config = tracepoint_number(category, name);
	low = is_raw(program) ? bpf_raw_tracepoint_open(name, program_fd(program))
			      : connect(open_event(&attributes, -1, 0), program_fd(program));
	high = low < 0 ? -1 : fcntl(low, F_DUPFD_CLOEXEC, HIGH_FD);
	if (high < 0)
		return low;
	close(low); /* if we are killed, the kernel closes in order of numbers: probes in the target are removed before this one */
	return high;
}

int attach_software(const char *program, u32 config, int cpu)
{
	struct perf_event_attr attributes = {.type = PERF_TYPE_SOFTWARE, .config = config, .sample_period = 1};

	return connect(open_event(&attributes, -1, cpu), program_fd(program));
}

/* Loads a copy of a program with its cookie patched in, for kernels without cookies. */
static int copy_with_cookie(const char *name, u32 cookie)
{
	struct bpf_program *program = loaded_program(name);
	size_t count = bpf_program__insn_cnt(program), bytes = count * sizeof(struct bpf_insn);
	struct bpf_insn *code = malloc(bytes);
	int fd;

	if (!code)
		return -1;
	memcpy(code, bpf_program__insns(program), bytes);
	for (size_t i = 0; i < count; i++)
		if (code[i].code == MOVE_NUMBER && code[i].imm == COOKIE_MARK)
			code[i].imm = cookie;
	fd = load_bare(code, count, has_multi_links());
	free(code);
	return fd;
}

static int perf_uprobe(const char *path, u64 offset, bool at_return)
{
	struct perf_event_attr attributes = {.uprobe_path = (u64)path, .probe_offset = offset};
	s64 bit = number_in(UPROBES "format/retprobe", "config:");

	attributes.type = number_in(UPROBES "type", "");
	attributes.config = at_return && bit >= 0 ? 1ULL << bit : 0;
	return open_event(&attributes, -1, 0);
}

int attach_uprobe(const char *program, const char *path, u64 offset, bool at_return, u64 cookie)
{
	struct {
		u32 program, target, type, flags;
		u64 cookie;
	} link = {0, 0, PERF_EVENT_LINK, 0, cookie};
	bool inside = cookie && !has_cookies();
	int fd = inside ? copy_with_cookie(program, cookie) : program_fd(program), event, error;

	if (fd < 0)
		return -1;
	if (has_multi_links())
		return multi_link(fd, path, offset, at_return, cookie);
	event = perf_uprobe(path, offset, at_return);
	if (event < 0 || !cookie || inside)
		return connect(event, fd);
	link.program = fd;
	link.target = event;
	fd = syscall(SYS_bpf, BPF_LINK_CREATE, &link, sizeof(link));
	error = errno;
	close(event);
	errno = error;
	return fd;
}
