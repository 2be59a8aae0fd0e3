// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Programs that another process compiles with BCC: it is given our maps and where this kernel's structs have their members, and
 * hands over one program at a time. Each message has an answer: "+", with the program's descriptor, or "-" and the reason.
 */
#include <bpf/btf.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "handed.h"

#define TURN_MS 100
#define MOST_FDS 64

static int helper = -1;
static void (*meanwhile)(void);

s64 offset_in(const struct btf *btf, s32 id, const char *wanted)
{
	const struct btf_type *type = btf__type_by_id(btf, id);

	for (int i = 0; i < btf_vlen(type); i++) {
		const struct btf_member *member = btf_members(type) + i;
		const char *name = btf__name_by_offset(btf, member->name_off);
		s64 at = btf_member_bit_offset(type, i) / 8, inner;

		if (!strcmp(name, wanted))
			return at;
		if (*name || !btf_is_composite(btf__type_by_id(btf, member->type)))
			continue;
		inner = offset_in(btf, member->type, wanted);
		if (inner >= 0)
			return at + inner;
	}
	return -1;
}

json_t *member_offsets(const struct btf *own, const struct btf *kernel)
{
	json_t *offsets = json_object();

	for (u32 id = 1; id < btf__type_cnt(own); id++) {
		const struct btf_type *type = btf__type_by_id(own, id);
		const char *name = btf__name_by_offset(own, type->name_off);
		s32 there = btf_is_struct(type) ? btf__find_by_name_kind(kernel, name, BTF_KIND_STRUCT) : -1;

		for (int i = 0; there > 0 && i < btf_vlen(type); i++) {
			const char *member = btf__name_by_offset(own, btf_members(type)[i].name_off);
			s64 at = offset_in(kernel, there, member);
			char key[256];

			snprintf(key, sizeof(key), "%s_%s", name, member);
			if (at >= 0)
				json_object_set_new(offsets, key, json_integer(at));
		}
	}
	return offsets;
}

static void send_to_helper(const char *text, const int *fds, int count)
{
	char room[CMSG_SPACE(MOST_FDS * sizeof(int))] = {0};
	struct iovec part = {(char *)text, strlen(text)};
	struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};

	if (count) {
		struct cmsghdr *header = (void *)room;

		header->cmsg_level = SOL_SOCKET;
		header->cmsg_type = SCM_RIGHTS;
		header->cmsg_len = CMSG_LEN(count * sizeof(int));
		memcpy(CMSG_DATA(header), fds, count * sizeof(int));
		message.msg_control = room;
		message.msg_controllen = CMSG_SPACE(count * sizeof(int));
	}
	if (sendmsg(helper, &message, MSG_NOSIGNAL) < 0)
		fail("the process that compiles the programs cannot be reached: %s", strerror(errno));
}

/* Its answer; a descriptor that came with it, or -1. */
static int receive_answer(char *text, size_t bytes)
{
	char room[CMSG_SPACE(sizeof(int))];
	struct iovec part = {text, bytes - 1};
	struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof(room)};
	struct pollfd one = {.fd = helper, .events = POLLIN};
	struct cmsghdr *header;
	ssize_t came;
	int fd = -1;

	while (poll(&one, 1, TURN_MS) <= 0)
		meanwhile();
	came = recvmsg(helper, &message, MSG_CMSG_CLOEXEC);
	if (came <= 0)
		fail("the process that compiles the programs has ended");
	text[came] = 0;
	header = CMSG_FIRSTHDR(&message);
	if (header && header->cmsg_type == SCM_RIGHTS)
		memcpy(&fd, CMSG_DATA(header), sizeof(fd));
	return fd;
}

void begin_compiling(int socket, json_t *request, const int *maps, int count, void (*waiting)(void))
{
	char *text = json_dumps(request, JSON_COMPACT), why[4096];

	if (!text || count > MOST_FDS)
		fail("too many maps for the process that compiles the programs");
	helper = socket;
	meanwhile = waiting;
	fcntl(helper, F_SETFD, FD_CLOEXEC);
	send_to_helper(text, maps, count);
	free(text);
	json_decref(request);
	receive_answer(why, sizeof(why));
	if (*why != '+')
		fail("%s", why + 1);
}

int compiled_program(const char *name, u32 type, u32 attach_type, char *why, size_t bytes)
{
	char text[256];
	int fd;

	snprintf(text, sizeof(text), "%s %u %u", name, type, attach_type);
	send_to_helper(text, NULL, 0);
	fd = receive_answer(why, bytes);
	memmove(why, why + 1, strlen(why));
	return fd;
}
