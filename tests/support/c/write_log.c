/* A preloaded library that notes every change of files below a folder, in the order of its effect.
 *
 * RKSERVE_WRITES_ROOT is the folder, RKSERVE_WRITES_LOG the file of records, outside of it. A record
 * is: kind, inode, offset, length, lengths of two paths, the paths, the data; numbers are
 * little-endian, as struct record lays them out. Paths are relative to the folder.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

struct __attribute__((packed)) record {
    uint8_t kind;
    uint64_t inode;
    uint64_t offset;
    uint32_t length;
    uint16_t first, second;
};

static char root[PATH_MAX];
static size_t root_length;
static int log_fd = -1;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

__attribute__((constructor)) static void begin(void) {
    const char *folder = getenv("RKSERVE_WRITES_ROOT"), *log = getenv("RKSERVE_WRITES_LOG");
    if (!folder || !log || !realpath(folder, root)) return;
    root_length = strlen(root);
    log_fd = (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
}

static void note(char kind, uint64_t inode, uint64_t offset, const char *first, const char *second,
                 const void *data, size_t length) {
    struct record head = {(uint8_t)kind, inode, offset, (uint32_t)length,
                          (uint16_t)strlen(first), (uint16_t)strlen(second)};
    struct iovec parts[] = {{&head, sizeof head}, {(void *)first, head.first},
                            {(void *)second, head.second}, {(void *)data, length}};
    if (syscall(SYS_writev, log_fd, parts, 4) < 0) abort();
}

/* The path below the folder; NULL where it is elsewhere. */
static const char *below(const char *path) {
    if (log_fd < 0 || strncmp(path, root, root_length) || path[root_length] != '/') return NULL;
    return path + root_length + 1;
}

static const char *of_fd(int fd, char *buffer) {
    char link[40];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, buffer, PATH_MAX - 1);
    if (size < 0) return NULL;
    buffer[size] = 0;
    if (log_fd >= 0 && !strcmp(buffer, root)) return "";
    return below(buffer);
}

static const char *at(int folder, const char *path, char *buffer) {
    if (log_fd < 0) return NULL;
    if (path[0] == '/') {
        snprintf(buffer, PATH_MAX, "%s", path);
    } else if (folder == AT_FDCWD) {
        if (!getcwd(buffer, PATH_MAX)) return NULL;
        size_t used = strlen(buffer);
        snprintf(buffer + used, PATH_MAX - used, "/%s", path);
    } else {
        char link[40];
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        ssize_t size = readlink(link, buffer, PATH_MAX - 1);
        if (size < 0) return NULL;
        snprintf(buffer + size, (size_t)(PATH_MAX - size), "/%s", path);
    }
    return below(buffer);
}

static uint64_t inode_of(int fd) {
    struct stat found;
    return fstat(fd, &found) ? 0 : found.st_ino;
}

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

static int opened(int fd, int folder, const char *path, int flags) {
    char buffer[PATH_MAX];
    const char *found = fd < 0 || !(flags & (O_CREAT | O_TRUNC)) ? NULL : at(folder, path, buffer);
    if (found) {
        if (flags & O_CREAT) note('c', inode_of(fd), 0, found, "", NULL, 0);
        if (flags & O_TRUNC) note('t', inode_of(fd), 0, found, "", NULL, 0);
    }
    return fd;
}

/* A file that exists already is created again in the log: the reader knows its name and inode. */
#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        va_list rest; \
        va_start(rest, flags); \
        int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0; \
        va_end(rest); \
        REAL(int, name, const char *, int, ...); \
        pthread_mutex_lock(&lock); \
        int fd = opened(real(path, flags, mode), AT_FDCWD, path, flags); \
        pthread_mutex_unlock(&lock); \
        return fd; \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        va_list rest; \
        va_start(rest, flags); \
        int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0; \
        va_end(rest); \
        REAL(int, name, int, const char *, int, ...); \
        pthread_mutex_lock(&lock); \
        int fd = opened(real(folder, path, flags, mode), folder, path, flags); \
        pthread_mutex_unlock(&lock); \
        return fd; \
    }
OPENAT(openat)
OPENAT(openat64)

