package lease

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock/internal/batcher"
	"github.com/pgxlock/pgxlock/internal/clock"
	"github.com/pgxlock/pgxlock/internal/dbconn"
	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/lockkey"
	"github.com/pgxlock/pgxlock/internal/pgtest"
)

// askers makes a Table call f with the stack of the goroutine that is about to send requests.
func askers(table *Table, f func(stack string)) {
	table.host.Clock = func() time.Duration {
		buf := make([]byte, 64<<10)
		if stack := string(buf[:runtime.Stack(buf, false)]); strings.Contains(stack, "(*Table).ask") && !strings.Contains(stack, "(*Table).settle") {
			f(stack)
		}
		return clock.System()
	}
}

func tryWith(ctx context.Context, table *Table, key string) (*hold.Hold, error) {
	attempts := []hold.Attempt{{Hold: newHold(table, key)}}
	table.Try(ctx, hold.Request{TTL: table.cfg.TTL}, attempts)
	return attempts[0].Hold, attempts[0].Err
}

func TestLoneCallerOfALeaseSendsItselfUnlessItsWaitMayEnd(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for name, c := range map[string]struct {
		ctx    func(*testing.T) context.Context
		itself bool
	}{
		"nothing ends the wait": {func(*testing.T) context.Context { return context.Background() }, true},
		"a context may end it":  {func(t *testing.T) context.Context { t.Helper(); return t.Context() }, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newBatchDB(t)
			table := db.table(t, db.Pool)
			if _, err := tryWith(t.Context(), table, "first"); err != nil { // a caller that leads does not wait for a connection
				t.Fatal(err)
			}
			table.flow.wait() // nobody leads any more
			var itself atomic.Bool
			askers(table, func(stack string) { itself.Store(strings.Contains(stack, "lease.tryWith")) })
			if _, err := tryWith(c.ctx(t), table, "k"); err != nil {
				t.Fatal(err)
			}
			if itself.Load() != c.itself {
				t.Errorf("the caller sends itself: %t, want %t", itself.Load(), c.itself)
			}
		})
	}
}

// The first caller leads, and has to wait for the connection. The second one waits for the first.
func TestCloseEndsTheWaitBehindACallerThatSendsItself(t *testing.T) {
	t.Parallel()
	db := newBatchDB(t)
	table := db.table(t, db.Pool)
	closing, end := context.WithCancel(context.Background())
	table.host.Closing = closing
	resume := pgtest.Occupy(t, table.requests)
	led := make(chan error, 1)
	go func() {
		_, err := tryWith(context.Background(), table, "first")
		led <- err
	}()
	for leads := false; !leads; runtime.Gosched() {
		table.flow.mu.Lock()
		leads = table.flow.led && len(table.flow.requests) == 0
		table.flow.mu.Unlock()
	}
	behind := make(chan error, 1)
	go func() {
		_, err := tryWith(context.Background(), table, "second")
		behind <- err
	}()
	for table.flow.queued() == 0 {
		runtime.Gosched()
	}
	end()
	if err := <-behind; !errors.Is(err, lockerr.ErrClosed) {
		t.Errorf("%v, want ErrClosed", err)
	}
	resume()
	if err := <-led; err != nil {
		t.Error(err)
	}
	table.flow.wait()
	table.cleaning.Wait()
	if held := db.held(t); len(held) != 1 || held["first"] == "" {
		t.Errorf("held are %v, want the first", held)
	}
}

// A wakingQueue says that somebody waits for each lease, and wakes once it may.
type wakingQueue struct {
	noQueue
	may   chan struct{}
	woken chan []lockkey.Name
}

func (q wakingQueue) WakeOn(run func(dbconn.Exchange) error, names []lockkey.Name) {
	<-q.may
	if err := run(func(context.Context, dbconn.Querier, bool) error { return nil }); err == nil {
		q.woken <- names
	}
}

func TestReleaseDoesNotWaitUntilTheNextHolderIsWoken(t *testing.T) {
	t.Parallel()
	db := newBatchDB(t)
	table := db.table(t, db.Pool)
	q := wakingQueue{may: make(chan struct{}), woken: make(chan []lockkey.Name, 1)}
	table.host.Queue = q
	lock, err := tryWith(context.Background(), table, "k")
	if err != nil {
		t.Fatal(err)
	}
	lock.Queue, lock.Waited = lockkey.Name{Key: "k#"}, true // as a permit of which others are known to wait
	released := make(chan error, 1)
	go func() { released <- table.Release(lock) }()
	if err := pgtest.Receive(t, "the release ends before the wake-up", released); err != nil {
		t.Error(err)
	}
	close(q.may)
	if names := <-q.woken; len(names) != 1 || names[0] != lock.Queue {
		t.Errorf("woken are the waiters for %v", names)
	}
}

