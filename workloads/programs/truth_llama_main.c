/* SPDX-License-Identifier: Apache-2.0 */
/* The program to the engine in truth_llama.c: truth_llama LOG STEPS PROMPT PAUSE_US. */
int truth(int count, char **arguments);

int main(int count, char **arguments)
{
	return truth(count, arguments);
}
