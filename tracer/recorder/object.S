/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The deflated BPF programs for either kind of buffer, each preceded by its size in 8 bytes. */
	.section .rodata
	.globl packed_for_ring, packed_for_ring_end, packed_for_perf, packed_for_perf_end
	.balign 8
packed_for_ring:
	.incbin RING_OBJECT
packed_for_ring_end:
	.balign 8
packed_for_perf:
	.incbin PERF_OBJECT
packed_for_perf_end:
	.section .note.GNU-stack,"",%progbits
