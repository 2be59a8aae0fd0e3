/* ggml's htp_iface for the stand-in: methods are numbered as the interface lists them, from 2, and packed as numbers of 64 bits. */
#include "htp_iface.h"

enum { START = 2, STOP, MMAP, MUNMAP, PROFILER, ETM, HWINFO };

static int call(remote_handle64 handle, uint32_t method, uint64_t *numbers, uint32_t count)
{
	remote_arg arg = {.buf = {numbers, count * sizeof(*numbers)}};

	return remote_handle64_invoke(handle, REMOTE_SCALARS_MAKE(method, method != HWINFO, method == HWINFO), &arg);
}

int htp_iface_open(const char *uri, remote_handle64 *handle)
{
	return remote_handle64_open(uri, handle);
}

int htp_iface_close(remote_handle64 handle)
{
	return remote_handle64_close(handle);
}

int htp_iface_start(remote_handle64 handle, unsigned int session, uint64_t queue, unsigned int n_hvx, unsigned int n_hmx, uint64_t max_vmem)
{
	uint64_t numbers[] = {session, queue, n_hvx, n_hmx, max_vmem};

	return call(handle, START, numbers, 5);
}

int htp_iface_stop(remote_handle64 handle)
{
	uint64_t none = 0;

	return call(handle, STOP, &none, 1);
}

int htp_iface_mmap(remote_handle64 handle, unsigned int fd, uint64_t size)
{
	uint64_t numbers[] = {fd, size};

	return call(handle, MMAP, numbers, 2);
}

int htp_iface_munmap(remote_handle64 handle, unsigned int fd)
{
	uint64_t number = fd;

	return call(handle, MUNMAP, &number, 1);
}

int htp_iface_profiler(remote_handle64 handle, unsigned int mode, const htp_iface_pmu_conf *pmu)
{
	uint64_t number = mode;

	return call(handle, PROFILER, &number, 1);
}

int htp_iface_etm(remote_handle64 handle, unsigned int enable)
{
	uint64_t number = enable;

	return call(handle, ETM, &number, 1);
}

int htp_iface_hwinfo(remote_handle64 handle, unsigned int *n_threads, unsigned int *n_hvx, unsigned int *n_hmx,
		     unsigned long long *vtcm_bytes)
{
	uint64_t numbers[4] = {};
	int error = call(handle, HWINFO, numbers, 4);

	*n_threads = numbers[0];
	*n_hvx = numbers[1];
	*n_hmx = numbers[2];
	*vtcm_bytes = numbers[3];
	return error;
}
