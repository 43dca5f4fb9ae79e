"""What a power cut leaves of the files of processes that ran with a small library in front of their libc.

The library notes, at every completed fsync or fdatasync, how long the file was, or which names the directory held,
when the call began. `PowerCut.apply` puts a folder back to that: it truncates files to what was flushed and removes
names that their directory had not flushed. What was overwritten in place counts as written.

kill -9 alone proves nothing about flushing, since the page cache survives it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

_SHIM = r"""
    #define _GNU_SOURCE
    #include <dirent.h>
    #include <dlfcn.h>
    #include <fcntl.h>
    #include <stdio.h>
    #include <stdlib.h>
    #include <string.h>
    #include <sys/stat.h>
    #include <unistd.h>

    /* Inode numbers are used again; with the time of birth they name one file, whatever it is renamed to. */
    int identify(const char *path, char *name, size_t size, long long *length, int *is_directory) {
        struct statx info;
        if (statx(AT_FDCWD, path, 0, STATX_BASIC_STATS | STATX_BTIME, &info)) return -1;
        snprintf(name, size, "%llu-%lld-%u", (unsigned long long)info.stx_ino, (long long)info.stx_btime.tv_sec,
                 info.stx_btime.tv_nsec);
        *length = (long long)info.stx_size;
        *is_directory = S_ISDIR(info.stx_mode);
        return 0;
    }

    static int noted(const char *call, int fd) {
        char path[64], name[96];
        long long length = 0;
        int is_directory = 0;
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        int known = identify(path, name, sizeof name, &length, &is_directory) == 0;
        char *line = NULL;
        size_t size = 0;
        FILE *text = open_memstream(&line, &size);
        fprintf(text, "%s/%lld", name, length);
        DIR *entries = known && is_directory ? opendir(path) : NULL;
        if (entries) {
            struct dirent *entry;
            while ((entry = readdir(entries))) fprintf(text, "/%s", entry->d_name);
            closedir(entries);
        }
        fprintf(text, "\n");
        fclose(text);
        int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, call);
        int result = real(fd);
        if (result == 0 && known) {
            int log = open(getenv("SYNC_LOG"), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
            if (write(log, line, size) != (ssize_t)size) abort();
            close(log);
        }
        free(line);
        return result;
    }
    int fsync(int fd) { return noted("fsync", fd); }
    int fdatasync(int fd) { return noted("fdatasync", fd); }
"""


def build_shim(folder: Path) -> Path:
    """The library, compiled into `folder`; skips the test where that is impossible."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs Linux and a C compiler")
    (folder / "shim.c").write_text(textwrap.dedent(_SHIM))
    library = folder / "shim.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, folder / "shim.c", "-ldl"], check=True, timeout=60)
    return library


class PowerCut:
    """One log of flushes. Kill the processes first, then `apply`."""

    def __init__(self, library: Path, log: Path) -> None:
        self._log = log
        self._identify = ctypes.CDLL(str(library)).identify
        self.environment = {"LD_PRELOAD": str(library), "SYNC_LOG": str(log)}
        """For the processes whose files are to be cut."""

    def apply(self, folder: Path) -> int:
        """Leave of what is in `folder` what had been flushed; returns the bytes that are gone."""
        lengths: dict[str, int] = {}
        names: dict[str, set[str]] = {}
        for line in self._log.read_text().splitlines():
            file, length, *entries = line.split("/")
            lengths[file] = int(length)
            names[file] = set(entries)
        return self._cut(folder, lengths, names)

    def _cut(self, folder: Path, lengths: dict[str, int], names: dict[str, set[str]]) -> int:
        lost = 0
        flushed = names.get(self._name(folder), set())
        for item in list(folder.iterdir()):
            if item.is_socket() or item.is_symlink():
                continue
            if item.is_dir():
                lost += self._cut(item, lengths, names)
                if item.name not in flushed:
                    lost += sum(file.stat().st_size for file in item.rglob("*") if file.is_file())
                    shutil.rmtree(item)
                continue
            size = item.stat().st_size
            left = min(size, lengths.get(self._name(item), 0)) if item.name in flushed else 0
            lost += size - left
            if item.name in flushed:
                os.truncate(item, left)
            else:
                item.unlink()
        return lost

    def _name(self, path: Path) -> str:
        name, length, is_directory = ctypes.create_string_buffer(96), ctypes.c_longlong(), ctypes.c_int()
        failed = self._identify(os.fsencode(path), name, len(name), ctypes.byref(length), ctypes.byref(is_directory))
        assert not failed, path
        return name.value.decode()
