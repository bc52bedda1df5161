package browsertest

import (
	"context"
	"fmt"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgserver"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

const token = "a token of 32 characters that nobody guesses"

// migrated returns a private server's database with pgxlock in it: pictures show what is on the server.
func migrated(t *testing.T) (*pgserver.Server, *pgtest.DB) {
	t.Helper()
	server := pgtest.Private(t, pgserver.Config{Settings: map[string]string{"max_connections": "200", "fsync": "on"}})
	db := &pgtest.DB{URL: server.URL("postgres"), Name: "postgres"}
	db.Pool = pgtest.Pool(t, db.URL)
	if err := migrations.Up(t.Context(), db.Pool, nil); err != nil {
		t.Fatal(err)
	}
	return server, db
}

func dark(b *tab) {
	b.t.Helper()
	b.do(emulation.SetEmulatedMedia().WithFeatures([]*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: "dark"}}))
}

func light(b *tab) {
	b.t.Helper()
	b.do(emulation.SetEmulatedMedia().WithFeatures([]*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: "light"}}))
}

func TestEmptyDatabase(t *testing.T) {
	chromium(t)
	_, db := migrated(t)
	address := serve(t, db.URL, nil)
	b := open(t)
	b.do(chromedp.Navigate(address))
	b.follows()
	b.shows("Nobody holds a lock, and nobody waits.")
	b.picture("empty")
}

// background runs what waits until the test is over.
type background struct {
	t   *testing.T
	ctx context.Context
	all sync.WaitGroup
}

func inBackground(t *testing.T) *background {
	ctx, cancel := context.WithCancel(context.Background())
	b := &background{t: t, ctx: ctx}
	t.Cleanup(func() {
		cancel()
		b.all.Wait()
	})
	return b
}

// locker returns a Locker of a worker that does not exist.
func (b *background) locker(pool *pgxpool.Pool, owner string) *pgxlock.Locker {
	b.t.Helper()
	locker, err := pgxlock.NewLeaseLocker(pool, &pgxlock.LeaseConfig{Owner: owner, TTL: time.Minute})
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() {
		if err := locker.Close(context.Background()); err != nil {
			b.t.Error(err)
		}
	})
	return locker
}

// acquire waits in the background for a lock.
func (b *background) acquire(ctx context.Context, locker *pgxlock.Locker, key string, opts ...pgxlock.AcquireOption) {
	b.all.Go(func() { _, _ = locker.Acquire(ctx, key, opts...) }) // it waits until the test is over
}

// session returns a session that has an advisory lock until the test is over, and how it waits
// for another one.
func (b *background) session(db *pgtest.DB, name string, has int) (wait func(wants int)) {
	b.t.Helper()
	conn, err := pgx.Connect(b.ctx, db.URL)
	if err != nil {
		b.t.Fatal(err)
	}
	if _, err := conn.Exec(b.ctx, fmt.Sprintf("set deadlock_timeout = '1h'; set application_name = '%s'; select pg_advisory_lock(%d)", name, has)); err != nil {
		b.t.Fatal(err)
	}
	wants := make(chan int, 1)
	b.all.Go(func() {
		select {
		case key := <-wants:
			_, _ = conn.Exec(b.ctx, fmt.Sprintf("select pg_advisory_lock(%d)", key)) // it waits until the test is over
		case <-b.ctx.Done():
		}
		_ = conn.Close(context.Background())
	})
	return func(key int) { wants <- key }
}

