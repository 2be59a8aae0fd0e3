/* The loops of analyzer/records/spans.py, analyzer/records/slot_columns.py and analyzer/tables: joins over columns of 64-bit integers, and passes
 * over slots.
 *
 * Columns are contiguous int64 buffers, given by the caller in matching lengths; answers are written into the last of them. A
 * function that wants rows in order of time answers False, and has done nothing of use, where they are not.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MOST_COLUMNS 8
#define MOST_BUFFERS 12
#define FLAGS 0xC0000000u /* a slot that was discarded or never finished: tracer/recording/format.py */
#define TS 8
#define KIND 24
#define IMPOSSIBLE (1ull << 62)

static uint64_t mixed(uint64_t x)
{
	x *= 0x9E3779B97F4A7C15ull;
	return x ^ x >> 29;
}

/* key: any number. value: what was last put there, -1 at first. */
struct map {
	int64_t *key, *value;
	char *taken;
	uint64_t mask, used;
};

static int map_open(struct map *map, uint64_t size)
{
	map->mask = size - 1;
	map->used = 0;
	map->key = malloc(size * sizeof(*map->key));
	map->value = malloc(size * sizeof(*map->value));
	map->taken = calloc(size, 1);
	return map->key && map->value && map->taken;
}

static void map_close(struct map *map)
{
	free(map->key);
	free(map->value);
	free(map->taken);
}

static int64_t *place(struct map *map, int64_t key);

static int map_grow(struct map *map)
{
	struct map wide;
	uint64_t i;

	if (!map_open(&wide, (map->mask + 1) * 2)) {
		map_close(&wide);
		return 0;
	}
	for (i = 0; i <= map->mask; i++)
		if (map->taken[i])
			*place(&wide, map->key[i]) = map->value[i];
	map_close(map);
	*map = wide;
	return 1;
}

/* Where the value of `key` lies, until the next call; NULL without memory. */
static int64_t *place(struct map *map, int64_t key)
{
	uint64_t at = mixed(key) & map->mask;

	for (; map->taken[at]; at = (at + 1) & map->mask)
		if (map->key[at] == key)
			return &map->value[at];
	if (map->used * 2 > map->mask)
		return map_grow(map) ? place(map, key) : NULL;
	map->used++;
	map->taken[at] = 1;
	map->key[at] = key;
	map->value[at] = -1;
	return &map->value[at];
}

/* The buffers of a call. */
struct given {
	Py_buffer view[MOST_BUFFERS];
	int count;
};

static void release(struct given *given)
{
	while (given->count)
		PyBuffer_Release(&given->view[--given->count]);
}

/* Take `count` buffers; the last `answers` of them are written to. */
static int take(struct given *given, PyObject *const *arguments, Py_ssize_t count, int answers)
{
	given->count = 0;
	if (count < 1 || count > MOST_BUFFERS) {
		PyErr_SetString(PyExc_TypeError, "wrong number of columns");
		return 0;
	}
	for (Py_ssize_t i = 0; i < count; i++) {
		int flags = i < count - answers ? PyBUF_SIMPLE : PyBUF_WRITABLE;

		if (PyObject_GetBuffer(arguments[i], &given->view[i], flags)) {
			release(given);
			return 0;
		}
		given->count++;
	}
	return 1;
}

#define COLUMN(i) ((int64_t *)given.view[i].buf)
#define LENGTH(i) (given.view[i].len / 8)

/* Whether the columns from..to are as long as column `from`; raises ValueError if not. */
static int alike(struct given *given, int from, int to)
{
	for (int i = from + 1; i <= to; i++)
		if (given->view[i].len != given->view[from].len) {
			PyErr_SetString(PyExc_ValueError, "columns of different lengths");
			return 0;
		}
	return 1;
}

static int in_order(const int64_t *ts, Py_ssize_t n)
{
	int back = 0;

	for (Py_ssize_t i = 1; i < n; i++)
		back |= ts[i] < ts[i - 1];
	return !back;
}

static int in_order_with(const int64_t *ts, const int64_t *position, Py_ssize_t n)
{
	for (Py_ssize_t i = 1; i < n; i++)
		if (ts[i] < ts[i - 1] || (ts[i] == ts[i - 1] && position[i] < position[i - 1]))
			return 0;
	return 1;
}

/* The result of a call: whether rows were in order, or an error. */
static PyObject *answered(struct given *given, int ordered, int memory)
{
	release(given);
	if (!memory)
		return PyErr_NoMemory();
	return PyErr_Occurred() ? NULL : PyBool_FromLong(ordered);
}

