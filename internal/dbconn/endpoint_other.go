//go:build !linux

package dbconn

import "net"

// listensAsParent is only known on Linux.
func listensAsParent(net.Conn, int32) bool { return false }