static ssize_t written(int fd, const void *data, ssize_t size, int64_t offset) {
    char buffer[PATH_MAX];
    const char *found = size > 0 && log_fd >= 0 ? of_fd(fd, buffer) : NULL;
    if (found) note('w', inode_of(fd), (uint64_t)offset, found, "", data, (size_t)size);
    return size;
}

ssize_t write(int fd, const void *data, size_t size) {
    REAL(ssize_t, write, int, const void *, size_t);
    if (log_fd < 0) return real(fd, data, size);
    pthread_mutex_lock(&lock);
    ssize_t done = real(fd, data, size);
    /* After the write: with O_APPEND it is the end then, whatever it was before. */
    off_t end = done > 0 ? lseek(fd, 0, SEEK_CUR) : -1;
    if (end >= done) written(fd, data, done, end - done);
    pthread_mutex_unlock(&lock);
    return done;
}

#define PWRITE(name, offset_type) \
    ssize_t name(int fd, const void *data, size_t size, offset_type offset) { \
        REAL(ssize_t, name, int, const void *, size_t, offset_type); \
        pthread_mutex_lock(&lock); \
        ssize_t done = written(fd, data, real(fd, data, size, offset), offset); \
        pthread_mutex_unlock(&lock); \
        return done; \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

#define OF_FD(name, kind, parameters, arguments, size) \
    int name parameters { \
        static int(*real) parameters; \
        if (!real) real = (int(*) parameters)dlsym(RTLD_NEXT, #name); \
        char buffer[PATH_MAX]; \
        pthread_mutex_lock(&lock); \
        int failed = real arguments; \
        const char *found = failed || log_fd < 0 ? NULL : of_fd(fd, buffer); \
        if (found) note(kind, inode_of(fd), (uint64_t)(size), found, "", NULL, 0); \
        pthread_mutex_unlock(&lock); \
        return failed; \
    }
OF_FD(fsync, 's', (int fd), (fd), 0)
OF_FD(fdatasync, 's', (int fd), (fd), 0)
OF_FD(ftruncate, 't', (int fd, off_t size), (fd, size), size)
OF_FD(ftruncate64, 't', (int fd, off64_t size), (fd, size), size)

#define OF_PATH(name, kind, parameters, arguments, folder, path) \
    int name parameters { \
        static int(*real) parameters; \
        if (!real) real = (int(*) parameters)dlsym(RTLD_NEXT, #name); \
        char buffer[PATH_MAX]; \
        pthread_mutex_lock(&lock); \
        int failed = real arguments; \
        const char *found = failed ? NULL : at(folder, path, buffer); \
        if (found) note(kind, 0, 0, found, "", NULL, 0); \
        pthread_mutex_unlock(&lock); \
        return failed; \
    }
OF_PATH(unlink, 'u', (const char *a), (a), AT_FDCWD, a)
OF_PATH(unlinkat, 'u', (int f, const char *a, int flags), (f, a, flags), f, a)
OF_PATH(rmdir, 'u', (const char *a), (a), AT_FDCWD, a)
OF_PATH(mkdir, 'd', (const char *a, mode_t mode), (a, mode), AT_FDCWD, a)
OF_PATH(mkdirat, 'd', (int f, const char *a, mode_t mode), (f, a, mode), f, a)

#define OF_PATHS(name, kind, parameters, arguments, from, a, to, b) \
    int name parameters { \
        static int(*real) parameters; \
        if (!real) real = (int(*) parameters)dlsym(RTLD_NEXT, #name); \
        char one[PATH_MAX], other[PATH_MAX]; \
        pthread_mutex_lock(&lock); \
        int failed = real arguments; \
        const char *first = failed ? NULL : at(from, a, one); \
        const char *second = first ? at(to, b, other) : NULL; \
        if (second) note(kind, 0, 0, first, second, NULL, 0); \
        pthread_mutex_unlock(&lock); \
        return failed; \
    }
OF_PATHS(rename, 'r', (const char *a, const char *b), (a, b), AT_FDCWD, a, AT_FDCWD, b)
OF_PATHS(renameat, 'r', (int f, const char *a, int g, const char *b), (f, a, g, b), f, a, g, b)
OF_PATHS(link, 'l', (const char *a, const char *b), (a, b), AT_FDCWD, a, AT_FDCWD, b)
OF_PATHS(linkat, 'l', (int f, const char *a, int g, const char *b, int flags), (f, a, g, b, flags),
         f, a, g, b)
