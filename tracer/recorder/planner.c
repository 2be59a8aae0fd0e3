// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* The pipe to a planner, which decides what is probed: questions go out, answers and orders come in, a line of JSON each. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "recorder.h"

#define PATIENCE_MS 15000
#define LAST_PATIENCE_MS 800
#define TURN_MS 100
#define MOST_BYTES (64UL << 20) /* of a line */

static int out = -1, in = -1;
static char *text; /* what was received and is not a whole line yet, or not looked at */
static size_t used, room;
static json_t *orders; /* that came while an answer was awaited */
static json_int_t asked;
static bool has_plan_file;
static volatile sig_atomic_t hurried;
static pid_t planner; /* 0: on another machine */

void hurry_planner(void)
{
	hurried = true;
}

bool has_planner(void)
{
	return out >= 0;
}

static void lose(const char *why)
{
	warn("the planner %s: %s", why, planner ? "the recording ends" : "what the target opens from now on is not probed");
	close(in);
	if (out != in)
		close(out);
	out = in = -1;
	if (planner) /* nobody attends to the recording any more */
		raise(SIGINT);
}

static bool is_ready(int fd, short events, int patience_ms)
{
	struct pollfd one = {.fd = fd, .events = events};

	return poll(&one, 1, patience_ms) > 0;
}

/* Writes, with a descriptor unless it is -1: only a socket carries one. */
static ssize_t write_with(const char *at, size_t bytes, int fd)
{
	union {
		struct cmsghdr header;
		char room[CMSG_SPACE(sizeof(int))];
	} control = {.header = {.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof(int))}};
	struct iovec part = {(char *)at, bytes};
	struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)};

	if (fd < 0 || out != in)
		return write(out, at, bytes);
	memcpy(CMSG_DATA(&control.header), &fd, sizeof(fd));
	return sendmsg(out, &message, 0);
}

static void send_line(json_t *message, int fd)
{
	char *line = json_dumps(message, JSON_COMPACT);
	size_t left = line ? strlen(line) + 1 : 0;

	json_decref(message);
	if (line)
		line[left - 1] = '\n';
	for (char *at = line; left && has_planner();) {
		ssize_t done;

		errno = 0; /* of an earlier call: silence is no interruption */
		done = is_ready(out, POLLOUT, PATIENCE_MS) ? write_with(at, left, fd) : -1;
		if (done < 0 && errno != EINTR) {
			lose("has ended");
			break;
		}
		at += done > 0 ? done : 0;
		left -= done > 0 ? done : 0;
		fd = done > 0 ? -1 : fd;
	}
	free(line);
}

/* Takes the first whole line out of what was received; NULL if there is none. */
static json_t *first_message(void)
{
	char *end = used ? memchr(text, '\n', used) : NULL;
	json_t *message;

	if (!end)
		return NULL;
	message = json_loadb(text, end - text, 0, NULL);
	used -= end + 1 - text;
	memmove(text, end + 1, used);
	if (!json_is_object(message)) {
		json_decref(message);
		lose("sent a line that is no JSON object");
		return NULL;
	}
	return message;
}

/* Reads what has come; false if nothing came in time. */
static bool receive(int patience_ms)
{
	ssize_t came;

	if (used == room) {
		room = room ? 2 * room : 1 << 16;
		text = room > MOST_BYTES ? NULL : realloc(text, room);
		if (!text)
			fail("the planner's message is too long");
	}
	if (!is_ready(in, POLLIN, patience_ms))
		return false;
	came = read(in, text + used, room - used);
	if (came <= 0) {
		lose("has ended");
		return false;
	}
	used += came;
	return true;
}

static json_t *next_message(int patience_ms)
{
	json_t *message;

	while (has_planner()) {
		message = first_message();
		if (json_object_get(message, "stop")) { /* a planner without root cannot send us a signal */
			raise(number_of(message, "stop"));
			json_decref(message);
			continue;
		}
		if (message || !receive(patience_ms))
			return message;
	}
	return NULL;
}

void heed_planner(void)
{
	for (json_t *message; (message = next_message(0));)
		json_array_append_new(orders, message);
}

bool asks_about(bool is_executable)
{
	return has_planner() && !(is_executable && has_plan_file);
}

void tell_planner(json_t *message)
{
	if (has_planner())
		send_line(message, -1);
	else
		json_decref(message);
}

/* Waits for an answer; for less long once the recording is to end. */
static json_t *await_answer(json_int_t number)
{
	u64 began = now_ns();
	json_t *message;

	while (has_planner()) {
		message = next_message(TURN_MS);
		if (message && number_of(message, "answer") == number)
			return message;
		if (message)
			json_array_append_new(orders, message);
		else if (now_ns() - began > (hurried ? LAST_PATIENCE_MS : PATIENCE_MS) * 1000000ULL)
			break;
	}
	if (has_planner())
		lose("does not answer");
	return NULL;
}

json_t *ask_planner(json_t *question, int fd)
{
	json_int_t number = ++asked;
	json_t *message;

	json_object_set_new(question, "ask", json_integer(number));
	send_line(question, fd);
	be_urgent(planner, true);
	message = await_answer(number);
	be_urgent(planner, false);
	return message;
}

json_t *next_order(void)
{
	json_t *order = json_array_get(orders, 0);

	if (!order)
		return next_message(0);
	json_incref(order);
	json_array_remove(orders, 0);
	return order;
}

void planner_wakes(void)
{
	if (has_planner())
		wake_on(in, false);
}

void begin_planning(int questions, int answers, json_t **plan)
{
	out = questions;
	in = answers;
	fcntl(out, F_SETFD, FD_CLOEXEC); /* the target gets neither end */
	fcntl(in, F_SETFD, FD_CLOEXEC);
	orders = json_array();
	has_plan_file = *plan;
	if (has_plan_file)
		return;
	tell_planner(json_pack("{so}", "machine", features()));
	*plan = next_message(PATIENCE_MS);
	if (!*plan)
		fail("the planner has sent no plan");
	planner = number_of(*plan, "planner_pid");
}
