/* The lock around every driver call, fault injection, options, violations and the report.  See vmm_control.h.
 *
 * Environment: EKV_STUB_OPTIONS "name=value,..." sets options before the first call; EKV_STUB_REPORT names a file that
 * gets one JSON line for each violation and one at unload; EKV_STUB_ABORT aborts at a violation. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "vmm_control.h"
#include "vmm_sim.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#define MAX_CALLS 96
#define MAX_ATTRIBUTES 16
#define TEXT_BYTES (1 << 16)

static struct {
    const char *name;
    int64_t initial, value;
} options[] = {
    {"total_memory", 256ll << 20, 0},
    {"granularity", 2 << 20, 0},
    {"recommended_factor", 1, 0},
    {"fabric_granularity_factor", 1, 0},
    {"poison", 1, 0},
    {"defer", 1, 0},
    {"log", 0, 0},
    {"granularity_code", 0, 0},      /* the granularity query answers this */
    {"fabric_code", SIM_NOT_SUPPORTED, 0}, /* a fabric handle answers this; 0: it works */
    {"rdma_code", 0, 0},             /* creating RDMA capable memory answers this */
    {"max_reserve_bytes", 0, 0},     /* a larger reservation is out of memory */
    /* What ROCm users report. */
    {"page_bytes", 0, 0},            /* memory is taken in pages of this size */
    {"hold_until_address_free", 0, 0},
    {"range_unmap_breaks_free", 0, 0},
    {"release_while_mapped_breaks_free", 0, 0},
    {"set_access_fails_every", 0, 0},
    {"set_access_first_sum", 0, 0},
    {"aligned_reserve_code", 0, 0},  /* reserving with an alignment answers this */
    {"refuse_address_hint", 0, 0},
    {"runtime_version", 70226015, 0}, /* before 70100000 a descriptor is imported by address */
};

sim_state sim;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void sim_lock(void) { pthread_mutex_lock(&lock); }
void sim_unlock(void) { pthread_mutex_unlock(&lock); }

static pthread_key_t thread_key;
static _Thread_local sim_thread this_thread;
static struct {
    const char *name;
    long count;
} calls[MAX_CALLS];
static struct {
    int attribute, value, code;
} attributes[MAX_ATTRIBUTES];
static size_t num_attributes;
static size_t num_violations;
static char violations[TEXT_BYTES], logged[TEXT_BYTES];
static const char *current_call = "";

static void append(char *buffer, const char *line)
{
    size_t length = strlen(buffer);
    snprintf(buffer + length, TEXT_BYTES - length, "%s\n", line);
}

static void report(const char *event, const char *text)
{
    const char *path = getenv("EKV_STUB_REPORT");
    int file = path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644) : -1;
    if (file < 0)
        return;
    dprintf(file, "{\"pid\": %d, \"event\": \"%s\", %s}\n", (int)getpid(), event, text);
    close(file);
}

int sim_violation(int code, const char *format, ...)
{
    char text[512], line[640], quoted[700];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    snprintf(line, sizeof line, "%s: %s", current_call, text);
    append(violations, line);
    num_violations++;
    snprintf(quoted, sizeof quoted, "\"text\": \"%s\"", line);
    report("violation", quoted);
    if (getenv("EKV_STUB_ABORT"))
        abort();
    return code;
}

sim_thread *sim_this_thread(void) { return &this_thread; }
int sim_current_device(void) { return this_thread.depth ? this_thread.stack[this_thread.depth - 1] : -1; }

static void thread_ends(void *unused)
{
    (void)unused;
    if (this_thread.pushes) {
        pthread_mutex_lock(&lock);
        current_call = "thread exit";
        sim_violation(0, "%d contexts pushed and not popped", this_thread.pushes);
        pthread_mutex_unlock(&lock);
    }
}

int64_t sim_option(const char *name)
{
    for (size_t i = 0; i < sizeof options / sizeof *options; i++)
        if (!strcmp(options[i].name, name))
            return options[i].value;
    abort();
}

