// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* From one frame to its caller: by call frame information, whose rules are kept for each address, else by the frame pointer. */
#include <dwarf.h>
#include <stdlib.h>
#include <string.h>

#include "unwind.h"

#define MOST_REGISTERS 33
#define MOST_OPERANDS 64
#define MOST_STEPS 256 /* of an expression */
#define USER_BITS 48   /* of an address; the bits above may sign a return address of arm64 */

enum way {
	LOST,	    /* the caller's value is not known */
	AT_FRAME,   /* in memory, at the frame's address plus `offset` */
	FROM_FRAME, /* the frame's address plus `offset` */
	FROM_REGISTER, /* the value of `other` plus `offset` */
	COMPUTED,   /* by an expression */
	COMPUTED_AT /* in memory, at what an expression gives */
};

/* How to find a register's value in the caller; those without a rule are unchanged. */
struct rule {
	u8 number, way, other;
	u16 count; /* of `operations` */
	s64 offset;
	Dwarf_Op *operations;
};

/* What holds at an address. */
struct row {
	u64 address;
	bool is_signal, is_outermost;
	u8 count;
	struct rule *rules; /* the first gives the frame's address; NULL: nothing is known here */
};

struct rows {
	struct row *slots;
	u32 room, count;
};

/* Registers of one frame, by DWARF's numbers. */
struct state {
	u64 values[MOST_REGISTERS];
	u64 known; /* a bit each */
	u64 pc;
	bool is_exact; /* the program counter is where the frame is, not behind a call */
};

static int stack_register(void)
{
	return is_arm ? 31 : 7;
}

static int frame_register(void)
{
	return is_arm ? 29 : 6;
}

static int return_register(void)
{
	return is_arm ? 30 : 16;
}

static int register_count(void)
{
	return is_arm ? 32 : 17;
}

static bool value_of(const struct state *s, u64 number, u64 *value)
{
	if (number >= MOST_REGISTERS || !(s->known >> number & 1))
		return false;
	*value = s->values[number];
	return true;
}

static void set_value(struct state *s, int number, u64 value)
{
	s->values[number] = value;
	s->known |= 1ULL << number;
}

/* Operations of two operands. */
static bool combine(u8 atom, u64 a, u64 b, u64 *result)
{
	switch (atom) {
	case DW_OP_plus: *result = a + b; return true;
	case DW_OP_minus: *result = a - b; return true;
	case DW_OP_mul: *result = a * b; return true;
	case DW_OP_and: *result = a & b; return true;
	case DW_OP_or: *result = a | b; return true;
	case DW_OP_xor: *result = a ^ b; return true;
	case DW_OP_shl: *result = b < 64 ? a << b : 0; return true;
	case DW_OP_shr: *result = b < 64 ? a >> b : 0; return true;
	case DW_OP_eq: *result = a == b; return true;
	case DW_OP_ne: *result = a != b; return true;
	case DW_OP_lt: *result = (s64)a < (s64)b; return true;
	case DW_OP_le: *result = (s64)a <= (s64)b; return true;
	case DW_OP_gt: *result = (s64)a > (s64)b; return true;
	case DW_OP_ge: *result = (s64)a >= (s64)b; return true;
	default: return false;
	}
}

/* What an operation of no operand but its own adds. */
static bool constant_of(const struct state *s, const Dwarf_Op *op, u64 *value)
{
	if (op->atom >= DW_OP_lit0 && op->atom <= DW_OP_lit31) {
		*value = op->atom - DW_OP_lit0;
		return true;
	}
	if (op->atom >= DW_OP_const1u && op->atom <= DW_OP_consts) {
		*value = op->number;
		return true;
	}
	if (op->atom >= DW_OP_breg0 && op->atom <= DW_OP_breg31 && value_of(s, op->atom - DW_OP_breg0, value)) {
		*value += op->number;
		return true;
	}
	if (op->atom == DW_OP_bregx && value_of(s, op->number, value)) {
		*value += op->number2;
		return true;
	}
	return false;
}

