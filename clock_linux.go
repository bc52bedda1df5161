package pgxlock

import (
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// systemClock reads CLOCK_BOOTTIME several times for each lock. The call never
// blocks, so that the scheduler need not hear of it, which would cost more than
// the call.
func systemClock() time.Duration {
	var t unix.Timespec
	if _, _, errno := unix.RawSyscall(unix.SYS_CLOCK_GETTIME, unix.CLOCK_BOOTTIME, uintptr(unsafe.Pointer(&t)), 0); errno != 0 {
		panic("pgxlock: CLOCK_BOOTTIME: " + errno.Error()) // Linux has it since 2.6.39
	}
	return time.Duration(t.Nano())
}