// A wait that brings nobody leaves its trace in what leaders know. On one processor the second
// caller asks only while the leader waits.
func TestLeaderOfAFlowWaitsForCallersThatAreAboutToAsk(t *testing.T) {
	pgtest.Long(t)
	db := newBatchDB(t)
	table := db.table(t, db.Pool)
	release := func(locks ...*hold.Hold) {
		t.Helper()
		for _, lock := range locks {
			if err := table.Release(lock); err != nil {
				t.Error(err)
			}
		}
	}
	release(take(t, table, "warm")...)
	table.flow.wait()
	table.flow.gathering = batcher.Gathering{}
	table.flow.gathering.Answered(2, 0, time.Millisecond)
	alone, err := tryWith(context.Background(), table, "k")
	if err != nil {
		t.Fatal(err)
	}
	table.flow.wait()
	knows := table.flow.gathering
	release(alone)
	if knows.Took <= 0 {
		t.Errorf("the message took %s", knows.Took)
	}
	if knows.Active, knows.Took = 0, 0; knows == (batcher.Gathering{}) {
		t.Fatal("the leader did not wait")
	}

	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	pgtest.Until(t, "both requests are in one batch", func() bool { // the scheduler may come back early
		table.flow.wait()
		table.flow.gathering = batcher.Gathering{}
		table.flow.gathering.Answered(2, 0, time.Millisecond)
		var batches atomic.Int64
		askers(table, func(string) { batches.Add(1) })
		other := make(chan *hold.Hold, 1)
		go func() {
			lock, err := tryWith(context.Background(), table, "other")
			if err != nil {
				t.Error(err)
			}
			other <- lock
		}()
		lock, err := tryWith(context.Background(), table, "k")
		if err != nil {
			t.Fatal(err)
		}
		locks := []*hold.Hold{lock, <-other}
		table.flow.wait()
		together := batches.Load() == 1
		release(locks...)
		return together
	})
}

func TestFlowPassesOverAKindOnceAtMost(t *testing.T) {
	t.Parallel()
	var f flow
	sent := func(requests, releases int) string {
		f.requests = append(f.requests, make([]*request, requests)...)
		f.releases = append(f.releases, make([]*release, releases)...)
		some, others := f.next()
		switch {
		case len(some) > 0 && len(others) == 0:
			return "requests"
		case len(others) > 0 && len(some) == 0:
			return "releases"
		}
		return "both or none"
	}
	for i, step := range []struct {
		requests, releases int // that are queued in addition
		want               string
	}{
		{8, 1, "requests"},
		{8, 0, "releases"}, // more callers have tried meanwhile
		{0, 0, "requests"},
		{1, 9, "releases"},
		{0, 9, "requests"},
		{0, 0, "releases"},
		{2, 0, "requests"},
		{2, 0, "requests"},
	} {
		if got := sent(step.requests, step.releases); got != step.want {
			t.Fatalf("step %d: %s were sent, want %s", i, got, step.want)
		}
	}
}

const tracerPanics = "the tracer panics"

type panickingTracer struct{}

func (panickingTracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if strings.Contains(data.SQL, "pgxlock_acquire_one") {
		panic(tracerPanics)
	}
	return ctx
}

func (panickingTracer) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// A caller that leads sends the requests of others, too. If it recovered from such a panic, they
// would wait for ever.
func TestPanicInTheTracerOfALeaderEndsTheProgram(t *testing.T) {
	t.Parallel()
	const child = "PGXLOCK_TEST_PANICKING_TRACER"
	if url := os.Getenv(child); url != "" { // it is that of the parent's database
		table := batchDB{}.table(t, pgtest.Pool(t, url, func(c *pgxpool.Config) { c.ConnConfig.Tracer = panickingTracer{} }))
		defer func() {
			_ = recover()
			os.Exit(0)
		}()
		_, err := tryWith(context.Background(), table, "k")
		t.Fatalf("the tracer saw no acquire: %v", err)
	}
	cmd := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$")
	cmd.Env = append(os.Environ(), child+"="+newBatchDB(t).URL)
	said, err := cmd.CombinedOutput()
	if exit, ok := errors.AsType[*exec.ExitError](err); !ok || exit.ExitCode() != 2 || !bytes.Contains(said, []byte("panic: "+tracerPanics)) {
		t.Errorf("%v, want a panic:\n%s", err, said)
	}
}

// A caller that leads sends its own kind first, whatever has joined it meanwhile: an exchange of others
// must not keep it.
func TestCallerThatLeadsSendsItsOwnKindFirst(t *testing.T) {
	t.Parallel()
	for _, releases := range []bool{false, true} {
		f := &flow{requests: []*request{{}}}
		if releases {
			f = &flow{releases: []*release{{}}}
		}
		f.mu.Lock()
		f.takeLeadLocked(true, releases)
		f.mu.Unlock()
		f.requests, f.releases = append(f.requests, make([]*request, 1)...), append(f.releases, make([]*release, 1)...)
		if releases {
			f.requests = append(f.requests, make([]*request, 9)...)
		} else {
			f.releases = append(f.releases, make([]*release, 9)...)
		}
		requests, sent := f.next()
		if (len(sent) > 0) != releases || (len(requests) > 0) == releases {
			t.Errorf("a caller with a release, %t, sends %d requests and %d releases", releases, len(requests), len(sent))
		}
	}
}
