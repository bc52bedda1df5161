package serve_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/cmd/pgxlock/internal/serve"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/monitor"
	"github.com/pgxlock/pgxlock/once"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

const token = "a token that nobody guesses"

// migrated returns a database with pgxlock in it.
func migrated(t *testing.T) *pgtest.DB {
	t.Helper()
	return testkit.Migrated(t)
}

// served serves a database, as configured.
func served(t *testing.T, pool *pgxpool.Pool, configure func(*serve.Config)) *httptest.Server {
	t.Helper()
	monitored := func(most int) *monitor.Monitor {
		locks, err := monitor.New(pool, &monitor.Config{MostLeases: most})
		if err != nil {
			t.Fatal(err)
		}
		return locks
	}
	cfg := serve.Config{
		Locks: monitored(serve.MostLeases), All: monitored(0), Ready: pool.Ping, Describe: func(err error) string { return err.Error() },
		JSON: func(shot monitor.Snapshot, _ []serve.Eviction, _ []serve.Run, _ []serve.Loss) any { return shot },
	}
	if configure != nil {
		configure(&cfg)
	}
	page, err := serve.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(page)
	t.Cleanup(server.Close)
	return server
}

// A browser keeps cookies, and shows redirects instead of following them.
type browser struct {
	t      *testing.T
	server *httptest.Server
	cookie *http.Cookie
}

type reply struct {
	code   int
	header http.Header
	body   string
}

func (b *browser) do(r *http.Request) reply {
	b.t.Helper()
	if b.cookie != nil {
		r.AddCookie(b.cookie)
	}
	client := http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	got, err := client.Do(r)
	if err != nil {
		b.t.Fatal(err)
	}
	defer got.Body.Close()
	text, err := io.ReadAll(got.Body)
	if err != nil {
		b.t.Fatal(err)
	}
	return reply{got.StatusCode, got.Header, string(text)}
}

func (b *browser) request(method, path string, form url.Values) *http.Request {
	b.t.Helper()
	r, err := http.NewRequestWithContext(b.t.Context(), method, b.server.URL+path, strings.NewReader(form.Encode()))
	if err != nil {
		b.t.Fatal(err)
	}
	if method == http.MethodPost {
		r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	}
	return r
}

// get reads a page, again if a busy machine needed more than the 5 s that the page has to look.
func (b *browser) get(path string) reply {
	b.t.Helper()
	for {
		if r := b.do(b.request(http.MethodGet, path, nil)); !strings.Contains(r.body, context.DeadlineExceeded.Error()) {
			return r
		}
	}
}

// until reads a page again and again until it shows a text.
func (b *browser) until(path, text string) (r reply) {
	b.t.Helper()
	pgtest.Until(b.t, path+" shows "+text, func() bool {
		r = b.get(path)
		return strings.Contains(r.body, text)
	})
	return r
}

func (b *browser) post(path string, form url.Values) reply {
	b.t.Helper()
	return b.do(b.request(http.MethodPost, path, form))
}

// logIn gets a session for the token.
func (b *browser) logIn() {
	b.t.Helper()
	r := b.post("/login", url.Values{"token": {token}})
	cookies := (&http.Response{Header: r.header}).Cookies()
	if r.code != http.StatusSeeOther || len(cookies) != 1 {
		b.t.Fatalf("code %d, cookies %v: %s", r.code, cookies, r.body)
	}
	b.cookie = cookies[0]
}

func (r reply) want(t *testing.T, code int, texts ...string) {
	t.Helper()
	if r.code != code {
		t.Errorf("code %d, want %d: %s", r.code, code, r.body)
	}
	for _, text := range texts {
		if !strings.Contains(r.body, text) {
			t.Errorf("no %q in:\n%s", text, r.body)
		}
	}
}

func (r reply) lacks(t *testing.T, texts ...string) {
	t.Helper()
	for _, text := range texts {
		if strings.Contains(r.body, text) {
			t.Errorf("%q is in:\n%s", text, r.body)
		}
	}
}