/* The value of an expression without jumps; `frame` is what stands for the frame's address. */
static bool computed(const struct state *s, const struct rule *rule, u64 frame, u64 *result)
{
	u64 stack[MOST_OPERANDS] = {frame}, value;
	int depth = 1; /* the frame's address is there first, as for rules of registers */

	for (int i = 0; i < rule->count && i < MOST_STEPS; i++) {
		const Dwarf_Op *op = &rule->operations[i];

		if (depth == MOST_OPERANDS)
			return false;
		if (constant_of(s, op, &value))
			stack[depth++] = value;
		else if (op->atom == DW_OP_call_frame_cfa)
			stack[depth++] = frame;
		else if (op->atom == DW_OP_dup && depth)
			stack[depth] = stack[depth - 1], depth++;
		else if (op->atom == DW_OP_drop && depth)
			depth--;
		else if (op->atom == DW_OP_plus_uconst && depth)
			stack[depth - 1] += op->number;
		else if (op->atom == DW_OP_deref && depth && read_stack(stack[depth - 1], &value))
			stack[depth - 1] = value;
		else if (depth >= 2 && combine(op->atom, stack[depth - 2], stack[depth - 1], &value))
			stack[--depth - 1] = value;
		else if (op->atom != DW_OP_nop)
			return false;
	}
	*result = depth ? stack[depth - 1] : 0;
	return depth;
}

static bool apply(const struct state *s, const struct rule *rule, u64 frame, u64 *value)
{
	switch (rule->way) {
	case AT_FRAME: return read_stack(frame + rule->offset, value);
	case FROM_FRAME: *value = frame + rule->offset; return true;
	case FROM_REGISTER:
		if (!value_of(s, rule->other, value))
			return false;
		*value += rule->offset;
		return true;
	case COMPUTED: return computed(s, rule, frame, value);
	case COMPUTED_AT: return computed(s, rule, frame, value) && read_stack(*value, value);
	default: return false;
	}
}

/* The simple forms of libdw's expressions: a register plus a number, the frame's address plus a number. */
static bool is_simple(const Dwarf_Op *ops, size_t count, bool is_value, struct rule *rule)
{
	if (count == 1 && ops->atom >= DW_OP_breg0 && ops->atom <= DW_OP_breg31 && is_value) {
		*rule = (struct rule){.way = FROM_REGISTER, .other = ops->atom - DW_OP_breg0, .offset = ops->number};
		return true;
	}
	if (count == 1 && ops->atom == DW_OP_bregx && ops->number < MOST_REGISTERS && is_value) {
		*rule = (struct rule){.way = FROM_REGISTER, .other = ops->number, .offset = ops->number2};
		return true;
	}
	if (count == 1 && ops->atom >= DW_OP_reg0 && ops->atom <= DW_OP_reg31) {
		*rule = (struct rule){.way = FROM_REGISTER, .other = ops->atom - DW_OP_reg0};
		return true;
	}
	if (count == 1 && ops->atom == DW_OP_regx && ops->number < MOST_REGISTERS) {
		*rule = (struct rule){.way = FROM_REGISTER, .other = ops->number};
		return true;
	}
	if (!count || ops->atom != DW_OP_call_frame_cfa || count > 2 || (count == 2 && ops[1].atom != DW_OP_plus_uconst))
		return false;
	*rule = (struct rule){.way = is_value ? FROM_FRAME : AT_FRAME, .offset = count == 2 ? (s64)ops[1].number : 0};
	return true;
}

static struct rule rule_of(const Dwarf_Op *ops, size_t count, bool is_location)
{
	bool is_value = !is_location || ops[count - 1].atom == DW_OP_stack_value;
	struct rule rule;

	if (count && is_location && is_value)
		count--;
	if (is_simple(ops, count, is_value, &rule))
		return rule;
	rule = (struct rule){.way = is_value ? COMPUTED : COMPUTED_AT, .count = count};
	rule.operations = malloc(count * sizeof(*ops) + 1);
	memcpy(rule.operations, ops, count * sizeof(*ops));
	return rule;
}

static void add_rule(struct row *row, Dwarf_Frame *frame, int number, int returns)
{
	Dwarf_Op room[3], *ops;
	size_t count;
	struct rule rule;

	if (dwarf_frame_register(frame, number, room, &ops, &count) || (!count && !ops))
		return;
	if (!count && number == returns)
		row->is_outermost = true;
	rule = count ? rule_of(ops, count, true) : (struct rule){.way = LOST};
	rule.number = number;
	row->rules[row->count++] = rule;
}

