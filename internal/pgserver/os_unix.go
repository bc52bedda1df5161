// Linux, macOS and the BSDs do these alike.

//go:build linux || darwin || dragonfly || freebsd || netbsd || openbsd

package pgserver

import (
	"errors"
	"io/fs"
	"os"
	"syscall"
)

// The signals that freeze and thaw a process.
const (
	sigFreeze = syscall.SIGSTOP
	sigThaw   = syscall.SIGCONT
)

// supported says whether a private server can be started on this system.
func supported() error { return nil }

// tryLock takes the file's lock, which ends with the last process that
// inherited the open file. It does not wait.
func tryLock(f *os.File) (bool, error) {
	err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return false, nil
	}
	return err == nil, err
}

// ours says whether the file is owned by the user that we are.
func ours(info fs.FileInfo) bool {
	stat, ok := info.Sys().(*syscall.Stat_t)
	return ok && int(stat.Uid) == os.Geteuid()
}
