/* Threads that grow, shrink, allocate, read and ask at once: run under ThreadSanitizer and AddressSanitizer.
 *
 *   threads DRIVER ROUNDS     DRIVER: 0 host, 1 cuda, 2 hip
 *
 * Each worker checks what it may rely on: new blocks are zero, its own blocks keep their content while others commit,
 * the first block of a shared reservation stays readable while another thread grows and shrinks it. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

#include "ekv.h"

void *ekv_malloc(ssize_t size, int device, void *stream);
void ekv_free(void *address, ssize_t size, int device, void *stream);

#define BLOCKS 12
#define STRIDE 24576

static int driver, rounds;
static uint64_t shared, shared_base;
static atomic_bool stop;

#define MUST(expression)                                                                                               \
    do {                                                                                                               \
        int status_ = (expression);                                                                                    \
        if (status_) {                                                                                                 \
            char text_[512];                                                                                           \
            ekv_last_error(text_, sizeof text_);                                                                       \
            fprintf(stderr, "%s:%d: %s: %d, %s\n", __FILE__, __LINE__, #expression, status_, text_);                   \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

static uint64_t make(uint64_t *base)
{
    ekv_segment segments[2] = {{0, STRIDE, BLOCKS * STRIDE}, {BLOCKS * STRIDE, STRIDE, BLOCKS * STRIDE}};
    ekv_reservation_info info;
    uint64_t id;
    MUST(ekv_reserve(driver, 0, 2 * BLOCKS * STRIDE, 65536, 0, &id));
    MUST(ekv_set_segments(id, segments, 2, BLOCKS));
    MUST(ekv_get_info(id, &info));
    *base = info.base;
    return id;
}

static void check_block(uint64_t base, int block, unsigned char value)
{
    for (int segment = 0; segment < 2; segment++) {
        const unsigned char *at = (const unsigned char *)base + (segment * BLOCKS + block) * STRIDE;
        for (int i = 0; i < STRIDE; i += 512)
            if (at[i] != value) {
                fprintf(stderr, "block %d, byte %d: %d, not %d\n", block, i, at[i], value);
                exit(1);
            }
    }
}

static void fill_block(uint64_t base, int block, unsigned char value)
{
    for (int segment = 0; segment < 2; segment++)
        memset((char *)base + (segment * BLOCKS + block) * STRIDE, value, STRIDE);
}

static void *owner(void *seed)
{
    unsigned random = (unsigned)(uintptr_t)seed;
    uint64_t base, id = make(&base);
    for (int round = 0; round < rounds; round++) {
        int low = rand_r(&random) % 4, high = low + 1 + rand_r(&random) % (BLOCKS - low);
        MUST(ekv_commit(&id, 1, (uint64_t)low, EKV_COMMIT_ZERO));
        for (int block = 0; block < low; block++)
            fill_block(base, block, (unsigned char)(round + block + 1));
        MUST(ekv_commit(&id, 1, (uint64_t)high, EKV_COMMIT_ZERO));
        for (int block = 0; block < high; block++)
            check_block(base, block, block < low ? (unsigned char)(round + block + 1) : 0);
        MUST(ekv_shrink(&id, 1, (uint64_t)low));
        for (int block = 0; block < low; block++)
            check_block(base, block, (unsigned char)(round + block + 1));
        MUST(ekv_release_physical(&id, 1));
        MUST(ekv_recommit(&id, 1));
        MUST(ekv_shrink(&id, 1, 0));
        if (round % 5 == 0) {
            ekv_drop(id);
            id = make(&base);
        }
        if (round % 5 == 1) {
            ekv_segment whole = {0, STRIDE, 2 * BLOCKS * STRIDE};
            MUST(ekv_commit(&id, 1, 2, 0));
            MUST(ekv_retire(id, round % 2));
            MUST(ekv_adopt(base, 65536, &id));
            MUST(ekv_set_segments(id, &whole, 1, 2 * BLOCKS));
            MUST(ekv_commit(&id, 1, 2 * BLOCKS, EKV_COMMIT_ZERO));
            MUST(ekv_unreserve(id));
            id = make(&base);
        }
    }
    MUST(ekv_unreserve(id));
    return NULL;
}

static void *grower(void *unused)
{
    for (int round = 0; round < 2 * rounds; round++) {
        MUST(ekv_commit(&shared, 1, BLOCKS, EKV_COMMIT_ZERO));
        MUST(ekv_shrink(&shared, 1, 1));
    }
    return unused;
}

static void *reader(void *unused)
{
    while (!stop) {
        ekv_reservation_info info;
        ekv_chunk_info chunks[4];
        uint64_t free_bytes, total_bytes;
        size_t count;
        char text[64];
        check_block(shared_base, 0, 42);
        MUST(ekv_get_info(shared, &info));
        if (info.committed_blocks < 1 || info.committed_blocks > BLOCKS || info.base != shared_base)
            exit(1);
        MUST(ekv_get_chunks(shared, chunks, 4, &count));
        MUST(ekv_memory_info(driver, 0, &free_bytes, &total_bytes));
        ekv_num_reservations();
        if (ekv_commit(&shared, 1, BLOCKS + 1, 0) != EKV_INVALID || ekv_last_error(text, sizeof text) != EKV_INVALID)
            exit(1);
    }
    return unused;
}

static void *allocating(void *unused)
{
    for (int round = 0; round < rounds; round++) {
        void *plain, *routed;
        uint64_t id;
        plain = ekv_malloc(8192, 0, NULL);
        MUST(ekv_route_begin(0, 0, 0));
        routed = ekv_malloc(4 * STRIDE, 0, NULL);
        id = ekv_route_end();
        if (!plain || !routed || !id)
            exit(1);
        MUST(ekv_set_segments(id, &(ekv_segment){0, STRIDE, 4 * STRIDE}, 1, 4));
        MUST(ekv_commit(&id, 1, 3, EKV_COMMIT_ZERO));
        if (*(char *)routed)
            exit(1);
        ekv_free(plain, 8192, 0, NULL);
        ekv_free(routed, 4 * STRIDE, 0, NULL);
    }
    return unused;
}

int main(int argc, char **argv)
{
    void *(*const workers[])(void *) = {owner, owner, grower, allocating};
    pthread_t threads[5];
    if (argc != 3)
        return 2;
    driver = atoi(argv[1]);
    rounds = atoi(argv[2]);
    if (driver != EKV_HOST)
        MUST(ekv_torch_driver(driver));
    shared = make(&shared_base);
    MUST(ekv_commit(&shared, 1, 1, EKV_COMMIT_ZERO));
    fill_block(shared_base, 0, 42);
    for (size_t i = 0; i < 4; i++)
        if (i != 3 || driver != EKV_HOST) /* the host driver serves no PyTorch allocator */
            pthread_create(&threads[i], NULL, workers[i], (void *)(uintptr_t)(i + 1));
    pthread_create(&threads[4], NULL, reader, NULL);
    for (size_t i = 0; i < 4; i++)
        if (i != 3 || driver != EKV_HOST)
            pthread_join(threads[i], NULL);
    stop = true;
    pthread_join(threads[4], NULL);
    check_block(shared_base, 0, 42);
    MUST(ekv_unreserve(shared));
    ekv_empty_cache();
    if (ekv_num_reservations())
        return 1;
    puts("done");
    return 0;
}
