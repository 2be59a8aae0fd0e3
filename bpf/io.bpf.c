// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* I/O that the target's threads wait for: page faults of files, reads, and the block requests that these cause. */

#ifndef LOADER_BCC
struct files_struct {
	struct fdtable *fdt;
} RELOCATED;

struct fdtable {
	unsigned int max_fds;
	struct file **fd;
} RELOCATED;

struct path {
	struct dentry *dentry;
} RELOCATED;

struct file {
	struct address_space *f_mapping;
	struct path f_path;
	s64 f_pos;
} RELOCATED;

struct address_space {
	struct inode *host;
} RELOCATED;

struct inode {
	unsigned short i_mode;
	unsigned long i_ino;
	struct super_block *i_sb;
} RELOCATED;

struct super_block {
	u32 s_dev;
} RELOCATED;

struct qstr {
	const unsigned char *name;
} RELOCATED;

struct dentry {
	struct qstr d_name;
} RELOCATED;

struct request {
	struct request_queue *q;
	struct gendisk *rq_disk;
	u64 __sector;
} RELOCATED;

struct request_queue {
	struct gendisk *disk;
} RELOCATED;

struct gendisk {
	int major;
	int first_minor;
} RELOCATED;
#endif

#define FILE_TYPE 0170000
#define REGULAR_FILE 0100000
#define BLOCK_DEVICE 0060000
#define MAP_IS_ANONYMOUS 0x20
#define A_FILE (0xF11EULL << 48) /* distinguishes files from tensors in `described` */
#define NO_BYTES 0xFFFFFFFF
#define NO_SECTOR (~0ULL)
#define MINOR_BITS 20

/* The used properties of an open file. */
struct opened {
	void *file;
	u64 ino;
	u32 dev;
	u32 fd;
};

/* Finds the running thread's open file `fd`; false if there is none, or it is neither a regular file nor a block device. */
static INLINE bool find_file(u32 fd, struct opened *out)
{
	void *files = KERNEL_READ(task_struct, files, bpf_get_current_task(), void *);
	void *table = KERNEL_READ(files_struct, fdt, files, void *);
	void **slots = KERNEL_READ(fdtable, fd, table, void *), *inode, *super;
	u32 kind;

	out->file = 0;
	if (fd >= KERNEL_READ(fdtable, max_fds, table, u32))
		return false;
	bpf_probe_read_kernel(&out->file, sizeof(out->file), slots + fd);
	inode = KERNEL_READ(address_space, host, KERNEL_READ(file, f_mapping, out->file, void *), void *);
	kind = KERNEL_READ(inode, i_mode, inode, u16) & FILE_TYPE;
	super = KERNEL_READ(inode, i_sb, inode, void *);
	out->ino = KERNEL_READ(inode, i_ino, inode, unsigned long);
	out->dev = KERNEL_READ(super_block, s_dev, super, u32);
	out->fd = fd;
	return kind == REGULAR_FILE || kind == BLOCK_DEVICE;
}

static INLINE void send_file(void *ctx, struct opened *o)
{
	void *dentry, *name;
	RECORD(rec_io_file, r);

	if (!is_news(o->ino ^ A_FILE, o->dev))
		return;
	if (!reserve(r, KIND_IO_FILE, ENGINE_KERNEL))
		return;
	r->ino = o->ino;
	r->dev = o->dev;
	r->fd = o->fd;
	r->name[0] = 0;
	dentry = KERNEL_READ(path, dentry, KERNEL_AT(file, f_path, o->file), void *);
	name = KERNEL_READ(qstr, name, KERNEL_AT(dentry, d_name, dentry), void *);
	bpf_probe_read_kernel_str(r->name, sizeof(r->name), name);
	submit(ctx, r);
}

/* The arguments and the result of a system call in its tracepoints' records. */
struct syscall_enter {
	u64 common;
	u64 number;
	u64 args[6];
};

struct syscall_exit {
	u64 common;
	u64 number;
	s64 result;
};