#define OPENING(columns)                                                                                                          \
	struct given given;                                                                                                       \
	struct map map = {0};                                                                                                     \
	int ordered = 0, memory = 1;                                                                                              \
	(void)module;                                                                                                             \
	if (count != (columns)) {                                                                                                 \
		PyErr_SetString(PyExc_TypeError, "wrong number of columns");                                                      \
		return NULL;                                                                                                      \
	}                                                                                                                         \
	if (!take(&given, arguments, count, 1))                                                                                   \
		return NULL

/* latest(right_group, right_ts, left_group, left_ts, answer): per left row the last right row of its group up to its time. */
static PyObject *latest(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
	OPENING(5);
	if (alike(&given, 0, 1) && alike(&given, 2, 4) && in_order(COLUMN(1), LENGTH(1)) && in_order(COLUMN(3), LENGTH(3))) {
		const int64_t *theirs = COLUMN(0), *since = COLUMN(1), *ours = COLUMN(2), *ts = COLUMN(3);
		int64_t *answer = COLUMN(4), *found;
		Py_ssize_t n = LENGTH(0), row = 0;

		ordered = 1;
		memory = map_open(&map, 64);
		for (Py_ssize_t i = 0; memory && i < LENGTH(2); i++) {
			for (; memory && row < n && since[row] <= ts[i]; row++)
				if ((memory = (found = place(&map, theirs[row])) != NULL))
					*found = row;
			if (memory && (memory = (found = place(&map, ours[i])) != NULL))
				answer[i] = *found;
		}
		map_close(&map);
	}
	return answered(&given, ordered, memory);
}

/* pairs(begin_key, begin_ts, begin_position, end_key, end_ts, end_position, answer): a stack per key; of each begin its end. */
static PyObject *pairs(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
	OPENING(7);
	if (alike(&given, 0, 2) && alike(&given, 3, 5) && LENGTH(6) == LENGTH(0) &&
	    in_order_with(COLUMN(1), COLUMN(2), LENGTH(0)) && in_order_with(COLUMN(4), COLUMN(5), LENGTH(3))) {
		const int64_t *key = COLUMN(0), *ts = COLUMN(1), *position = COLUMN(2);
		const int64_t *closes = COLUMN(3), *until = COLUMN(4), *place_of_end = COLUMN(5);
		int64_t *answer = COLUMN(6), *before = malloc(LENGTH(0) * 8 + 1), *open;
		Py_ssize_t n = LENGTH(0), row = 0;

		ordered = 1;
		memory = map_open(&map, 64) && before;
		memset(answer, 0xFF, n * 8);
		for (Py_ssize_t i = 0; memory && i < LENGTH(3); i++) {
			for (; memory && row < n && (ts[row] < until[i] || (ts[row] == until[i] && position[row] <= place_of_end[i])); row++)
				if ((memory = (open = place(&map, key[row])) != NULL)) {
					before[row] = *open;
					*open = row;
				}
			if (memory && (memory = (open = place(&map, closes[i])) != NULL) && *open >= 0) {
				answer[*open] = i;
				*open = before[*open];
			}
		}
		free(before);
		map_close(&map);
	}
	return answered(&given, ordered, memory);
}

/* Number combinations of values in a table of all that are possible, if these are not too many: 1, or 0 where they are; -1
 * without memory. Answers their number in `distinct`. */
static int number_directly(struct given *given, int columns, int64_t *first, int64_t *answer, uint32_t *distinct)
{
	Py_ssize_t n = given->view[0].len / 8;
	uint64_t size = 1, at, width[MOST_COLUMNS];
	int64_t low[MOST_COLUMNS];
	uint32_t *number;

	for (int c = 0; c < columns; c++) {
		const int64_t *value = given->view[c].buf;
		int64_t high = low[c] = n ? value[0] : 0;

		for (Py_ssize_t i = 1; i < n; i++) {
			low[c] = value[i] < low[c] ? value[i] : low[c];
			high = value[i] > high ? value[i] : high;
		}
		width[c] = (uint64_t)high - (uint64_t)low[c] + 1;
		if (width[c] == 0 || width[c] > (uint64_t)n * 4 + 1024 || (size *= width[c]) > (uint64_t)n * 4 + 1024)
			return 0;
	}
	number = calloc(size, sizeof(*number));
	for (Py_ssize_t i = 0; number && i < n; i++) {
		at = 0;
		for (int c = 0; c < columns; c++)
			at = at * width[c] + (uint64_t)(((int64_t *)given->view[c].buf)[i] - low[c]);
		if (!number[at]) {
			first[*distinct] = i;
			number[at] = ++*distinct;
		}
		answer[i] = number[at] - 1;
	}
	free(number);
	return number ? 1 : -1;
}

