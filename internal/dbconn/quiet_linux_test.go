package dbconn

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// pair returns a connection whose reads and writes are quiet, and the other end.
func pair(t *testing.T, network string) (ours, theirs net.Conn) {
	t.Helper()
	address := "127.0.0.1:0"
	if network == "unix" {
		address = filepath.Join(t.TempDir(), "s")
	}
	listener, err := net.Listen(network, address)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	ours, err = quietly((&net.Dialer{}).DialContext)(t.Context(), network, listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ours.Close() })
	if _, ok := ours.(*quiet); !ok {
		t.Fatalf("the connection is a %T", ours)
	}
	hush(ours)
	if theirs, err = listener.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = theirs.Close() })
	return ours, theirs
}

func eachSocket(t *testing.T, test func(t *testing.T, ours, theirs net.Conn)) {
	for _, network := range []string{"tcp", "unix"} {
		t.Run(network, func(t *testing.T) {
			ours, theirs := pair(t, network)
			test(t, ours, theirs)
		})
	}
}

func TestQuietWriteGoesOnWhereTheSocketHasNoRoom(t *testing.T) {
	eachSocket(t, func(t *testing.T, ours, theirs net.Conn) {
		sent := make([]byte, 16<<20) // more than the buffers of both ends take
		for i := range sent {
			sent[i] = byte(i>>16 ^ i)
		}
		written := make(chan error, 1)
		go func() {
			n, err := ours.Write(sent)
			if err == nil && n != len(sent) {
				err = io.ErrShortWrite
			}
			written <- err
		}()
		received := make([]byte, len(sent))
		if _, err := io.ReadFull(theirs, received); err != nil {
			t.Fatal(err)
		}
		if err := <-written; err != nil {
			t.Error(err)
		}
		if !bytes.Equal(received, sent) {
			t.Error("it received something else")
		}
	})
}

func TestQuietWriteTellsHowMuchItWroteUntilTheDeadline(t *testing.T) {
	eachSocket(t, func(t *testing.T, ours, theirs net.Conn) {
		sent := make([]byte, 16<<20) // more than the buffers of both ends take
		first := make(chan error, 1)
		go func() { // a deadline that comes before the first byte would leave nothing to tell
			_, err := io.ReadFull(theirs, make([]byte, 1))
			first <- errors.Join(err, ours.SetWriteDeadline(time.Now()))
		}()
		n, err := ours.Write(sent)
		if n == 0 || n == len(sent) || !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("%d bytes were written: %v", n, err)
		}
		if err := <-first; err != nil {
			t.Fatal(err)
		}
		_ = ours.Close()
		if rest, err := io.ReadAll(theirs); 1+len(rest) != n || err != nil {
			t.Errorf("%d bytes were received, not %d: %v", 1+len(rest), n, err)
		}
	})
}

func TestQuietReadWaits(t *testing.T) {
	eachSocket(t, func(t *testing.T, ours, theirs net.Conn) {
		if n, err := ours.Read(nil); n != 0 || err != nil {
			t.Errorf("nothing was asked for, and read: %d, %v", n, err)
		}
		_ = ours.SetReadDeadline(time.Now())
		if _, err := ours.Read(make([]byte, 8)); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("there is nothing to read until the deadline: %v", err)
		}
		_ = ours.SetReadDeadline(time.Time{})
		read := make(chan string)
		go func() {
			b := make([]byte, 8)
			n, _ := ours.Read(b)
			read <- string(b[:n])
		}()
		if _, err := theirs.Write([]byte("hello")); err != nil {
			t.Fatal(err)
		}
		if got := <-read; got != "hello" {
			t.Errorf("it read %q", got)
		}
		_ = theirs.Close()
		if n, err := ours.Read(make([]byte, 8)); n != 0 || err != io.EOF { //nolint:errorlint // io.Reader: EOF itself
			t.Errorf("the other end is closed: %d, %v", n, err)
		}
	})
}

// pgx reads in the background when a write takes it long. The race detector judges this.
func TestHushDoesNotDisturbAReadThatIsUnderWay(t *testing.T) {
	eachSocket(t, func(t *testing.T, ours, theirs net.Conn) {
		ours.(*quiet).hushed.Store(false)
		read := make(chan string)
		begun := make(chan struct{})
		go func() {
			b := make([]byte, 8)
			close(begun)
			n, _ := ours.Read(b)
			read <- string(b[:n])
		}()
		<-begun
		hush(ours)
		if _, err := theirs.Write([]byte("hello")); err != nil {
			t.Fatal(err)
		}
		if got := <-read; got != "hello" {
			t.Errorf("it read %q", got)
		}
	})
}

// As with sockets themselves. The race detector judges this.
func TestQuietReadFollowsTheWritesBeforeIt(t *testing.T) {
	eachSocket(t, func(t *testing.T, ours, theirs net.Conn) {
		b, changed := make([]byte, 1), 0
		done := make(chan struct{})
		go func() {
			defer close(done)
			_, _ = io.ReadFull(theirs, b)
			changed++
			_, _ = theirs.Write(b)
		}()
		changed++
		_, _ = ours.Write([]byte("x"))
		_, _ = io.ReadFull(ours, make([]byte, 1))
		if changed++; changed != 3 {
			t.Error(changed)
		}
		<-done
	})
}

