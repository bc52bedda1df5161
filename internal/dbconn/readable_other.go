//go:build !linux

package dbconn

import "net"

// Readable is only known on Linux.
func Readable(net.Conn) func() bool { return nil }
