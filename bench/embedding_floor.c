/* What this machine's memory asks for reading rows at random: bench/embedding.py compiles it when it runs. */
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

enum { AHEAD = 16, LINE = 64 };

/* `bytes` of memory in large pages where the kernel gives them, all of it touched; NULL if there is none. */
char* floor_memory(size_t bytes) {
  char* found = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED) return NULL;
  madvise(found, bytes, MADV_HUGEPAGE);
  memset(found, 1, bytes);
  return found;
}

void floor_free(char* memory, size_t bytes) { munmap(memory, bytes); }

static void prefetch(const char* from, size_t width) {
  for (size_t i = 0; i < width; i += LINE) __builtin_prefetch(from + i);
}

/* out[i] = the first `copied` bytes after the first `skipped` ones of row rows[i]; rows are `stride` bytes apart. */
void floor_read(const char* table, size_t stride, size_t skipped, size_t copied, const int64_t* rows, size_t count,
                char* out) {
  for (size_t i = 0; i < count; ++i) {
    if (i + AHEAD < count) prefetch(table + rows[i + AHEAD] * stride, skipped + copied);
    memcpy(out + i * copied, table + rows[i] * stride + skipped, copied);
  }
}
