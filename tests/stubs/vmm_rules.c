/* Fault injection: rules that make matching calls fail.  See vmm_control.h. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "vmm_control.h"
#include "vmm_sim.h"

#include <stdlib.h>
#include <string.h>

#define MAX_RULES 16

typedef struct rule {
    const char *call; /* NULL: every one */
    long n, seen;
    int code;
    bool persistent, waits, is_neighbour;
    int device;
    int64_t bytes;
} rule;

static rule rules[MAX_RULES];
static size_t num_rules;
static long injected;

bool sim_matches(const char *pattern, const char *call)
{
    size_t length = pattern ? strlen(pattern) : 0;
    if (!length)
        return true;
    return pattern[length - 1] == '*' ? !strncmp(pattern, call, length - 1) : !strcmp(pattern, call);
}

static bool rule_fires(rule *each, const char *call)
{
    if (each->waits || !sim_matches(each->call, call))
        return false;
    each->seen++;
    return each->persistent ? each->seen >= each->n : each->seen == each->n;
}

int sim_apply_rules(const char *call)
{
    int code = SIM_OK;
    for (size_t i = 0; i < num_rules; i++) {
        if (!rule_fires(&rules[i], call))
            continue;
        if (rules[i].is_neighbour)
            sim.devices[rules[i].device].neighbour += (uint64_t)rules[i].bytes;
        else if (!code)
            code = rules[i].code;
    }
    if (code) {
        injected++;
        for (size_t i = 0; i < num_rules; i++)
            rules[i].waits = false;
    }
    return code;
}

static void add_rule(rule added)
{
    LOCKED(if (num_rules < MAX_RULES) rules[num_rules++] = added);
}

SIM_EXPORT void stub_fail_nth(const char *call, long n, int code, int persistent)
{
    add_rule((rule){.call = call ? strdup(call) : NULL, .n = n, .code = code, .persistent = persistent});
}

SIM_EXPORT void stub_fail_after_first(const char *call, long n, int code, int persistent)
{
    add_rule((rule){.call = call ? strdup(call) : NULL, .n = n, .code = code, .persistent = persistent, .waits = true});
}

SIM_EXPORT void stub_neighbour_takes_at(const char *call, long n, int device, int64_t bytes)
{
    add_rule((rule){.call = strdup(call), .n = n, .device = device, .bytes = bytes, .is_neighbour = true});
}

void sim_clear_rules(void)
{
    for (size_t i = 0; i < num_rules; i++)
        free((void *)rules[i].call);
    num_rules = 0;
    injected = 0;
}

SIM_EXPORT void stub_fail_clear(void) { LOCKED(sim_clear_rules()); }
SIM_EXPORT long stub_injected(void) { return injected; }
