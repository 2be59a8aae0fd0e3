/* The loops of analyzer/records/spans.py, analyzer/records/slot_columns.py and analyzer/tables/sched.py: joins over columns of 64-bit
 * integers, and passes over slots. analyzer/records/loops.py declares them to Python. Nothing is allocated here: who calls gives columns
 * of matching lengths, and those to be written.
 */
#include <stdint.h>
#include <string.h>

#define FLAGS 0xC0000000u /* a slot that was discarded or never finished: tracer/recording/format.py */
#define TS 8
#define KIND 24
#define IMPOSSIBLE (1ull << 62)

static int in_time(const int64_t *ts, int64_t n)
{
	int64_t back = 0;

	for (int64_t i = 1; i < n; i++)
		back |= ts[i] < ts[i - 1];
	return !back;
}

/* Per left row the last right row of its group up to its time. Answers 0 where rows are not in order of time.
 * low: the least group; last: -1 for each group from there on. */
int64_t latest(int64_t n, const int64_t *theirs, const int64_t *since, int64_t m, const int64_t *ours, const int64_t *ts, int64_t low,
	       int64_t *last, int64_t *answer)
{
	int64_t row = 0;

	if (!in_time(since, n) || !in_time(ts, m))
		return 0;
	for (int64_t i = 0; i < m; i++) {
		for (; row < n && since[row] <= ts[i]; row++)
			last[theirs[row] - low] = row;
		answer[i] = last[ours[i] - low];
	}
	return 1;
}

/* Likewise the first right row of its group behind its time. */
int64_t following(int64_t n, const int64_t *theirs, const int64_t *since, int64_t m, const int64_t *ours, const int64_t *ts, int64_t low,
		  int64_t *next, int64_t *answer)
{
	int64_t row = n;

	if (!in_time(since, n) || !in_time(ts, m))
		return 0;
	for (int64_t i = m - 1; i >= 0; i--) {
		for (; row > 0 && since[row - 1] > ts[i]; row--)
			next[theirs[row - 1] - low] = row - 1;
		answer[i] = next[ours[i] - low];
	}
	return 1;
}

static int in_order(const int64_t *ts, const int64_t *position, int64_t n)
{
	for (int64_t i = 1; i < n; i++)
		if (ts[i] < ts[i - 1] || (ts[i] == ts[i - 1] && position[i] < position[i - 1]))
			return 0;
	return 1;
}

/* A stack per key: of each begin its end, -1 where there is none. Answers 0 where rows are not in order of time and position.
 * open: -1 for each key; before: room for as many as there are begins. */
int64_t pairs(int64_t n, const int64_t *key, const int64_t *ts, const int64_t *position, int64_t m, const int64_t *closes,
	      const int64_t *until, const int64_t *place, int64_t *open, int64_t *before, int64_t *answer)
{
	int64_t row = 0;

	if (!in_order(ts, position, n) || !in_order(until, place, m))
		return 0;
	memset(answer, 0xFF, n * sizeof(*answer));
	for (int64_t i = 0; i < m; i++) {
		for (; row < n && (ts[row] < until[i] || (ts[row] == until[i] && position[row] <= place[i])); row++) {
			before[row] = open[key[row]];
			open[key[row]] = row;
		}
		int64_t begin = open[closes[i]];

		if (begin >= 0) {
			answer[begin] = i;
			open[closes[i]] = before[begin];
		}
	}
	return 1;
}

/* The least value of a column, and the greatest. */
void extent(int64_t n, const int64_t *value, int64_t *answer)
{
	int64_t low = value[0], high = value[0];

	for (int64_t i = 1; i < n; i++) {
		low = value[i] < low ? value[i] : low;
		high = value[i] > high ? value[i] : high;
	}
	answer[0] = low;
	answer[1] = high;
}

/* Numbers of the distinct combinations of values, from 0 as they appear, and the first row of each; answers how many there are.
 * low, width: of each column's values. number: 0 for every combination that is possible. */