/* Describes a file when it is mapped, since faults name only its inode. */
static INLINE int maps_file(void *ctx)
{
	struct syscall_enter *call = ctx;
	struct opened o;

	if (!traced() || (call->args[3] & MAP_IS_ANONYMOUS))
		return 0;
	if (find_file(call->args[4], &o))
		send_file(ctx, &o);
	return 0;
}

TRACEPOINT(syscalls, sys_enter_mmap)
{
	return maps_file(ctx);
}

/* `offset`: the call's; NO_COUNT if it reads from the file's position. */
static INLINE int read_begins(void *ctx, u32 call, u32 fd, u32 bytes, u64 offset)
{
	u32 tid = (u32)bpf_get_current_pid_tgid();
	RECORD(rec_read_begin, r);
	struct opened o;
	u64 none = 0;

	if (!traced())
		return 0;
	map_delete(MAP(faulting), &tid); /* a thread that makes a system call is in no fault */
	if (!find_file(fd, &o))
		return 0;
	send_file(ctx, &o);
	map_update(MAP(reading), &tid, &none);
	if (!reserve(r, KIND_READ_BEGIN, ENGINE_KERNEL))
		return 0;
	r->ino = o.ino;
	r->offset = offset == NO_COUNT ? KERNEL_READ(file, f_pos, o.file, u64) : offset;
	r->dev = o.dev;
	r->bytes = bytes;
	r->fd = fd;
	r->call = call;
	submit(ctx, r);
	return 0;
}

static INLINE int read_ends(void *ctx)
{
	struct syscall_exit *call = ctx;
	u32 tid = (u32)bpf_get_current_pid_tgid();
	u64 *added = map_lookup(MAP(reading), &tid), pages;
	RECORD(rec_read_end, r);

	if (!added)
		return 0;
	pages = *added;
	map_delete(MAP(reading), &tid);
	if (!reserve(r, KIND_READ_END, ENGINE_KERNEL))
		return 0;
	r->result = call->result;
	r->added = pages;
	r->pad[0] = r->pad[1] = 0;
	submit(ctx, r);
	return 0;
}

