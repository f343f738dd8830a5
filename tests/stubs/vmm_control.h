/* What a test may ask of a stub driver library: exported by both, next to the driver's own symbols.
 *
 * A rule counts the calls that match (NULL: every driver call; "cuMem*": every one that begins so) from the moment it is
 * set, and makes the n-th answer `code` without doing anything; persistent: the n-th and all later ones. */
#ifndef VMM_CONTROL_H
#define VMM_CONTROL_H

#include <stddef.h>
#include <stdint.h>

void stub_reset(void); /* rules, options, attributes, counters, violations and the log; objects stay */
void stub_fail_nth(const char *call, long n, int code, int persistent);
void stub_fail_after_first(const char *call, long n, int code, int persistent); /* counts once any rule has fired */
void stub_fail_clear(void);
long stub_injected(void);
long stub_calls(const char *call); /* NULL: all */

size_t stub_live_handles(void);
size_t stub_live_mappings(void);
size_t stub_live_reservations(void);
size_t stub_live_allocations(void);
size_t stub_live_streams(void);
uint64_t stub_used_bytes(int device);
int stub_context_references(int device);
int stub_thread_pushes(void); /* of the calling thread, minus its pops */

size_t stub_num_violations(void);
const char *stub_violations(void);
const char *stub_log(void); /* "call -> code" lines since stub_reset, while option "log" is set */

void stub_set_total_memory(int device, uint64_t bytes);
void stub_neighbour_takes(int device, int64_t bytes);                         /* negative: gives back */
void stub_neighbour_takes_at(const char *call, long n, int device, int64_t bytes); /* before the n-th call */
void stub_set_attribute(int attribute, int value, int code);
int stub_set_option(const char *name, int64_t value); /* 0, or -1 for an unknown name */
void stub_begin_capture(void);
int stub_end_capture(void); /* 0: the capture is valid */

#endif
