package serve_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"

	"github.com/pgxlock/pgxlock/cmd/pgxlock/internal/serve"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// The page may be older than the holder that an operator sees there.
func TestStalePageDoesNotEvictTheNextHolder(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	db.Exec(t, `select acquire_lock('order:1', 'pod-1', 300)`)
	b := &browser{t: t, server: served(t, db.Pool, func(cfg *serve.Config) { cfg.Token, cfg.AllowEvict = token, true })}
	b.logIn()
	r := b.get("/evict?hold=" + b.get("/").after(t, `href="/evict?hold=`))
	form := url.Values{"hold": {r.after(t, `name="hold" value="`)}, "csrf": {r.after(t, `name="csrf" value="`)}, "reason": {"it hangs"}}
	for _, next := range []string{"pod-2", "pod-1"} { // the same holder has another token
		db.Exec(t, `select release_lock(lock_name, holder_id) from distributed_locks; select acquire_lock('order:1', '`+next+`', 300)`)
		b.post("/evict", form).want(t, http.StatusConflict, "no longer holds the lock")
		var holder string
		if err := db.Pool.QueryRow(t.Context(), "select holder_id from distributed_locks").Scan(&holder); err != nil || holder != next {
			t.Fatalf("%q holds it, %v", holder, err)
		}
	}
}

func TestRequestsThatAreNotThePagesAreRefused(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	db.Exec(t, `select acquire_lock('order:1', 'pod-1', 300)`)
	b := &browser{t: t, server: served(t, db.Pool, func(cfg *serve.Config) { cfg.Token, cfg.AllowEvict = token, true })}
	for _, path := range []string{"/server.go", "/page.html", "/assets/page.html", "/..%2f..%2fetc%2fpasswd", "/style.css/..%2f..%2fserver.go", "/static/"} {
		b.get(path).want(t, http.StatusUnauthorized)
	}
	// A token in an address would be in histories and in logs of proxies.
	if r := b.get("/?token=" + url.QueryEscape(token)); r.code != http.StatusSeeOther {
		t.Errorf("a token in the address: %d", r.code)
	}
	if r := b.post("/login?token="+url.QueryEscape(token), nil); r.code != http.StatusUnauthorized {
		t.Errorf("a token in the address: %d", r.code)
	}
	large := url.Values{"token": {token}, "reason": {strings.Repeat("x", 1<<20)}}
	b.post("/login", large).want(t, http.StatusUnauthorized)

	b.logIn()
	for _, path := range []string{"/server.go", "/page.html", "/assets/page.html", "/..%2f..%2fetc%2fpasswd"} {
		b.get(path).want(t, http.StatusNotFound)
	}
	b.post("/evict", large).want(t, http.StatusBadRequest, "the form cannot be read")
	for _, method := range []string{http.MethodPut, http.MethodDelete, http.MethodPost} {
		if r := b.do(b.request(method, "/api/snapshot", nil)); r.code != http.StatusMethodNotAllowed {
			t.Errorf("%s: %d", method, r.code)
		}
	}
	if r := b.get("/evict?hold=" + strings.Repeat("A", 4096)); r.code != http.StatusBadRequest {
		t.Errorf("%d", r.code)
	}
	// Each word of a search is looked for in each row: what is behind 200 characters does not count.
	b.get("/?q="+strings.Repeat("order:1+", 25)+"nowhere").want(t, http.StatusOK, ">order:1<")
}

// pinched is a listener whose connections take little before they are read.
type pinched struct{ net.Listener }

func (p pinched) Accept() (net.Conn, error) {
	conn, err := p.Listener.Accept()
	if err == nil {
		err = conn.(*net.TCPConn).SetWriteBuffer(4096)
	}
	return conn, err
}

func TestViewersThatDoNotReadHoldUpNobodyAndAreCutOff(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	db.Exec(t, `select acquire_lock('order:' || i, repeat('x', 200), 300, to_jsonb(repeat('x', 400))) from generate_series(1, 100) i`)
	wide := served(t, db.Pool, nil) // its handler, behind another listener
	server := httptest.NewUnstartedServer(wide.Config.Handler)
	server.Listener = pinched{server.Listener}
	server.Start()
	t.Cleanup(server.Close)

	const most = 256
	for range most {
		conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", server.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		if err := conn.(*net.TCPConn).SetReadBuffer(4096); err != nil {
			t.Fatal(err)
		}
		if _, err := fmt.Fprintf(conn, "GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
		// It reads that it is a viewer, and nothing more.
		if line, err := bufio.NewReaderSize(conn, 16).ReadString('\n'); err != nil || !strings.Contains(line, "200 OK") {
			t.Fatalf("%q, %v", line, err)
		}
	}
	b := &browser{t: t, server: server}
	b.get("/events").want(t, http.StatusServiceUnavailable, "too many viewers")
	b.get("/").want(t, http.StatusOK, "order:1")
	var got *http.Response
	pgtest.Until(t, "those that do not read an event within 10 s make room", func() bool {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL+"/events", nil)
		if err != nil {
			t.Fatal(err)
		}
		if got, err = http.DefaultClient.Do(r); err != nil {
			t.Fatal(err)
		}
		if got.StatusCode == http.StatusOK {
			return true
		}
		_, _ = io.Copy(io.Discard, got.Body)
		got.Body.Close()
		return false
	})
	defer got.Body.Close()
	lines := bufio.NewReader(got.Body)
	for line := ""; !strings.Contains(line, "order:1<"); {
		var err error
		if line, err = lines.ReadString('\n'); err != nil {
			t.Fatal(err)
		}
	}
}
