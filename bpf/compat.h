/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Lets one source compile for libbpf (CO-RE) and for BCC.
 *
 * libbpf: maps are declared here and found by name; kernel fields are relocated against the running kernel's BTF.
 * BCC: the loader defines LOADER_BCC, passes the file descriptor of each map as MAP_FD_<name> and the offset of each
 * kernel field as OFFSET_<field>, because the headers BCC compiles against need not be the running kernel's. The same
 * holds for tracepoint fields, from tracefs: FIELD(ctx, event, field, type) reads one, FIELD_AT is an array's address.
 * HAS_RECORD(event): whether this kernel has the record; if it does not, the verifier never sees the code that reads it.
 * KERNEL_AT(type, field, pointer) is the address of a field of a kernel struct; KERNEL_READ below reads it; HAS_FIELD is
 * true if this kernel's struct has it. CURRENT_SYSCALL is the number of the running thread's system call, below 0 for none, where
 * HAS_CURRENT_REGS.
 */
#ifndef MOESCOPE_COMPAT_H
#define MOESCOPE_COMPAT_H

#define INLINE inline __attribute__((always_inline))

/*
 * A function of up to five numbers that the verifier checks by itself, once, and not for each turn of the loop that calls it:
 *
 *	CHECKED_ONCE(send_part, u64 address, u32 first)		CALL_CHECKED(send_part, address, first)
 *
 * It has `ctx`, which only perf buffers need: there, and where BCC loads, it is inlined.
 */
#if defined(LOADER_BCC) || defined(BUFFER_PERF)
#define CHECKED_ONCE(name, ...) static INLINE int name(void *ctx, __VA_ARGS__)
#define CALL_CHECKED(name, ...) name(ctx, __VA_ARGS__)
#else
#define CHECKED_ONCE(name, ...) __attribute__((noinline)) int name(__VA_ARGS__)
#define CALL_CHECKED(name, ...) name(__VA_ARGS__)
#endif

/* Bytes that the call instruction has pushed when a function begins. */
#if defined(__TARGET_ARCH_arm64) || defined(__aarch64__)
#define RETURN_ADDRESS_BYTES 0
#else
#define RETURN_ADDRESS_BYTES 8
#endif

/* Numbers of system calls. */
#if defined(__TARGET_ARCH_arm64) || defined(__aarch64__)
enum { SYSCALL_OPENAT = 56, SYSCALL_READ = 63, SYSCALL_READV = 65, SYSCALL_PREAD64 = 67, SYSCALL_PREADV = 69 };
enum { SYSCALL_MMAP = 222, SYSCALL_PREADV2 = 286, SYSCALL_WRITE = 64, SYSCALL_WRITEV = 66, SYSCALL_SENDTO = 206 };
#else
enum { SYSCALL_READ = 0, SYSCALL_MMAP = 9, SYSCALL_PREAD64 = 17, SYSCALL_READV = 19, SYSCALL_OPENAT = 257 };
enum { SYSCALL_PREADV = 295, SYSCALL_PREADV2 = 327, SYSCALL_WRITE = 1, SYSCALL_WRITEV = 20, SYSCALL_SENDTO = 44 };
#endif

#ifdef LOADER_BCC

#include <uapi/linux/ptrace.h>

#define MAP(name) ((void *)bpf_pseudo_fd(1, MAP_FD_##name))
#define HAS_RECORD(event) 1
#define FIELD_AT(ctx, event, field) ((char *)(ctx) + OFFSET_##event##_##field)
#define FIELD(ctx, event, field, type) (*(type *)FIELD_AT(ctx, event, field))
#define map_lookup(map, key) bpf_map_lookup_elem_((u64)map, (void *)(key))
#define map_update(map, key, value) bpf_map_update_elem_((u64)map, (void *)(key), (void *)(value), 0)
#define map_delete(map, key) bpf_map_delete_elem_((u64)map, (void *)(key))
#define BARE_UPROBE(name) int name(struct pt_regs *ctx)
#define BARE_TRACEPOINT(category, name) int name(void *ctx)
#define NUMBER_SYMBOL(name)
#define BARE_PERF_EVENT(name) int name(void *ctx)
#define BARE_RAW_PROGRAM(tracepoint, name) int name(void *ctx)
#define BARE_RAW_TRACEPOINT(name) BARE_RAW_PROGRAM(name, name)
#define KERNEL_AT(type, field, pointer) ((char *)(pointer) + OFFSET_##type##_##field)
#define HAS_FIELD(type, field) (OFFSET_##type##_##field != OFFSET_OF_NOTHING)
#define HAS_CURRENT_REGS 0
#define CURRENT_SYSCALL() 0
#define task_counter(field)                                                                                            \
	({                                                                                                             \
		unsigned long value_ = 0;                                                                              \
		bpf_probe_read_kernel(&value_, sizeof(value_), KERNEL_AT(task_struct, field, bpf_get_current_task())); \
		value_;                                                                                                \
	})
