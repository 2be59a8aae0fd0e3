/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Many protobuf messages at once, from columns; the packets of slices that nest, and their order.
 *
 * A message's form is a list of steps, each a tuple of Python: (kind, bytes, column, map, absent). A message takes one row of its
 * form's columns. Columns are read from begin to end, before their messages are written in the order of time: to read
 * dozens of columns here and there, memory is too slow. Everything is checked before it is read.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum kind { CONSTANT, VARINT, FIXED64, MEMBER, OPEN, CLOSE };
enum { MOST_STEPS = 64, MOST_DEPTH = 8, MOST_PARTS = 2, MOST_LEVELS = 64 };
enum { VARINT_BYTES = 10, WORD = 8, CHUNK = 16, USUAL_BYTES = 24 };
enum { PACKET = 0x0a, TRACK_EVENT = 0x5a }; /* tags of Trace.packet and TracePacket.track_event */

/* Bytes that grow, and where they start. */
struct out {
	PyObject *bytes; /* a bytearray, which can grow: copying all bytes at the end would cost 2 to 3 % */
	uint8_t *start;
	Py_ssize_t used, room;
};

/* Where to write the next `more` bytes, or NULL and an error; `used` tells what was written. Python's lock need not be held. */
static uint8_t *reserve(struct out *out, Py_ssize_t more)
{
	PyGILState_STATE lock;

	if (out->room < out->used + more) {
		lock = PyGILState_Ensure();
		out->room = out->used + more + out->used / 2;
		if (!out->bytes)
			out->bytes = PyByteArray_FromStringAndSize(NULL, out->room);
		else if (PyByteArray_Resize(out->bytes, out->room))
			Py_CLEAR(out->bytes);
		out->start = out->bytes ? (uint8_t *)PyByteArray_AsString(out->bytes) : NULL;
		PyGILState_Release(lock);
	}
	return out->start ? out->start + out->used : NULL;
}

static void use(struct out *out, const uint8_t *end)
{
	out->used = end - out->start;
}

/* What was written, or NULL where there was an error; `wrong` says which, if nothing has. */
static PyObject *finish(struct out *out, const char *wrong)
{
	if (wrong && !PyErr_Occurred())
		PyErr_SetString(PyExc_IndexError, wrong);
	if (PyErr_Occurred() || !reserve(out, 1) || PyByteArray_Resize(out->bytes, out->used))
		Py_CLEAR(out->bytes);
	return out->bytes;
}

static void release_all(Py_buffer *columns, int count)
{
	for (int i = 0; i < count; i++)
		PyBuffer_Release(&columns[i]);
}

/* What is read for every message, in one cache line: `word` holds bytes that are few. */
struct step {
	uint64_t word;
	const int64_t *column, *map;
	Py_ssize_t mapped;
	int64_t absent;
	const char *bytes;
	uint32_t length;
	uint8_t kind, optional;
};

struct form {
	struct step steps[MOST_STEPS];
	int count, holds;
	Py_ssize_t rows, bound;
	Py_buffer held[2 * MOST_STEPS];
};

/* Writes up to WORD bytes more than it returns as used, as all that follows here does: there is room for them. */
static uint8_t *put_varint(uint8_t *to, uint64_t value)
{
	uint64_t spread = value;
	int width;

	if (value < 0x80) {
		*to = (uint8_t)value;
		return to + 1;
	}
	while (spread >> 56) {
		*to++ = (uint8_t)(spread | 0x80);
		spread >>= 7;
	}
	spread = (spread & 0x000000000fffffff) | (spread & 0x00fffffff0000000) << 4;
	spread = (spread & 0x00003fff00003fff) | (spread & 0x0fffc0000fffc000) << 2;
	spread = (spread & 0x007f007f007f007f) | (spread & 0x3f803f803f803f80) << 1;
	width = (63 - __builtin_clzll(spread | 1)) / 8;
	spread |= 0x8080808080808080 & (((uint64_t)1 << 8 * width) - 1);
	memcpy(to, &spread, WORD);
	return to + width + 1;
}

static uint8_t *put_bytes(uint8_t *to, const struct step *step)
{
	if (step->length <= WORD)
		memcpy(to, &step->word, WORD);
	else
		memcpy(to, step->bytes, (size_t)step->length);
	return to + step->length;
}