/* codes(column ..., first, answer): numbers of the distinct combinations, from 0 as they appear, and the first row of each;
 * answers how many there are. */
static PyObject *codes(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
	struct given given;
	int columns = (int)count - 2, same;
	uint64_t mask = 255, at, hash;
	uint32_t *number, *wide, distinct = 0;
	int64_t *first, *answer;
	Py_ssize_t n;

	(void)module;
	if (!take(&given, arguments, count, 2))
		return NULL;
	if (columns < 1 || columns > MOST_COLUMNS || !alike(&given, 0, (int)count - 1)) {
		release(&given);
		return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "wrong number of columns");
	}
	n = LENGTH(0);
	first = COLUMN(count - 2);
	answer = COLUMN(count - 1);
	same = number_directly(&given, columns, first, answer, &distinct);
	if (same) {
		release(&given);
		return same > 0 ? PyLong_FromUnsignedLong(distinct) : PyErr_NoMemory();
	}
	number = calloc(mask + 1, sizeof(*number));
	for (Py_ssize_t i = 0; number && i < n; i++) {
		for (hash = 0, at = 0; at < (uint64_t)columns; at++)
			hash = mixed(hash ^ (uint64_t)COLUMN(at)[i]);
		for (at = hash & mask; number[at]; at = (at + 1) & mask) {
			same = 1;
			for (int c = 0; same && c < columns; c++)
				same = COLUMN(c)[i] == COLUMN(c)[first[number[at] - 1]];
			if (same)
				break;
		}
		if (!number[at]) {
			first[distinct] = i;
			number[at] = ++distinct;
		}
		answer[i] = number[at] - 1;
		if (distinct * 2 <= mask)
			continue;
		mask = mask * 2 + 1; /* half full: twice the room, every number put anew */
		wide = calloc(mask + 1, sizeof(*wide));
		free(number);
		number = wide;
		for (uint32_t d = 0; number && d < distinct; d++) {
			for (hash = 0, at = 0; at < (uint64_t)columns; at++)
				hash = mixed(hash ^ (uint64_t)COLUMN(at)[first[d]]);
			for (at = hash & mask; number[at]; at = (at + 1) & mask)
				;
			number[at] = d + 1;
		}
	}
	release(&given);
	if (!number)
		return PyErr_NoMemory();
	free(number);
	return PyLong_FromUnsignedLong(distinct);
}

/* A field of a slot, sign- or zero-extended. */
static inline int64_t field(const char *slot, long size, int is_signed)
{
	uint64_t u8;
	uint32_t u4;
	uint16_t u2;

	switch (size) {
	case 8:
		memcpy(&u8, slot, 8);
		return (int64_t)u8;
	case 4:
		memcpy(&u4, slot, 4);
		return is_signed ? (int64_t)(int32_t)u4 : (int64_t)u4;
	case 2:
		memcpy(&u2, slot, 2);
		return is_signed ? (int64_t)(int16_t)u2 : (int64_t)u2;
	default:
		return is_signed ? (int64_t)(int8_t)*slot : (int64_t)(uint8_t)*slot;
	}
}

/* Whether all rows are slots. */
static int all_within(const Py_buffer *slots, const Py_buffer *rows, long width)
{
	uint64_t n = width > 0 ? slots->len / width : 0;
	const int64_t *row = rows->buf;
	int good = 1;

	for (Py_ssize_t i = 0; i < rows->len / 8; i++)
		good &= (uint64_t)row[i] < n;
	return good;
}

/* Whether a slot has a field there. */
static int is_place(long width, long offset, long size)
{
	return offset >= 0 && (size == 1 || size == 2 || size == 4 || size == 8) && offset + size <= width;
}

#define NEAR 256
#define EACH(size, is_signed)                                                                                                     \
	for (Py_ssize_t i = 0; i < n; i++)                                                                                        \
	answer[i] = field(slots + row[i] * width, size, is_signed)

static void gather_field(const char *slots, long width, const int32_t *place, const int64_t *row, int64_t *answer, Py_ssize_t n)
{
	if (place[1] == 8)
		EACH(8, 0);
	else if (place[1] == 4 && place[2])
		EACH(4, 1);
	else if (place[1] == 4)
		EACH(4, 0);
	else if (place[1] == 2 && !place[2])
		EACH(2, 0);
	else
		EACH(place[1], place[2]);
}

/* gather(width, places, slots, rows, answer): fields of some slots, [fields, rows]. `places` has four int32 for each field:
 * offset, bytes, whether it is signed, 0. */
