/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What this kernel offers, and where it says so. */
#ifndef MOESCOPE_KERNEL_FEATURES_H
#define MOESCOPE_KERNEL_FEATURES_H

#include "recorder.h"

#define UPROBE_MULTI 48 /* enum bpf_attach_type, since Linux 6.6 */
#define AT_RETURN 1
#define MOVE_NUMBER 0xB7
#define UPROBES "/sys/bus/event_source/devices/uprobe/"
#define VMLINUX "/sys/kernel/btf/vmlinux"

struct bpf_insn;

s64 tracepoint_number(const char *category, const char *name); /* -1 if there is none */
s64 number_in(const char *path, const char *before); /* in its first line; -1 if there is none */
/* Linux 6.6: 89ae89f53d20 "bpf: Add multi uprobe link". Such probes are removed in a fraction of the time. */
bool has_multi_links(void);
bool has_uprobes(void);
bool has_cookies(void);
bool has_task_btf(void);
bool has_thread_registers(void); /* of the running thread, in its programs: Linux 5.15 */
int load_bare(const struct bpf_insn *code, size_t count, bool multi);
/* Attaches by a uprobe_multi link: union bpf_attr as in Linux 6.6, which older headers lack. */
int multi_link(int program, const char *path, u64 offset, bool at_return, u64 cookie, pid_t only);

#endif
