/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Many protobuf messages at once, from columns; the order in which to write slices that nest; columns of texts as numbers.
 *
 * A message's form is a list of steps, each a tuple of Python: (kind, bytes, column, map, absent). A message chooses a form and a
 * row of its columns; an EACH step's column has a number for every message instead. Everything is checked before it is read.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum kind { CONSTANT, VARINT, EACH, FIXED64, MEMBER, OPEN, CLOSE };
enum { MOST_STEPS = 64, MOST_DEPTH = 8, VARINT_BYTES = 10, WORD = 8, MET = 4096 };

/* What is read for every message, in one cache line: `word` holds bytes that are few. */
struct step {
	uint64_t word;
	const int64_t *column, *map;
	Py_ssize_t mapped;
	int64_t absent;
	const char *bytes;
	Py_ssize_t length;
	uint8_t kind, optional;
};

struct form {
	struct step steps[MOST_STEPS];
	int count, holds;
	Py_ssize_t rows, messages, bound;
	Py_buffer held[2 * MOST_STEPS];
};

/* Writes up to WORD bytes more than it returns as used, as all that follows here does: the last message has room for them. */
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

/* A step's number in a row; false where its map has none. */
static int value_of(const struct step *step, int64_t row, int64_t *value)
{
	*value = step->column[row];
	if (!step->map)
		return 1;
	if (*value < 0 || *value >= step->mapped)
		return 0;
	*value = step->map[*value];
	return 1;
}