static PyObject *gather(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
	struct given given;
	long width = count == 5 ? PyLong_AsLong(arguments[0]) : 0;
	Py_ssize_t n, fields;
	int good;

	(void)module;
	if (count != 5)
		return PyErr_Format(PyExc_TypeError, "gather wants five arguments");
	if (PyErr_Occurred() || !take(&given, arguments + 1, 4, 1))
		return NULL;
	const int32_t *place = given.view[0].buf;
	const char *slots = given.view[1].buf;
	const int64_t *row = COLUMN(2);
	int64_t *answer = COLUMN(3);

	n = LENGTH(2);
	fields = given.view[0].len / 16;
	good = LENGTH(3) == n * fields && all_within(&given.view[1], &given.view[2], width);
	for (Py_ssize_t f = 0; f < fields; f++)
		good = good && is_place(width, place[4 * f], place[4 * f + 1]);
	if (!good)
		PyErr_SetString(PyExc_IndexError, "no such slot or field");
	for (Py_ssize_t from = 0; good && from < n; from += NEAR) /* few slots at a time: they stay in the cache for all fields */
		for (Py_ssize_t f = 0; f < fields; f++)
			gather_field(slots + place[4 * f], width, &place[4 * f], row + from, answer + f * n + from, n - from < NEAR ? n - from : NEAR);
	return answered(&given, 1, 1);
}

struct found {
	uint64_t first, last, damaged, discarded;
};

/* The kind of each slot from begin on and before end, 0 for the others, counted by kind; what there was of written records. */
static struct found kinds_of(const char *slots, long width, Py_ssize_t n, uint64_t begin, uint64_t end, uint16_t *kind, uint32_t *counts)
{
	struct found found = {UINT64_MAX, 0, 0, 0};

	for (Py_ssize_t i = 0; i < n; i++) {
		const char *slot = slots + i * width;
		uint32_t length;
		uint64_t ts;

		memcpy(&length, slot, 4);
		memcpy(&ts, slot + TS, 8);
		memcpy(&kind[i], slot + KIND, 2);
		if (length & FLAGS) {
			found.discarded++;
			kind[i] = 0;
		} else if (kind[i] && ts >= IMPOSSIBLE) {
			found.damaged++;
		} else if (kind[i]) {
			found.first = ts < found.first ? ts : found.first;
			found.last = ts > found.last ? ts : found.last;
		}
		if (ts < begin || ts >= end)
			kind[i] = 0;
		counts[kind[i]]++;
	}
	return found;
}

/* by_kind(width, begin, end, slots, order): the numbers of the slots from begin on and before end into `order`, kind by kind,
 * as they lie in the file; answers ([(kind, count)], first, last, damaged, discarded). */
static PyObject *by_kind(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
	struct given given;
	struct found found = {0};
	uint64_t begin, end;
	uint32_t *counts = NULL, at = 0;
	uint16_t *kind = NULL;
	PyObject *list = NULL;
	long width;

	(void)module;
	if (count != 5)
		return PyErr_Format(PyExc_TypeError, "by_kind wants five arguments");
	width = PyLong_AsLong(arguments[0]);
	begin = PyLong_AsUnsignedLongLong(arguments[1]);
	end = PyLong_AsUnsignedLongLong(arguments[2]);
	if (PyErr_Occurred() || !take(&given, arguments + 3, 2, 1))
		return NULL;
	if (width < KIND + 2 || given.view[0].len / width > LENGTH(1)) {
		PyErr_SetString(PyExc_ValueError, "slots too small, or more of them than places");
		return answered(&given, 0, 1);
	}
	counts = calloc(1 << 16, sizeof(*counts));
	kind = malloc(given.view[0].len / width * sizeof(*kind) + 1);
	list = PyList_New(0);
	if (counts && kind && list) {
		Py_ssize_t n = given.view[0].len / width;
		int64_t *order = COLUMN(1);

		found = kinds_of(given.view[0].buf, width, n, begin, end, kind, counts);
		for (long k = 1; k < 1 << 16; k++) {
			if (counts[k]) {
				PyObject *row = Py_BuildValue("lI", k, counts[k]);

				if (!row || PyList_Append(list, row))
					PyErr_NoMemory();
				Py_XDECREF(row);
			}
			at += counts[k];
			counts[k] = at - counts[k]; /* from now on where the next of this kind goes */
		}
		for (Py_ssize_t i = 0; i < n; i++)
			if (kind[i])
				order[counts[kind[i]]++] = i;
	}
	free(counts);
	free(kind);
	release(&given);
	if (!counts || !kind || !list || PyErr_Occurred()) {
		Py_XDECREF(list);
		return PyErr_Occurred() ? NULL : PyErr_NoMemory();
	}
	return Py_BuildValue("NKKKK", list, found.first, found.last, found.damaged, found.discarded);
}