static void fill(struct row *row, Dwarf_Frame *frame)
{
	int returns = dwarf_frame_info(frame, NULL, NULL, &row->is_signal);
	Dwarf_Op *ops;
	size_t count;

	if (returns != return_register() || dwarf_frame_cfa(frame, &ops, &count) || !count)
		return;
	row->rules = malloc((register_count() + 1) * sizeof(*row->rules));
	row->rules[row->count++] = rule_of(ops, count, false);
	for (int i = 0; i < register_count(); i++)
		add_rule(row, frame, i, returns);
}

/* The rules of a function in assembly without call frame information, from the instruction at which it is. */
static void fill_by_code(struct process *p, Dwfl_Module *module, struct row *row)
{
	static const u8 dwarf[] = {0, 2, 1, 3, 7, 6, 4, 5, 8, 9, 10, 11, 12, 13, 14, 15};
	const struct mapping *m = mapping_of(p, row->address);
	struct code_way way;
	Dwarf_Addr bias;
	size_t bytes;
	char *code;

	if (!m || !may_read_code(m->path))
		return;
	code = elf_rawfile(dwfl_module_getelf(module, &bias), &bytes);
	if (!code || !follow_code((const u8 *)code, bytes, row->address - m->start + m->offset, &way))
		return;
	row->rules = malloc((register_count() + 2) * sizeof(*row->rules));
	row->rules[row->count++] = (struct rule){.way = FROM_REGISTER, .other = stack_register(), .offset = way.returns_at + WORD};
	row->rules[row->count++] = (struct rule){.number = return_register(), .way = AT_FRAME, .offset = -WORD};
	row->rules[row->count++] = (struct rule){.number = stack_register(), .way = FROM_FRAME};
	for (int i = 0; i < 16; i++) {
		struct rule rule = {.number = dwarf[i], .way = way.restored[i] < 0 ? LOST : AT_FRAME, .offset = way.restored[i] - way.returns_at - WORD};

		if (way.restored[i] != IN_REGISTER && rule.number != stack_register())
			row->rules[row->count++] = rule;
	}
}

/* `is_exact`: the address is an instruction's. */
static void look_up(struct process *p, struct row *row, bool is_exact)
{
	Dwfl_Module *module = dwfl_addrmodule(p->dwfl, row->address);
	Dwarf_CFI *(*const kinds[])(Dwfl_Module *, Dwarf_Addr *) = {dwfl_module_eh_cfi, dwfl_module_dwarf_cfi};
	Dwarf_Frame *frame;

	for (int i = 0; module && !row->rules && i < 2; i++) {
		Dwarf_Addr bias;
		Dwarf_CFI *information = kinds[i](module, &bias);

		if (!information || dwarf_cfi_addrframe(information, row->address - bias, &frame))
			continue;
		fill(row, frame);
		free(frame);
	}
	if (module && !row->rules && is_exact)
		fill_by_code(p, module, row);
}

static struct row *slot_in(struct rows *rows, u64 address)
{
	u32 at = (address * 0x9E3779B97F4A7C15ULL) >> 32 & (rows->room - 1);

	while (rows->slots[at].address && rows->slots[at].address != address)
		at = (at + 1) & (rows->room - 1);
	return &rows->slots[at];
}

static void widen_rows(struct rows *rows)
{
	struct rows wide = {.room = rows->room ? 2 * rows->room : 1024, .count = rows->count};

	wide.slots = calloc(wide.room, sizeof(*wide.slots));
	for (u32 i = 0; i < rows->room; i++)
		if (rows->slots[i].address)
			*slot_in(&wide, rows->slots[i].address) = rows->slots[i];
	free(rows->slots);
	*rows = wide;
}

static const struct row *row_at(struct process *p, u64 address, bool is_exact)
{
	struct row *row;

	if (!p->rows)
		p->rows = calloc(1, sizeof(*p->rows));
	if (2 * p->rows->count >= p->rows->room)
		widen_rows(p->rows);
	row = slot_in(p->rows, address);
	if (!row->address && address) {
		row->address = address;
		p->rows->count++;
		look_up(p, row, is_exact);
	}
	return row;
}

void forget_rows(struct process *p)
{
	for (u32 i = 0; p->rows && i < p->rows->room; i++) {
		for (int k = 0; k < p->rows->slots[i].count; k++)
			free(p->rows->slots[i].rules[k].operations);
		free(p->rows->slots[i].rules);
	}
	if (p->rows)
		free(p->rows->slots);
	free(p->rows);
	p->rows = NULL;
}

/* A return address without its signature. */
static u64 plain_address(u64 address)
{
	return is_arm ? address & ((1ULL << USER_BITS) - 1) : address;
}

