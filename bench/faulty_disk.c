/* Preloaded into a process: lets calls on files below a folder fail at random.

   KVD_FAULTY_FOLDER: part of the paths. KVD_FAULTY_CONTROL: a file of 16 bytes that other processes
   may change at any time: failures per 1000 calls (4), the error (4), failures so far (8). With
   ENOSPC, only calls that write fail. One failure in three of a write is a short write instead. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

struct control {
    volatile uint32_t per_mille;
    volatile uint32_t error;
    volatile uint64_t failures;
};
static struct control *control;
static const char *folder;
static __thread unsigned seed;

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("KVD_FAULTY_CONTROL");
    folder = getenv("KVD_FAULTY_FOLDER");
    if (!path || !folder) return;
    int fd = NEXT(open64)(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return;
    void *found = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (found != MAP_FAILED) control = found;
}

static int chance(int writes) {
    if (!control || !control->per_mille) return 0;
    if (control->error == ENOSPC && !writes) return 0;
    if (!seed) seed = (unsigned)getpid() ^ (unsigned)(uintptr_t)&seed;
    return rand_r(&seed) % 1000 < control->per_mille;
}

static int fails(const char *path, int writes) {
    if (!chance(writes) || !path || !strstr(path, folder)) return 0;
    __atomic_fetch_add(&control->failures, 1, __ATOMIC_RELAXED);
    errno = (int)control->error;
    return 1;
}

static int fd_fails(int fd, int writes) {
    char name[64], path[4096];
    if (!chance(writes)) return 0;
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(name, path, sizeof path - 1);
    if (size <= 0) return 0;
    path[size] = 0;
    if (!strstr(path, folder)) return 0;
    __atomic_fetch_add(&control->failures, 1, __ATOMIC_RELAXED);
    errno = (int)control->error;
    return 1;
}

static int is_short(void) { return rand_r(&seed) % 3 == 0; }

#define OPEN(name)                                              \
    int name(const char *path, int flags, ...) {                \
        va_list list;                                           \
        va_start(list, flags);                                  \
        mode_t mode = flags & O_CREAT ? va_arg(list, mode_t) : 0; \
        va_end(list);                                           \
        if (fails(path, flags & O_CREAT)) return -1;            \
        return NEXT(name)(path, flags, mode);                   \
    }
OPEN(open)
OPEN(open64)

ssize_t write(int fd, const void *data, size_t size) {
    if (fd_fails(fd, 1)) {
        if (size < 2 || !is_short()) return -1;
        size /= 2;
    }
    return NEXT(write)(fd, data, size);
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    if (fd_fails(fd, 1)) {
        if (!is_short()) return -1;
        count = 1;
    }
    return NEXT(writev)(fd, parts, count);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    return fd_fails(fd, 1) ? -1 : NEXT(pwrite64)(fd, data, size, at);
}

ssize_t read(int fd, void *data, size_t size) {
    return fd_fails(fd, 0) ? -1 : NEXT(read)(fd, data, size);
}

ssize_t pread64(int fd, void *data, size_t size, off64_t at) {
    return fd_fails(fd, 0) ? -1 : NEXT(pread64)(fd, data, size, at);
}

ssize_t readv(int fd, const struct iovec *parts, int count) {
    return fd_fails(fd, 0) ? -1 : NEXT(readv)(fd, parts, count);
}

ssize_t preadv64(int fd, const struct iovec *parts, int count, off64_t at) {
    return fd_fails(fd, 0) ? -1 : NEXT(preadv64)(fd, parts, count, at);
}

int fsync(int fd) { return fd_fails(fd, 1) ? -1 : NEXT(fsync)(fd); }
int fdatasync(int fd) { return fd_fails(fd, 1) ? -1 : NEXT(fdatasync)(fd); }

int rename(const char *from, const char *to) {
    return fails(to, 1) ? -1 : NEXT(rename)(from, to);
}

int unlink(const char *path) { return fails(path, 0) ? -1 : NEXT(unlink)(path); }

int mkdir(const char *path, mode_t mode) {
    return fails(path, 1) ? -1 : NEXT(mkdir)(path, mode);
}
