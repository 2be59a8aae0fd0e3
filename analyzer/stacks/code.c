// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * From a function in assembly to its caller, where it has neither call frame information nor a frame pointer: whichever way its
 * instructions lead to its return, the stack pointer ends at the return address, so one way is searched. None leads on from an
 * instruction that is not known here, a call, or another change of the stack pointer than those below. x86-64.
 */
#include <string.h>

#include "unwind.h"

#define MOST_INSTRUCTIONS 6000
#define MOST_MET 8192
#define MOST_JUMPS 256
#define MOST_PREFIXES 6
#define LONGEST 32 /* bytes of an instruction, damaged ones included */
#define RSP 4

/* Of open source: no other file's code is read. */
static const char *const readable[] = {"libonnxruntime", "onnxruntime_pybind11_state"};

struct instruction {
	u8 map, opcode, rex, modrm; /* map: 0: one byte; 1 to 7: of 0F, 0F 38, 0F 3A, and those of EVEX */
	bool is_short, is_vector;   /* operands of 16 bits; VEX or EVEX */
	const u8 *memory;	    /* behind the ModRM byte; NULL: it has none */
	s64 number;		    /* immediate or distance of a jump */
	const u8 *next;
};

bool may_read_code(const char *path)
{
	const char *name = strrchr(path, '/');

	for (size_t i = 0; i < sizeof(readable) / sizeof(*readable); i++)
		if (name && !strncmp(name + 1, readable[i], strlen(readable[i])))
			return !is_arm;
	return false;
}

static s64 signed_number(const u8 *at, int bytes)
{
	s64 value = 0;

	memcpy(&value, at, bytes);
	return bytes ? (s64)((u64)value << (64 - 8 * bytes)) >> (64 - 8 * bytes) : 0;
}

static bool has_modrm(const struct instruction *in)
{
	u8 op = in->opcode;

	if (in->map == 1)
		return in->is_vector ? op != 0x77 : (op & 0xf0) != 0x80 && op != 0x31 && op != 0x77 && op != 0xa2 && (op & 0xf8) != 0xc8;
	return in->map || (op < 0x40 && (op & 7) < 4) || op == 0x63 || op == 0x69 || op == 0x6b || (op >= 0x80 && op <= 0x8e) ||
	       (op & 0xfe) == 0xc0 || (op & 0xfe) == 0xc6 || (op & 0xfc) == 0xd0 || (op & 0xfe) == 0xf6 || op >= 0xfe;
}

/* Bytes of the number at its end; -1: the instruction is not known. */
static int number_bytes(const struct instruction *in)
{
	u8 op = in->opcode, of_word = in->is_short && !(in->rex & 8) ? 2 : 4;

	if (in->is_vector ? !in->map || in->map > 6 : in->map == 1 && (op == 0x05 || op == 0x0b || (op & 0xf6) == 0xa0))
		return -1;
	if (in->map == 1 && !in->is_vector && (op & 0xf0) == 0x80)
		return 4;
	if (in->map == 1)
		return (op >= 0x70 && op <= 0x73) || op == 0xc2 || (op >= 0xc4 && op <= 0xc6) || (!in->is_vector && (op == 0xa4 || op == 0xac || op == 0xba));
	if (in->map)
		return in->map == 3;
	if ((op & 0xf8) == 0xb8)
		return in->rex & 8 ? 8 : of_word;
	if ((op < 0x40 && (op & 7) == 5) || op == 0x68 || op == 0x69 || op == 0x81 || op == 0xa9 || op == 0xc7 || (op == 0xf7 && !(in->modrm & 0x30)))
		return of_word;
	if (op == 0xe9)
		return 4;
	if ((op < 0x40 && (op & 7) == 4) || op == 0x6a || op == 0x6b || (op & 0xf0) == 0x70 || op == 0x80 || op == 0x83 || op == 0xa8 ||
	    (op & 0xf8) == 0xb0 || (op & 0xfe) == 0xc0 || op == 0xc6 || op == 0xe3 || op == 0xeb || (op == 0xf6 && !(in->modrm & 0x30)))
		return 1;
	return has_modrm(in) || (op & 0xf0) == 0x50 || (op & 0xfc) == 0x98 || op == 0x90 || op == 0xc3 ? 0 : -1;
}

static int displacement_bytes(u8 modrm, u8 sib)
{
	u8 mod = modrm >> 6, base = modrm & 7;

	if (mod == 0)
		return base == 5 || (base == 4 && (sib & 7) == 5) ? 4 : 0;
	return mod == 1 ? 1 : mod == 2 ? 4 : 0;
}

/* Prefixes and the opcode; where they end. */
static const u8 *read_opcode(struct instruction *in, const u8 *at)
{
	for (int i = 0; i < MOST_PREFIXES && (*at == 0x66 || *at == 0xf2 || *at == 0xf3 || *at == 0x2e || *at == 0x3e); i++)
		in->is_short |= *at++ == 0x66;
	if ((*at & 0xf0) == 0x40)
		in->rex = *at++;
	in->is_vector = *at == 0xc4 || *at == 0xc5 || *at == 0x62;
	if (in->is_vector) {
		in->map = *at == 0xc5 ? 1 : at[1] & (*at == 0x62 ? 7 : 31);
		at += *at == 0xc5 ? 2 : *at == 0xc4 ? 3 : 4;
	} else if (*at == 0x0f) {
		in->map = at[1] == 0x38 ? 2 : at[1] == 0x3a ? 3 : 1;
		at += in->map == 1 ? 1 : 2;
	}
	in->opcode = *at;
	return at + 1;
}

