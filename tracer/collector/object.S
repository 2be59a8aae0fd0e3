/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The deflated BPF programs, preceded by their size in 8 bytes. */
	.section .rodata
	.globl packed_object
	.globl packed_object_end
	.balign 8
packed_object:
	.incbin OBJECT
packed_object_end:
	.section .note.GNU-stack,"",%progbits