static bool step_by_rules(const struct row *row, struct state *s)
{
	struct state caller = *s;
	u64 frame, value;

	if (!apply(s, &row->rules[0], 0, &frame))
		return false;
	for (int i = 1; i < row->count; i++) {
		const struct rule *rule = &row->rules[i];

		if (apply(s, rule, frame, &value))
			set_value(&caller, rule->number, value);
		else
			caller.known &= ~(1ULL << rule->number);
	}
	if (!value_of(&caller, return_register(), &value))
		return false;
	caller.pc = plain_address(value);
	caller.is_exact = row->is_signal;
	*s = caller;
	return true;
}

/* The outermost function has no frame pointer, by the ABIs of x86-64 and arm64. */
static bool is_end_of_chain(const struct process *p, const struct state *s)
{
	u64 at;

	return mapping_of(p, s->pc - !s->is_exact) && value_of(s, frame_register(), &at) && !at;
}

/* A frame pointer points at the caller's and, above it, at the return address, which must be in code. */
static bool step_by_pointer(struct process *p, struct state *s)
{
	u64 at, stack, next, address;

	if (!mapping_of(p, s->pc - !s->is_exact) || !value_of(s, frame_register(), &at) || !value_of(s, stack_register(), &stack) || at < stack || at % WORD)
		return false;
	if (!read_stack(at, &next) || !read_stack(at + WORD, &address))
		return false;
	s->known = 0; /* the others may have been changed */
	set_value(s, stack_register(), at + 2 * WORD);
	set_value(s, frame_register(), next);
	s->pc = plain_address(address);
	s->is_exact = false;
	return true;
}

/*
 * CPython calls a function with `-X perf` through code of its own (Python/asm_trampoline.S), which keeps two words: the frame
 * pointer, or nothing, and the return address.
 */
static bool step_by_trampoline(struct process *p, struct state *s)
{
	u64 at, frame, next, address;

	if (s->is_exact || !is_python(p, s->pc - 1) || !value_of(s, stack_register(), &at) || !read_stack(at + WORD, &address))
		return false;
	if (value_of(s, frame_register(), &frame) && frame == at && read_stack(at, &next))
		set_value(s, frame_register(), next);
	set_value(s, stack_register(), at + 2 * WORD);
	s->pc = plain_address(address);
	return true;
}

/* How the caller was found; -1: it was not. */
static int step(struct process *p, const struct row *row, struct state *s)
{
	if (row->rules)
		return step_by_rules(row, s) ? BY_RULES : -1;
	return step_by_trampoline(p, s) ? BY_RULES : step_by_pointer(p, s) ? BY_POINTER : -1;
}

/* A call makes the stack deeper and is in executable memory; only a function that has called nothing has no frame on arm64. */
static bool is_plausible(const struct process *p, const struct state *caller, const struct state *s, const struct row *row)
{
	u64 before, after;

	if (caller->pc && !mapping_of(p, caller->pc - !caller->is_exact))
		return false;
	if (row->is_signal) /* which may have a stack of its own */
		return true;
	if (!value_of(s, stack_register(), &before) || !value_of(caller, stack_register(), &after))
		return false;
	return after > before || (s->is_exact && after == before && caller->pc != s->pc);
}

enum end unwind_registers(struct process *p, const u64 *registers, u64 pc, struct frames *frames)
{
	struct state s = {.known = (1ULL << register_count()) - 1, .pc = pc, .is_exact = true}, caller;
	bool is_elsewhere = false; /* on the stack that a signal interrupted, which may not be the one that was copied */
	int way = BY_RULES;

	memcpy(s.values, registers, register_count() * sizeof(*registers));
	for (frames->count = 0; frames->count < MOST_FRAMES;) {
		const struct row *row = row_at(p, s.pc - !s.is_exact, s.is_exact);

		frames->rows[frames->count++] = (struct frame){s.pc, !s.is_exact, way};
		if (row->rules ? row->is_outermost : is_end_of_chain(p, &s))
			return WHOLE;
		caller = s;
		way = step(p, row, &caller);
		if (way < 0 || !is_plausible(p, &caller, &s, row))
			return is_elsewhere || was_cut() ? CUT : UNKNOWN;
		is_elsewhere = is_elsewhere || row->is_signal;
		s = caller;
		if (!s.pc) /* a return address of 0 ends a stack */
			return WHOLE;
	}
	return TOO_DEEP;
}
