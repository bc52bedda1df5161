// Only Linux has network namespaces.

package cutnet

import (
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// newNamespace returns a network namespace that nobody is in.
func newNamespace() (*os.File, error) {
	type result struct {
		ns  *os.File
		err error
	}
	made := make(chan result)
	go func() {
		runtime.LockOSThread() // without an unlock the thread ends here, and leaves the namespace to its file
		if err := os.NewSyscallError("unshare", unix.Unshare(unix.CLONE_NEWNET)); err != nil {
			made <- result{err: err}
			return
		}
		ns, err := os.Open("/proc/thread-self/ns/net")
		made <- result{ns, err}
	}()
	r := <-made
	return r.ns, r.err
}

func enter(ns *os.File) error {
	return os.NewSyscallError("setns", unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET))
}
