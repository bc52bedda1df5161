package systemtest_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// The messages of an Advisory Locker are counted here: one caller alone sends each of its own,
// many callers send few together.

// quiet returns a Locker whose messages a tap sees, and which sends none by itself.
// It is connected.
func quiet(t *testing.T, db *pgtest.DB) (*tap, *pgxlock.Locker) {
	t.Helper()
	tap, pool := tappedPool(t, db)
	locks := testkit.Advisory(t, pool, &pgxlock.AdvisoryConfig{TTL: -1, MaxLocks: 3000})
	t.Cleanup(func() { locks.Close(context.Background()) })
	t.Cleanup(tap.letGo)
	if err := testkit.Acquire(t, locks, "warm").Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	return tap, locks
}

// A gathering is calls that stand in the queue while the answer to another one is
// held back.
type gathering struct {
	t       *testing.T
	tap     *tap
	calls   sync.WaitGroup
	sent    int // messages before
	waiting int
}

func gather(t *testing.T, tap *tap, locks *pgxlock.Locker) *gathering {
	t.Helper()
	g := &gathering{t: t, tap: tap, sent: tap.count()}
	tap.hold()
	g.calls.Go(func() { testkit.Acquire(t, locks, fmt.Sprint("ahead:", g.sent)) })
	pgtest.Until(t, "the message ahead is sent", func() bool { return tap.count() == g.sent+1 })
	return g
}

// join starts calls, and returns when they stand in the queue.
func (g *gathering) join(calls ...func()) {
	g.t.Helper()
	for _, call := range calls {
		g.calls.Go(call)
	}
	g.waiting += len(calls)
	pgtest.Until(g.t, "those who should stand in the queue", func() bool { return waitingCalls(g.t.Name()) == g.waiting })
}

// letGo lets the answer through, and returns the messages that were sent for those
// in the queue.
func (g *gathering) letGo() []tapped {
	g.tap.letGo()
	g.calls.Wait()
	return g.tap.since(g.sent + 1)
}

// waitingCalls returns how many goroutines of that test wait for another one to
// bring their answer.
func waitingCalls(test string) (n int) {
	buf := make([]byte, 16<<20)
	for stack := range strings.SplitSeq(string(buf[:runtime.Stack(buf, true)]), "\n\n") {
		waits := strings.Contains(stack, "[select") || strings.Contains(stack, "[chan receive") // the latter where no context can end it
		if waits && strings.Contains(stack, "advisory.(*mux).await(") && strings.Contains(stack, test) {
			n++
		}
	}
	return n
}