// attribute returns the first value of an attribute that is behind a text.
func (r reply) after(t *testing.T, text string) string {
	t.Helper()
	found := regexp.MustCompile(regexp.QuoteMeta(text) + `([^"]*)"`).FindStringSubmatch(r.body)
	if found == nil {
		t.Fatalf("no %q in:\n%s", text, r.body)
	}
	return found[1]
}

func TestPageShowsHoldersWithTheirTokenMetadataAndTTL(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	b := &browser{t: t, server: served(t, db.Pool, nil)}
	b.get("/").want(t, http.StatusOK, "Nobody holds a lock, and nobody waits.")

	db = migrated(t)
	db.Exec(t, `select acquire_lock('order:1', 'pod-1', 300, '"step 3"');
		select acquire_lock('import', 'pod-3', 300);
		update distributed_locks set expires_at = now() - interval '1 minute' where lock_name = 'import'`)
	conn := db.Connect(t)
	if _, err := conn.Exec(t.Context(), "set application_name = 'reporter'; select pg_advisory_lock(42)"); err != nil {
		t.Fatal(err)
	}
	var number int64
	if err := db.Pool.QueryRow(t.Context(), "select fencing_token from distributed_locks where lock_name = 'order:1'").Scan(&number); err != nil {
		t.Fatal(err)
	}
	b = &browser{t: t, server: served(t, db.Pool, nil)}
	r := b.get("/")
	r.want(t, http.StatusOK, "order:1", "pod-1", "step 3", fmt.Sprint(number), "of about 5m0s", `id="expired"`, "import", "#42", "reporter:")
	r.lacks(t, "Evict<", "Log out")
	if got := r.header.Get("Content-Type"); got != "text/html; charset=utf-8" {
		t.Error(got)
	}
	b.get("/api/snapshot").want(t, http.StatusOK, "order:1", `"Expired":[{`)
}

func TestSearchShowsWhatHasEachWord(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	db.Exec(t, `select acquire_lock('order:1', 'pod-1', 300), acquire_lock('order:2', 'pod-2', 300), acquire_lock('invoice:1', 'pod-1', 300)`)
	b := &browser{t: t, server: served(t, db.Pool, nil)}
	r := b.get("/?q=ORDER+pod-1")
	r.want(t, http.StatusOK, ">order:1<", `value="ORDER pod-1"`)
	r.lacks(t, ">order:2<", ">invoice:1<")
	b.get("/?q=nowhere").want(t, http.StatusOK, "Nothing matches.")
	b.get("/?kind=advisory").lacks(t, ">order:1<")
	b.get("/?holders=-1&kind=nonsense&holders=99999999999999999999").want(t, http.StatusOK, ">order:1<")
}

func TestLeaseThatWasTakenOverIsShownAsLost(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	db.Exec(t, `select acquire_lock('order:1', 'pod-1', 300), acquire_lock('order:2', 'pod-1', 300), acquire_lock('order:3', 'pod-1', 300);
		update distributed_locks set expires_at = now() - interval '1 minute', acquired_at = now() - interval '3 minutes' where lock_name <> 'order:3'`)
	b := &browser{t: t, server: served(t, db.Pool, nil)}
	b.get("/").lacks(t, `id="lost"`)
	db.Exec(t, `select acquire_lock('order:1', 'pod-2', 300); select reap_expired_locks('1 second'); select release_lock('order:3', 'pod-1')`)
	r := b.until("/", `id="lost"`)
	_, lost, _ := strings.Cut(r.body, `id="lost"`)
	r.body, _, _ = strings.Cut(lost, "</section>")
	r.want(t, http.StatusOK, ">order:1<", ">order:2<", ">pod-1<", ">pod-2<", "2m0s")
	r.lacks(t, "order:3") // it was released
}