func TestBusyDatabase(t *testing.T) {
	chromium(t)
	_, db := migrated(t)
	b := inBackground(t)
	must := func(lock *pgxlock.Lock, err error) *pgxlock.Lock {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return lock
	}
	const contended = 20
	var workers []*pgxlock.Locker
	for i := range 11 {
		workers = append(workers, b.locker(db.Pool, fmt.Sprintf("billing-%d", i)))
	}
	key := func(i int) string { return fmt.Sprintf("invoice:%d", 4200+i) }
	holder := workers[0]
	for i := range contended {
		must(holder.TryAcquire(t.Context(), key(i), pgxlock.Metadata("month-end run")))
	}
	for i := range 28 {
		must(workers[i%len(workers)].TryAcquire(t.Context(), fmt.Sprintf("order:%04d", 17*i), pgxlock.TTL(time.Duration(10+20*(i%5))*time.Second)))
	}
	// Workers that hold what others wait for wait themselves.
	for i := 1; i <= 2; i++ {
		has := must(workers[i].TryAcquire(t.Context(), fmt.Sprintf("customer:%d", i), pgxlock.Metadata("statement")))
		ctx, cancel := has.Context(b.ctx)
		t.Cleanup(cancel)
		b.acquire(ctx, workers[i], key(i))
		for j := 3; j < 6; j++ {
			b.acquire(b.ctx, workers[j], fmt.Sprintf("customer:%d", i))
		}
	}
	for _, worker := range workers[1:] {
		for i := range contended {
			if i > 2 || worker != workers[1] && worker != workers[2] {
				b.acquire(b.ctx, worker, key(i))
			}
		}
	}
	ledger, archive, reports, nightly := b.session(db, "ledger", 71), b.session(db, "archive", 72), b.session(db, "reports", 73), b.session(db, "nightly", 74)
	ledger(72)
	archive(73)
	reports(71)
	nightly(71)
	db.Exec(t, `select acquire_lock('import:eu', 'etl-3', 300, '"batch 88"'), acquire_lock('import:us', 'etl-7', 300);
		update distributed_locks set expires_at = now() - interval '4 minutes', acquired_at = now() - interval '9 minutes' where lock_name = 'import:eu';
		update distributed_locks set expires_at = now() - interval '2 days', acquired_at = now() - interval '3 days' where lock_name = 'import:us'`)
	db.Exec(t, `select acquire_lock('export:eu', 'etl-4', 300)`)
	db.Exec(t, `select evict_lock('export:eu', 'etl-4', (select fencing_token from distributed_locks where lock_name = 'export:eu'), 'hangs since the deploy, INC-4711')`)
	db.Exec(t, `select start_run('ledger:nightly', interval '1 day'), start_run('report:weekly', interval '7 days');
		update pgxlock_runs set state = 'failed', error = 'exit status 3: the disk of the archive is full', finished_at = now() where run_key = 'ledger:nightly';
		update pgxlock_runs set slot = slot - interval '7 days', started_at = started_at - interval '7 days' where run_key = 'report:weekly'`)
	db.Exec(t, `alter table pgxlock_since_crash set logged`)
	for n := 0; n < 200; {
		if err := db.Pool.QueryRow(t.Context(), "select count(*) from pgxlock_waiters").Scan(&n); err != nil {
			t.Fatal(err)
		}
	}

	address := serve(t, db.URL, []string{"PGXLOCK_SERVE_TOKEN=" + token}, "--allow-evict")
	p := open(t)
	p.do(chromedp.Navigate(address), chromedp.SendKeys("#token", token+kb.Enter), chromedp.WaitVisible("#page"))
	p.follows()
	p.shows("deadlock:")
	p.shows("archive:")
	p.shows("doctor: schema")
	p.shows("abandoned leases: 1")
	p.shows("stopped runs: 2")
	p.picture("busy")
	p.legible()
	if n := value[int](p, `document.querySelectorAll("#canvas rect").length`); n < 50 {
		t.Errorf("the graph has %d boxes", n)
	}
	if !value[bool](p, `document.documentElement.scrollWidth <= window.innerWidth`) {
		t.Error("the page is wider than the window")
	}
	p.do(chromedp.Evaluate(`document.getElementById("holders").scrollIntoView()`, nil))
	p.picture("busy-held")
	p.do(chromedp.Evaluate(`scrollTo(0, 0)`, nil))
	dark(p)
	p.picture("busy-dark")
	p.legible()

	for _, width := range []int64{400, 800, 1600} {
		p.do(emulation.SetDeviceMetricsOverride(width, 900, 1, false))
		p.until(fmt.Sprintf(`window.innerWidth === %[1]d && document.documentElement.scrollWidth <= %[1]d`, width))
		p.picture(fmt.Sprintf("%d-dark", width))
		light(p)
		p.do(chromedp.Click(`a[href="#runs"]`))
		p.until(`document.querySelector("#runs h2").getBoundingClientRect().top >= document.querySelector("header").getBoundingClientRect().bottom`)
		p.picture(fmt.Sprintf("%d-runs", width))
		if high := value[float64](p, `Math.max(...[...document.querySelectorAll("tbody tr")].map(row => row.getBoundingClientRect().height))`); high > 60 {
			t.Errorf("at %d pixels a row is %v high", width, high)
		}
		p.do(chromedp.Evaluate(`scrollTo(0, 0)`, nil))
		dark(p)
	}

	// In a small window a table scrolls by itself, and stays where it was scrolled to.
	p.do(emulation.SetDeviceMetricsOverride(380, 700, 1, false))
	p.until(`window.innerWidth === 380 && document.documentElement.scrollWidth <= 380`)
	p.do(chromedp.Evaluate(`document.getElementById("holders-rows").scrollLeft = 150`, nil))
	p.picture("small")
	p.changes()
	if at := value[int](p, `document.getElementById("holders-rows").scrollLeft`); at != 150 {
		t.Errorf("the table was scrolled to 150, and is at %d", at)
	}
	p.do(emulation.ClearDeviceMetricsOverride())

	// The next rows, without the mouse: the link has the focus whatever changes around it.
	p.do(chromedp.Evaluate(`document.getElementById("waiters-next").focus()`, nil))
	p.changes()
	p.do(chromedp.KeyEvent(kb.Enter), chromedp.WaitVisible("#waiters-previous"))
	p.shows("101 to 200 shown")
	p.do(chromedp.Navigate(address))
	p.follows()

	// A search, without the mouse.
	p.do(chromedp.KeyEvent("/"), chromedp.KeyEvent("invoice:4207"))
	p.lacks("order:0017")
	p.until(`location.search === "?q=invoice%3A4207" && document.querySelectorAll("#holders tbody tr").length === 1`)
	p.picture("search")
}