/* False if it is not known. LONGEST bytes are there. */
static bool decode(struct instruction *in, const u8 *at)
{
	int bytes;

	*in = (struct instruction){0};
	at = read_opcode(in, at);
	if (has_modrm(in)) {
		in->modrm = *at++;
		in->memory = at;
		if (in->modrm < 0xc0)
			at += ((in->modrm & 7) == 4) + displacement_bytes(in->modrm, *at);
	}
	bytes = number_bytes(in);
	if (bytes < 0)
		return false;
	in->number = signed_number(at, bytes);
	in->next = at + bytes;
	return true;
}

/* What an instruction of one byte's opcode does to the stack pointer, `way->returns_at` bytes above the first; false: not known. */
static bool moves_stack(const struct instruction *in, struct code_way *way)
{
	u8 op = in->opcode, reg = (in->modrm >> 3 & 7) | (in->rex & 4) << 1, rm = (in->modrm & 7) | (in->rex & 1) << 3;
	bool is_register = in->memory && in->modrm >= 0xc0, is_at_stack = in->memory && !is_register && rm == RSP && *in->memory == 0x24;
	s64 distance = is_at_stack ? signed_number(in->memory + 1, displacement_bytes(in->modrm, 0x24)) : 0;

	if ((op & 0xf8) == 0x50 || op == 0x68 || op == 0x6a || (op == 0xff && (reg & 7) == 6))
		way->returns_at -= WORD;
	else if ((op & 0xf8) == 0x58) {
		if (way->returns_at < 0)
			return false; /* it was pushed on this path */
		way->restored[(op & 7) | (in->rex & 1) << 3] = way->returns_at;
		way->returns_at += WORD;
	} else if ((op == 0x81 || op == 0x83) && is_register && rm == RSP && (reg == 0 || reg == 5))
		way->returns_at += reg ? -in->number : in->number;
	else if (op == 0x8d && reg == RSP && is_at_stack)
		way->returns_at += distance;
	else if (op == 0x8b && is_at_stack && in->rex & 8 && reg != RSP)
		way->restored[reg] = way->returns_at + distance;
	else if (is_register && rm == RSP && (op < 0x40 ? !(op & 2) && (op & 0x38) != 0x38 : op == 0x89 || op == 0x81 || op == 0x83 || op == 0x87))
		return (op == 0x81 || op == 0x83) && reg == 7; /* compared */
	else if (in->memory && reg == RSP && (op == 0x8b || op == 0x8d || (op < 0x38 && op & 2)))
		return false;
	return !(op == 0xff && reg >= 2 && reg <= 5); /* a call or a jump to what only the running program knows */
}

/* Where a jump leads; 0: it is none. */
static u64 target_of(const struct instruction *in, const u8 *code)
{
	bool is_near = in->map == 1 && !in->is_vector && (in->opcode & 0xf0) == 0x80;
	bool is_short = !in->map && ((in->opcode & 0xf0) == 0x70 || in->opcode == 0xe3 || in->opcode == 0xe9 || in->opcode == 0xeb);

	return is_near || is_short ? in->next - code + (u64)in->number : 0;
}

/* Whether an instruction was met before: all ways to it are alike. */
static bool is_met(u64 *met, u64 at)
{
	u32 slot = at * 0x9E3779B97F4A7C15ULL >> 48;

	while (met[slot % MOST_MET] && met[slot % MOST_MET] != at)
		slot++;
	if (met[slot % MOST_MET])
		return true;
	met[slot % MOST_MET] = at;
	return false;
}

bool follow_code(const u8 *code, u64 bytes, u64 at, struct code_way *way)
{
	static u64 met[MOST_MET];
	static struct code_way others[MOST_JUMPS]; /* after conditional jumps */
	static u64 places[MOST_JUMPS];
	struct instruction in;
	int waiting = 0;

	memset(met, 0, sizeof(met));
	memset(way, 0, sizeof(*way));
	memset(way->restored, IN_REGISTER, sizeof(way->restored));
	for (int i = 0; i < MOST_INSTRUCTIONS; i++) {
		bool leads_on = at < bytes && bytes - at >= LONGEST && !is_met(met, at) && decode(&in, code + at) && (in.map || moves_stack(&in, way));
		u64 target = leads_on ? target_of(&in, code) : 0;
		bool is_always = !in.map && (in.opcode == 0xe9 || in.opcode == 0xeb);

		if (leads_on && !in.map && in.opcode == 0xc3)
			return way->returns_at >= 0;
		if (target && !is_always && waiting < MOST_JUMPS) {
			places[waiting] = target;
			others[waiting++] = *way;
		}
		if (!leads_on && !waiting)
			return false;
		if (!leads_on)
			*way = others[--waiting];
		at = leads_on ? target && is_always ? target : (u64)(in.next - code) : places[waiting];
	}
	return false;
}