// Any caller may choose a name, an owner and metadata.
func TestHostileNamesAreText(t *testing.T) {
	t.Parallel()
	hostile := []string{
		`<script>alert(1)</script>`, `"><img src=x onerror=alert(1)>`, `'"&lt;{{.}}`, "\u202eevil\u202c", "line\nbreak\rdata: x", "\u009b2J\x7f", `]]></title></svg><script>alert(2)</script>`,
		strings.Repeat("long ", 40),
	}
	db := migrated(t)
	for _, name := range hostile {
		var has bool
		if err := db.Pool.QueryRow(t.Context(), "select acquire_lock($1, $2, 300, to_jsonb($3::text))", name, name, strings.Repeat(name, 20)).Scan(&has); err != nil || !has {
			t.Fatalf("%q: %v, %v", name, has, err)
		}
	}
	for i, name := range hostile { // the graph shows them
		if _, err := db.Pool.Exec(t.Context(), `insert into pgxlock_waiters (kind, name, ticket, owner, waiters, since, live_until)
			values (0, $1, $2, $1, 1, now(), now() + interval '1 hour')`, name, i); err != nil {
			t.Fatal(err)
		}
	}
	b := &browser{t: t, server: served(t, db.Pool, func(cfg *serve.Config) {
		cfg.Evictions = func(context.Context) (all []serve.Eviction, err error) {
			for _, name := range hostile {
				all = append(all, serve.Eviction{Key: name, Kind: pgxlock.KindLease, Holder: name, By: name, Reason: name})
			}
			return all, nil
		}
		cfg.Runs = func(context.Context) (all []serve.Run, err error) {
			for _, name := range hostile {
				all = append(all, serve.Run{Key: name, State: once.StateFailed, Holder: name, Error: name})
			}
			return all, nil
		}
	})}
	b.get("/").want(t, http.StatusOK, "&lt;script&gt;alert(1)&lt;/script&gt;", `\u202eevil\u202c`, `line\nbreak\rdata: x`, "<title>&lt;script&gt;alert(1)&lt;/script&gt;</title>",
		"<title>]]&gt;&lt;/title&gt;&lt;/svg&gt;&lt;script&gt;alert(2)&lt;/script&gt;</title>")
	for _, path := range []string{"/", "/?q=" + url.QueryEscape(hostile[1])} {
		r := b.get(path)
		r.want(t, http.StatusOK, "&lt;img src=x")
		r.lacks(t, "<script>", "<img", "\u202e", "</svg><script")
		if n := strings.Count(r.body, "<script"); n != 1 { // our own
			t.Errorf("%d scripts in:\n%s", n, r.body)
		}
	}
	r := b.get("/api/snapshot")
	r.want(t, http.StatusOK, `\u009b2J\u007f`)
	r.lacks(t, "\u009b", "\x7f", "\u202e")
}

func TestLeasesAreShownInPagesUpToABound(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	insert := func(from, to int) {
		db.Exec(t, `insert into distributed_locks (lock_name, holder_id, acquired_at, expires_at, metadata, fencing_token)
			select 'order:' || to_char(i, 'FM00000'), 'pod-' || i, now(), now() + interval '1 hour', '{}', i from generate_series($1::int, $2::int) i`, from, to)
	}
	insert(1, serve.MostLeases)
	b := &browser{t: t, server: served(t, db.Pool, nil)}
	r := b.get("/")
	r.want(t, http.StatusOK, "1 to 100 shown, 1 900 not", "order:00001", "order:00100")
	r.lacks(t, "order:00101", "there are more")
	if len(r.body) > 200_000 {
		t.Errorf("the page has %d bytes", len(r.body))
	}
	r = b.get(strings.ReplaceAll(r.after(t, `id="holders-next" href="`), "&amp;", "&"))
	r.want(t, http.StatusOK, "101 to 200 shown", "order:00101", ">previous<", ">next<")
	b.get("/?holders=5000").want(t, http.StatusOK, "1901 to 2000 shown")
	b.get("/?q=order:01999").want(t, http.StatusOK, "order:01999")
	b.get("/?q=nowhere").want(t, http.StatusOK, "Nothing matches.")

	insert(serve.MostLeases+1, 10_000)
	db.Exec(t, `insert into pgxlock_waiters (kind, name, ticket, owner, waiters, since, live_until)
		values (0, 'order:09998', 1, 'me', 1, now(), now() + interval '1 hour'), (0, 'work#', 2, 'me', 1, now(), now() + interval '1 hour');
		select acquire_permit('work', 'w1', 2, 3600), acquire_permit('work', 'w2', 2, 3600), acquire_lock('zzz', 'h', 3600)`)
	b = &browser{t: t, server: served(t, db.Pool, nil)}
	r = b.get("/")
	r.want(t, http.StatusOK, "cannot see:", "leases: there are more than 2000", ">order:09998<", ">work#2<", ">pod-9998<")
	r.lacks(t, "order:09997", "zzz")
	b.get("/?q=nowhere").want(t, http.StatusOK, "Nothing matches in the leases that were read")
	r = b.get("/api/snapshot")
	r.want(t, http.StatusOK, "order:10000", "zzz")
	r.lacks(t, "there are more")
}

