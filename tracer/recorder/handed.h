/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Programs that another process compiles and hands over. */
#ifndef MOESCOPE_HANDED_H
#define MOESCOPE_HANDED_H

#include "recorder.h"

struct btf;

/* Byte offset of a struct's member, also within its anonymous members; -1 if it has none. */
s64 offset_in(const struct btf *btf, s32 id, const char *wanted);
/* "struct_member" → offset in this kernel's structs, of those that our programs declare and it has. */
json_t *member_offsets(const struct btf *own, const struct btf *kernel);
/*
 * Has the sources compiled onto these maps, or fails with the reason; takes the request. It takes seconds, in which `waiting` is
 * called now and then.
 */
void begin_compiling(int socket, json_t *request, const int *maps, int count, void (*waiting)(void));
/* The descriptor of a program, or -1 and why the kernel refused it. */
int compiled_program(const char *name, u32 type, u32 attach_type, char *why, size_t bytes);

#endif
