// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Probes: attaches programs to functions, tracepoints and events. A descriptor holds a probe. */
#include <bpf/bpf.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/perf_event.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kernel_features.h"

#define PERF_EVENT_LINK 41
#define HIGH_FD 512

int open_event(struct perf_event_attr *attributes, pid_t tid, int cpu)
{
	attributes->size = sizeof(*attributes);
	return syscall(SYS_perf_event_open, attributes, tid, cpu, -1, PERF_FLAG_FD_CLOEXEC);
}

/* Debian's kernels want more than CAP_PERFMON where kernel.perf_event_paranoid is above 2. */
bool may_open_events(void)
{
	struct perf_event_attr attributes = {.type = PERF_TYPE_SOFTWARE, .config = PERF_COUNT_SW_DUMMY};
	int fd = open_event(&attributes, -1, 0), error = errno;

	if (fd >= 0)
		close(fd);
	return fd >= 0 || error != EACCES;
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

int connect_event(struct perf_event_attr *attributes, int cpu, const char *program)
{
	return connect(open_event(attributes, -1, cpu), program_fd(program));
}

int attach_software(const char *program, u32 config, int cpu)
{
	struct perf_event_attr attributes = {.type = PERF_TYPE_SOFTWARE, .config = config, .sample_period = 1};

	return connect_event(&attributes, cpu, program);
}

static int perf_uprobe(const char *path, u64 offset, bool at_return, pid_t only)
{
	struct perf_event_attr attributes = {.uprobe_path = (u64)path, .probe_offset = offset};
	s64 bit = number_in(UPROBES "format/retprobe", "config:");

	attributes.type = number_in(UPROBES "type", "");
	attributes.config = at_return && bit >= 0 ? 1ULL << bit : 0;
	return open_event(&attributes, only ? only : -1, only ? -1 : 0);
}

int attach_uprobe(const char *program, const char *path, u64 offset, bool at_return, u64 cookie, pid_t only)
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
		return multi_link(fd, opening_path(path), offset, at_return, cookie, only);
	event = perf_uprobe(opening_path(path), offset, at_return, only);
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