/* One byte was left for the length of what lies between `at` + 1 and `to`: make it longer where it has to be. */
static uint8_t *close_message(uint8_t *at, uint8_t *to)
{
	uint64_t length = (uint64_t)(to - at - 1);
	uint8_t prefix[VARINT_BYTES + WORD];
	Py_ssize_t width;

	if (length < 0x80) {
		*at = (uint8_t)length;
		return to;
	}
	width = put_varint(prefix, length) - prefix;
	memmove(at + width, at + 1, length);
	memcpy(at, prefix, (size_t)width);
	return to + width - 1;
}

/* A short sub-message. Its bytes end before its number, and have the length that it takes where the number fits one byte. */
static uint8_t *put_member(uint8_t *to, const struct step *step, uint64_t value)
{
	uint64_t word = step->word | value << 8 * (step->length % WORD);
	uint8_t *length = to + 1;

	if (value < 0x80 && step->length < WORD) {
		memcpy(to, &word, WORD);
		return to + step->length + 1;
	}
	to = put_varint(put_bytes(to, step), value);
	*length = (uint8_t)(to - length - 1);
	return to;
}

static uint8_t *put_fixed(uint8_t *to, const struct step *step, int64_t value)
{
	to = put_bytes(to, step);
	memcpy(to, &value, sizeof value);
	return to + sizeof value;
}

/* One message of a form; NULL where a map has no such number. */
static uint8_t *put_message(const struct form *form, Py_ssize_t row, uint8_t *to)
{
	uint8_t *opened[MOST_DEPTH];
	int64_t value = 0;
	int depth = 0;

	for (const struct step *step = form->steps, *end = step + form->count; step < end; step++) {
		if (step->column) {
			value = step->column[row];
			if (step->map) {
				if ((uint64_t)value >= (uint64_t)step->mapped)
					return NULL;
				value = step->map[value];
			}
			if (step->optional && value == step->absent)
				continue;
		}
		switch (step->kind) {
		case CLOSE:
			depth--;
			to = close_message(opened[depth], to);
			break;
		case OPEN:
			to = put_bytes(to, step);
			opened[depth++] = to++;
			break;
		case MEMBER:
			to = put_member(to, step, (uint64_t)value);
			break;
		case FIXED64:
			to = put_fixed(to, step, value);
			break;
		case CONSTANT:
			to = put_bytes(to, step);
			break;
		default:
			to = put_varint(put_bytes(to, step), (uint64_t)value);
		}
	}
	return to;
}

static int hold(struct form *form, PyObject *array, const int64_t **numbers, Py_ssize_t *count)
{
	Py_buffer *view = &form->held[form->holds];

	*numbers = NULL;
	if (array == Py_None)
		return 1;
	if (PyObject_GetBuffer(array, view, PyBUF_C_CONTIGUOUS) < 0)
		return 0;
	form->holds++;
	if (view->itemsize != sizeof(int64_t)) {
		PyErr_SetString(PyExc_TypeError, "a column has no 8 bytes per number");
		return 0;
	}
	*numbers = view->buf;
	*count = view->len / (Py_ssize_t)sizeof(int64_t);
	return 1;
}

static int read_step(struct form *form, PyObject *told, int *depth)
{
	struct step *step = &form->steps[form->count++];
	PyObject *column, *map, *absent;
	Py_ssize_t rows = 0, length;
	int kind;

	memset(step, 0, sizeof *step);
	if (!PyArg_ParseTuple(told, "iy#OOO", &kind, &step->bytes, &length, &column, &map, &absent))
		return 0;
	step->kind = (uint8_t)kind;
	step->length = (uint32_t)length;
	if (!hold(form, column, &step->column, &rows) || !hold(form, map, &step->map, &step->mapped))
		return 0;
	memcpy(&step->word, step->bytes, (size_t)(length < WORD ? length : WORD));
	if (step->column && rows < form->rows)
		form->rows = rows;
	step->optional = absent != Py_None;
	if (step->optional)
		step->absent = PyLong_AsLongLong(absent);
	*depth += (kind == OPEN) - (kind == CLOSE);
	if (kind < CONSTANT || kind > CLOSE || *depth < 0 || *depth >= MOST_DEPTH || length > UINT32_MAX ||
	    (kind == MEMBER && (length < 2 || length > 0x80 - VARINT_BYTES)) ||
	    (kind == VARINT || kind == FIXED64 || kind == MEMBER) != (step->column != NULL))
		PyErr_SetString(PyExc_ValueError, "steps that make no message");
	form->bound += length + VARINT_BYTES;
	return !PyErr_Occurred();
}

