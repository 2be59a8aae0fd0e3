/* SPDX-License-Identifier: Apache-2.0 */
/* Functions of one instruction to probe (label s_NAME) between nothing and a return: long f_NAME(long x0, long x1). */
#define F(name, before, insn, after)                                                                                   \
	__asm__(".text\n.arch armv8.5-a\n.balign 8\n.globl f_" #name "\n.type f_" #name ",%function\nf_" #name ": " before              \
		"\n.globl s_" #name "\n.type s_" #name ",%function\ns_" #name ": " insn "\n" after "\n ret\n.size s_" #name ", 4\n.size f_" #name \
		", . - f_" #name "\n")
F(nop, "", "nop", "");
F(b, "", "b 1f", "mov x0, #1\n1:");
F(bcond, "cmp x0, x1", "b.ne 1f", "mov x0, #1\n1:");
F(cbz, "", "cbz x0, 1f", "mov x0, #1\n1:");
F(cbnz, "", "cbnz x0, 1f", "mov x0, #1\n1:");
F(tbz, "", "tbz x0, #3, 1f", "mov x0, #1\n1:");
F(tbnz, "", "tbnz x0, #0, 1f", "mov x0, #1\n1:");
F(adr, "", "adr x0, 1f", "1:");
F(adrp, "", "adrp x0, f_nop", "");
F(bl, "mov x9, x30", "bl 1f", "b 2f\n1: add x0, x0, #5\n ret\n2: mov x30, x9");
F(blr, "mov x9, x30\n adr x10, 1f", "blr x10", "b 2f\n1: add x0, x0, #5\n ret\n2: mov x30, x9");
F(br, "adr x10, 1f", "br x10", "1: add x0, x0, #7");
F(ret, "add x0, x0, #9", "ret", "");
F(ldr_lit_x, "", "ldr x0, 1f", "ret\n.balign 8\n1: .quad 0x1122334455667788");
F(ldr_lit_w, "", "ldr w0, 1f", "ret\n.balign 8\n1: .quad 0x1122334455667788");
F(ldrsw_lit, "", "ldrsw x0, 1f", "ret\n.balign 8\n1: .quad 0xf1223344f5667788");
F(ldr_lit_d, "", "ldr d0, 1f", "fmov x0, d0\n ret\n.balign 8\n1: .quad 0x1122334455667788");
F(prfm_lit, "", "prfm pldl1keep, 1f", "1:");
F(mov, "", "mov x0, x1", "");
F(add, "", "add x0, x0, x1", "");
F(stp, "", "stp x29, x30, [sp, #-16]!", "ldp x29, x30, [sp], #16");
F(subsp, "", "sub sp, sp, #64", "add sp, sp, #64");
F(ldp, "stp x0, x1, [sp, #-16]!", "ldp x1, x0, [sp], #16", "");
F(str, "", "str x0, [sp, #-16]!", "ldr x0, [sp], #16");
F(paciasp, "", "hint #25", "hint #29");
F(bti_c, "", "hint #34", "");
F(yield, "", "yield", "");
F(dmb, "", "dmb ish", "");
F(isb, "", "isb", "");
F(mrs_tpidr, "", "mrs x0, tpidr_el0", "mov x0, #3");
F(ldxr, "sub sp, sp, #16\n str x0, [sp]\n mov x9, sp", "ldxr x0, [x9]", "clrex\n add sp, sp, #16");
F(ldar, "sub sp, sp, #16\n str x0, [sp]\n mov x9, sp", "ldar x0, [x9]", "add sp, sp, #16");
F(ldadd, "sub sp, sp, #16\n str x0, [sp]\n mov x9, sp", "ldaddal x1, x0, [x9]", "ldr x0, [sp]\n add sp, sp, #16");
F(casal, "sub sp, sp, #16\n str x0, [sp]\n mov x9, sp", "casal x0, x1, [x9]", "ldr x0, [sp]\n add sp, sp, #16");
F(fadd, "scvtf d0, x0", "fadd d0, d0, d0", "fcvtzs x0, d0");
F(svc, "mov x8, #172", "svc #0", "mov x0, #2");