func TestHostileNames(t *testing.T) {
	chromium(t)
	_, db := migrated(t)
	for i, name := range []string{
		`<script>alert(1)</script>`, `<img src=x onerror=alert(1)>`, `"'><svg onload=alert(1)>`, "\u202emoc.elpmaxe\u202c", "שלום עולם", "مرحبا بالعالم",
		strings.Repeat("long ", 50), strings.Repeat("x", 255), "line\nbreak\tand tab", "🔒 zero\u200bwidth", "{{.Cannot}} ${alert(1)} `", "javascript:alert(1)",
	} {
		if _, err := db.Pool.Exec(t.Context(), "select acquire_lock($1, $2, 300, to_jsonb($3::text))", name, fmt.Sprintf("%s %d", name[:min(len(name), 200)], i), strings.Repeat(name, 5)); err != nil {
			t.Logf("%q is refused: %v", name, err)
		}
	}
	b := inBackground(t)
	worker := b.locker(db.Pool, "<b>worker</b>")
	b.acquire(b.ctx, worker, `<script>alert(1)</script>`)
	address := serve(t, db.URL, nil)
	p := open(t)
	p.do(chromedp.Navigate(address))
	p.follows()
	p.shows("<b>worker</b>")
	p.shows(`<script>alert(1)</script>`)
	if n := value[int](p, `document.querySelectorAll("main script, main img, main b, main [onload], main [onerror]").length`); n != 0 {
		t.Errorf("%d elements come from names", n)
	}
	if !value[bool](p, `document.documentElement.scrollWidth <= window.innerWidth`) {
		t.Error("the page is wider than the window")
	}
	p.picture("hostile")
	p.do(chromedp.Navigate(address + "?q=" + url.QueryEscape(`"><script>alert(1)</script>`)))
	p.follows()
	p.shows("Nothing matches.")
}

func TestPageWithoutAServer(t *testing.T) {
	chromium(t)
	address := serve(t, "postgres://alice@127.0.0.1:1/shop", nil)
	p := open(t)
	p.do(chromedp.Navigate(address))
	p.shows("cannot see: cannot connect as user \"alice\" to database \"shop\"")
	p.shows("cannot see the server") // where it said live
	p.picture("no-server")
}

func TestRoleWithoutRights(t *testing.T) {
	chromium(t)
	server, db := migrated(t)
	db.Exec(t, `select harden_locks()`)
	db.Exec(t, `create role guest login`)
	db.Exec(t, `select acquire_lock('order:1', 'pod-1', 300)`)
	b := inBackground(t)
	b.session(db, "reports", 71)
	address := serve(t, strings.Replace(server.URL("postgres"), "postgres@", "guest@", 1), nil)
	p := open(t)
	p.do(chromedp.Navigate(address))
	p.follows()
	p.shows("cannot see: ")
	p.shows("#71")
	p.shows("doctor: rights")
	p.picture("no-rights")
	if value[bool](p, `document.body.innerText.includes("order:1")`) {
		t.Error("a guest sees a lease")
	}
}