static int read_form(struct form *form, PyObject *steps)
{
	Py_ssize_t count = PyList_Size(steps);
	int depth = 0;

	form->rows = PY_SSIZE_T_MAX;
	form->bound = WORD;
	if (count > MOST_STEPS)
		PyErr_SetString(PyExc_ValueError, "a message of too many steps");
	for (Py_ssize_t i = 0; i < count && !PyErr_Occurred(); i++)
		read_step(form, PyList_GetItem(steps, i), &depth);
	if (!PyErr_Occurred() && depth)
		PyErr_SetString(PyExc_ValueError, "steps that make no message");
	return !PyErr_Occurred();
}

/* What is wrong, or NULL. */
static const char *put_rows(const struct form *form, int64_t *offsets, Py_ssize_t n, struct out *out)
{
	uint8_t *to;

	offsets[0] = 0;
	for (Py_ssize_t i = 0; i < n; i++) {
		to = i < form->rows ? reserve(out, form->bound) : NULL;
		to = to ? put_message(form, i, to) : NULL;
		if (!to)
			return "a message of no row, or a number that its map does not know";
		use(out, to);
		offsets[i + 1] = out->used;
	}
	return NULL;
}

static PyObject *encode(PyObject *module, PyObject *arguments)
{
	struct form *form = calloc(1, sizeof *form);
	const char *wrong = NULL;
	struct out out = {0};
	Py_buffer offsets;
	PyObject *steps;

	(void)module;
	if (!form)
		return PyErr_NoMemory();
	if (PyArg_ParseTuple(arguments, "Ow*", &steps, &offsets)) {
		if (offsets.len < WORD)
			PyErr_SetString(PyExc_ValueError, "no offsets");
		else if (read_form(form, steps)) {
			Py_BEGIN_ALLOW_THREADS
			wrong = put_rows(form, offsets.buf, offsets.len / WORD - 1, &out);
			Py_END_ALLOW_THREADS
		}
		PyBuffer_Release(&offsets);
	}
	release_all(form->held, form->holds);
	free(form);
	return finish(&out, wrong);
}

static PyObject *varints(PyObject *module, PyObject *arguments)
{
	struct out out = {0};
	Py_buffer column;
	uint8_t *to;

	(void)module;
	if (!PyArg_ParseTuple(arguments, "y*", &column))
		return NULL;
	to = reserve(&out, column.len / WORD * VARINT_BYTES + WORD);
	if (to) {
		Py_BEGIN_ALLOW_THREADS
		for (Py_ssize_t i = 0; i < column.len / WORD; i++)
			to = put_varint(to, ((const uint64_t *)column.buf)[i]);
		use(&out, to);
		Py_END_ALLOW_THREADS
	}
	PyBuffer_Release(&column);
	return finish(&out, NULL);
}

/* Bytes among others: `beyond` more may be read behind them. */
struct said {
	const uint8_t *bytes;
	Py_ssize_t length, beyond;
};

/* A part of what a level's slices say: number r stands from offsets[r] to offsets[r + 1]; slice i says number row[i], or i. */
struct part {
	Py_buffer bytes, offsets, row;
};

struct level {
	struct part parts[MOST_PARTS];
	Py_ssize_t count;
};

/* The slices of one track as columns, and the order of their begins (i) and ends (~i). */
struct track {
	struct said head, ended;
	Py_buffer order, rank, row, begin, end;
	struct level levels[MOST_LEVELS];
	Py_ssize_t count;
};

static void read_level(struct level *level, PyObject *parts)
{
	Py_ssize_t count = PyList_Size(parts);

	if (count > MOST_PARTS)
		PyErr_SetString(PyExc_ValueError, "a level of too many parts");
	for (Py_ssize_t i = 0; i < count && !PyErr_Occurred(); i++) {
		struct part *part = &level->parts[i];

		if (PyArg_ParseTuple(PyList_GetItem(parts, i), "y*y*z*", &part->bytes, &part->offsets, &part->row))
			level->count++;
	}
}

