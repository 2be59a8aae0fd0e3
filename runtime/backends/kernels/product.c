/* SPDX-License-Identifier: Apache-2.0 */
/* Sizes of a product, its division into pieces for threads, and the choice of the instruction set. */
#include <sched.h>

#include "product.h"

#define LINE 64		/* bytes of a cache line */
#define SHARES 16	/* pieces of a single row's product, at least */
#define MOST_TIMES 4	/* TASK_COLUMNS in a piece of it, at most */
#define VISIBLE __attribute__((visibility("default")))

/* The fastest first. */
static const struct instruction_set *const sets[] = {
#if defined(__x86_64__)
	&set_avx512vnni, &set_avxvnni, &set_avx2,
#elif defined(__aarch64__)
	&set_neon_i8mm, &set_neon_dotprod,
#endif
	&set_plain,
};
#define SETS (sizeof(sets) / sizeof(*sets))
static const struct instruction_set *chosen;

static const struct instruction_set *set_in_use(void)
{
	for (size_t i = 0; !chosen && i < SETS; i++)
		if (sets[i]->available())
			chosen = sets[i];
	return chosen;
}

static size_t up_to(size_t size, size_t multiple)
{
	return (size + multiple - 1) / multiple * multiple;
}

bool product_sizes(struct product *p)
{
	if (p->block < 16 || p->block > MAX_BLOCK || p->block & (p->block - 1) || (p->bits != 4 && p->bits != 8))
		return false;
	p->blocks = (p->k + p->block - 1) / p->block;
	p->block_bytes = p->block * p->bits / 8;
	p->row_bytes = p->blocks * p->block_bytes;
	p->zero_bytes = (p->blocks * p->bits + 7) / 8;
	p->groups = (p->blocks + GROUP - 1) / GROUP;
	p->stride = p->groups * GROUP * p->block;
	return true;
}

void *product_room(struct product *p)
{
	const size_t rows = up_to(p->m, ROW_MULTIPLE), whole = p->m / ROW_MULTIPLE * ROW_MULTIPLE, codes = rows * p->stride;
	const size_t entries = up_to(rows * p->groups * GROUP * set_in_use()->copies, 16);
	const size_t widened = p->m > 1 ? up_to(product_pieces(p) * p->blocks * set_in_use()->widened, 16) : 0;
	char *room = aligned_alloc(64, codes + entries * (sizeof(int32_t) + sizeof(float)) + widened * sizeof(float));

	if (!room)
		return NULL;
	p->codes = (int8_t *)room;
	p->sums = (int32_t *)(room + codes);
	p->row_scales = (float *)(p->sums + entries);
	p->column_scales = p->row_scales + entries;
	for (size_t row = 0; row < p->m; row++)
		memset(p->codes + row * p->stride + p->blocks * p->block / CHUNK * CHUNK, 0,
		       p->stride - p->blocks * p->block / CHUNK * CHUNK);
	memset(p->codes + whole * p->stride, 0, (rows - whole) * p->stride);
	memset(p->sums, 0, entries * (sizeof(int32_t) + sizeof(float)));
	return room;
}

/* Columns of a piece; of a single row more, since reading memory is faster the longer it goes on, but for several threads. */
static size_t piece_columns(const struct product *p)
{
	const size_t times = p->m > 1 ? 1 : p->n / SHARES / TASK_COLUMNS;

	return TASK_COLUMNS * (times < 1 ? 1 : times > MOST_TIMES ? MOST_TIMES : times);
}

size_t product_pieces(const struct product *p)
{
	return (p->n + piece_columns(p) - 1) / piece_columns(p);
}

static size_t end_of_piece(const struct product *p, size_t index)
{
	const size_t end = (index + 1) * piece_columns(p);

	return end < p->n ? end : p->n;
}

/* Adds bias and residual to columns first .. end. */
static void add_terms(const struct product *p, size_t first, size_t end)
{
	for (size_t row = 0; row < p->m; row++) {
		float *out = p->out + row * p->n;
		for (size_t i = first; p->bias && i < end; i++)
			out[i] += p->bias[i];
		for (size_t i = first; p->residual && i < end; i++)
			out[i] += p->residual[row * p->n + i];
	}
}

void product_piece(const struct product *p, size_t index)
{
	const size_t first = index * piece_columns(p), end = end_of_piece(p, index);

	set_in_use()->columns(p, first, end);
	if (p->bias || p->residual)
		add_terms(p, first, end);
}

void product_await(const struct product *p, size_t index, const atomic_bool *rounded)
{
	const uint8_t *line = p->values + index * piece_columns(p) * p->row_bytes, *end = p->values + end_of_piece(p, index) * p->row_bytes;

	for (; line < end && !atomic_load_explicit(rounded, memory_order_acquire); line += LINE)
		__builtin_prefetch(line, 0, 2);
	while (!atomic_load_explicit(rounded, memory_order_acquire))
		sched_yield();
}

size_t product_row_groups(const struct product *p)
{
	return (p->m + ROW_MULTIPLE - 1) / ROW_MULTIPLE;
}

void product_quantize(struct product *p, size_t group)
{
	const size_t first = group * ROW_MULTIPLE, end = first + ROW_MULTIPLE < p->m ? first + ROW_MULTIPLE : p->m;

	for (size_t row = first; row < end; row++)
		set_in_use()->quantize(p, row);
}

/* Name of this processor's instruction set number `index`, the fastest first; NULL beyond the last. */
VISIBLE const char *moescope_instruction_set(size_t index)
{
	for (size_t i = 0; i < SETS; i++)
		if (sets[i]->available() && !index--)
			return sets[i]->name;
	return NULL;
}

/* Uses this set from now on; false if this processor lacks it. */
VISIBLE bool moescope_choose(const char *name)
{
	for (size_t i = 0; i < SETS; i++)
		if (!strcmp(sets[i]->name, name) && sets[i]->available()) {
			chosen = sets[i];
			return true;
		}
	return false;
}

VISIBLE const char *moescope_chosen(void)
{
	return set_in_use()->name;
}
