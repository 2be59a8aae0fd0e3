// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* The target's processes: begin and end of threads and children, programs executed, libraries opened. */

TRACEPOINT(sched, sched_process_fork)
{
	u32 child = FIELD(ctx, sched_process_fork, child_pid, s32), zero = 0;
	struct traced *fresh = map_lookup(MAP(blank), &zero);
	RECORD(rec_task_fork, r);

	if (!traced() || !fresh)
		return 0;
	map_update(MAP(threads), &child, fresh);
	if (!reserve(r, KIND_TASK_FORK, ENGINE_KERNEL))
		return 0;
	r->parent_tid = FIELD(ctx, sched_process_fork, parent_pid, s32);
	r->child_tid = child;
	r->pad[0] = r->pad[1] = r->pad[2] = 0;
	if (counting())
		submit_urgent(ctx, r); /* the new thread has no counters until the tracer has seen this */
	else
		submit(ctx, r);
	return 0;
}

TRACEPOINT(sched, sched_process_exit)
{
	RECORD(rec_task_exit, r);

	if (!traced())
		return 0;
	if (!reserve(r, KIND_TASK_EXIT, ENGINE_KERNEL))
		return 0;
	bpf_get_current_comm(r->comm, sizeof(r->comm));
	r->pad[0] = r->pad[1] = 0;
	submit(ctx, r);
	return 0;
}

/* A thread is removed here and not at its exit, so that its last switch is still seen. */
RAW_TRACEPOINT(sched_process_free)
{
	u32 tid = KERNEL_READ(task_struct, pid, RAW_ARG(ctx, 0), s32);

	map_delete(MAP(threads), &tid);
	return 0;
}

TRACEPOINT(sched, sched_process_exec)
{
	u32 filename = FIELD(ctx, sched_process_exec, __data_loc_filename, u32); /* low half: offset of the text */
	RECORD(rec_task_exec, r);

	if (!traced())
		return 0;
	if (!reserve(r, KIND_TASK_EXEC, ENGINE_KERNEL))
		return 0;
	bpf_probe_read_kernel_str(r->path, sizeof(r->path), (char *)ctx + (filename & 0xFFFF));
	stop_target();
	submit_urgent(ctx, r);
	return 0;
}

struct sys_enter_openat_args {
	u64 common;
	u64 number;
	u64 dfd;
	u64 filename;
	u64 flags;
	u64 mode;
};

static INLINE bool starts_with(struct path_scratch *path, u32 at, struct pattern *pattern)
{
	if (!pattern->length)
		return false;
	for (u32 i = 0; i < sizeof(pattern->text); i++) {
		if (i >= pattern->length)
			return true;
		if (path->text[(at + i) & 255] != pattern->text[i])
			return false;
	}
	return true;
}

/* The serialized profile that QNN's tools read: ONNX Runtime's provider names it <profiling file>_qnn.log. */
static INLINE bool is_qnn_log(struct path_scratch *path, long length)
{
	const char suffix[8] = "_qnn.log";

	for (u32 i = 0; i < sizeof(suffix); i++) {
		if (path->text[(length - 1 - sizeof(suffix) + i) & 255] != suffix[i])
			return false;
	}
	return true;
}

/* Whether a file is opened through a descriptor, like libraries in memory, whose names user space determines. */
static INLINE bool is_descriptor(struct path_scratch *path)
{
	const char folder[4] = "/fd/";

	for (u32 i = 0; i < sizeof(folder); i++) {
		if (path->text[(path->base - sizeof(folder) + i) & 255] != folder[i])
			return false;
	}
	return true;
}

/* FNV-1a */
static INLINE u64 path_hash(struct path_scratch *path)
{
	u64 hash = 0xcbf29ce484222325;

	for (u32 i = 0; i < PATH_BYTES; i++) {
		if (!path->text[i])
			break;
		hash = (hash ^ path->text[i]) * 0x100000001b3;
	}
	return hash;
}

/* It is opened for every harvest, and reported once if its name is an absolute path. */
static INLINE bool is_new_log(struct path_scratch *path)
{
	return path->text[0] != '/' || is_news(path_hash(path), KIND_QNN_LOG);
}

static INLINE void send_qnn_log(void *ctx, void *filename)
{
	RECORD(rec_qnn_log, r);

	if (!reserve(r, KIND_QNN_LOG, ENGINE_KERNEL))
		return;
	bpf_probe_read_user_str(r->path, sizeof(r->path), filename);
	submit(ctx, r);
}

/* An engine's library is about to be mapped: its probes must be attached before its code runs. */
static INLINE int opens_file(void *ctx)
{
	struct sys_enter_openat_args *args = ctx;
	u32 zero = 0;
	struct path_scratch *path;
	RECORD(rec_library, r);
	bool wanted = false;
	long length;

	if (!traced())
		return 0;
	path = map_lookup(MAP(paths), &zero);
	if (!path)
		return 0;
	length = bpf_probe_read_user_str(path->text, PATH_BYTES, (void *)args->filename);
	if (length <= 0)
		return 0;
	if (is_qnn_log(path, length) && is_new_log(path))
		send_qnn_log(ctx, (void *)args->filename);
	path->base = 0;
	for (u32 i = 0; i < PATH_BYTES; i++) {
		if (!path->text[i])
			break;
		if (path->text[i] == '/')
			path->base = i + 1;
	}
	for (u32 i = 0; i < MAX_PATTERNS && !wanted; i++) {
		u32 key = i;
		struct pattern *pattern = map_lookup(MAP(patterns), &key);

		wanted = pattern && starts_with(path, path->base, pattern);
	}
	if (!wanted && !is_descriptor(path))
		return 0;
	if (!reserve(r, KIND_LIBRARY, ENGINE_KERNEL))
		return 0;
	bpf_probe_read_user_str(r->path, sizeof(r->path), (void *)args->filename);
	stop_target();
	submit_urgent(ctx, r);
	return 0;
}

TRACEPOINT(syscalls, sys_enter_openat)
{
	return opens_file(ctx);
}

/*
 * Kernels without CONFIG_FTRACE_SYSCALLS, as on most phones, have only the tracepoint that all calls of all processes pass.
 * Its record has the layout of those of single calls.
 */
TRACEPOINT(raw_syscalls, sys_enter)
{
	struct syscall_enter *call = ctx;
	struct settings *s = settings();

	if (!traced())
		return 0;
	if (call->number == SYSCALL_OPENAT)
		return opens_file(ctx);
	if (!s || !s->files)
		return 0;
	if (call->number == SYSCALL_MMAP)
		return maps_file(ctx);
	return moves_bytes(ctx, call->number);
}

TRACEPOINT(raw_syscalls, sys_exit)
{
	return read_ends(ctx);
}

/* Does nothing: for measuring the cost of a probe itself. */
BARE_UPROBE(empty)
{
	return 0;
}