#define ARGS ((struct syscall_enter *)ctx)->args
#define READ_CALL(name, call, bytes, offset)                                                                           \
	TRACEPOINT(syscalls, sys_enter_##name)                                                                         \
	{                                                                                                              \
		return read_begins(ctx, call, ARGS[0], bytes, offset);                                                 \
	}                                                                                                              \
	TRACEPOINT(syscalls, sys_exit_##name)                                                                          \
	{                                                                                                              \
		return read_ends(ctx);                                                                                 \
	}

READ_CALL(read, CALL_READ, ARGS[2], NO_COUNT)
READ_CALL(pread64, CALL_PREAD64, ARGS[2], ARGS[3])
READ_CALL(readv, CALL_READV, NO_BYTES, NO_COUNT)
READ_CALL(preadv, CALL_PREADV, NO_BYTES, ARGS[3])
READ_CALL(preadv2, CALL_PREADV2, NO_BYTES, ARGS[3])

static INLINE int writes(void *ctx, u32 call, u64 bytes)
{
	RECORD(rec_write, r);

	if (!traced() || !reserve(r, KIND_WRITE, ENGINE_KERNEL))
		return 0;
	r->bytes = bytes;
	r->fd = ARGS[0];
	r->call = call;
	r->pad[0] = r->pad[1] = 0;
	submit(ctx, r);
	return 0;
}

/* What the C library gathers: its buffer and what did not fit into it. Of more parts, those after the second do not count. */
static INLINE int writes_parts(void *ctx)
{
	u64 part[4] = {};

	if (traced())
		bpf_probe_read_user(part, ARGS[2] > 1 ? 32 : 16, (void *)ARGS[1]);
	return writes(ctx, CALL_WRITEV, part[1] + part[3]);
}

TRACEPOINT(syscalls, sys_enter_write)
{
	return writes(ctx, CALL_WRITE, ARGS[2]);
}

TRACEPOINT(syscalls, sys_enter_writev)
{
	return writes_parts(ctx);
}

TRACEPOINT(syscalls, sys_enter_sendto)
{
	return writes(ctx, CALL_SENDTO, ARGS[2]);
}

/* The begin of any of these calls, by its number. */
static INLINE int moves_bytes(void *ctx, u64 number)
{
	u64 bytes = ARGS[2], offset = ARGS[3];
	u32 call;

	switch (number) {
	case SYSCALL_READ: call = CALL_READ, offset = NO_COUNT; break;
	case SYSCALL_PREAD64: call = CALL_PREAD64; break;
	case SYSCALL_READV: call = CALL_READV, bytes = NO_BYTES, offset = NO_COUNT; break;
	case SYSCALL_PREADV: call = CALL_PREADV, bytes = NO_BYTES; break;
	case SYSCALL_PREADV2: call = CALL_PREADV2, bytes = NO_BYTES; break;
	case SYSCALL_WRITE: return writes(ctx, CALL_WRITE, bytes);
	case SYSCALL_WRITEV: return writes_parts(ctx);
	case SYSCALL_SENDTO: return writes(ctx, CALL_SENDTO, bytes);
	default: return 0;
	}
	return read_begins(ctx, call, ARGS[0], bytes, offset);
}

static INLINE void fault_begins(u32 tid, u64 ino, u32 dev, u32 page, u32 last, u32 flags)
{
	struct faulting f = {bpf_ktime_get_ns(), ino, dev, page, last, 0, flags, 0};

	map_update(MAP(faulting), &tid, &f);
}

/* The fault handler looks up the page: at its begin, and again if it had to wait and is retried. */
RECENT_TRACEPOINT(filemap, mm_filemap_fault, HAS_RECORD(mm_filemap_fault))
{
	u32 tid = (u32)bpf_get_current_pid_tgid(), dev = FIELD(ctx, mm_filemap_fault, s_dev, u32);
	u64 ino = FIELD(ctx, mm_filemap_fault, i_ino, unsigned long);
	u32 page = FIELD(ctx, mm_filemap_fault, index, unsigned long);
	struct faulting *f;

	if (!traced())
		return 0;
	f = map_lookup(MAP(faulting), &tid);
	if (!f || f->ino != ino || f->dev != dev || page < f->page || page > f->last) {
		fault_begins(tid, ino, dev, page, page, FAULT_EXACT);
		return 0;
	}
	f->page = f->last = page;
	f->flags = FAULT_EXACT;
	return 0;
}

/* Pages around the touched one are mapped if in the page cache: before the handler above, instead of it, or after a retry. */
RECENT_TRACEPOINT(filemap, mm_filemap_map_pages, HAS_RECORD(mm_filemap_op_page_cache_range))
{
	u32 tid = (u32)bpf_get_current_pid_tgid(), dev = FIELD(ctx, mm_filemap_op_page_cache_range, s_dev, u32);
	u64 ino = FIELD(ctx, mm_filemap_op_page_cache_range, i_ino, unsigned long);
	u32 page = FIELD(ctx, mm_filemap_op_page_cache_range, index, unsigned long);
	u32 last = FIELD(ctx, mm_filemap_op_page_cache_range, last_index, unsigned long);
	struct faulting *f;

	if (!traced())
		return 0;
	f = map_lookup(MAP(faulting), &tid);
	if (!f || f->ino != ino || f->dev != dev || f->page < page || f->last > last)
		fault_begins(tid, ino, dev, page, last, 0);
	return 0;
}

/* log2 of the pages added at once; kernels without large folios add one. */
static INLINE u32 order_of(void *ctx)
{
#ifdef LOADER_BCC
	return OFFSET_mm_filemap_op_page_cache_order ? FIELD(ctx, mm_filemap_op_page_cache, order, u8) : 0;
#else
	struct trace_event_raw_mm_filemap_op_page_cache *added = ctx;

	return bpf_core_field_exists(added->order) ? added->order : 0;
#endif
}

/*
 * A kernel without a tracepoint at the begin of faults still has one for the pages that they add: the pages that the thread
 * added last, in one contiguous run, are those that its next major fault waited for.
 */
static INLINE void infer_fault(struct faulting *f, u32 tid, u64 ino, u32 dev, u32 page, u32 pages)
{
	if (!f || f->ino != ino || f->dev != dev || page != f->page + f->added) {
		fault_begins(tid, ino, dev, page, page, 0);
		f = map_lookup(MAP(faulting), &tid);
	}
	if (f)
		f->added += pages;
}

TRACEPOINT(filemap, mm_filemap_add_to_page_cache)
{
	u32 tid = (u32)bpf_get_current_pid_tgid(), dev = FIELD(ctx, mm_filemap_op_page_cache, s_dev, u32);
	u64 ino = FIELD(ctx, mm_filemap_op_page_cache, i_ino, unsigned long);
	u32 page = FIELD(ctx, mm_filemap_op_page_cache, index, unsigned long), pages = 1u << (order_of(ctx) & 31);
	struct settings *s = settings();
	struct faulting *f;
	u64 *read;

	if (!traced() || !s)
		return 0;
	f = map_lookup(MAP(faulting), &tid);
	read = map_lookup(MAP(reading), &tid);
	if (read && !(f && !s->infer_faults))
		*read += pages;
	else if (s->infer_faults)
		infer_fault(f, tid, ino, dev, page, pages);
	else if (f && f->ino == ino && f->dev == dev)
		f->added += pages;
	return 0;
}

/* The kernel counts a fault at its end; one without a file tracepoint is of anonymous memory, and I/O only if major. */
static INLINE int fault_ends(void *ctx, u32 major)
{
	u32 tid = (u32)bpf_get_current_pid_tgid();
	struct faulting *f = map_lookup(MAP(faulting), &tid), was = {};
	struct settings *s;
	RECORD(rec_page_fault, r);

	if (!f && (!major || !traced()))
		return 0;
	if (f)
		was = *f;
	map_delete(MAP(faulting), &tid);
	s = settings();
	if (!s || (!major && s->infer_faults))
		return 0;
	if (!reserve(r, KIND_PAGE_FAULT, ENGINE_KERNEL))
		return 0;
	r->begin = was.begin;
	r->ino = was.ino;
	r->dev = was.dev;
	r->page = was.page;
	r->added = was.added;
	r->flags = was.flags | major;
	submit(ctx, r);
	return 0;
}

PERF_EVENT(major_faults)
{
	return fault_ends(ctx, FAULT_MAJOR);
}

PERF_EVENT(minor_faults)
{
	return fault_ends(ctx, 0);
}

/* The thread itself, or a kernel worker in its process (io_uring's). */
static INLINE bool ours(u64 id)
{
	u32 tid = (u32)id, pid = id >> 32;

	return map_lookup(MAP(threads), &tid) != 0 || map_lookup(MAP(threads), &pid) != 0;
}

static INLINE struct request_key request_at(u32 dev, u64 sector)
{
	struct request_key key = {sector, dev, 0};

	return key;
}

/* The request is created on the requesting thread; it may be issued later, on another one. */
TRACEPOINT(block, block_io_start)
{
	struct request_key key = request_at(FIELD(ctx, block_rq, dev, u32), FIELD(ctx, block_rq, sector, u64));
	u64 id = bpf_get_current_pid_tgid();
	struct asker owner = {id >> 32, (u32)id};

	if (ours(id))
		map_update(MAP(requests), &key, &owner);
	else
		map_delete(MAP(requests), &key); /* an earlier request of ours at this sector, whose answer was missed */
	return 0;
}

TRACEPOINT(block, block_rq_issue)
{
	struct request_key key = request_at(FIELD(ctx, block_rq, dev, u32), FIELD(ctx, block_rq, sector, u64));
	struct asker *known = map_lookup(MAP(requests), &key), owner;
	u64 id = bpf_get_current_pid_tgid();
	RECORD(rec_block_issue, r);

	if (!known && !ours(id))
		return 0;
	owner.pid = known ? known->pid : id >> 32;
	owner.tid = known ? known->tid : (u32)id;
	map_update(MAP(requests), &key, &owner);
	if (!reserve(r, KIND_BLOCK_ISSUE, ENGINE_KERNEL))
		return 0;
	r->h.pid = owner.pid;
	r->h.tid = owner.tid;
	r->sector = key.sector;
	r->dev = key.dev;
	r->bytes = FIELD(ctx, block_rq, bytes, u32);
	bpf_probe_read_kernel(r->rwbs, sizeof(r->rwbs), FIELD_AT(ctx, block_rq, rwbs));
	r->pad = 0;
	submit(ctx, r);
	return 0;
}

/* Linux 5.15: d152c682f03c "block: add an explicit ->disk backpointer to the request_queue"; the request has it until 5.17. */
static INLINE void *disk_of(void *request)
{
	if (HAS_FIELD(request, rq_disk))
		return KERNEL_READ(request, rq_disk, request, void *);
	return KERNEL_READ(request_queue, disk, KERNEL_READ(request, q, request, void *), void *);
}

/* The key as in the tracepoint of issued requests: sector 0 for one without a sector, a flush. */
static INLINE struct request_key key_of(void *request)
{
	void *disk = disk_of(request);
	u32 major = KERNEL_READ(gendisk, major, disk, s32), minor = KERNEL_READ(gendisk, first_minor, disk, s32);
	u64 sector = KERNEL_READ(request, __sector, request, u64);

	return request_at(major << MINOR_BITS | minor, sector == NO_SECTOR ? 0 : sector);
}

/* Newer kernels report a status of the block layer: convert it to the error of system calls, as in block/blk-core.c. */
static INLINE s32 error_of(s32 status)
{
	switch (status) {
	case 1: return -95;  /* BLK_STS_NOTSUPP, EOPNOTSUPP */
	case 2: return -110; /* BLK_STS_TIMEOUT, ETIMEDOUT */
	case 3: return -28;  /* BLK_STS_NOSPC, ENOSPC */
	case 4: return -67;  /* BLK_STS_TRANSPORT, ENOLINK */
	case 5: return -121; /* BLK_STS_TARGET, EREMOTEIO */
	case 6: return -52;  /* BLK_STS_RESV_CONFLICT, EBADE */
	case 7: return -61;  /* BLK_STS_MEDIUM, ENODATA */
	case 8: return -84;  /* BLK_STS_PROTECTION, EILSEQ */
	case 9: return -12;  /* BLK_STS_RESOURCE, ENOMEM */
	case 11: return -78; /* BLK_STS_DM_REQUEUE, EREMCHG */
	case 12: return -11; /* BLK_STS_AGAIN, EAGAIN */
	default: return status > 0 ? -5 : status; /* EIO; older kernels report the error itself */
	}
}

RAW_TRACEPOINT(block_rq_complete)
{
	struct request_key key = key_of((void *)RAW_ARG(ctx, 0));
	struct asker *known = map_lookup(MAP(requests), &key), owner;
	RECORD(rec_block_done, r);

	if (!known)
		return 0;
	owner = *known;
	map_delete(MAP(requests), &key);
	if (!reserve(r, KIND_BLOCK_DONE, ENGINE_KERNEL))
		return 0;
	r->h.pid = owner.pid;
	r->h.tid = owner.tid;
	r->sector = key.sector;
	r->dev = key.dev;
	r->error = error_of(RAW_ARG(ctx, 1));
	r->pad[0] = r->pad[1] = 0;
	submit(ctx, r);
	return 0;
}