// wait makes a session wait in the server, until the connection is closed.
func wait(t *testing.T, db *pgtest.DB, conn *pgx.Conn, sql string) {
	t.Helper()
	ended := make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		defer close(ended)
		_, _ = conn.Exec(ctx, sql) // it waits until the test is over
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
	})
	pgtest.Until(t, "it waits", func() (waits bool) {
		if err := db.Pool.QueryRow(t.Context(), "select exists (select from pg_locks where pid = $1 and not granted and waitstart is not null)", conn.PgConn().PID()).Scan(&waits); err != nil {
			t.Fatal(err)
		}
		return waits
	})
}

func TestDeadlockIsDrawnAndNamed(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	var conns []*pgx.Conn
	for _, name := range []string{"alice", "bob", "carol"} {
		conn := db.Connect(t)
		if _, err := conn.Exec(t.Context(), "set deadlock_timeout = '1h'; set application_name = '"+name+"'"); err != nil {
			t.Fatal(err)
		}
		conns = append(conns, conn)
	}
	for i, conn := range conns[:2] {
		if _, err := conn.Exec(t.Context(), fmt.Sprintf("select pg_advisory_lock(%d)", i+1)); err != nil {
			t.Fatal(err)
		}
	}
	b := &browser{t: t, server: served(t, db.Pool, nil)}
	wait(t, db, conns[0], "select pg_advisory_lock(2)")
	wait(t, db, conns[2], "select pg_advisory_lock(2)")
	b.get("/").lacks(t, "deadlock")

	wait(t, db, conns[1], "select pg_advisory_lock(1)")
	b = &browser{t: t, server: served(t, db.Pool, nil)}
	r := b.get("/")
	r.want(t, http.StatusOK, `<strong>deadlock:</strong> `, `class="waiter circle"`, `class="line circle"`, `<span class="tag bad">deadlock</span>`)
	if story := regexp.MustCompile(`alice:\d+ waits for #2, held by bob:\d+ waits for #1, held by alice:\d+`); !story.MatchString(r.body) {
		t.Errorf("the deadlock is not told:\n%s", r.body)
	}
	if n := strings.Count(r.body, `<span class="tag bad">`); n != 2 { // carol waits for one of them, and is in no circle
		t.Errorf("%d waiters are in the deadlock", n)
	}
}

func TestPageSaysWhatItCannotSeeAndRecovers(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	db.Exec(t, `select acquire_lock('order:1', 'pod-1', 300)`)
	var gone sync.Map
	pool := db.NewPool(t, func(cfg *pgxpool.Config) {
		cfg.BeforeConnect = func(context.Context, *pgx.ConnConfig) error {
			if err, is := gone.Load("why"); is {
				return err.(error)
			}
			return nil
		}
	})
	b := &browser{t: t, server: served(t, pool, nil)}
	gone.Store("why", io.ErrUnexpectedEOF)
	b.get("/livez").want(t, http.StatusOK, "ok")
	b.get("/readyz").want(t, http.StatusServiceUnavailable, "cannot reach the database")
	b.get("/").want(t, http.StatusOK, "<strong>cannot see:</strong>", "unexpected EOF")
	b.get("/api/snapshot").want(t, http.StatusServiceUnavailable, `{"error":`)

	gone.Delete("why")
	b.until("/readyz", "ok") // it asks at most once a second
	b.until("/", "order:1").lacks(t, "cannot see")

	gone.Store("why", io.ErrUnexpectedEOF)
	pool.Reset()
	b.until("/", "cannot see").want(t, http.StatusOK, "What is below was read", "order:1", `<div id="tables" class="stale">`)
}

