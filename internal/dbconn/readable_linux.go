package dbconn

import (
	"net"
	"syscall"
	"unsafe"

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
	var atOnce unix.Timespec
	look := func(fd uintptr) {
		sockets[0] = unix.PollFd{Fd: int32(fd), Events: unix.POLLIN}
		// Not announced to the scheduler, as in quietly.
		n, _, errno := unix.RawSyscall6(unix.SYS_PPOLL, uintptr(unsafe.Pointer(&sockets[0])), 1, uintptr(unsafe.Pointer(&atOnce)), 0, 0, 0)
		readable = errno == 0 && n > 0 || errno != 0 && errno != unix.EINTR
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
