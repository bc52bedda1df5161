//go:build unix

package withserver

import (
	"fmt"
	"syscall"
	"time"
)

// processorTime says how much of it this process and all those took that it has waited for, which
// are the command's and the server's.
func processorTime() string {
	var sum time.Duration
	for _, of := range []int{syscall.RUSAGE_SELF, syscall.RUSAGE_CHILDREN} {
		var used syscall.Rusage
		if err := syscall.Getrusage(of, &used); err != nil {
			return err.Error()
		}
		sum += time.Duration(used.Utime.Nano() + used.Stime.Nano())
	}
	return fmt.Sprintf("%.0f s of processor time", sum.Seconds())
}