func TestRoleWithoutRightsSeesWhatItCannotSee(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	db.Exec(t, `select harden_locks()`)
	db.Exec(t, `select acquire_lock('order:1', 'pod-1', 300); create role `+role(db)+` login`)
	t.Cleanup(func() {
		if _, err := db.Pool.Exec(context.WithoutCancel(t.Context()), `drop role `+role(db)); err != nil {
			t.Error(err)
		}
	})
	pool := db.NewPool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.User = role(db) })
	r := (&browser{t: t, server: served(t, pool, nil)}).get("/")
	r.want(t, http.StatusOK, "<strong>cannot see:</strong>", "leases")
	r.lacks(t, "order:1")
	r.lacks(t, "Nobody holds a lock")
}

func role(db *pgtest.DB) string { return "r" + regexp.MustCompile(`\W`).ReplaceAllString(db.Name, "") }

// stream follows the page, and sends what comes.
func stream(t *testing.T, server *httptest.Server, path string) <-chan string {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	got, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { got.Body.Close() })
	if kind := got.Header.Get("Content-Type"); kind != "text/event-stream" {
		t.Fatalf("%d, %s", got.StatusCode, kind)
	}
	events := make(chan string)
	go func() {
		defer close(events)
		lines := bufio.NewReader(got.Body)
		var event strings.Builder
		for {
			line, err := lines.ReadString('\n')
			if err != nil {
				return
			}
			if line != "\n" {
				event.WriteString(line)
				continue
			}
			select {
			case events <- event.String():
			case <-t.Context().Done():
				return
			}
			event.Reset()
		}
	}()
	return events
}

func TestEventsDeliverAChange(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	server := served(t, db.Pool, nil)
	all, some := stream(t, server, "/events"), stream(t, server, "/events?q=order:1")
	first := <-all
	if first != "retry: 2000\n" {
		t.Fatalf("%q", first)
	}
	for first = <-all; strings.Contains(first, context.DeadlineExceeded.Error()); first = <-all { // after 5 s, which a busy machine may need
	}
	if !strings.Contains(first, "Nobody holds a lock") {
		t.Fatal(first)
	}
	db.Exec(t, `select acquire_lock('order:1', 'pod-1', 300), acquire_lock('order:2', 'pod-2', 300)`)
	for event := range all {
		if strings.Contains(event, "order:2") {
			break
		}
	}
	for event := range some {
		if strings.Contains(event, "order:1<") {
			if strings.Contains(event, "order:2") {
				t.Error("a viewer who searches receives everything")
			}
			break
		}
	}
}

func TestSnapshotServesAllViewersAndIsNotTakenWithoutThem(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	pool := db.NewPool(t)
	server := served(t, pool, nil)
	began := time.Now()
	if n := pool.Stat().AcquireCount(); n != 0 {
		t.Errorf("%d connections were used before anybody looked", n)
	}
	for range 100 { // by anybody: it needs no token
		(&browser{t: t, server: server}).get("/readyz").want(t, http.StatusOK)
	}
	if n, most := pool.Stat().AcquireCount(), int64(time.Since(began)/time.Second)+1; n > most {
		t.Errorf("%d pings in %s", n, time.Since(began))
	}
	const viewers = 40
	pings := pool.Stat().AcquireCount()
	began = time.Now()
	var all sync.WaitGroup
	for range viewers {
		all.Go(func() {
			b := &browser{t: t, server: server}
			for range 5 {
				b.get("/")
			}
		})
	}
	all.Wait()
	if n, most := pool.Stat().AcquireCount()-pings, int64(time.Since(began)/time.Second)+1; n > most {
		t.Errorf("%d snapshots for %d viewers in %s", n, viewers, time.Since(began))
	}

	// A stream that ends takes the reading with it: of two snapshots that are seen, one each second, none follows.
	ctx, cancel := context.WithCancel(t.Context())
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, server.URL+"/events", nil)
	if err != nil {
		t.Fatal(err)
	}
	got, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	before := pool.Stat().AcquireCount()
	for pool.Stat().AcquireCount() < before+2 {
		time.Sleep(10 * time.Millisecond)
	}
	cancel()
	got.Body.Close()
	ended := before
	for quiet := time.Now(); time.Since(quiet) < 2500*time.Millisecond; time.Sleep(50 * time.Millisecond) {
		if n := pool.Stat().AcquireCount(); n != before {
			before, quiet = n, time.Now()
		}
		if before > ended+30 { // a busy server hears late that nobody looks
			t.Fatal("it goes on reading while nobody looks")
		}
	}
}