/* The states that a thread goes through, as in analyzer/tables/sched.py; UNSEEN: nothing is known of it yet. */
enum { RUNNING, RUNNABLE, SLEEPING, WAITING, STOPPED, OVER, UNSEEN = -1 };
#define UNINTERRUPTIBLE 2
#define HELD (0x4 | 0x8)	 /* by a signal, or by a tracer; ours holds the target while it places probes */
#define GONE (0x10 | 0x20 | 0x80) /* dead and zombie bits of a task's state */
#define REPORTED 0xFF		 /* sched_switch adds 0x100 to the state of a task that was preempted */

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
	int64_t *begin, *state, *cpu, *last;		      /* of each thread */
	int64_t *thread, *ended, *on, *from, *until;	      /* of each row */
	Py_ssize_t rows;
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

	for (Py_ssize_t i = 1; i < of->rows; i++)
		for (Py_ssize_t at = i; at && of->until[at] == of->until[at - 1] && of->thread[at] < of->thread[at - 1]; at--)
			for (int c = 0; c < 5; c++) {
				int64_t kept = column[c][at];

				column[c][at] = column[c][at - 1];
				column[c][at - 1] = kept;
			}
}

/* states(final, threads, switches, wakings, open, answer): the states of some threads, one row for each, in order of their ends;
 * with `final` those that are still open follow, until their threads' last events. Answers how many rows there are.
 *
 * threads: their numbers. switches: [time, position, previous, its state, next, cpu] and wakings: [time, position, thread], in
 * order of time and position. open: [begin, state or -1, cpu, last event] of each thread, read and written. answer: [place in
 * threads, state, cpu, begin, end], with room for two rows a switch, one a waking and one a thread. */
static PyObject *states(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
	struct given given;
	struct map map = {0};
	int memory, final = count == 6 ? PyObject_IsTrue(arguments[0]) : -1;
	int64_t *found;

	(void)module;
	if (final < 0)
		return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "states wants six arguments");
	if (!take(&given, arguments + 1, 5, 2))
		return NULL;
	Py_ssize_t known = LENGTH(0), n = LENGTH(1) / 6, m = LENGTH(2) / 3, room = LENGTH(4) / 5, w = 0;
	const int64_t *tid = COLUMN(0), *s = COLUMN(1), *wake = COLUMN(2);
	int64_t *open = COLUMN(3), *row = COLUMN(4);
	struct states of = {open, open + known, open + 2 * known, open + 3 * known,
			    row, row + room, row + 2 * room, row + 3 * room, row + 4 * room, 0};

	if (LENGTH(3) != 4 * known || room < 2 * n + m + known) {
		PyErr_SetString(PyExc_ValueError, "no room for the states");
		return answered(&given, 0, 1);
	}
	memory = map_open(&map, 64);
	for (Py_ssize_t i = 0; memory && i < known; i++)
		if (tid[i] > 0 && (memory = (found = place(&map, tid[i])) != NULL))
			*found = i;
	for (Py_ssize_t i = 0; memory && i <= n; i++) {
		for (; memory && w < m && (i == n || wake[w] < s[i] || (wake[w] == s[i] && wake[m + w] < s[n + i])); w++)
			if ((memory = (found = place(&map, wake[2 * m + w])) != NULL) && *found >= 0 && of.state[*found] != RUNNING)
				enter(&of, *found, wake[w], RUNNABLE, -1);
		if (i == n)
			break;
		if ((memory = memory && (found = place(&map, s[2 * n + i])) != NULL))
			enter(&of, *found, s[i], state_after(s[3 * n + i]), -1);
		if ((memory = memory && (found = place(&map, s[4 * n + i])) != NULL))
			enter(&of, *found, s[i], RUNNING, s[5 * n + i]);
	}
	map_close(&map);
	order_ties(&of);
	for (Py_ssize_t i = 0; memory && final && i < known; i++)
		write_state(&of, i, of.last[i]);
	release(&given);
	return memory ? PyLong_FromSsize_t(of.rows) : PyErr_NoMemory();
}

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}
static PyMethodDef methods[] = {
	METHOD(latest), METHOD(pairs), METHOD(codes), METHOD(gather), METHOD(by_kind), METHOD(states), {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
	.m_base = PyModuleDef_HEAD_INIT,
	.m_name = "_joins",
	.m_doc = "The analyzer's joins over columns of integers.",
	.m_size = 0,
	.m_methods = methods,
};

PyMODINIT_FUNC PyInit__joins(void)
{
	return PyModuleDef_Init(&module);
}
