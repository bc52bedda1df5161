package cutnet

import (
	"io"
	"net"
	"testing"
)

// Messages of PostgreSQL's protocol, the first of a connection without a type.
const (
	hello  = "\x00\x00\x00\x05!"
	asked  = "Q\x00\x00\x00\x05?"
	answer = "Z\x00\x00\x00\x05I"
)

// relayed returns both ends of a connection through a relay, after its first messages.
func relayed(t *testing.T, cfg RelayConfig) (r *Relay, near, far net.Conn) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	cfg.Server = listener.Addr().String()
	r = NewRelay(t, cfg)
	if near, err = net.Dial("tcp", r.Address()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = near.Close() })
	if far, err = listener.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = far.Close() })
	send(t, near, hello)
	receive(t, far, hello)
	return r, near, far
}

func send(t *testing.T, conn net.Conn, message string) {
	t.Helper()
	if _, err := io.WriteString(conn, message); err != nil {
		t.Fatal(err)
	}
}

func receive(t *testing.T, conn net.Conn, message string) {
	t.Helper()
	got := make([]byte, len(message))
	if _, err := io.ReadFull(conn, got); err != nil || string(got) != message {
		t.Fatalf("received %q, %v; want %q", got, err, message)
	}
}

func TestRelayCutsOneDirection(t *testing.T) {
	t.Parallel()
	for name, requests := range map[string]bool{"requests": true, "answers": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, near, far := relayed(t, RelayConfig{})
			cut, held, passing, heldText, passingText := r.CutAnswers, near, far, answer, asked
			if requests {
				cut, held, passing, heldText, passingText = r.CutRequests, far, near, asked, answer
			}
			if err := cut(); err != nil {
				t.Fatal(err)
			}
			if r.to[server].opened() == requests || r.to[client].opened() != requests {
				t.Fatal("the wrong direction is cut")
			}
			send(t, passing, heldText)
			send(t, held, passingText)
			receive(t, passing, passingText)
			if err := r.Heal(); err != nil {
				t.Fatal(err)
			}
			receive(t, held, heldText)
		})
	}
}

func TestRelayLosesAnAnswerWithItsConnection(t *testing.T) {
	t.Parallel()
	answers := 0
	_, near, far := relayed(t, RelayConfig{Answer: func([]byte) bool { answers++; return answers < 2 }})
	send(t, far, answer)
	receive(t, near, answer)
	send(t, far, answer)
	if n, err := near.Read(make([]byte, 1)); err == nil {
		t.Errorf("%d bytes of a lost answer arrived", n)
	}
}

func TestRelayResetLosesWhatItHeldBack(t *testing.T) {
	t.Parallel()
	r, near, far := relayed(t, RelayConfig{})
	if err := r.Cut(); err != nil {
		t.Fatal(err)
	}
	send(t, near, asked)
	r.Reset()
	if err := r.Heal(); err != nil {
		t.Fatal(err)
	}
	if n, err := far.Read(make([]byte, 1)); err == nil {
		t.Errorf("%d bytes arrived after a reset", n)
	}
}