func TestAnswersForbidWhatIsNotOurs(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	b := &browser{t: t, server: served(t, db.Pool, nil)}
	for _, path := range []string{"/", "/style.css", "/page.js", "/icon.svg", "/livez", "/login", "/nowhere", "/api/snapshot"} {
		r := b.get(path)
		policy := r.header.Get("Content-Security-Policy")
		for _, want := range []string{"default-src 'none'", "script-src 'self'", "style-src 'self'", "frame-ancestors 'none'", "base-uri 'none'", "form-action 'self'"} {
			if !strings.Contains(policy, want) {
				t.Errorf("%s: no %s in %q", path, want, policy)
			}
		}
		if strings.Contains(policy, "unsafe") || r.header.Get("X-Content-Type-Options") != "nosniff" || r.header.Get("Cache-Control") != "no-store" || r.header.Get("Referrer-Policy") != "no-referrer" {
			t.Errorf("%s: %v", path, r.header)
		}
	}
	if r := b.get("/"); regexp.MustCompile(`\sstyle=|\son\w+=|<style|<script>`).MatchString(r.body) {
		t.Errorf("the page has what its policy forbids:\n%s", r.body)
	}
}

// A page elsewhere can make its name lead here.
func TestOnlyKnownHostNamesAreAnswered(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	asked := func(server *httptest.Server, host string) int {
		b := &browser{t: t, server: server}
		r := b.request(http.MethodGet, "/livez", nil)
		r.Host = host
		return b.do(r).code
	}
	local := served(t, db.Pool, func(cfg *serve.Config) { cfg.Hosts = []string{"locks.example"} })
	remote := served(t, db.Pool, func(cfg *serve.Config) { cfg.Remote, cfg.Token = true, token })
	for host, want := range map[string][2]bool{
		"localhost": {true, true}, "LOCALHOST:8473": {true, true}, "127.0.0.1:1": {true, true}, "127.9.9.9": {true, true}, "[::1]:8473": {true, true},
		"locks.example": {true, false}, "Locks.Example:80": {true, false}, "locks.example.": {true, false}, "evil.example": {false, false},
		"127.0.0.1.evil.example": {false, false}, "localhost.evil.example": {false, false}, "10.0.0.1": {false, true}, "x.locks.example": {false, false},
	} {
		for i, server := range []*httptest.Server{local, remote} {
			code := http.StatusMisdirectedRequest
			if want[i] {
				code = http.StatusOK
			}
			if got := asked(server, host); got != code {
				t.Errorf("server %d, %s: %d, want %d", i, host, got, code)
			}
		}
	}
}

