/* The fault ladder of the host driver: every system call and every malloc of the shim fails in its turn.
 *
 *   host_ladder
 *
 * Linked with --wrap for the functions below.  Each operation runs with its n-th such call failing, n = 1, 2, ..., once
 * or from there on; afterwards the reservation is as it was (or, where undoing failed too, a prefix with its content),
 * the next attempt works, and in the end no file and no mapping is left. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dirent.h>
#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ekv.h"

#define BLOCKS 6
#define STRIDE 20480
#define SEGMENTS 2

static long until_failure; /* 0: none fails */
static bool persistent;
static int fired;

static bool fails(int code)
{
    if (!until_failure || (until_failure > 1 && --until_failure))
        return false;
    if (!persistent)
        until_failure = 0;
    fired++;
    errno = code;
    return true;
}

#define WRAP(type, name, parameters, arguments, code, failure)                                                         \
    type __real_##name parameters;                                                                                     \
    type __wrap_##name parameters;                                                                                     \
    type __wrap_##name parameters { return fails(code) ? failure : __real_##name arguments; }

WRAP(void *, malloc, (size_t size), (size), ENOMEM, NULL)
WRAP(void *, calloc, (size_t count, size_t size), (count, size), ENOMEM, NULL)
WRAP(void *, realloc, (void *old, size_t size), (old, size), ENOMEM, NULL)
WRAP(void *, mmap, (void *at, size_t size, int access, int flags, int file, off_t offset),
     (at, size, access, flags, file, offset), ENOMEM, MAP_FAILED)
WRAP(int, munmap, (void *at, size_t size), (at, size), ENOMEM, -1)
WRAP(int, mprotect, (void *at, size_t size, int access), (at, size, access), ENOMEM, -1)
WRAP(int, madvise, (void *at, size_t size, int advice), (at, size, advice), EAGAIN, -1)
WRAP(int, memfd_create, (const char *name, unsigned flags), (name, flags), ENFILE, -1)
WRAP(int, fallocate, (int file, int mode, off_t offset, off_t size), (file, mode, offset, size), ENOSPC, -1)

/* Linux has closed the descriptor also when close says that it failed. */
int __real_close(int file);
int __wrap_close(int file);
int __wrap_close(int file)
{
    bool fail = fails(EIO);
    int result = __real_close(file);
    if (fail)
        errno = EIO;
    return fail ? -1 : result;
}

static uint64_t id, base;
static const char *step = "";
static long n;