int64_t distinct(int64_t columns, int64_t n, const int64_t *const *value, const int64_t *low, const int64_t *width, int64_t *number,
		 int64_t *first, int64_t *answer)
{
	int64_t count = 0;

	for (int64_t i = 0; i < n; i++) {
		int64_t at = 0;

		for (int64_t c = 0; c < columns; c++)
			at = at * width[c] + value[c][i] - low[c];
		if (!number[at]) {
			first[count] = i;
			number[at] = ++count;
		}
		answer[i] = number[at] - 1;
	}
	return count;
}

#define NEAR 256
#define EACH(type)                                                                                                                \
	for (int64_t i = 0; i < n; i++) {                                                                                         \
		type value;                                                                                                       \
		memcpy(&value, slots + row[i] * width, sizeof(value));                                                            \
		answer[i] = (int64_t)value;                                                                                       \
	}                                                                                                                         \
	return

static void gather_field(const char *slots, int64_t width, int64_t kind, const int64_t *row, int64_t *answer, int64_t n)
{
	switch (kind) {
	case 1: EACH(uint8_t);
	case 2: EACH(uint16_t);
	case 4: EACH(uint32_t);
	case -1: EACH(int8_t);
	case -2: EACH(int16_t);
	case -4: EACH(int32_t);
	default: EACH(int64_t);
	}
}

/* Fields of some of `count` slots, [fields, rows]. offset and size of each field, in bytes; size is negative where the field is signed.
 * Answers 0 where a row is no slot. */
int64_t gather(const char *slots, int64_t width, int64_t count, int64_t fields, const int64_t *offset, const int64_t *size, int64_t n,
	       const int64_t *row, int64_t *answer)
{
	int64_t outside = 0;

	for (int64_t i = 0; i < n; i++)
		outside |= (uint64_t)row[i] >= (uint64_t)count;
	if (outside)
		return 0;
	for (int64_t from = 0; from < n; from += NEAR) /* few slots at a time: they stay in the cache for all fields */
		for (int64_t f = 0; f < fields; f++)
			gather_field(slots + offset[f], width, size[f], row + from, answer + f * n + from, n - from < NEAR ? n - from : NEAR);
	return 1;
}

/* The numbers of the slots from begin on and before end into `order`, kind by kind, as they lie in the file, and where each kind ends
 * there. kind: room for that of each slot; ends: zeros. about: first and last time of the written ones, how many are damaged, how many
 * discarded. Answers the greatest kind. */
int64_t by_kind(const char *slots, int64_t width, int64_t n, uint64_t begin, uint64_t end, uint16_t *kind, int64_t *order, int64_t *ends,
	     uint64_t *about)
{
	int64_t at = 0, most = 0;

	about[0] = UINT64_MAX;
	for (int64_t i = 0; i < n; i++) {
		const char *slot = slots + i * width;
		uint32_t length;
		uint64_t ts;

		memcpy(&length, slot, 4);
		memcpy(&ts, slot + TS, 8);
		memcpy(&kind[i], slot + KIND, 2);
		if (length & FLAGS) {
			about[3]++;
			kind[i] = 0;
		} else if (kind[i] && ts >= IMPOSSIBLE) {
			about[2]++;
		} else if (kind[i]) {
			about[0] = ts < about[0] ? ts : about[0];
			about[1] = ts > about[1] ? ts : about[1];
		}
		if (ts < begin || ts >= end)
			kind[i] = 0;
		ends[kind[i]]++;
		most = kind[i] > most ? kind[i] : most;
	}
	ends[0] = 0;
	for (int64_t k = 0; k <= most; k++) {
		at += ends[k];
		ends[k] = at - ends[k]; /* from now on where the next of this kind goes */
	}
	for (int64_t i = 0; i < n; i++)
		if (kind[i])
			order[ends[kind[i]]++] = i;
	return most;
}

