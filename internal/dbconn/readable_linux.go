package dbconn

import (
	"errors"
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// Readable returns a function that reports, without waiting, whether there is something to read
// from a connection: bytes, its end, or an error. It is nil where that cannot be told.
func Readable(conn net.Conn) func() bool {
	raw := socketOf(conn)
	if raw == nil {
		return nil
	}
	var readable bool
	var sockets [1]unix.PollFd
	look := func(fd uintptr) {
		sockets[0] = unix.PollFd{Fd: int32(fd), Events: unix.POLLIN}
		n, err := unix.Poll(sockets[:], 0)
		readable = n > 0 || err != nil && !errors.Is(err, unix.EINTR)
	}
	return func() bool { return raw.Control(look) != nil || readable }
}

// socketOf returns the socket of a connection, also of one with TLS; nil: it has none.
func socketOf(conn net.Conn) syscall.RawConn {
	if wrapped, ok := conn.(interface{ NetConn() net.Conn }); ok { // of TLS
		conn = wrapped.NetConn()
	}
	socket, ok := conn.(syscall.Conn)
	if !ok {
		return nil
	}
	raw, err := socket.SyscallConn()
	if err != nil {
		return nil
	}
	return raw
}