int sim_attribute(int attribute, int *value, int fallback)
{
    *value = fallback;
    for (size_t i = 0; i < num_attributes; i++)
        if (attributes[i].attribute == attribute) {
            *value = attributes[i].value;
            return attributes[i].code;
        }
    return SIM_OK;
}

static void count_call(const char *call)
{
    for (size_t i = 0; i < MAX_CALLS; i++) {
        if (!calls[i].name)
            calls[i].name = call;
        if (!strcmp(calls[i].name, call)) {
            calls[i].count++;
            return;
        }
    }
}

static int check_state(unsigned needs)
{
    int device = sim_current_device();
    if (sim.forked)
        return sim_violation(SIM_NOT_INITIALIZED, "called in a forked child");
    if (needs & SIM_NEEDS_INIT && !sim.initialized)
        return sim_violation(SIM_NOT_INITIALIZED, "called before initialization");
    if (needs & SIM_NEEDS_CONTEXT && device < 0)
        return sim_violation(SIM_INVALID_CONTEXT, "called without a current context");
    if (needs & SIM_NEEDS_CONTEXT && !sim.devices[device].context_references)
        return sim_violation(SIM_INVALID_CONTEXT, "called with a context that was released");
    if (needs & SIM_NEEDS_CONTEXT && sim.devices[device].dead)
        return SIM_ILLEGAL_ADDRESS;
    if (sim.capturing && (needs & SIM_FORBIDDEN_IN_CAPTURE ||
                          (needs & SIM_UNSAFE_IN_CAPTURE && this_thread.capture_mode != 2))) {
        sim.capture_broken = true;
        return sim_violation(SIM_CAPTURE_UNSUPPORTED, "not permitted while a stream is captured");
    }
    return SIM_OK;
}

int sim_enter(const char *call, unsigned needs)
{
    int code;
    pthread_mutex_lock(&lock);
    pthread_setspecific(thread_key, &this_thread);
    current_call = call;
    count_call(call);
    code = sim_apply_rules(call);
    return code ? code : check_state(needs);
}

int sim_leave(int code)
{
    if (sim_option("log")) {
        char line[128];
        snprintf(line, sizeof line, "%s -> %d", current_call, code);
        append(logged, line);
    }
    pthread_mutex_unlock(&lock);
    return code;
}

static void after_fork(void)
{
    pthread_mutex_init(&lock, NULL);
    sim.forked = sim.initialized;
}

static void default_options(void)
{
    for (size_t i = 0; i < sizeof options / sizeof *options; i++)
        options[i].value = options[i].initial;
}

__attribute__((constructor)) static void load(void)
{
    const char *text = getenv("EKV_STUB_OPTIONS");
    char copy[1024], *rest = copy, *pair;
    struct rlimit limit;
    if (!getrlimit(RLIMIT_NOFILE, &limit) && limit.rlim_cur < limit.rlim_max) {
        limit.rlim_cur = limit.rlim_max; /* a real driver's handles are no files */
        setrlimit(RLIMIT_NOFILE, &limit);
    }
    pthread_key_create(&thread_key, thread_ends);
    pthread_atfork(NULL, NULL, after_fork);
    default_options();
    snprintf(copy, sizeof copy, "%s", text ? text : "");
    while ((pair = strsep(&rest, ",")) && *pair) {
        char *value = strchr(pair, '=');
        if (value)
            *value++ = '\0';
        if (!value || stub_set_option(pair, strtoll(value, NULL, 10)))
            abort();
    }
    for (int device = 0; device < SIM_DEVICES; device++)
        sim.devices[device].total = (uint64_t)sim_option("total_memory");
}