func TestPageFollowsAServerThatDiesAndComesBack(t *testing.T) {
	chromium(t)
	server, db := migrated(t)
	db.Exec(t, `select acquire_lock('order:1', 'pod-1', 3600), acquire_lock('order:2', 'pod-2', 3600)`)
	address := serve(t, db.URL, []string{"PGXLOCK_SERVE_TOKEN=" + token}, "--allow-evict")
	p := open(t)
	p.do(chromedp.Navigate(address), chromedp.SendKeys("#token", token+kb.Enter), chromedp.WaitVisible("#page"))
	p.follows()
	p.shows("order:1")
	p.do(chromedp.Evaluate(`window.loadedOnce = true`, nil))

	if err := server.Crash(); err != nil {
		t.Fatal(err)
	}
	p.shows("cannot see:")
	p.shows("What is below was read")
	p.legible()
	if err := server.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	p.lacks("cannot see:")
	p.follows()
	p.shows("order:1")

	// Evict with the keyboard alone: focus on the link of the row stays while the page changes.
	p.do(chromedp.Evaluate(`[...document.querySelectorAll("#holders tbody tr")].find(r => r.innerText.includes("order:1")).querySelector("a.evict").focus()`, nil))
	p.changes()
	p.until(`document.activeElement.className === "evict"`)
	p.do(chromedp.KeyEvent(kb.Enter), chromedp.WaitVisible("#dialog form"))
	p.until(`document.activeElement.id === "reason"`)
	p.do(chromedp.KeyEvent(kb.Enter)) // a reason is required
	p.do(chromedp.KeyEvent("the node is drained"))
	p.picture("evict")
	p.legible()
	p.do(chromedp.KeyEvent(kb.Enter))
	p.shows("Evicted.")
	p.until(`[...document.querySelectorAll("#holders tbody tr")].every(r => !r.innerText.includes("order:1")) && document.querySelector("#holders").innerText.includes("order:2")`)
	p.do(chromedp.KeyEvent(kb.Escape))
	p.until(`!document.getElementById("dialog").open`)
	p.shows("the node is drained") // it is in the record
	if !value[bool](p, `window.loadedOnce === true`) {
		t.Error("the page was loaded again")
	}
}

func TestPageWorksWithoutJavaScript(t *testing.T) {
	chromium(t)
	_, db := migrated(t)
	db.Exec(t, `select acquire_lock('order:1', 'pod-1', 3600), acquire_lock('order:2', 'pod-2', 3600)`)
	address := serve(t, db.URL, []string{"PGXLOCK_SERVE_TOKEN=" + token}, "--allow-evict")
	p := open(t)
	text := func(want string) {
		t.Helper()
		var got string
		p.do(chromedp.Text("body", &got, chromedp.ByQuery))
		if !strings.Contains(got, want) {
			t.Errorf("no %q in:\n%s", want, got)
		}
	}
	p.do(emulation.SetScriptExecutionDisabled(true))
	p.do(chromedp.Navigate(address))
	p.arrives("#token")
	p.do(chromedp.SendKeys("#token", token), chromedp.Click("button"))
	p.arrives("#holders")
	text("order:2")
	p.do(chromedp.SendKeys("#q", "order:1"), chromedp.Click("#search button"))
	p.arrives(`#q[value="order:1"]`)
	p.do(chromedp.WaitNotPresent("tbody tr:nth-child(2)"))
	text("order:1")
	p.do(chromedp.Click("a.evict"))
	p.arrives("#reason")
	p.do(chromedp.SendKeys("#reason", "why not"), chromedp.Click("button.danger"))
	p.arrives(".done")
	text("Evicted.")
	p.do(chromedp.Click("a.button"))
	p.arrives("#evictions")
	text("why not")
}

func TestPageWhoseSessionHasEndedAsksForTheToken(t *testing.T) {
	chromium(t)
	_, db := migrated(t)
	address := serve(t, db.URL, []string{"PGXLOCK_SERVE_TOKEN=" + token})
	p := open(t)
	p.expected = "/events"
	p.do(chromedp.Navigate(address), chromedp.SendKeys("#token", token+kb.Enter), chromedp.WaitVisible("#page"))
	p.follows()
	p.do(chromedp.Evaluate(`fetch("/logout", { method: "POST" })`, nil)) // as another tab does
	p.do(chromedp.WaitVisible("#token"))
	p.legible()
}

func TestHiddenPageDoesNotFollow(t *testing.T) {
	chromium(t)
	_, db := migrated(t)
	address := serve(t, db.URL, nil)
	p := open(t)
	p.do(chromedp.Navigate(address))
	p.follows()
	hide := func(hidden bool) {
		t.Helper()
		p.do(chromedp.Evaluate(fmt.Sprintf(`Object.defineProperty(document, "hidden", { value: %t, configurable: true }); document.dispatchEvent(new Event("visibilitychange"))`, hidden), nil))
	}
	hide(true)
	db.Exec(t, `select acquire_lock('order:1', 'pod-1', 3600)`)
	p.until(`document.getElementById("live").innerText === "paused"`)
	if value[bool](p, `document.body.innerText.includes("order:1")`) {
		t.Error("a hidden page follows")
	}
	hide(false)
	p.shows("order:1")
	p.follows()
}
