/*
 * The messages between llama.cpp's Hexagon backend and its processor, by ggml/src/ggml-hexagon/htp/htp-ops.h: a request, and in a
 * buffer beside it the descriptions of buffers, tensors and operators, then room for a profile of each operator. LAYOUT chooses
 * the version as tracer/engines/hexagon.toml numbers them; 9 is none that ever was.
 */
#ifndef MOESCOPE_HEXAGON_MESSAGES_H
#define MOESCOPE_HEXAGON_MESSAGES_H

#include <stdint.h>

#ifndef LAYOUT
#define LAYOUT 3
#endif

#define N_TRACES 11
#define STATUS_OK 1

struct buffer_desc {
	uint64_t base, size;
	uint32_t flags, fd;
};

#define IS_WIDE (LAYOUT == 3 || LAYOUT == 9)

struct tensor_desc {
#if LAYOUT >= 3
#if IS_WIDE
	uint64_t data;
#else
	uint32_t data, reserved;
#endif
	uint32_t size, flags, type;
	uint16_t bi, ti;
#else
	uint32_t data, size, flags;
	uint16_t type, bi;
#endif
	uint32_t ne[4], nb[4];
};

struct op_desc {
	uint32_t opcode, flags;
	int32_t params[16];
#if LAYOUT == 1
	uint16_t src[6], dst;
#else
	int32_t kernel_params[32];
#if LAYOUT == 9
	uint32_t news[3];
#endif
	uint16_t src[IS_WIDE ? 10 : 6], dst[4], pad[2];
#endif
};

#if LAYOUT == 1
#define FIRST_DST(op) ((op)->dst)
#else
#define FIRST_DST(op) ((op)->dst[0])
#endif

struct op_profile {
	uint32_t opcode, usecs;
#if LAYOUT == 1
	uint32_t cycles, pad;
#else
	uint32_t cycles_start, cycles_stop;
#endif
	uint32_t pmu[8];
};

struct request {
#if IS_WIDE
	uint64_t seq;
	uint32_t n_bufs, n_tensors, n_ops, n_traces;
#else
	uint32_t seq, n_bufs, n_tensors, n_ops, n_traces, pad;
#endif
};

struct response {
#if IS_WIDE
	uint64_t seq, cycles_start, cycles_stop;
	uint32_t status, n_bufs, n_tensors, n_ops, usecs, n_traces[N_TRACES];
#else
	uint32_t seq, status, n_bufs, n_tensors, n_ops;
#if LAYOUT == 1
	uint32_t pad;
#else
	uint32_t n_traces[N_TRACES];
#if LAYOUT == 2
	uint8_t pad[8];
#else
	uint32_t usecs, pad;
	uint64_t cycles_start, cycles_stop;
#endif
#endif
#endif
};

#endif
