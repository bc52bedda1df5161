package clock

import (
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// System reads CLOCK_BOOTTIME. Locks read it several times each, so the call is raw: it
// never blocks, and telling Go's scheduler of it would cost more than the call.
func System() time.Duration {
	var t unix.Timespec
	if _, _, errno := unix.RawSyscall(unix.SYS_CLOCK_GETTIME, unix.CLOCK_BOOTTIME, uintptr(unsafe.Pointer(&t)), 0); errno != 0 {
		panic("pgxlock: CLOCK_BOOTTIME: " + errno.Error()) // Linux has it since 2.6.39
	}
	return time.Duration(t.Nano())
}