#if defined(__x86_64__) || defined(__TARGET_ARCH_x86)
#define REG(ctx, x86, arm) ((ctx)->x86)
#define STACK(ctx) ((ctx)->sp)
#define PLACE(ctx) ((ctx)->ip)
#else
#define REG(ctx, x86, arm) ((ctx)->regs[arm])
#define STACK(ctx) ((ctx)->sp)
#define PLACE(ctx) ((ctx)->pc)
#endif
#define ARG1(ctx) REG(ctx, di, 0)
#define ARG2(ctx) REG(ctx, si, 1)
#define ARG3(ctx) REG(ctx, dx, 2)
#define ARG4(ctx) REG(ctx, cx, 3)
#define ARG5(ctx) REG(ctx, r8, 4)
#define ARG6(ctx) REG(ctx, r9, 5)
#define RESULT(ctx) REG(ctx, ax, 0)

#else

#include <linux/bpf.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

typedef __u8 u8;
typedef __u16 u16;
typedef __u32 u32;
typedef __u64 u64;
typedef __s32 s32;
typedef __s64 s64;

/* The context of a program on a uprobe, as in the kernel's uapi headers; copied so that any machine compiles for both. */
#if defined(__TARGET_ARCH_x86)
struct pt_regs {
	u64 r15, r14, r13, r12, rbp, rbx, r11, r10, r9, r8, rax, rcx, rdx, rsi, rdi, orig_rax, rip, cs, eflags, rsp, ss;
};
#elif defined(__TARGET_ARCH_arm64)
struct pt_regs {
	u64 regs[31], sp, pc, pstate;
};
#else
#error "define __TARGET_ARCH_x86 or __TARGET_ARCH_arm64"
#endif

/* Features of this kernel: set by the loader before programs are loaded, so that the verifier never sees the unused branch. */
const volatile bool has_task_btf, has_cookies;

/* The kernel types that are read; the loader finds their real offsets. */
struct thread_info {
	u32 cpu;
} __attribute__((preserve_access_index));

struct task_struct {
	struct thread_info thread_info;
	u32 cpu;
	s32 pid;
	s32 prio;
	char comm[16];
	unsigned long min_flt;
	unsigned long maj_flt;
	struct files_struct *files;
	struct uprobe_task *utask;
	u32 __state;
	long state; /* until Linux 5.14: 2f064a59a11f "sched: Change task_struct::state" */
} __attribute__((preserve_access_index));

struct uprobe_task {
	struct return_instance *return_instances;
} __attribute__((preserve_access_index));

/* A call of a function with a probe at its return: the kernel has put another return address on the stack. */
struct return_instance {
	unsigned long stack;	      /* the stack pointer at the call */
	unsigned long orig_ret_vaddr; /* the function's own return address */
	struct return_instance *next; /* of the outer call */
} __attribute__((preserve_access_index));

#define RELOCATED __attribute__((preserve_access_index))
/* A thread's registers when it entered the kernel, as the kernel itself has them. */
struct pt_regs___kernel {
	long orig_ax;	/* x86-64 */
	s32 syscallno; /* arm64 */
} RELOCATED;

/* The used fields of the kernel's tracepoint records, whose layouts differ between versions. */
struct trace_event_raw_sched_switch {
	char prev_comm[16];
	s32 prev_pid;
	s32 prev_prio;
	long prev_state;
	char next_comm[16];
	s32 next_pid;
	s32 next_prio;
} RELOCATED;

struct trace_event_raw_sched_process_fork {
	s32 parent_pid;
	s32 child_pid;
} RELOCATED;

struct trace_event_raw_sched_process_exec {
	u32 __data_loc_filename;
} RELOCATED;

struct trace_event_raw_mm_filemap_fault {
	unsigned long i_ino;
	u32 s_dev;
	unsigned long index;
} RELOCATED;

struct trace_event_raw_mm_filemap_op_page_cache_range {
	unsigned long i_ino;
	u32 s_dev;
	unsigned long index;
	unsigned long last_index;
} RELOCATED;

struct trace_event_raw_mm_filemap_op_page_cache {
	unsigned long i_ino;
	unsigned long index;
	u32 s_dev;
	unsigned char order;
} RELOCATED;

struct trace_event_raw_block_rq {
	u32 dev;
	u64 sector;
	u32 bytes;
	char rwbs[8];
} RELOCATED;

struct trace_event_raw_cpu {
	u32 state;
	u32 cpu_id;
} RELOCATED;

struct trace_event_raw_cpu_frequency_limits {
	u32 min_freq;
	u32 max_freq;
	u32 cpu_id;
} RELOCATED;

struct trace_event_raw_thermal_temperature {
	int id;
	int temp;
} RELOCATED;

struct trace_event_raw_cdev_update {
	u32 __data_loc_type;
	unsigned long target;
} RELOCATED;