func TestTokenIsDemanded(t *testing.T) {
	t.Parallel()
	for _, cfg := range []serve.Config{{Remote: true}, {AllowEvict: true}} {
		if _, err := serve.New(cfg); err == nil {
			t.Errorf("%+v needs none", cfg)
		}
	}
	db := migrated(t)
	db.Exec(t, `select acquire_lock('order:1', 'pod-1', 300)`)
	b := &browser{t: t, server: served(t, db.Pool, func(cfg *serve.Config) {
		cfg.Token = token
		cfg.Metrics = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "pgxlock_up 1") })
	})}
	if r := b.get("/"); r.code != http.StatusSeeOther || r.header.Get("Location") != "/login" {
		t.Errorf("%+v", r)
	}
	for _, path := range []string{"/events", "/api/snapshot", "/metrics", "/evict"} {
		b.get(path).want(t, http.StatusUnauthorized, "the token is missing or wrong")
	}
	b.get("/livez").want(t, http.StatusOK)
	b.get("/readyz").want(t, http.StatusOK)
	b.get("/login").want(t, http.StatusOK, `type="password"`)
	b.post("/login", url.Values{"token": {token + "x"}}).want(t, http.StatusUnauthorized, "That is not the token")
	b.post("/login", url.Values{}).want(t, http.StatusUnauthorized, "That is not the token")

	bearer := func(path, token string) reply {
		r := b.request(http.MethodGet, path, nil)
		r.Header.Set("Authorization", "Bearer "+token)
		return b.do(r)
	}
	bearer("/api/snapshot", "wrong").want(t, http.StatusUnauthorized)
	bearer("/api/snapshot", token).want(t, http.StatusOK, "order:1")
	bearer("/metrics", token).want(t, http.StatusOK, "pgxlock_up 1")

	b.logIn()
	if c := b.cookie; !c.HttpOnly || c.SameSite != http.SameSiteStrictMode || c.Path != "/" || c.Domain != "" || c.MaxAge <= 0 || strings.Contains(c.Value, token) {
		t.Errorf("%+v", c)
	}
	b.get("/").want(t, http.StatusOK, "order:1", "Log out")
	b.get("/evict").want(t, http.StatusNotFound) // it was not allowed
	b.post("/evict", nil).want(t, http.StatusNotFound)

	good := b.cookie.Value
	for _, forged := range []string{"", "x", good[:len(good)-1], "9" + good, strings.Replace(good, ".", "9.", 1)} {
		b.cookie = &http.Cookie{Name: b.cookie.Name, Value: forged}
		if r := b.get("/"); r.code != http.StatusSeeOther {
			t.Errorf("%q: %d", forged, r.code)
		}
	}
	other := &browser{t: t, server: served(t, db.Pool, func(cfg *serve.Config) { cfg.Token = token })}
	other.logIn()
	if other.cookie.Name == b.cookie.Name {
		t.Errorf("a browser that logs in to a server on another port of the host loses the session of this one: %s", other.cookie.Name)
	}
	other.cookie.Value = good
	if r := other.get("/"); r.code != http.StatusSeeOther {
		t.Errorf("a cookie is good for another server: %d", r.code)
	}
	behind := other.request(http.MethodPost, "/login", url.Values{"token": {token}}) // a proxy with TLS
	behind.Header.Set("X-Forwarded-Proto", "https")
	other.cookie = nil
	if c := other.do(behind).header.Get("Set-Cookie"); !strings.HasPrefix(c, "__Host-pgxlock_serve_") || !strings.Contains(c, "; Path=/;") || !strings.HasSuffix(c, "; HttpOnly; Secure; SameSite=Strict") {
		t.Errorf("behind TLS: %s", c)
	}
	b.cookie.Value = good
	if r := b.post("/logout", nil); r.code != http.StatusSeeOther || !strings.Contains(r.header.Get("Set-Cookie"), "Max-Age=0") {
		t.Errorf("%+v", r)
	}
	if r := b.get("/"); r.code != http.StatusSeeOther {
		t.Errorf("a session that was ended is still good: %d", r.code)
	}
}

