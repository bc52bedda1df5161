//go:build !linux

package history

import "time"

// Now reads the clock that the processes of a machine share, in nanoseconds.
func Now() int64 { return time.Now().UnixNano() }