/* One message of a form; NULL where a map has no such number. */
static uint8_t *put_message(const struct form *form, Py_ssize_t message, int64_t row, uint8_t *to)
{
	uint8_t *opened[MOST_DEPTH], *inner;
	int64_t value = 0;
	int depth = 0;

	for (const struct step *step = form->steps, *end = step + form->count; step < end; step++) {
		if (step->column) {
			if (!value_of(step, step->kind == EACH ? message : row, &value))
				return NULL;
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
		case MEMBER: /* its bytes have a place for the length, which fits one byte */
			inner = to + 1;
			to = put_varint(put_bytes(to, step), (uint64_t)value);
			*inner = (uint8_t)(to - inner - 1);
			break;
		case FIXED64:
			to = put_bytes(to, step);
			memcpy(to, &value, sizeof value);
			to += sizeof value;
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
	Py_ssize_t rows = 0, *least;
	int kind;

	memset(step, 0, sizeof *step);
	if (!PyArg_ParseTuple(told, "iy#OOO", &kind, &step->bytes, &step->length, &column, &map, &absent))
		return 0;
	step->kind = (uint8_t)kind;
	if (!hold(form, column, &step->column, &rows) || !hold(form, map, &step->map, &step->mapped))
		return 0;
	memcpy(&step->word, step->bytes, (size_t)(step->length < WORD ? step->length : WORD));
	least = kind == EACH ? &form->messages : &form->rows;
	if (step->column && rows < *least)
		*least = rows;
	step->optional = absent != Py_None;
	if (step->optional)
		step->absent = PyLong_AsLongLong(absent);
	*depth += (kind == OPEN) - (kind == CLOSE);
	if (kind < CONSTANT || kind > CLOSE || *depth < 0 || *depth >= MOST_DEPTH ||
	    (kind == MEMBER && (step->length < 2 || step->length > 0x80 - VARINT_BYTES)) ||
	    (kind >= VARINT && kind <= MEMBER) != (step->column != NULL))
		PyErr_SetString(PyExc_ValueError, "steps that make no message");
	form->bound += step->length + VARINT_BYTES;
	return !PyErr_Occurred();
}

static int read_form(struct form *form, PyObject *steps)
{
	Py_ssize_t count = PySequence_Size(steps);
	int depth = 0;

	form->rows = form->messages = PY_SSIZE_T_MAX;
	if (count > MOST_STEPS)
		PyErr_SetString(PyExc_ValueError, "a message of too many steps");
	for (Py_ssize_t i = 0; i < count && !PyErr_Occurred(); i++) {
		PyObject *told = PySequence_GetItem(steps, i);

		if (told)
			read_step(form, told, &depth);
		Py_XDECREF(told); /* the list keeps it, and with it the bytes */
	}
	if (!PyErr_Occurred() && depth)
		PyErr_SetString(PyExc_ValueError, "steps that make no message");
	return !PyErr_Occurred();
}

static void release(struct form *forms, Py_ssize_t count)
{
	for (Py_ssize_t i = 0; i < count; i++)
		for (int h = 0; h < forms[i].holds; h++)
			PyBuffer_Release(&forms[i].held[h]);
	free(forms);
}

/* The messages, one after the other, or NULL: which of them has no form, no row, or a number that its map does not know. */
static uint8_t *put_messages(const struct form *forms, Py_ssize_t count, const int64_t *form, const int64_t *row, Py_ssize_t n,
			     uint8_t *to)
{
	for (Py_ssize_t i = 0; i < n && to; i++) {
		if ((uint64_t)form[i] >= (uint64_t)count || (uint64_t)row[i] >= (uint64_t)forms[form[i]].rows ||
		    i >= forms[form[i]].messages)
			return NULL;
		to = put_message(&forms[form[i]], i, row[i], to);
	}
	return to;
}

static PyObject *encoded(const struct form *forms, Py_ssize_t count, const Py_buffer *form, const Py_buffer *row)
{
	Py_ssize_t n = row->len / (Py_ssize_t)sizeof(int64_t), bound = 0;
	PyObject *out;
	uint8_t *begin, *end;

	if (form->len != row->len || row->len % (Py_ssize_t)sizeof(int64_t)) {
		PyErr_SetString(PyExc_ValueError, "as many forms as rows are wanted, of 8 bytes each");
		return NULL;
	}
	for (Py_ssize_t i = 0; i < count; i++)
		bound = forms[i].bound > bound ? forms[i].bound : bound;
	out = PyBytes_FromStringAndSize(NULL, n * bound + WORD);
	if (!out)
		return NULL;
	begin = (uint8_t *)PyBytes_AsString(out);
	Py_BEGIN_ALLOW_THREADS
	end = put_messages(forms, count, form->buf, row->buf, n, begin);
	Py_END_ALLOW_THREADS
	if (!end) {
		Py_DECREF(out);
		PyErr_SetString(PyExc_IndexError, "a message of no form, no row or no mapped number");
		return NULL;
	}
	_PyBytes_Resize(&out, end - begin);
	return out;
}

static PyObject *encode(PyObject *module, PyObject *arguments)
{
	PyObject *told, *out = NULL;
	Py_buffer form, row;
	struct form *forms;
	Py_ssize_t count;

	(void)module;
	if (!PyArg_ParseTuple(arguments, "O!y*y*", &PyList_Type, &told, &form, &row))
		return NULL;
	count = PyList_Size(told);
	forms = calloc((size_t)count + 1, sizeof *forms);
	if (!forms)
		PyErr_NoMemory();
	for (Py_ssize_t i = 0; forms && i < count && !PyErr_Occurred(); i++)
		read_form(&forms[i], PyList_GetItem(told, i));
	if (!PyErr_Occurred())
		out = encoded(forms, count, &form, &row);
	if (forms)
		release(forms, count);
	PyBuffer_Release(&form);
	PyBuffer_Release(&row);
	return out;
}

/*
 * Begin (i) and end (~i) events of slices, from their order of beginning. A slice that outlasts the one around it has crossed it:
 * that is marked, and from there to the next moment without a slice the order is of no use.
 */
static Py_ssize_t nest(const int64_t *opening, Py_ssize_t n, const int64_t *begin, const int64_t *end, const uint8_t *instant,
		       int64_t *stack, int64_t *events, uint8_t *crossed, int *bad)
{
	Py_ssize_t depth = 0, count = 0;

	for (Py_ssize_t k = 0; k < n; k++) {
		int64_t i = opening[k];

		if ((uint64_t)i >= (uint64_t)n) {
			*bad = 1;
			return 0;
		}
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
	Py_buffer opening, begin, end, instant, events, crossed;
	Py_ssize_t n, count = 0;
	int64_t *stack;
	int bad = 0;

	(void)module;
	if (!PyArg_ParseTuple(arguments, "y*y*y*y*w*w*", &opening, &begin, &end, &instant, &events, &crossed))
		return NULL;
	n = instant.len;
	stack = malloc((size_t)(n + 1) * sizeof *stack);
	if (!stack)
		PyErr_NoMemory();
	else if (opening.len != 8 * n || begin.len != 8 * n || end.len != 8 * n || events.len != 16 * n || crossed.len != n)
		PyErr_SetString(PyExc_ValueError, "columns of different lengths");
	else
		count = nest(opening.buf, n, begin.buf, end.buf, instant.buf, stack, events.buf, crossed.buf, &bad);
	if (bad)
		PyErr_SetString(PyExc_IndexError, "an order of slices that are not there");
	free(stack);
	PyBuffer_Release(&opening);
	PyBuffer_Release(&begin);
	PyBuffer_Release(&end);
	PyBuffer_Release(&instant);
	PyBuffer_Release(&events);
	PyBuffer_Release(&crossed);
	return PyErr_Occurred() ? NULL : PyLong_FromSsize_t(count);
}

/* A text's code: known by its address, where few texts stand in many rows, else by what it says. -1: an error. */
static int64_t code_of(PyObject *text, PyObject *known, PyObject *distinct)
{
	PyObject *told = PyDict_GetItemWithError(known, text);
	int64_t code = PyList_Size(distinct);

	if (told)
		return PyLong_AsLongLong(told);
	told = PyErr_Occurred() ? NULL : PyLong_FromLongLong(code);
	if (!told || PyDict_SetItem(known, text, told) < 0 || PyList_Append(distinct, text) < 0)
		code = -1;
	Py_XDECREF(told);
	return code;
}

static int put_codes(PyObject *const *texts, Py_ssize_t n, int64_t *codes, PyObject *known, PyObject *distinct)
{
	struct { PyObject *text; int64_t code; } *met = calloc(MET, sizeof *met);
	int good = met != NULL;

	if (!met)
		PyErr_NoMemory();
	for (Py_ssize_t i = 0; good && i < n; i++) {
		size_t slot = ((uintptr_t)texts[i] >> 4) % MET;

		if (met[slot].text != texts[i]) {
			met[slot].text = texts[i];
			met[slot].code = code_of(texts[i], known, distinct);
			good = met[slot].code >= 0;
		}
		codes[i] = met[slot].code;
	}
	free(met);
	return good;
}

static PyObject *codes(PyObject *module, PyObject *arguments)
{
	PyObject *array, *known = PyDict_New(), *distinct = PyList_New(0);
	Py_buffer texts, out;
	int good = 0;

	(void)module;
	if (!known || !distinct || !PyArg_ParseTuple(arguments, "Ow*", &array, &out))
		goto done;
	if (!PyObject_GetBuffer(array, &texts, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)) {
		if (strcmp(texts.format, "O") || texts.len != out.len)
			PyErr_SetString(PyExc_TypeError, "texts as objects, and a code of 8 bytes for each");
		else
			good = put_codes(texts.buf, texts.len / (Py_ssize_t)sizeof(PyObject *), out.buf, known, distinct);
		PyBuffer_Release(&texts);
	}
	PyBuffer_Release(&out);
done:
	Py_XDECREF(known);
	if (good)
		return distinct;
	Py_XDECREF(distinct);
	return NULL;
}

static PyMethodDef functions[] = {
	{"codes", codes, METH_VARARGS, "codes(texts, codes) -> the distinct texts; codes[i] becomes the place of texts[i] among them"},
	{"encode", encode, METH_VARARGS, "encode(forms, form, row) -> bytes: message i has form[i] and takes row[i] of its columns"},
	{"nested", nested, METH_VARARGS, "nested(opening, begin, end, instant, events, crossed) -> number of events"},
	{NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
	PyModuleDef_HEAD_INIT, .m_name = "_messages", .m_size = 0, .m_methods = functions,
};

PyMODINIT_FUNC PyInit__messages(void)
{
	return PyModule_Create(&definition);
}
