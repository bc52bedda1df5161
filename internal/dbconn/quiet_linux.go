package dbconn

import (
	"context"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"github.com/jackc/pgx/v5/pgconn"
	"golang.org/x/sys/unix"
)

// quietly returns a dial function whose connections, once hush was called, do not announce each read
// and write to Go's scheduler. It could do nothing meanwhile, because these do not block. But the first
// call that is announced after all threads have slept wakes the thread that watches the scheduler
// (sysmon), which then looks every 20 microseconds until all sleep again: in a fleet of small
// processes that was a third of the processor time of a message. That thread also interrupts goroutines
// that compute for long, and sees to the others: see [heartbeat].
func quietly(dial pgconn.DialFunc) pgconn.DialFunc {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		if err != nil {
			return nil, err
		}
		switch conn.(type) {
		case *net.TCPConn, *net.UnixConn:
		default:
			return conn, nil // what else a DialFunc returns may do more than read and write
		}
		if raw := socketOf(conn); raw != nil && neverBlocks(raw) {
			return newQuiet(conn, raw), nil
		}
		return conn, nil
	}
}

// neverBlocks reports whether calls of the socket return at once, as Go makes its sockets: os.File.Fd,
// which a DialFunc may have called, undoes that.
func neverBlocks(raw syscall.RawConn) bool {
	flags, failed := 0, error(nil)
	err := raw.Control(func(fd uintptr) { flags, failed = unix.FcntlInt(fd, unix.F_GETFL, 0) })
	return err == nil && failed == nil && flags&unix.O_NONBLOCK != 0
}

// hush makes a connection of a quiet dial function quiet from now on. pgx may be reading meanwhile: a write
// that takes it long starts a reader in the background, which ends with its next answer.
func hush(conn net.Conn) {
	if wrapped, ok := conn.(interface{ NetConn() net.Conn }); ok { // of TLS
		conn = wrapped.NetConn()
	}
	if q, ok := conn.(*quiet); ok {
		q.hushed.Store(true)
	}
}

// A heartbeat keeps sysmon from sleeping for long, if no call is announced: it would until the first timer
// that ran when all processors fell idle, for minutes perhaps. The first quiet read for a while wakes it, and
// from then on there is a timer, until no quiet connection was read from for so long.
type heartbeat struct {
	every time.Duration
	beats atomic.Bool // there is a timer
	read  atomic.Bool // a quiet connection was read from since it was set
}

// beating is how late a goroutine is interrupted that computes after a quiet read, at most.
var beating = heartbeat{every: 16 * time.Millisecond}

// beat follows each quiet read.
func (h *heartbeat) beat() {
	if !h.read.Load() {
		h.read.Store(true)
	}
	if !h.beats.Load() && h.beats.CompareAndSwap(false, true) {
		time.AfterFunc(h.every, h.next)
		_, _, _ = syscall.Syscall(syscall.SYS_GETPID, 0, 0, 0) // is announced
	}
}

// next sets the timer once more, or ends the heartbeat.
func (h *heartbeat) next() {
	if h.read.Swap(false) {
		time.AfterFunc(h.every, h.next)
		return
	}
	h.beats.Store(false)
	if h.read.Load() { // meanwhile
		h.beat()
	}
}

// A quiet connection is a socket whose reads and writes are not announced. Deadlines and Close end
// them as they end those of the socket itself.
type quiet struct {
	net.Conn
	raw      syscall.RawConn
	hushed   atomic.Bool
	beating  *heartbeat
	in, out  transfer
	from, to func(fd uintptr) bool // made once: each would be an allocation
}

func newQuiet(conn net.Conn, raw syscall.RawConn) *quiet {
	q := &quiet{Conn: conn, raw: raw, beating: &beating}
	q.from = func(fd uintptr) bool { return q.in.once(syscall.SYS_READ, fd) }
	q.to = func(fd uintptr) bool {
		for len(q.out.rest) > 0 && q.out.err == 0 {
			if !q.out.once(syscall.SYS_WRITE, fd) {
				return false
			}
		}
		return true
	}
	return q
}

func (q *quiet) SyscallConn() (syscall.RawConn, error) { return q.raw, nil }

func (q *quiet) Read(b []byte) (int, error) {
	if !q.hushed.Load() || len(b) == 0 {
		return q.Conn.Read(b)
	}
	n, err := q.in.do(b, func() error { return q.raw.Read(q.from) })
	afterRead()
	q.beating.beat()
	if err == nil && n == 0 {
		return 0, io.EOF
	}
	return n, q.named("read", err)
}

func (q *quiet) Write(b []byte) (int, error) {
	if !q.hushed.Load() {
		return q.Conn.Write(b)
	}
	beforeWrite()
	n, err := q.out.do(b, func() error { return q.raw.Write(q.to) })
	return n, q.named("write", err)
}

// named returns an error as the socket itself returns it.
func (q *quiet) named(call string, err error) error {
	switch err := err.(type) { //nolint:errorlint // nobody has wrapped it yet
	case syscall.Errno:
		return &net.OpError{Op: call, Net: q.LocalAddr().Network(), Source: q.LocalAddr(), Addr: q.RemoteAddr(), Err: os.NewSyscallError(call, err)}
	case *net.OpError: // raw-read, raw-write
		err.Op = call
	}
	return err
}

// A transfer is the read, or the write, that is going on.
type transfer struct {
	mu   sync.Mutex
	rest []byte
	err  syscall.Errno
}

// do transfers b, by as many calls as it takes, in wait.
func (t *transfer) do(b []byte, wait func() error) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.rest, t.err = b, 0
	err := wait()
	n := len(b) - len(t.rest)
	t.rest = nil
	if err == nil && t.err != 0 {
		err = t.err
	}
	return n, err
}

// once makes one system call, and reports whether it is done; otherwise the socket is not ready.
func (t *transfer) once(number, fd uintptr) bool {
	for {
		n, _, errno := syscall.RawSyscall(number, fd, uintptr(unsafe.Pointer(unsafe.SliceData(t.rest))), uintptr(len(t.rest)))
		switch errno {
		case syscall.EINTR:
		case syscall.EAGAIN:
			return false
		case 0:
			t.rest = t.rest[n:]
			return true
		default:
			t.err = errno
			return true
		}
	}
}