#define MUST(condition)                                                                                                \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            char text_[512];                                                                                           \
            ekv_last_error(text_, sizeof text_);                                                                       \
            fprintf(stderr, "%s, n %ld%s, line %d: %s; %s\n", step, n, persistent ? " and on" : "", __LINE__,          \
                    #condition, text_);                                                                                \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

static int reserve(void)
{
    ekv_segment segments[SEGMENTS] = {{0, STRIDE, BLOCKS * STRIDE}, {BLOCKS * STRIDE, STRIDE, BLOCKS * STRIDE}};
    ekv_reservation_info info;
    int status = ekv_reserve(EKV_HOST, 0, SEGMENTS * BLOCKS * STRIDE, 32768, 0, &id);
    if (status)
        return status;
    status = ekv_set_segments(id, segments, SEGMENTS, BLOCKS);
    if (status) {
        until_failure = 0;
        MUST(!ekv_unreserve(id));
        return status;
    }
    until_failure = 0;
    MUST(!ekv_get_info(id, &info));
    base = info.base;
    return 0;
}

static char *block(int segment, uint64_t number) { return (char *)base + (segment * BLOCKS + number) * STRIDE; }

static void fill(uint64_t from, uint64_t to)
{
    for (int segment = 0; segment < SEGMENTS; segment++)
        for (uint64_t number = from; number < to; number++)
            memset(block(segment, number), (int)(1 + number + 16 * (unsigned)segment), STRIDE);
}

/* Blocks below filled hold their pattern, those from there to committed are zero. */
static void check(uint64_t filled, uint64_t committed)
{
    for (int segment = 0; segment < SEGMENTS; segment++)
        for (uint64_t number = 0; number < committed; number++)
            for (int i = 0; i < STRIDE; i += 1024)
                MUST(block(segment, number)[i] == (char)(number < filled ? 1 + number + 16 * (unsigned)segment : 0));
}

static uint64_t committed_blocks(void)
{
    ekv_reservation_info info;
    MUST(!ekv_get_info(id, &info));
    return info.committed_blocks;
}

static size_t open_files(void)
{
    DIR *folder = opendir("/proc/self/fd");
    size_t count = 0;
    while (readdir(folder))
        count++;
    closedir(folder);
    return count;
}

static size_t mapped_files(void)
{
    char line[512];
    size_t count = 0;
    FILE *maps = fopen("/proc/self/maps", "re");
    while (fgets(line, sizeof line, maps))
        count += strstr(line, "memfd:extensible-kv") != NULL;
    fclose(maps);
    return count;
}

static int commit(void) { return ekv_commit(&id, 1, 5, EKV_COMMIT_ZERO); }
static int defragment(void) { return ekv_commit(&id, 1, 5, EKV_COMMIT_ZERO | EKV_COMMIT_DEFRAGMENT); }
static int shrink(void) { return ekv_shrink(&id, 1, 2); }
static int release(void) { return ekv_release_physical(&id, 1); }
static int recommit(void) { return ekv_recommit(&id, 1); }
static int unreserve(void) { return ekv_unreserve(id); }

/* before and filled: blocks committed, and written, first; kept: of those, how many the operation keeps. */
static const struct {
    const char *name;
    int (*run)(void);
    uint64_t before, kept, after;
    bool released;
} operations[] = {
    {"reserve", reserve, 0, 0, 0, false},       {"commit", commit, 0, 0, 5, false},
    {"grow", commit, 2, 2, 5, false},           {"defragment", defragment, 5, 0, 5, false},
    {"shrink", shrink, 5, 2, 2, false},         {"release", release, 5, 0, 0, false},
    {"recommit", recommit, 5, 0, 5, true},      {"unreserve", unreserve, 5, 0, 0, false},
};

static bool climb(size_t i)
{
    bool reserves = operations[i].run == reserve, frees = operations[i].run == unreserve, again = false;
    uint64_t before = operations[i].before;
    if (!reserves) {
        MUST(!reserve());
        if (before)
            MUST(!ekv_commit(&id, 1, before, EKV_COMMIT_ZERO));
        fill(0, before);
        if (operations[i].released)
            MUST(!release());
    }
    fired = 0;
    until_failure = n;
    int status = operations[i].run();
    until_failure = 0;
    if (status) {
        MUST(fired);
        if (!reserves && !frees) {
            uint64_t left = committed_blocks();
            MUST(persistent ? left <= before : left == (operations[i].released ? 0 : before));
            check(left, left);
            if (left < before && !operations[i].released) {
                MUST(!ekv_commit(&id, 1, before, EKV_COMMIT_ZERO));
                fill(left, before);
            }
        }
        MUST(!operations[i].run());
        again = true;
    }
    again |= fired > 0;
    if (!frees) {
        check(operations[i].kept, operations[i].after);
        MUST(committed_blocks() == operations[i].after);
        MUST(!unreserve());
    }
    return again;
}

int main(void)
{
    size_t files;
    MUST(!reserve() && !commit() && !unreserve()); /* opens the device */
    files = open_files();
    for (size_t i = 0; i < sizeof operations / sizeof *operations; i++)
        for (int mode = 0; mode < 2; mode++) {
            step = operations[i].name;
            persistent = mode;
            for (n = 1; climb(i); n++) {
                MUST(open_files() == files);
                MUST(!mapped_files());
                MUST(!ekv_num_reservations());
            }
            printf("%s: %ld\n", step, n - 1);
        }
    return 0;
}