/* The states that a thread goes through, as in analyzer/tables/sched.py; UNSEEN: nothing is known of it yet. */
enum { RUNNING, RUNNABLE, SLEEPING, WAITING, STOPPED, OVER, UNSEEN = -1 };
#define UNINTERRUPTIBLE 2
#define HELD (0x4 | 0x8)	  /* by a signal, or by a tracer; ours holds the target while it places probes */
#define GONE (0x10 | 0x20 | 0x80) /* dead and zombie bits of a task's state */
#define REPORTED 0xFF		  /* sched_switch adds 0x100 to the state of a task that was preempted */

/* The state of a thread that was switched out with these kernel state bits. */
static int64_t state_after(int64_t bits)
{
	bits &= REPORTED;
	if (!bits)
		return RUNNABLE;
	if (bits & GONE)
		return OVER;
	return bits & UNINTERRUPTIBLE ? WAITING : bits & HELD ? STOPPED : SLEEPING;
}

/* The threads' open states by thread, and the rows that are written when one ends. */
struct states {
	int64_t *begin, *state, *cpu, *last;	       /* of each thread */
	int64_t *thread, *ended, *on, *from, *until; /* of each row */
	int64_t rows;
};

static void write_state(struct states *of, int64_t thread, int64_t until)
{
	if (of->state[thread] == OVER || of->state[thread] == UNSEEN || until <= of->begin[thread])
		return;
	of->thread[of->rows] = thread;
	of->ended[of->rows] = of->state[thread];
	of->on[of->rows] = of->cpu[thread];
	of->from[of->rows] = of->begin[thread];
	of->until[of->rows++] = until;
}

static void enter(struct states *of, int64_t thread, int64_t ts, int64_t state, int64_t cpu)
{
	if (thread < 0)
		return;
	if (of->state[thread] != state || of->cpu[thread] != cpu) {
		write_state(of, thread, ts);
		of->begin[thread] = ts;
		of->state[thread] = state;
		of->cpu[thread] = cpu;
	}
	of->last[thread] = ts > of->last[thread] ? ts : of->last[thread];
}

/* Rows that ended at one time, by thread. */
static void order_ties(struct states *of)
{
	int64_t *column[] = {of->thread, of->ended, of->on, of->from, of->until};

	for (int64_t i = 1; i < of->rows; i++)
		for (int64_t at = i; at && of->until[at] == of->until[at - 1] && of->thread[at] < of->thread[at - 1]; at--)
			for (int c = 0; c < 5; c++) {
				int64_t kept = column[c][at];

				column[c][at] = column[c][at - 1];
				column[c][at - 1] = kept;
			}
}

/* The states of some threads, one row for each, in order of their ends; with `final` those that are still open follow, until their
 * threads' last events. Answers how many rows there are.
 *
 * s: [time, position, previous, its state, next, cpu] of n switches and wake: [time, position, thread] of m wakings, in order of time and
 * position; a thread is its place among the `threads`, -1 for others. open: [begin, state or -1, cpu, last event] of each thread, read and
 * written. row: [thread, state, cpu, begin, end], with room for two rows a switch, one a waking and one a thread. */
int64_t states(int64_t final, int64_t threads, int64_t n, const int64_t *s, int64_t m, const int64_t *wake, int64_t *open, int64_t *row)
{
	int64_t room = 2 * n + m + threads, w = 0;
	struct states of = {open, open + threads, open + 2 * threads, open + 3 * threads,
			    row, row + room, row + 2 * room, row + 3 * room, row + 4 * room, 0};

	for (int64_t i = 0; i <= n; i++) {
		for (; w < m && (i == n || wake[w] < s[i] || (wake[w] == s[i] && wake[m + w] < s[n + i])); w++)
			if (wake[2 * m + w] >= 0 && of.state[wake[2 * m + w]] != RUNNING)
				enter(&of, wake[2 * m + w], wake[w], RUNNABLE, -1);
		if (i == n)
			break;
		enter(&of, s[2 * n + i], s[i], state_after(s[3 * n + i]), -1);
		enter(&of, s[4 * n + i], s[i], RUNNING, s[5 * n + i]);
	}
	order_ties(&of);
	for (int64_t i = 0; final && i < threads; i++)
		write_state(&of, i, of.last[i]);
	return of.rows;
}
