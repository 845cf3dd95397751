/* What a killer, a signal or a full disk does to a process, at a chosen moment; loaded into it with LD_PRELOAD.
 *
 * It stands between the process, with all libraries in it, and libc's functions that change files. It counts the changes
 * below one folder and writes each to a file (`rename /config.yaml`). At the chosen change it sends a signal, or
 * refuses with an error what would take space on the disk. A write gets through in part: a kill leaves half a file, and
 * a full disk takes what still fits.
 *
 * strace lists the same changes of a run (573), but for the 24 renames that safetensors makes with system calls of its
 * own, in folders that have a temporary name. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

struct fault {
    long moment;     /* the change at which it comes, from 1 */
    int signal;      /* sent before the change; 0: none */
    int error;       /* with which what takes space is refused, from that change on; 0: none */
    int once;        /* refuse a single change */
    int percent;     /* of a write that get through */
    int done;
};

static struct fault faults[4];
static int num_faults, log_file = -1;
static atomic_long changes;
static char folder[PATH_MAX];

/* Begin to count the changes below a folder, and to write them to a file that is open. */
void watch(const char *path, int file)
{
    log_file = file;
    strncpy(folder, path, sizeof folder - 1);
}

void add_fault(long moment, int signal, int error, int once, int percent)
{
    faults[num_faults++] = (struct fault){moment, signal, error, once, percent, 0};
}

/* Send this process a signal once it has computed for so long. */
int add_timer(int signal, long microseconds)
{
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = signal};
    struct itimerspec when = {.it_value = {microseconds / 1000000, microseconds % 1000000 * 1000}};
    timer_t timer;
    return timer_create(CLOCK_PROCESS_CPUTIME_ID, &event, &timer) || timer_settime(timer, 0, &when, NULL);
}

/* The whole path of `name`, which is relative to an open folder, or of the open file itself if it is empty. */
static const char *find(int file, const char *name, char path[2 * PATH_MAX])
{
    char link[40];
    if (name[0] == '/')
        return name;
    if (file == AT_FDCWD)
        snprintf(link, sizeof link, "/proc/self/cwd");
    else
        snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    if (length < 0)
        length = 0;
    snprintf(path + length, PATH_MAX, name[0] ? "/%s" : "%s", name);
    return path;
}

/* Count a change; returns the fault that comes with it, if any. */
static struct fault *due(const char *call, int file, const char *name, int takes_space)
{
    int before = errno;
    char path[2 * PATH_MAX], line[2 * PATH_MAX + 64];
    struct fault *found = NULL;
    if (!folder[0])
        return NULL;
    const char *whole = find(file, name, path);
    size_t length = strlen(folder);
    if (strncmp(whole, folder, length) == 0 && (whole[length] == '/' || !whole[length])) {
        long now = ++changes;
        for (struct fault *fault = faults; fault < faults + num_faults; fault++) {
            int again = fault->error && now > fault->moment && !(fault->once && fault->done);
            if ((now == fault->moment || again) && (takes_space || !fault->error))
                found = fault;
        }
        int size = snprintf(line, sizeof line, "%s %s%s\n", call, whole + length, found ? " !" : "");
        syscall(SYS_write, log_file, line, size);
    }
    errno = before;
    return found;
}

/* Bring the fault about; true if the change is refused. */
static int strike(struct fault *fault)
{
    if (!fault)
        return 0;
    fault->done = 1;
    if (fault->signal)
        kill(getpid(), fault->signal);
    if (fault->error)
        errno = fault->error;
    return fault->error;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define CHANGE(type, name, parameters, arguments, file, path, takes_space) \
    type name parameters \
    { \
        return strike(due(#name, file, path, takes_space)) ? -1 : REAL(name) arguments; \
    }

CHANGE(int, fsync, (int file), (file), file, "", 1)
CHANGE(int, fdatasync, (int file), (file), file, "", 1)
CHANGE(int, ftruncate, (int file, off_t size), (file, size), file, "", size > 0)
CHANGE(int, ftruncate64, (int file, off_t size), (file, size), file, "", size > 0)
CHANGE(int, truncate64, (const char *path, off_t size), (path, size), AT_FDCWD, path, 0)
CHANGE(int, rename, (const char *old, const char *new), (old, new), AT_FDCWD, new, 1)
CHANGE(int, renameat, (int at, const char *old, int to, const char *new), (at, old, to, new), to, new, 1)
CHANGE(int, mkdir, (const char *path, mode_t mode), (path, mode), AT_FDCWD, path, 1)
CHANGE(int, mkdirat, (int at, const char *path, mode_t mode), (at, path, mode), at, path, 1)
CHANGE(int, rmdir, (const char *path), (path), AT_FDCWD, path, 0)
CHANGE(int, unlink, (const char *path), (path), AT_FDCWD, path, 0)
CHANGE(int, unlinkat, (int at, const char *path, int flags), (at, path, flags), at, path, 0)
CHANGE(int, symlink, (const char *target, const char *path), (target, path), AT_FDCWD, path, 1)
CHANGE(int, link, (const char *old, const char *path), (old, path), AT_FDCWD, path, 1)
CHANGE(ssize_t, writev, (int file, const struct iovec *parts, int count), (file, parts, count), file, "", 1)
CHANGE(ssize_t, sendfile64, (int to, int from, off_t *at, size_t size), (to, from, at, size), to, "", 1)
CHANGE(ssize_t, pwrite64, (int file, const void *data, size_t size, off_t at), (file, data, size, at), file, "", 1)

ssize_t write(int file, const void *data, size_t size)
{
    struct fault *fault = due("write", file, "", 1);
    size_t part = fault && !fault->done ? size * fault->percent / 100 : 0;
    if (part) {
        ssize_t written = REAL(write)(file, data, part);
        strike(fault);
        return written;
    }
    return strike(fault) ? -1 : REAL(write)(file, data, size);
}

/* Opening a file is a change if it can be written to then, and takes space if it is new. */
static int refuse_open(int at, const char *path, int flags)
{
    struct stat facts;
    if ((flags & O_ACCMODE) == O_RDONLY && !(flags & (O_CREAT | O_TRUNC)))
        return 0;
    return strike(due("open", at, path, flags & O_CREAT && fstatat(at, path, &facts, 0)));
}

#define OPEN(name, parameters, arguments, at) \
    int name parameters \
    { \
        mode_t mode = 0; \
        if (flags & O_CREAT) { \
            va_list more; \
            va_start(more, flags); \
            mode = va_arg(more, mode_t); \
            va_end(more); \
        } \
        return refuse_open(at, path, flags) ? -1 : REAL(name) arguments; \
    }

OPEN(open, (const char *path, int flags, ...), (path, flags, mode), AT_FDCWD)
OPEN(open64, (const char *path, int flags, ...), (path, flags, mode), AT_FDCWD)
OPEN(openat, (int at, const char *path, int flags, ...), (at, path, flags, mode), at)
OPEN(openat64, (int at, const char *path, int flags, ...), (at, path, flags, mode), at)