#define HAS_RECORD(event) bpf_core_type_exists(struct trace_event_raw_##event)
#define MAP(name) (&name)
#define FIELD_AT(ctx, event, field) (((struct trace_event_raw_##event *)(ctx))->field)
#define FIELD(ctx, event, field, type) (((struct trace_event_raw_##event *)(ctx))->field)
#define map_lookup(map, key) bpf_map_lookup_elem(map, key)
#define map_update(map, key, value) bpf_map_update_elem(map, key, value, BPF_ANY)
#define map_delete(map, key) bpf_map_delete_elem(map, key)
#define BARE_UPROBE(name) SEC("uprobe") int name(struct pt_regs *ctx)
#define BARE_TRACEPOINT(category, name) SEC("tracepoint/" #category "/" #name) int name(void *ctx)
/* Its offset in the section tells user space the number under which the program counts its runs. */
#define NUMBER_SYMBOL(name) static const char number_##name SEC(".numbers") __attribute__((used)) = 0;
#define BARE_PERF_EVENT(name) SEC("perf_event") int name(void *ctx)
#define BARE_RAW_PROGRAM(tracepoint, name) SEC("raw_tracepoint/" #tracepoint) int name(void *ctx)
#define BARE_RAW_TRACEPOINT(name) BARE_RAW_PROGRAM(name, name)
#define KERNEL_AT(type, field, pointer) ((void *)&((struct type *)(pointer))->field)
#define HAS_FIELD(type, field) bpf_core_field_exists(((struct type *)0)->field)
/* Linux 5.15: dd6e10fbd9fb "bpf: Add bpf_task_pt_regs() helper" */
#define HAS_CURRENT_REGS (has_task_btf && bpf_core_enum_value_exists(enum bpf_func_id, BPF_FUNC_task_pt_regs))
#if defined(__TARGET_ARCH_x86)
#define CURRENT_SYSCALL() KERNEL_READ(pt_regs___kernel, orig_ax, bpf_task_pt_regs(bpf_get_current_task_btf()), long)
#else
#define CURRENT_SYSCALL() KERNEL_READ(pt_regs___kernel, syscallno, bpf_task_pt_regs(bpf_get_current_task_btf()), s32)
#endif
#define task_counter(field)                                                                                            \
	({                                                                                                             \
		unsigned long value_ = 0;                                                                              \
		if (has_task_btf)                                                                                      \
			value_ = bpf_get_current_task_btf()->field;                                                    \
		else                                                                                                   \
			bpf_probe_read_kernel(&value_, sizeof(value_),                                                 \
					      &((struct task_struct *)bpf_get_current_task())->field);                 \
		value_;                                                                                                \
	})

#if defined(__TARGET_ARCH_x86)
#define REG(ctx, x86, arm) ((ctx)->x86)
#define STACK(ctx) ((ctx)->rsp)
#define PLACE(ctx) ((ctx)->rip)
#else
#define REG(ctx, x86, arm) ((ctx)->regs[arm])
#define STACK(ctx) ((ctx)->sp)
#define PLACE(ctx) ((ctx)->pc)
#endif
#define ARG1(ctx) REG(ctx, rdi, 0)
#define ARG2(ctx) REG(ctx, rsi, 1)
#define ARG3(ctx) REG(ctx, rdx, 2)
#define ARG4(ctx) REG(ctx, rcx, 3)
#define ARG5(ctx) REG(ctx, r8, 4)
#define ARG6(ctx) REG(ctx, r9, 5)
#define RESULT(ctx) REG(ctx, rax, 0)

#endif

#define KERNEL_READ(type, field, pointer, as)                                                                          \
	({                                                                                                             \
		as read_ = 0;                                                                                          \
		bpf_probe_read_kernel(&read_, sizeof(read_), KERNEL_AT(type, field, pointer));                         \
		read_;                                                                                                 \
	})

/* An argument of a raw program's tracepoint. */
#define RAW_ARG(ctx, number) (((u64 *)(ctx))[number])

/* The eighth argument at a function's entry. */
#if defined(__TARGET_ARCH_arm64) || defined(__aarch64__)
#define ARG8(ctx) REG(ctx, unused, 7)
#else
#define ARG8(ctx)                                                                                                      \
	({                                                                                                             \
		u64 value_ = 0;                                                                                        \
		bpf_probe_read_user(&value_, sizeof(value_), (void *)(STACK(ctx) + 16));                               \
		value_;                                                                                                \
	})
#endif

/* In a called function: the return address, and the stack pointer at the call. */
#if defined(__TARGET_ARCH_arm64) || defined(__aarch64__)
/* After `paciasp` it is signed in the bits that are 0 in user space addresses. */
#define RETURN_ADDRESS(ctx) (REG(ctx, unused, 30) & ((1ULL << 48) - 1))
#define CALLER_STACK(ctx) STACK(ctx)
#else
#define RETURN_ADDRESS(ctx)                                                                                            \
	({                                                                                                             \
		u64 address_ = 0;                                                                                      \
		bpf_probe_read_user(&address_, sizeof(address_), (void *)STACK(ctx));                                  \
		address_;                                                                                              \
	})
#define CALLER_STACK(ctx) (STACK(ctx) + 8)
#endif
#endif