__attribute__((destructor)) static void unload(void)
{
    char text[512];
    if (sim.forked)
        return;
    if (this_thread.pushes)
        sim_violation(0, "unload: %d contexts pushed and not popped", this_thread.pushes);
    snprintf(text, sizeof text,
             "\"calls\": %ld, \"handles\": %zu, \"mappings\": %zu, \"reservations\": %zu, \"allocations\": %zu, "
             "\"streams\": %zu, \"used_bytes\": [%llu, %llu], \"violations\": %zu",
             stub_calls(NULL), stub_live_handles(), stub_live_mappings(), stub_live_reservations(),
             stub_live_allocations(), stub_live_streams(), (unsigned long long)sim.devices[0].used,
             (unsigned long long)sim.devices[1].used, num_violations);
    report("unload", text);
}

SIM_EXPORT long stub_calls(const char *call)
{
    long total = 0;
    LOCKED(for (size_t i = 0; i < MAX_CALLS && calls[i].name; i++)
               total += sim_matches(call, calls[i].name) ? calls[i].count : 0);
    return total;
}

SIM_EXPORT void stub_reset(void)
{
    pthread_mutex_lock(&lock);
    sim_clear_rules();
    default_options();
    num_attributes = num_violations = 0;
    violations[0] = logged[0] = '\0';
    memset(calls, 0, sizeof calls);
    for (int device = 0; device < SIM_DEVICES; device++) {
        sim.devices[device].total = (uint64_t)sim_option("total_memory");
        sim.devices[device].neighbour = 0;
        sim.devices[device].dead = false;
    }
    pthread_mutex_unlock(&lock);
}

#define COUNT(type, list, condition)                                                                                   \
    size_t count = 0;                                                                                                  \
    LOCKED(for (type *each = list; each; each = each->next) count += (condition));                                     \
    return count

SIM_EXPORT size_t stub_live_handles(void) { COUNT(sim_handle, sim.handles, each->size > 0); }
SIM_EXPORT size_t stub_live_mappings(void) { COUNT(sim_mapping, sim.mappings, each->size > 0); }
SIM_EXPORT size_t stub_live_reservations(void) { COUNT(sim_range, sim.ranges, !each->is_allocation); }
SIM_EXPORT size_t stub_live_allocations(void) { COUNT(sim_range, sim.ranges, each->is_allocation); }
SIM_EXPORT size_t stub_live_streams(void) { return sim_live_streams(); }
SIM_EXPORT uint64_t stub_used_bytes(int device) { return sim.devices[device].used; }
SIM_EXPORT int stub_context_references(int device) { return sim.devices[device].context_references; }
SIM_EXPORT int stub_thread_pushes(void) { return this_thread.pushes; }
SIM_EXPORT size_t stub_num_violations(void) { return num_violations; }
SIM_EXPORT const char *stub_violations(void) { return violations; }
SIM_EXPORT const char *stub_log(void) { return logged; }
SIM_EXPORT void stub_set_total_memory(int device, uint64_t bytes) { LOCKED(sim.devices[device].total = bytes); }

SIM_EXPORT void stub_neighbour_takes(int device, int64_t bytes)
{
    LOCKED(sim.devices[device].neighbour += (uint64_t)bytes);
}

SIM_EXPORT void stub_set_attribute(int attribute, int value, int code)
{
    LOCKED(if (num_attributes < MAX_ATTRIBUTES) {
        attributes[num_attributes].attribute = attribute;
        attributes[num_attributes].value = value;
        attributes[num_attributes++].code = code;
    });
}

SIM_EXPORT int stub_set_option(const char *name, int64_t value)
{
    for (size_t i = 0; i < sizeof options / sizeof *options; i++)
        if (!strcmp(options[i].name, name)) {
            LOCKED(options[i].value = value);
            return 0;
        }
    return -1;
}

SIM_EXPORT void stub_begin_capture(void)
{
    LOCKED(sim.capturing = true; sim.capture_broken = false; sim.capture++);
}

SIM_EXPORT int stub_end_capture(void)
{
    LOCKED(sim.capturing = false);
    return sim.capture_broken;
}