static void read_track(struct track *track, PyObject *arguments, long long *last)
{
	PyObject *levels;

	if (!PyArg_ParseTuple(arguments, "y#y#O!y*y*y*y*y*L", &track->head.bytes, &track->head.length, &track->ended.bytes,
			      &track->ended.length, &PyList_Type, &levels, &track->order, &track->rank, &track->row, &track->begin,
			      &track->end, last))
		return;
	if (track->rank.len != track->row.len || track->begin.len != track->row.len || track->end.len != track->row.len)
		PyErr_SetString(PyExc_ValueError, "columns of different lengths");
	if (PyList_Size(levels) > MOST_LEVELS)
		PyErr_SetString(PyExc_ValueError, "too many levels");
	while (!PyErr_Occurred() && track->count < PyList_Size(levels)) {
		read_level(&track->levels[track->count], PyList_GetItem(levels, track->count));
		track->count++;
	}
}

static void release(struct track *track)
{
	Py_buffer *columns[] = {&track->order, &track->rank, &track->row, &track->begin, &track->end};

	for (size_t i = 0; i < sizeof columns / sizeof *columns; i++)
		PyBuffer_Release(columns[i]);
	for (Py_ssize_t i = 0; i < track->count; i++)
		for (Py_ssize_t p = 0; p < track->levels[i].count; p++) {
			PyBuffer_Release(&track->levels[i].parts[p].bytes);
			PyBuffer_Release(&track->levels[i].parts[p].offsets);
			PyBuffer_Release(&track->levels[i].parts[p].row);
		}
	free(track);
}

/* Number i of a column that may not have so many; false then. */
static int at(const Py_buffer *column, int64_t i, int64_t *number)
{
	if ((uint64_t)i >= (uint64_t)column->len / WORD)
		return 0;
	*number = ((const int64_t *)column->buf)[i];
	return 1;
}

static int find(const struct part *part, int64_t row, struct said *said)
{
	int64_t from, to;

	if (part->row.buf && !at(&part->row, row, &row))
		return 0;
	if (!at(&part->offsets, row, &from) || !at(&part->offsets, row + 1, &to) || from < 0 || to < from || to > part->bytes.len)
		return 0;
	*said = (struct said){(const uint8_t *)part->bytes.buf + from, to - from, part->bytes.len - to};
	return 1;
}

/* What the begin of slice i says, in how many parts; -1 where there is no such slice. */
static int begun(const struct track *track, int64_t i, struct said *said)
{
	const struct level *level;
	int64_t rank, row;

	if (!at(&track->rank, i, &rank) || !at(&track->row, i, &row) || (uint64_t)rank >= (uint64_t)track->count)
		return -1;
	level = &track->levels[rank];
	for (Py_ssize_t p = 0; p < level->count; p++)
		if (!find(&level->parts[p], row, &said[p]))
			return -1;
	return (int)level->count;
}

/* Most are shorter than what a call of memcpy is worth. Writes up to CHUNK bytes more. */
static uint8_t *put_said(uint8_t *to, const struct said *said)
{
	if (said->beyond < CHUNK)
		memcpy(to, said->bytes, (size_t)said->length);
	else
		for (Py_ssize_t done = 0; done < said->length; done += CHUNK)
			memcpy(to + done, said->bytes + done, CHUNK);
	return to + said->length;
}

static Py_ssize_t bytes_of(const struct said *said, int count)
{
	Py_ssize_t length = 0;

	for (int p = 0; p < count; p++)
		length += said[p].length;
	return length;
}

static uint8_t *put_packet(uint8_t *to, const struct said *head, uint64_t since, const struct said *said, int count)
{
	uint8_t *opened;

	*to++ = PACKET;
	opened = to++;
	to = put_varint(put_said(to, head), since);
	*to++ = TRACK_EVENT;
	to = put_varint(to, (uint64_t)bytes_of(said, count));
	for (int p = 0; p < count; p++)
		to = put_said(to, &said[p]);
	return close_message(opened, to);
}