func TestCallerAloneSendsAndReadsItself(t *testing.T) {
	t.Parallel()
	tap, locks := quiet(t, pgtest.New(t))
	sent, read := tap.count(), tap.answers()
	const pairs = 200
	for i := range pairs {
		if err := testkit.Acquire(t, locks, fmt.Sprint("key:", i)).Release(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	self := goroutine()
	messages := tap.since(sent)
	if len(messages) != 2*pairs {
		t.Errorf("%d messages for %d calls", len(messages), 2*pairs)
	}
	for _, m := range messages {
		if len(m.asks) != 1 || m.writer != self {
			t.Fatalf("a message of %v, from goroutine %d and not from the caller, %d", m.asks, m.writer, self)
		}
	}
	readers := tap.readersSince(read)
	for _, reader := range readers {
		if reader != self {
			t.Fatalf("an answer was read by goroutine %d and not by the caller, %d", reader, self)
		}
	}
	if len(readers) < 2*pairs {
		t.Errorf("%d answers were seen", len(readers))
	}
}

func TestEachCallerInABatchHearsItsOwnAnswer(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	tap, locks := quiet(t, db)
	// Another session has every third key, of each form, and shares every fifth.
	const n = 600
	name := func(i int) string {
		switch i % 4 {
		case 0:
			return pgxlock.RawKey(int64(i) - n/2)
		case 1:
			return pgxlock.RawKey2(int32(i)-n/2, int32(-i))
		}
		return fmt.Sprint("key:", i)
	}
	others := testkit.Advisory(t, db.NewPool(t), &pgxlock.AdvisoryConfig{MaxLocks: n})
	defer others.Close(context.Background())
	for i := range n {
		switch {
		case i%3 == 0:
			testkit.Acquire(t, others, name(i))
		case i%5 == 0:
			testkit.Acquire(t, others, name(i), pgxlock.Shared)
		}
	}
	errs, calls := make([]error, n), make([]func(), n)
	mode := func(i int) pgxlock.Mode { return pgxlock.Mode(i % 2) }
	for i := range n {
		calls[i] = func() { _, errs[i] = locks.TryAcquire(t.Context(), name(i), mode(i)) }
	}
	g := gather(t, tap, locks)
	g.join(calls...)
	messages := g.letGo()
	for i, err := range errs {
		busy := i%3 == 0 || i%5 == 0 && mode(i) == pgxlock.Exclusive
		if busy != errors.Is(err, pgxlock.ErrNotAcquired) || !busy && err != nil {
			t.Errorf("key %d (%s), held by others: %t; %v", i, mode(i), busy, err)
		}
	}
	if len(messages) != 3 || len(messages[0].asks) != 256 || len(messages[1].asks) != 256 || len(messages[2].asks) != n-512 {
		t.Errorf("%d calls took %d messages, want 3, of 256, 256 and %d", n, len(messages), n-512)
	}
}

func TestThousandKeysAreOneMessageOfTheirOwn(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	tap, locks := quiet(t, pgtest.New(t))
	keys := make([]string, 1000)
	for i := range keys {
		keys[i] = fmt.Sprint("key:", i)
	}
	one := func(key string) func() { return func() { testkit.Acquire(t, locks, key) } }
	g := gather(t, tap, locks)
	g.join(one("before"))
	g.join(func() {
		all, err := locks.AcquireAll(t.Context(), keys)
		if err != nil || len(all) != len(keys) {
			t.Errorf("%d locks, %v", len(all), err)
		}
	})
	g.join(one("behind"), one("at the end"))
	messages := g.letGo()
	var sizes []int
	for _, m := range messages {
		sizes = append(sizes, len(m.asks))
	}
	if fmt.Sprint(sizes) != "[1 1000 2]" {
		t.Errorf("messages of %v, want 1, 1000 and 2", sizes)
	}
}

// A lock that its holder has begun to give back is taken by the next one in the
// same message: the order in which callers ask is the order of the server's doing.
func TestReleaseComesBeforeTheNextAcquire(t *testing.T) {
	t.Parallel()
	tap, locks := quiet(t, pgtest.New(t))
	lock := testkit.Acquire(t, locks, "k")
	g := gather(t, tap, locks)
	g.join(func() {
		if err := lock.Release(t.Context()); err != nil {
			t.Errorf("Release: %v", err)
		}
	})
	g.join(func() {
		next, err := locks.TryAcquire(t.Context(), "k")
		if err != nil {
			t.Errorf("it was being given back: %v", err)
		} else if err := next.Err(); err != nil {
			t.Error(err)
		}
	})
	messages := g.letGo()
	if len(messages) != 1 || len(messages[0].asks) != 2 || !messages[0].asks[0].unlocks() || messages[0].asks[1].unlocks() {
		t.Errorf("messages: %+v, want one that gives back and takes", messages)
	}

	// And from hand to hand, many times.
	const hands, rounds = 4, 100
	baton := make(chan int)
	var passing sync.WaitGroup
	for range hands {
		passing.Go(func() {
			for round := range baton {
				lock, err := locks.TryAcquire(t.Context(), "baton")
				if err == nil {
					err = lock.Release(t.Context())
				}
				if err != nil {
					t.Errorf("round %d: %v", round, err)
				}
				if round == rounds {
					close(baton)
				} else {
					baton <- round + 1
				}
			}
		})
	}
	baton <- 1
	passing.Wait()
}

// A caller that shares a request that was made before does not depend on whether the one
// who made it still waits.
func TestSharedRequestOutlivesWhoMadeIt(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	tap, locks := quiet(t, db)
	ctx, cancel := context.WithCancel(t.Context())
	var lock *pgxlock.Lock
	left := make(chan struct{})
	g := gather(t, tap, locks)
	g.join(func() {
		defer close(left)
		if _, err := locks.TryAcquire(ctx, "k", pgxlock.Shared); !errors.Is(err, context.Canceled) {
			t.Errorf("the one who left: %v", err)
		}
	})
	g.join(func() {
		var err error
		if lock, err = locks.TryAcquire(t.Context(), "k", pgxlock.Shared); err != nil {
			t.Errorf("nobody else has it: %v", err)
		}
	})
	cancel()
	<-left // woken is not gone: the answer may still overtake it
	g.letGo()
	if t.Failed() {
		return
	}
	if err := lock.Release(t.Context()); err != nil {
		t.Error(err)
	}
	if err := locks.Close(t.Context()); err != nil {
		t.Error(err)
	}
	pgtest.Until(t, "nothing is left", func() bool { return advisoryRows(t, db) == 0 })
}

type callersKey struct{}

func TestContextsOfCallersDoNotReachTheConnection(t *testing.T) {
	t.Parallel()
	tap, pool := tappedPool(t, pgtest.New(t))
	locks := testkit.Advisory(t, pool, &pgxlock.AdvisoryConfig{TTL: -1})
	defer locks.Close(context.Background())
	// Minutes away, so that nobody else has such deadlines, and gone at last.
	ctx, cancel := context.WithTimeout(context.WithValue(t.Context(), callersKey{}, true), 2*pgtest.Patience)
	defer cancel()
	callers := make(chan time.Time, 1000)
	bounded := func(by time.Duration) (context.Context, context.CancelFunc) {
		ctx, cancel := context.WithTimeout(ctx, by)
		d, _ := ctx.Deadline()
		callers <- d
		return ctx, cancel
	}
	var working sync.WaitGroup
	for w := range 8 {
		working.Go(func() {
			for i := range 20 {
				short, end := bounded(time.Duration(i) * 100 * time.Microsecond)
				if lock, err := locks.Acquire(short, fmt.Sprint("key:", w)); err == nil {
					lock.Release(short)
				}
				end()
				ctx, cancel := bounded(pgtest.Patience)
				lock, err := locks.Acquire(ctx, fmt.Sprint("key:", w), pgxlock.MaxWait(pgtest.Patience-time.Minute))
				if err != nil {
					t.Errorf("Acquire: %v", err)
					cancel()
					return
				}
				err = lock.Renew(ctx)
				if _, holders := locks.Holders(ctx, "key:0"); holders != nil {
					err = errors.Join(err, holders)
				}
				if i%2 == 0 {
					cancel()
				}
				if err := errors.Join(err, lock.Release(ctx)); err != nil {
					t.Error(err)
				}
				cancel()
			}
		})
	}
	working.Wait()
	close(callers)
	tap.mu.Lock()
	defer tap.mu.Unlock()
	for _, ctx := range tap.contexts {
		if ctx.Value(callersKey{}) != nil {
			t.Error("a caller's context dialled")
		}
	}
	set := make(map[time.Time]bool)
	for _, d := range tap.deadlines {
		set[d.Round(0)] = true
		if left := time.Until(d); left > 30*time.Second {
			t.Errorf("the connection has a deadline in %s: more than any of ours", left)
		}
	}
	for d := range callers {
		if set[d.Round(0)] {
			t.Error("the connection got the deadline of a caller")
		}
	}
	if len(tap.contexts) != 1 || len(set) == 0 {
		t.Errorf("%d dials, want 1; %d deadlines", len(tap.contexts), len(set))
	}
}

// Not parallel: it counts what the whole process allocates.
func TestLockAllocatesLittle(t *testing.T) {
	pgtest.Long(t)
	db := pgtest.New(t)
	locks := testkit.Advisory(t, db.NewPool(t, func(c *pgxpool.Config) { c.MaxConns = 1 }), nil)
	defer locks.Close(context.Background())
	pair := func() {
		if err := testkit.Acquire(t, locks, "k").Release(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	pair()
	n := testing.AllocsPerRun(500, pair)
	t.Logf("%.1f allocations for an Acquire and a Release", n)
	if n > 60 {
		t.Errorf("%.1f allocations for an Acquire and a Release", n)
	}
}
