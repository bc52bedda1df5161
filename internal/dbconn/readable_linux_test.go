package dbconn_test

import (
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"testing"

	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// ends returns both ends of a new connection.
func ends(t *testing.T, network, address string) (here, there net.Conn) {
	t.Helper()
	listener, err := net.Listen(network, address)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	if here, err = net.Dial(network, listener.Addr().String()); err != nil {
		t.Fatal(err)
	}
	if there, err = listener.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = here.Close()
		_ = there.Close()
	})
	return here, there
}

// encrypted returns both ends of a new connection with TLS.
func encrypted(t *testing.T) (here, there net.Conn) {
	t.Helper()
	example := httptest.NewTLSServer(nil)
	defer example.Close()
	trust := example.Client().Transport.(*http.Transport).TLSClientConfig.Clone()
	trust.ServerName = "example.com"
	client, server := ends(t, "tcp", "127.0.0.1:0")
	// A ticket, which follows the handshake, would be something to read.
	ours, theirs := tls.Client(client, trust), tls.Server(server, &tls.Config{Certificates: example.TLS.Certificates, SessionTicketsDisabled: true})
	done := make(chan error, 1)
	go func() { done <- theirs.Handshake() }()
	if err := ours.Handshake(); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	return ours, theirs
}

func TestConnectionIsReadableWhenAReadWouldNotWait(t *testing.T) {
	t.Parallel()
	for name, connect := range map[string]func(*testing.T) (here, there net.Conn){
		"TCP":  func(t *testing.T) (here, there net.Conn) { return ends(t, "tcp", "127.0.0.1:0") },
		"Unix": func(t *testing.T) (here, there net.Conn) { return ends(t, "unix", filepath.Join(t.TempDir(), "s")) },
		"TLS":  encrypted,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			here, there := connect(t)
			readable := dbconn.Readable(here)
			if readable() {
				t.Error("it is readable before anything was sent")
			}
			if _, err := there.Write([]byte("answer")); err != nil {
				t.Fatal(err)
			}
			pgtest.Until(t, "an answer is readable", readable)
			if _, err := io.ReadFull(here, make([]byte, len("answer"))); err != nil {
				t.Fatal(err)
			}
			if readable() {
				t.Error("it is readable after all was read")
			}
			if err := there.Close(); err != nil {
				t.Fatal(err)
			}
			pgtest.Until(t, "its end is readable", readable)
			if err := here.Close(); err != nil {
				t.Fatal(err)
			}
			pgtest.Until(t, "it is readable because it was closed here", readable)
		})
	}
}

func TestConnectionWithoutASocketIsOfUnknownReadability(t *testing.T) {
	t.Parallel()
	here, there := net.Pipe()
	defer here.Close()
	defer there.Close()
	if dbconn.Readable(here) != nil {
		t.Error("it tells of a pipe")
	}
}
