// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* What this kernel offers, by trying it. */
#include <bpf/bpf.h>
#include <bpf/libbpf.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "kernel_features.h"

static int be_silent(enum libbpf_print_level level, const char *format, va_list arguments)
{
	(void)level, (void)format, (void)arguments;
	return 0;
}

const char *tracefs(void)
{
	static const char *const places[] = {"/sys/kernel/tracing", "/sys/kernel/debug/tracing"};

	for (int turn = 0; turn < 2; turn++) {
		for (int i = 0; i < 2; i++) {
			char path[64];

			snprintf(path, sizeof(path), "%s/events", places[i]);
			if (!faccessat(AT_FDCWD, path, X_OK, AT_EACCESS))
				return places[i];
		}
		mount("tracefs", places[0], "tracefs", 0, NULL);
	}
	return places[0];
}

void check_tracefs(void)
{
	char path[64];
	int error;

	snprintf(path, sizeof(path), "%s/events/sched", tracefs());
	if (!faccessat(AT_FDCWD, path, X_OK, AT_EACCESS))
		return;
	error = mount("tracefs", tracefs(), "tracefs", 0, NULL) ? errno : 0;
	fail("the kernel's tracepoints cannot be read: %s: as root on the machine, mount -t tracefs tracefs %s",
	     error ? strerror(error) : "tracefs has none", tracefs());
}

s64 number_in(const char *path, const char *before)
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

s64 tracepoint_number(const char *category, const char *name)
{
	char path[256];

	snprintf(path, sizeof(path), "%s/events/%s/%s/id", tracefs(), category, name);
	return number_in(path, "");
}

bool has_tracepoint(const char *category, const char *name)
{
	return tracepoint_number(category, name) >= 0;
}

int multi_link(int program, const char *path, u64 offset, bool at_return, u64 cookie, pid_t only)
{
	struct {
		u32 program, target, type, flags;
		u64 path, offsets, references, cookies;
		u32 count, kind, pid, pad;
	} link = {program, 0, UPROBE_MULTI, 0, (u64)path, (u64)&offset, 0, (u64)&cookie, 1, at_return ? AT_RETURN : 0, only, 0};

	return syscall(SYS_bpf, BPF_LINK_CREATE, &link, sizeof(link));
}

int load_bare(const struct bpf_insn *code, size_t count, bool multi)
{
	LIBBPF_OPTS(bpf_prog_load_opts, options, .expected_attach_type = multi ? UPROBE_MULTI : 0);

	return bpf_prog_load(BPF_PROG_TYPE_KPROBE, NULL, "GPL", code, count, &options);
}

bool has_multi_links(void)
{
	static const struct bpf_insn nothing[] = {{.code = MOVE_NUMBER}, {.code = 0x95}};
	static int answer = -1;
	int program;

	if (answer >= 0)
		return answer;
	program = load_bare(nothing, 2, true);
	answer = program >= 0 && multi_link(program, "/", 0, false, 0, 0) < 0 && errno == EBADF;
	if (program >= 0)
		close(program);
	return answer;
}

static bool has_helper(int number)
{
	return libbpf_probe_bpf_helper(BPF_PROG_TYPE_KPROBE, number, NULL) == 1;
}

bool has_cookies(void)
{
	return has_helper(BPF_FUNC_get_attach_cookie);
}

bool has_task_btf(void)
{
	return !access(VMLINUX, R_OK) && has_helper(BPF_FUNC_get_current_task_btf);
}

bool has_thread_registers(void)
{
	return has_task_btf() && has_helper(BPF_FUNC_task_pt_regs);
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

bool has_uprobes(void)
{
	return !access(UPROBES "type", R_OK) || has_multi_links();
}

json_t *features(void)
{
	struct utsname system;

	uname(&system);
	libbpf_set_print(be_silent);
	return json_pack("{ss ss ss sb sb sb sb sb sb sb sb}", "arch", system.machine, "kernel", system.release, "sources", SOURCES,
			 "fast_nop", has_fast_nop(), "uprobes", has_uprobes(), "uprobe_multi", has_multi_links(), "btf",
			 !access(VMLINUX, R_OK), "ring_buffers", has_ring_buffers(),
			 "task_btf", has_task_btf(), "cookies", has_cookies(), "syscall_tracepoints",
			 has_tracepoint("syscalls", "sys_enter_openat"));
}

