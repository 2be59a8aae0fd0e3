/* SPDX-License-Identifier: Apache-2.0 */
/* Loads a library, calls its work_other() and drops it again: reload LIBRARY TIMES CALLS. Prints the calls. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

int main(int count, char **arguments)
{
	int times = count > 3 ? atoi(arguments[2]) : 0, calls = count > 3 ? atoi(arguments[3]) : 0, called = 0;

	for (int i = 0; i < times; i++) {
		void *library = dlopen(arguments[1], RTLD_NOW);
		int (*work)(void) = library ? (int (*)(void))dlsym(library, "work_other") : NULL;

		if (!work) {
			fprintf(stderr, "%s\n", dlerror());
			return 2;
		}
		for (int j = 0; j < calls; j++)
			called += work() == -1;
		dlclose(library);
	}
	printf("%d\n", called);
	return 0;
}
