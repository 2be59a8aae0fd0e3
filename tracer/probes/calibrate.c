/* SPDX-License-Identifier: Apache-2.0 */
/* Empty functions to probe, and the loop that times calls of them: what does one probe hit cost on this machine? */
#include <stdint.h>
#include <time.h>

#if defined(__x86_64__)
__asm__(".text\n"
	".globl calibrate_emulated\n.type calibrate_emulated,@function\ncalibrate_emulated: nop\n ret\n.size calibrate_emulated,2\n"
	".globl calibrate_stepped\n.type calibrate_stepped,@function\ncalibrate_stepped: mov %eax,%eax\n ret\n.size calibrate_stepped,3\n"
	".globl calibrate_nop5\n.type calibrate_nop5,@function\ncalibrate_nop5: .byte 0x0f,0x1f,0x44,0,0\n ret\n.size calibrate_nop5,6\n");
#elif defined(__aarch64__)
__asm__(".text\n"
	".globl calibrate_emulated\n.type calibrate_emulated,%function\ncalibrate_emulated: b 1f\n1: ret\n.size calibrate_emulated,8\n"
	".globl calibrate_stepped\n.type calibrate_stepped,%function\ncalibrate_stepped: mov x9,x9\n ret\n.size calibrate_stepped,8\n"
	".globl calibrate_nop5\n.type calibrate_nop5,%function\ncalibrate_nop5: nop\n ret\n.size calibrate_nop5,8\n");
#endif

void calibrate_emulated(void);
void calibrate_stepped(void);
void calibrate_nop5(void);

static volatile uint8_t other_data[4 << 20];

/*
 * Nanoseconds that `calls` calls of function 0 (emulated), 1 (stepped) or 2 (nop5) take. Between calls `bytes` of other data are
 * touched outside the measured time, as a program does between two hits: the kernel's path through a probe is then cold.
 */
uint64_t calibrate(int which, int calls, uint64_t bytes)
{
	void (*const functions[])(void) = {calibrate_emulated, calibrate_stepped, calibrate_nop5};
	struct timespec begin, end;
	uint64_t spent = 0;

	for (int i = 0; i < calls; i++) {
		for (uint64_t at = 0; at < bytes && at < sizeof(other_data); at += 64)
			other_data[at]++;
		clock_gettime(CLOCK_MONOTONIC, &begin);
		functions[which]();
		clock_gettime(CLOCK_MONOTONIC, &end);
		spent += (end.tv_sec - begin.tv_sec) * 1000000000ULL + end.tv_nsec - begin.tv_nsec;
	}
	return spent;
}