/* What is wrong, or NULL. */
static const char *put_events(const struct track *track, int64_t last, struct out *out)
{
	struct said said[MOST_PARTS];
	int64_t event, ts;
	int count;
	uint8_t *to;

	for (Py_ssize_t k = 0; k < track->order.len / WORD; k++) {
		event = ((const int64_t *)track->order.buf)[k];
		count = event < 0 ? 1 : begun(track, event, said);
		if (event < 0)
			said[0] = track->ended;
		if (count < 0 || !at(event < 0 ? &track->end : &track->begin, event < 0 ? ~event : event, &ts))
			return "an event of no slice";
		to = reserve(out, track->head.length + bytes_of(said, count) + 4 * VARINT_BYTES + CHUNK);
		if (!to)
			return "too many bytes";
		use(out, put_packet(to, &track->head, (uint64_t)ts - (uint64_t)last, said, count));
		last = ts;
	}
	return NULL;
}

static PyObject *events(PyObject *module, PyObject *arguments)
{
	struct track *track = calloc(1, sizeof *track);
	const char *wrong = NULL;
	struct out out = {0};
	long long last = 0;

	(void)module;
	if (!track)
		return PyErr_NoMemory();
	read_track(track, arguments, &last);
	if (!PyErr_Occurred()) {
		Py_BEGIN_ALLOW_THREADS
		reserve(&out, track->order.len / WORD * USUAL_BYTES);
		wrong = put_events(track, last, &out);
		Py_END_ALLOW_THREADS
	}
	release(track);
	return finish(&out, wrong);
}

/*
 * Begin (i) and end (~i) events of slices that stand in the order of their begins. A slice that outlasts the one around it has crossed it:
 * that is marked, and from there to the next moment without a slice the order is of no use.
 */
static Py_ssize_t nest(Py_ssize_t n, const int64_t *begin, const int64_t *end, const uint8_t *instant, int64_t *stack,
		       int64_t *events, uint8_t *crossed)
{
	Py_ssize_t depth = 0, count = 0;

	for (Py_ssize_t i = 0; i < n; i++) {
		while (depth && end[stack[depth - 1]] <= begin[i])
			events[count++] = ~stack[--depth];
		events[count++] = i;
		if (instant[i])
			continue;
		crossed[i] = depth && end[i] > end[stack[depth - 1]];
		if (end[i] <= begin[i])
			events[count++] = ~i;
		else
			stack[depth++] = i;
	}
	while (depth)
		events[count++] = ~stack[--depth];
	return count;
}

static PyObject *nested(PyObject *module, PyObject *arguments)
{
	Py_buffer columns[5], *begin = columns, *end = columns + 1, *instant = columns + 2, *events = columns + 3, *crossed = columns + 4;
	Py_ssize_t n, count = 0;
	int64_t *stack;

	(void)module;
	if (!PyArg_ParseTuple(arguments, "y*y*y*w*w*", begin, end, instant, events, crossed))
		return NULL;
	n = instant->len;
	stack = malloc((size_t)(n + 1) * sizeof *stack);
	if (!stack)
		PyErr_NoMemory();
	else if (begin->len != WORD * n || end->len != WORD * n || events->len != 2 * WORD * n || crossed->len != n)
		PyErr_SetString(PyExc_ValueError, "columns of different lengths");
	else {
		Py_BEGIN_ALLOW_THREADS
		count = nest(n, begin->buf, end->buf, instant->buf, stack, events->buf, crossed->buf);
		Py_END_ALLOW_THREADS
	}
	free(stack);
	release_all(columns, 5);
	return PyErr_Occurred() ? NULL : PyLong_FromSsize_t(count);
}

static PyMethodDef functions[] = {
	{"encode", encode, METH_VARARGS, "encode(steps, offsets) -> bytes of len(offsets) - 1 messages, and where each begins and ends"},
	{"events", events, METH_VARARGS, "events(head, ended, levels, order, rank, row, begin, end, last) -> packets"},
	{"nested", nested, METH_VARARGS, "nested(begin, end, instant, events, crossed) -> number of events"},
	{"varints", varints, METH_VARARGS, "varints(numbers) -> bytes"},
	{NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
	PyModuleDef_HEAD_INIT, .m_name = "_messages", .m_size = 0, .m_methods = functions,
};

PyMODINIT_FUNC PyInit__messages(void)
{
	return PyModule_Create(&definition);
}