// What went wrong is said as by the socket itself: callers see it in ErrUnavailable.
func TestQuietErrorsAreThoseOfTheSocket(t *testing.T) {
	for name, c := range map[string]struct {
		fails func(ours, theirs net.Conn) error
		want  error
	}{
		"a reset while it reads": {func(ours, theirs net.Conn) error {
			_ = theirs.(*net.TCPConn).SetLinger(0)
			failed := make(chan error)
			go func() { _, err := ours.Read(make([]byte, 8)); failed <- err }()
			_ = theirs.Close()
			return <-failed
		}, syscall.ECONNRESET},
		"a write after a reset": {func(ours, theirs net.Conn) error {
			_ = theirs.(*net.TCPConn).SetLinger(0)
			_ = theirs.Close()
			_, _ = ours.Read(make([]byte, 8)) // until the reset is there
			_, err := ours.Write([]byte("x"))
			return err
		}, syscall.EPIPE},
		"a close while it reads": {func(ours, _ net.Conn) error {
			failed := make(chan error)
			go func() { _, err := ours.Read(make([]byte, 8)); failed <- err }()
			_ = ours.Close()
			return <-failed
		}, net.ErrClosed},
		"a deadline": {func(ours, _ net.Conn) error {
			_ = ours.SetReadDeadline(time.Now())
			_, err := ours.Read(make([]byte, 8))
			return err
		}, os.ErrDeadlineExceeded},
	} {
		t.Run(name, func(t *testing.T) {
			ours, theirs := pair(t, "tcp")
			err := c.fails(ours, theirs)
			loud, theirs := pair(t, "tcp")
			want := c.fails(loud.(*quiet).Conn, theirs)
			op, ok := errors.AsType[*net.OpError](err)
			wantOp, _ := errors.AsType[*net.OpError](want)
			if !errors.Is(err, c.want) || !errors.Is(want, c.want) {
				t.Fatalf("%v, the socket says %v, want %v", err, want, c.want)
			}
			if !ok || op.Op != wantOp.Op || op.Net != wantOp.Net || op.Err.Error() != wantOp.Err.Error() || op.Timeout() != wantOp.Timeout() || op.Source == nil || op.Addr == nil {
				t.Errorf("%v, the socket says %v", err, want)
			}
		})
	}
}

func TestQuietReadAndWriteAllocateNothing(t *testing.T) {
	eachSocket(t, func(t *testing.T, ours, theirs net.Conn) {
		b := make([]byte, 8)
		if n := testing.AllocsPerRun(100, func() {
			_, _ = ours.Write(b)
			_, _ = io.ReadFull(theirs, b)
			_, _ = theirs.Write(b)
			_, _ = ours.Read(b)
		}); n != 0 {
			t.Errorf("%v allocations", n)
		}
	})
}

// A DialFunc may return what does more than read and write.
func TestConnectionOfACallersOwnKindStaysAsItIs(t *testing.T) {
	ours, theirs := net.Pipe()
	defer ours.Close()
	defer theirs.Close()
	conn, err := quietly(func(context.Context, string, string) (net.Conn, error) { return ours, nil })(t.Context(), "tcp", "")
	if conn != ours || err != nil {
		t.Errorf("it is a %T: %v", conn, err)
	}
	refused := errors.New("refused")
	if _, err := quietly(func(context.Context, string, string) (net.Conn, error) { return nil, refused })(t.Context(), "tcp", ""); err != refused { //nolint:errorlint // as it is
		t.Errorf("%v", err)
	}
}

// The thread that quiet reads do not wake wakes nevertheless, and then nobody keeps the only processor.
func TestCallerThatComputesAfterAQuietReadIsInterrupted(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	for reads, every := range map[int]time.Duration{1: beating.every, 2: time.Second} { // the heartbeat of the first read lasts until the second
		ours, theirs := pair(t, "unix")
		ours.(*quiet).beating = &heartbeat{every: every}
		end, err := theirs.(*net.UnixConn).File()
		if err != nil {
			t.Fatal(err)
		}
		defer end.Close()
		other := exec.CommandContext(t.Context(), "sh", "-c", "sleep 0.2; echo x >&3; sleep 0.1; echo y >&3; sleep 0.1; echo")
		other.ExtraFiles = []*os.File{end}
		out, err := other.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := other.Start(); err != nil {
			t.Fatal(err)
		}
		var went atomic.Bool
		done := make(chan struct{})
		go func() {
			defer close(done)
			_, _ = io.ReadAll(out)
			went.Store(true)
		}()
		for range reads { // all threads sleep meanwhile
			if _, err := ours.Read(make([]byte, 2)); err != nil {
				t.Fatal(err)
			}
		}
		for deadline := time.Now().Add(30 * time.Second); !went.Load() && time.Now().Before(deadline); { // computes
		}
		if !went.Load() {
			t.Errorf("%d reads: nobody else had the processor while the caller computed", reads)
		}
		<-done
		_ = other.Wait()
	}
}

// Blocked in a call that the scheduler does not know of, one thread would stop them all.
func TestSocketThatBlocksIsNotMadeQuiet(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	conn, err := quietly(func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
		if err != nil {
			return nil, err
		}
		file, err := conn.(*net.TCPConn).File()
		if err != nil {
			return nil, err
		}
		defer file.Close()
		_ = file.Fd() // as programs do that set an option of the socket
		return conn, nil
	})(t.Context(), "tcp", listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, ok := conn.(*quiet); ok {
		t.Error("it is quiet")
	}
}
