/* The read bandwidth of memory, as a ceiling for programs that read weights once a step.

   Each thread reads its part of the buffer as four streams at once, 64 bytes of each in turn. One
   stream waits for its own cache misses: a plain sum reads a third less, and a matrix product
   would beat such a "ceiling". */

#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

enum { STREAMS = 4, LINE = 64, MOST_THREADS = 64 };

typedef uint64_t line_t __attribute__((vector_size(LINE)));

typedef struct {
    const char *data;
    size_t bytes;
    uint64_t sum;
} part_t;

static void *read_part(void *argument) {
    part_t *part = argument;
    size_t stride = part->bytes / STREAMS / LINE * LINE;
    line_t sums[STREAMS] = {{0}};
    for (size_t at = 0; at < stride; at += LINE) {
        for (int s = 0; s < STREAMS; s++) {
            line_t line;
            memcpy(&line, part->data + s * stride + at, LINE);
            sums[s] ^= line;
        }
    }
    line_t all = sums[0] ^ sums[1] ^ sums[2] ^ sums[3];
    for (int i = 0; i < LINE / 8; i++) part->sum ^= all[i];
    return NULL;
}

/* Seconds to read `bytes` at `data` once with `threads` threads; a negative number is an error.
   `sum` receives a number that depends on every byte, so that no read can be left out. */
double read_once(const char *data, size_t bytes, int threads, uint64_t *sum) {
    if (threads < 1 || threads > MOST_THREADS) return -1;
    pthread_t others[MOST_THREADS];
    part_t parts[MOST_THREADS];
    struct timespec begin, end;
    size_t share = bytes / threads / (STREAMS * LINE) * (STREAMS * LINE);
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (int i = 0; i < threads; i++) parts[i] = (part_t){data + i * share, share, 0};
    for (int i = 1; i < threads; i++) {
        if (pthread_create(&others[i], NULL, read_part, &parts[i])) return -1;
    }
    read_part(&parts[0]);
    for (int i = 1; i < threads; i++) pthread_join(others[i], NULL);
    clock_gettime(CLOCK_MONOTONIC, &end);
    for (int i = 0; i < threads; i++) *sum ^= parts[i].sum;
    return (end.tv_sec - begin.tv_sec) + 1e-9 * (end.tv_nsec - begin.tv_nsec);
}
