// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* The rights that the recorder uses, as root or as a program with capabilities of its own, and those that it sets aside. */
#include <errno.h>
#include <linux/capability.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "recorder.h"

#ifndef CAP_PERFMON
#define CAP_PERFMON 38
#define CAP_BPF 39
#endif
#define BIT(number) (1ULL << (number))

/* To read what root alone may: sysfs, tracefs, what a process has mapped. */
#define READS (BIT(CAP_DAC_READ_SEARCH) | BIT(CAP_DAC_OVERRIDE) | BIT(CAP_SYS_PTRACE) | BIT(CAP_SYSLOG))
/* CAP_SYS_ADMIN: programs before Linux 5.8, and to mount tracefs. */
#define KEPT                                                                                                           \
	(READS | BIT(CAP_BPF) | BIT(CAP_PERFMON) | BIT(CAP_SYS_ADMIN) | BIT(CAP_SYS_RESOURCE) | BIT(CAP_SYS_NICE) |     \
	 BIT(CAP_IPC_LOCK) | BIT(CAP_KILL) | BIT(CAP_SETUID) | BIT(CAP_SETGID) | BIT(CAP_CHOWN) | BIT(CAP_FOWNER))

struct rights {
	u64 effective, permitted, inheritable;
};

static struct rights rights(void)
{
	struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
	struct __user_cap_data_struct halves[2] = {0};

	syscall(SYS_capget, &header, halves);
	return (struct rights){
		halves[0].effective | (u64)halves[1].effective << 32,
		halves[0].permitted | (u64)halves[1].permitted << 32,
		halves[0].inheritable | (u64)halves[1].inheritable << 32,
	};
}

static bool take_rights(struct rights wanted)
{
	struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
	struct __user_cap_data_struct halves[2] = {
		{wanted.effective, wanted.permitted, wanted.inheritable},
		{wanted.effective >> 32, wanted.permitted >> 32, wanted.inheritable >> 32},
	};

	return !syscall(SYS_capset, &header, halves);
}

bool may_trace(void)
{
	u64 both = BIT(CAP_BPF) | BIT(CAP_PERFMON), has = rights().effective;

	return (has & both) == both || has & BIT(CAP_SYS_ADMIN);
}

/* They stay permitted: a command that gained some by being executed would not be dumpable, and lose its perf events. */
void keep_few_rights(void)
{
	struct rights has = rights();

	has.effective &= KEPT;
	take_rights(has);
}

void read_as_user(bool as_user)
{
	struct rights has = rights();

	has.effective = as_user ? has.effective & ~READS : has.effective | (has.permitted & READS);
	if (!take_rights(has) && as_user)
		fail("the recorder's rights to read cannot be set aside: %s", strerror(errno));
}

void leave_rights(void)
{
	prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
}