func TestEvictNeedsAFormOfTheSession(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	db.Exec(t, `select acquire_lock(E'order:1\r\n"', 'pod-1', 300)`)
	b := &browser{t: t, server: served(t, db.Pool, func(cfg *serve.Config) { cfg.Token, cfg.AllowEvict = token, true })}
	held := func() (n int) {
		t.Helper()
		if err := db.Pool.QueryRow(t.Context(), "select count(*) from distributed_locks where holder_id = 'pod-1'").Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	b.logIn()
	link := b.get("/").after(t, `href="/evict?hold=`)
	r := b.get("/evict?hold=" + link)
	r.want(t, http.StatusOK, "Take the lock away?", "pod-1", `order:1\r\n`)
	form := url.Values{"hold": {r.after(t, `name="hold" value="`)}, "csrf": {r.after(t, `name="csrf" value="`)}, "reason": {"it hangs"}}

	with := func(name, value string) url.Values {
		other := url.Values{}
		for k, v := range form {
			other[k] = v
		}
		other.Set(name, value)
		return other
	}
	b.post("/evict", with("csrf", "")).want(t, http.StatusForbidden, "not of your session")
	first := "x"
	if strings.HasPrefix(form.Get("csrf"), first) {
		first = "y"
	}
	b.post("/evict", with("csrf", first+form.Get("csrf")[1:])).want(t, http.StatusForbidden, "not of your session")
	other := &browser{t: t, server: b.server}
	other.post("/evict", form).want(t, http.StatusUnauthorized)
	other.logIn()
	other.post("/evict", form).want(t, http.StatusForbidden, "not of your session")
	foreign := b.request(http.MethodPost, "/evict", form)
	foreign.Header.Set("Origin", "https://evil.example")
	b.do(foreign).want(t, http.StatusForbidden)
	program := (&browser{t: t, server: b.server}).request(http.MethodPost, "/evict", form)
	program.Header.Set("Authorization", "Bearer "+token)
	(&browser{t: t, server: b.server}).do(program).want(t, http.StatusForbidden, "needs a session")
	b.post("/evict", with("reason", " ")).want(t, http.StatusUnprocessableEntity, "A reason is needed")
	b.post("/evict", with("reason", strings.Repeat("é", 307))).want(t, http.StatusUnprocessableEntity, "A reason is needed")
	b.post("/evict", with("hold", "nonsense")).want(t, http.StatusBadRequest, "does not name a holder")
	if held() != 1 {
		t.Fatal("a request that was refused evicted")
	}

	// The record says who, though one token is all viewers', and though they ask for as much as there is room for.
	longest := strings.Repeat("é", 306)
	evict := b.request(http.MethodPost, "/evict", with("reason", longest))
	evict.Header.Set("X-Forwarded-For", "6.6.6.6, 10.0.0.7")
	evict.Header.Set("X-Forwarded-User", "alice\t\u202e"+strings.Repeat("\u202e", 300))
	b.do(evict).want(t, http.StatusOK, "Evicted.")
	if held() != 0 {
		t.Error("pod-1 still holds it")
	}
	b.post("/evict", form).want(t, http.StatusConflict, "no longer holds the lock")
	var reason string
	if err := db.Pool.QueryRow(t.Context(), "select reason from pgxlock_evictions").Scan(&reason); err != nil {
		t.Fatal(err)
	}
	want := longest + ` (from 127.0.0.1, X-Forwarded-For "10.0.0.7", X-Forwarded-User "alice\t\u202e`
	if !strings.HasPrefix(reason, want) || !strings.HasSuffix(reason, "...)") {
		t.Errorf("%q, want %q", reason, want)
	}
}

func TestSessionThatDoesNotListenIsNotEvicted(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := migrated(t)
	conn := db.Connect(t)
	if _, err := conn.Exec(t.Context(), "select pg_advisory_lock(42)"); err != nil {
		t.Fatal(err)
	}
	b := &browser{t: t, server: served(t, db.Pool, func(cfg *serve.Config) { cfg.Token, cfg.AllowEvict = token, true })}
	b.logIn()
	r := b.get("/evict?hold=" + b.get("/").after(t, `href="/evict?hold=`))
	r.want(t, http.StatusOK, "#42", "The session is asked")
	b.post("/evict", url.Values{"hold": {r.after(t, `name="hold" value="`)}, "csrf": {r.after(t, `name="csrf" value="`)}, "reason": {"why"}}).
		want(t, http.StatusConflict, "still holds it", "--terminate")
}
