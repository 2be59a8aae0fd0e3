/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The part of ggml's public struct ggml_tensor (ggml.h) that says what a tensor is. */
#ifndef MOESCOPE_GGML_H
#define MOESCOPE_GGML_H

struct ggml_tensor_view {
	u32 type;
	u32 pad;
	u64 buffer;
	s64 ne[4];
	u64 nb[4];
	u32 op;
	s32 op_params[16];
	s32 flags;
	u64 src[MAX_SOURCES];
	u64 view_src;
	u64 view_offs;
	u64 data;
	char name[64];
};

#endif
