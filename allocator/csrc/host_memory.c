/* How much memory this machine, or the container around this process, can still hand out. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "host_memory.h"

#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The number behind field in a file of "field number" lines; the file's only number where field is NULL.  false when
 * there is none: "max" is none. */
static bool read_number(const char *path, const char *field, uint64_t *value)
{
    char line[256];
    size_t length = field ? strlen(field) : 0;
    bool found = false;
    FILE *file = fopen(path, "re");
    if (!file)
        return false;
    while (!found && fgets(line, sizeof line, file)) {
        char *end;
        if (field && strncmp(line, field, length))
            continue;
        *value = strtoull(line + length, &end, 10);
        found = end != line + length;
    }
    fclose(file);
    return found;
}

typedef struct {
    const char *root, *limit, *usage, *file_cache[2];
} cgroup_files;

static const cgroup_files version_2 = {
    "/sys/fs/cgroup", "memory.max", "memory.current", {"active_file ", "inactive_file "}};
static const cgroup_files version_1 = {"/sys/fs/cgroup/memory",
                                       "memory.limit_in_bytes",
                                       "memory.usage_in_bytes",
                                       {"total_active_file ", "total_inactive_file "}};

/* One group's limit and what is left of it; cached files can be dropped and count as free. */
static void look_at_group(const cgroup_files *files, const char *group, uint64_t *free_bytes, uint64_t *total_bytes)
{
    char path[PATH_MAX];
    uint64_t limit, usage, part, cache = 0, left;
    snprintf(path, sizeof path, "%s%s/%s", files->root, group, files->limit);
    if (!read_number(path, NULL, &limit))
        return;
    snprintf(path, sizeof path, "%s%s/%s", files->root, group, files->usage);
    if (!read_number(path, NULL, &usage))
        return;
    snprintf(path, sizeof path, "%s%s/memory.stat", files->root, group);
    for (int i = 0; i < 2; i++)
        if (read_number(path, files->file_cache[i], &part))
            cache += part;
    usage -= cache < usage ? cache : usage;
    left = limit > usage ? limit - usage : 0;
    if (left < *free_bytes)
        *free_bytes = left;
    if (limit < *total_bytes)
        *total_bytes = limit;
}

/* The groups that this process is in, up to the root: each may have a limit. */
static void look_at_groups(uint64_t *free_bytes, uint64_t *total_bytes)
{
    char line[PATH_MAX];
    FILE *file = fopen("/proc/self/cgroup", "re");
    if (!file)
        return;
    while (fgets(line, sizeof line, file)) {
        const cgroup_files *files;
        char *group = strchr(line, '/');
        if (!group)
            continue;
        if (!strncmp(line, "0::", 3))
            files = &version_2;
        else if (strstr(line, ":memory:"))
            files = &version_1;
        else
            continue;
        group[strcspn(group, "\n")] = '\0';
        for (;;) {
            char *last = strrchr(group, '/');
            look_at_group(files, group[1] ? group : "", free_bytes, total_bytes);
            if (!last || !group[1])
                break;
            *(last == group ? last + 1 : last) = '\0';
        }
    }
    fclose(file);
}

void ekv_machine_memory(uint64_t *free_bytes, uint64_t *total_bytes)
{
    uint64_t kib;
    *free_bytes = read_number("/proc/meminfo", "MemAvailable:", &kib) ? kib * 1024 : UINT64_MAX;
    *total_bytes = read_number("/proc/meminfo", "MemTotal:", &kib) ? kib * 1024 : UINT64_MAX;
    look_at_groups(free_bytes, total_bytes);
}
