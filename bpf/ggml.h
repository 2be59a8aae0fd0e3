/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The used parts of ggml's structs, and the places in a caller's frame where a build may keep its loop variables. */
#ifndef MOESCOPE_GGML_H
#define MOESCOPE_GGML_H

/*
 * The part of struct ggml_tensor (ggml.h) that has not changed since 2023. It was followed by a gradient until late 2024; then
 * come the sources, until mid-2024 three counters, the tensor that it views and the offset in that, its data, and its name.
 */
struct ggml_tensor_view {
	u32 type;
	u32 pad;
	u64 buffer;
	s64 ne[4];
	u64 nb[4];
	u32 op;
	s32 op_params[16];
	s32 flags;
};
#define TYPE_I32 26
#define MOST_OPERATORS 512 /* many more than exist */
#define GRADIENT_BYTES 8
#define SOURCES_BYTES (8 * MAX_SOURCES)
#define COUNTERS_BYTES 24
#define DATA_BYTES 8
#define NAME_BEHIND_SOURCES (SOURCES_BYTES + 16 + DATA_BYTES)

/* The part that identifies a tensor's kind, size and sources: from `ne` on, the first sources with or without a gradient. */
struct ggml_tensor_core {
	u64 ne[4];
	u64 nb[4];
	u32 op;
	s32 op_params[16];
	s32 flags;
	u64 src[3];
};

/* struct ggml_cgraph (ggml-impl.h) */
struct ggml_graph_view {
	s32 size;
	s32 n_nodes;
	s32 n_leafs;
	u32 pad;
	u64 nodes;
};

/*
 * Places are numbered: first the registers that a callee must preserve, then the words of the stack upwards from the stack
 * pointer at the call.
 */
#if defined(__TARGET_ARCH_arm64) || defined(__aarch64__)
#define FRAME_REGISTERS 11
#define FRAME_WORDS 53
#else
#define FRAME_REGISTERS 6
#ifdef LOADER_BCC
#define FRAME_BX bx
#define FRAME_BP bp
#else
#define FRAME_BX rbx
#define FRAME_BP rbp
#endif
#define FRAME_WORDS 58 /* a loop with inlined operators has a large frame */
#endif
#define FRAME_PLACES (FRAME_REGISTERS + FRAME_WORDS)

/* Keeps the compiler from reading through a computed pointer into the context, which the verifier refuses. */
#define READ_NOW(value)                                                                                                \
	({                                                                                                             \
		u64 now_ = (value);                                                                                    \
		asm volatile("" : "+r"(now_));                                                                         \
		now_;                                                                                                  \
	})

static INLINE u64 preserved_register(struct pt_regs *ctx, u32 number)
{
	switch (number) {
#if FRAME_REGISTERS == 11
	case 0: return READ_NOW(REG(ctx, unused, 19));
	case 1: return READ_NOW(REG(ctx, unused, 20));
	case 2: return READ_NOW(REG(ctx, unused, 21));
	case 3: return READ_NOW(REG(ctx, unused, 22));
	case 4: return READ_NOW(REG(ctx, unused, 23));
	case 5: return READ_NOW(REG(ctx, unused, 24));
	case 6: return READ_NOW(REG(ctx, unused, 25));
	case 7: return READ_NOW(REG(ctx, unused, 26));
	case 8: return READ_NOW(REG(ctx, unused, 27));
	case 9: return READ_NOW(REG(ctx, unused, 28));
	default: return READ_NOW(REG(ctx, unused, 29));
#else
	case 0: return READ_NOW(REG(ctx, FRAME_BX, 0));
	case 1: return READ_NOW(REG(ctx, FRAME_BP, 0));
	case 2: return READ_NOW(REG(ctx, r12, 0));
	case 3: return READ_NOW(REG(ctx, r13, 0));
	case 4: return READ_NOW(REG(ctx, r14, 0));
	default: return READ_NOW(REG(ctx, r15, 0));
#endif
	}
}

#endif
