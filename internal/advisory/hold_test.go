package advisory

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/migrations"
)

// A handClock advances when the test says so.
type handClock struct{ now atomic.Int64 }

func (c *handClock) read() time.Duration     { return time.Hour + time.Duration(c.now.Load()) }
func (c *handClock) advance(d time.Duration) { c.now.Add(int64(d)) }

// The TTL of processes with a handClock, and the margin that it has.
const (
	handTTL    = time.Minute
	handMargin = 6 * time.Second
)

// byHand returns a connected process whose clock advances when the test says so.
func byHand(t *testing.T, db *pgtest.DB) (*process, *handClock) {
	t.Helper()
	c := &handClock{}
	p := newProcess(t, db.Pool, Config{TTL: handTTL}, c.read)
	mustAcquire(t, p, "warm", hold.Exclusive)
	return p, c
}

func mustAcquire(t *testing.T, p *process, key string, mode hold.Mode) held {
	t.Helper()
	lock, err := p.acquire(t.Context(), key, mode)
	if err != nil {
		t.Fatal(err)
	}
	return lock
}

// wantFree checks that no session has the advisory lock once the mux has sent what was in its
// queue.
func wantFree(t *testing.T, p *process, key string) {
	t.Helper()
	if holders, err := p.Holders(t.Context(), []string{key}); err != nil || len(holders) != 0 {
		t.Errorf("the holders of %s are %+v, %v; want none", key, holders, err)
	}
}

// answeredLater reads the answer, 5 s after the message was sent, and hands the lead on.
func answeredLater(t *testing.T, p *process, clock *handClock) {
	t.Helper()
	clock.advance(5 * time.Second)
	if err := p.mux.conn.receive(&p.mux.message); err != nil {
		t.Fatal(err)
	}
	p.mux.answered()
	p.mux.pass()
}

func wantDeadline(t *testing.T, what string, lock *hold.Hold, sent time.Duration) {
	t.Helper()
	if until, err := lock.Ended(); err != nil || until != sent+handTTL-handMargin {
		t.Errorf("%s: the deadline is %s after the message was sent, want %s; %v", what, until-sent, handTTL-handMargin, err)
	}
}

func TestDeadlinesCountFromWhenTheMessageWasSent(t *testing.T) {
	t.Parallel()
	p, clock := byHand(t, pgtest.New(t))
	before := mustAcquire(t, p, "before", hold.Exclusive)
	_ = stall(p.mux)
	clock.advance(handTTL / 2)
	sent := clock.read()
	granted := acquiring(t.Context(), p, "granted", hold.Exclusive)
	queued(t, p.mux, 2)
	if err := p.mux.begin(); err != nil {
		t.Fatal(err)
	}
	answeredLater(t, p, clock)
	got := <-granted
	if got.err != nil {
		t.Fatal(got.err)
	}
	wantDeadline(t, "a lock that the answer grants", got.lock.Hold, sent)
	wantDeadline(t, "a lock that was held before", before.Hold, sent)
}

func TestRenewCountsFromWhenItsMessageWasSent(t *testing.T) {
	t.Parallel()
	p, clock := byHand(t, pgtest.New(t))
	lock := mustAcquire(t, p, "k", hold.Exclusive)
	_ = stall(p.mux)
	clock.advance(time.Second) // too little for the mux to move deadlines
	sent := clock.read()
	renewed := make(chan error, 1)
	go func() { renewed <- p.Renew(t.Context(), lock.Hold) }()
	queued(t, p.mux, 2)
	if err := p.mux.begin(); err != nil {
		t.Fatal(err)
	}
	answeredLater(t, p, clock)
	if err := <-renewed; err != nil {
		t.Error(err)
	}
	wantDeadline(t, "the lock", lock.Hold, sent)
}

func TestGrantThatArrivesAfterItsDeadlineIsReleased(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	p, clock := byHand(t, db)
	_ = stall(p.mux)
	attempts := []hold.Attempt{{Hold: p.newHold("k", hold.Exclusive)}}
	tried := make(chan struct{})
	go func() {
		defer close(tried)
		p.Try(t.Context(), hold.Request{}, attempts)
	}()
	queued(t, p.mux, 2)
	if err := p.mux.begin(); err != nil {
		t.Fatal(err)
	}
	p.mux.ttl = 0 // the session itself is not given up
	clock.advance(handTTL - handMargin - 5*time.Second)
	answeredLater(t, p, clock)
	<-tried
	if err := attempts[0].Err; !errors.Is(err, hold.ErrLateGrant) {
		t.Errorf("the try: %v, want %v", err, hold.ErrLateGrant)
	}
	wantFree(t, p, "k")
}

// A lock that is granted shortly after the mux has moved all deadlines expires before its
// session does.
func TestHoldThatExpiresLocallyIsReleasedInTheSameSession(t *testing.T) {
	t.Parallel()
	p, clock := byHand(t, pgtest.New(t))
	lock := mustAcquire(t, p, "k", hold.Exclusive)
	clock.advance(10 * time.Second) // too little for the mux to move deadlines
	wantFree(t, p, "other")
	p.mu.Lock()
	session := p.session
	p.mu.Unlock()
	clock.advance(handTTL - handMargin - 10*time.Second)
	if err := lock.Err(); !errors.Is(err, lockerr.ErrLost) {
		t.Errorf("after its deadline: %v", err)
	}
	wantFree(t, p, "k")
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.session != session {
		t.Error("it is another session")
	}
}

func TestSessionSendsNothingFromItsMarginOn(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		silent time.Duration
		want   error
	}{
		"before": {handTTL - handMargin - 1, nil},
		"at it":  {handTTL - handMargin, errSilentTooLong},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, clock := byHand(t, pgtest.New(t))
			_ = stall(p.mux)
			next := acquiring(t.Context(), p, "k", hold.Exclusive)
			queued(t, p.mux, 2)
			clock.advance(p.mux.sent + c.silent - clock.read())
			err := p.mux.begin()
			if !errors.Is(err, c.want) {
				t.Errorf("%v, want %v", err, c.want)
			}
			if err != nil {
				p.mux.end(err)
			} else {
				p.mux.finish()
			}
			p.mux.pass()
			if got := <-next; got.err != nil {
				t.Error(got.err)
			}
		})
	}
}

func TestEvictedHolderLosesItsLockAndNoOther(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	if err := migrations.Up(t.Context(), db.Pool, nil); err != nil {
		t.Fatal(err)
	}
	p := connected(t, db.Pool, Config{})
	lock, unharmed := mustAcquire(t, p, "k", hold.Exclusive), mustAcquire(t, p, "unharmed", hold.Exclusive)
	evict := func() {
		t.Helper()
		var had bool
		if err := db.Pool.QueryRow(t.Context(), "select evict_advisory_lock($1, $2, 'it is drained')", p.pid, numberOf("k")).Scan(&had); err != nil || !had {
			t.Fatal(had, err)
		}
		p.Evicted()
		<-p.evicting.Done()
	}
	evict()
	for lock.Err() == nil && t.Context().Err() == nil { // in doubt, soon after the grant, it keeps the lock
		evict()
	}
	if err := lock.Err(); !errors.Is(err, lockerr.ErrLost) || !errors.Is(err, lockerr.ErrEvicted) {
		t.Errorf("the evicted one: %v", err)
	}
	wantFree(t, p, "k")
	next := mustAcquire(t, p, "k", hold.Exclusive)
	p.Evicted() // for the holder before
	<-p.evicting.Done()
	if err := errors.Join(next.Err(), unharmed.Err()); err != nil {
		t.Errorf("the others: %v", err)
	}
}

func TestNamesOfLocksThatAreHeldForLongArePublishedOnce(t *testing.T) {
	t.Parallel()
	p := connected(t, pgtest.New(t).Pool, Config{})
	lock := mustAcquire(t, p, "old", hold.Exclusive)
	young := mustAcquire(t, p, "young", hold.Exclusive)
	young.Since = time.Now().Add(time.Hour)
	lock.Since = time.Now().Add(-nameAfter)
	if names := p.Unpublished(); len(names) != 1 || names[0] != "old" {
		t.Errorf("%q, want old alone", names)
	}
	if names := p.Unpublished(); len(names) != 0 {
		t.Errorf("%q are published again at once", names)
	}
}

func TestGrantOfACallerThatLeftIsReleased(t *testing.T) {
	t.Parallel()
	p := connected(t, pgtest.New(t).Pool, Config{})
	_ = stall(p.mux)
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	left := acquiring(ctx, p, "k", hold.Exclusive)
	queued(t, p.mux, 2)
	if err := p.mux.begin(); err != nil {
		t.Fatal(err)
	}
	leave()
	if got := <-left; !errors.Is(got.err, context.Canceled) {
		t.Errorf("%v, want that its context was cancelled", got.err)
	}
	p.mux.finish()
	p.mux.pass()
	wantFree(t, p, "k")
}

func TestRefusedRequestLeavesNothing(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	other, p := connected(t, db.Pool, Config{}), connected(t, db.Pool, Config{MaxLocks: 1})
	lock := mustAcquire(t, other, "k", hold.Exclusive)
	if _, err := p.try(t.Context(), "k", hold.Exclusive); !errors.Is(err, lockerr.ErrNotAcquired) {
		t.Fatalf("%v, want ErrNotAcquired", err)
	}
	if err := mustAcquire(t, p, "another", hold.Exclusive).release(); err != nil {
		t.Error(err)
	}
	if err := lock.release(); err != nil {
		t.Fatal(err)
	}
	if _, err := p.try(t.Context(), "k", hold.Shared); err != nil {
		t.Errorf("in the other mode: %v", err)
	}
}

func TestProcessHasAtMostMaxLocks(t *testing.T) {
	t.Parallel()
	p := connected(t, pgtest.New(t).Pool, Config{MaxLocks: 2})
	first := mustAcquire(t, p, "first", hold.Shared)
	mustAcquire(t, p, "second", hold.Exclusive)
	if _, err := p.try(t.Context(), "third", hold.Exclusive); !errors.Is(err, lockerr.ErrMaxLocks) {
		t.Errorf("a third: %v, want ErrMaxLocks", err)
	}
	again := mustAcquire(t, p, "first", hold.Shared) // the session has that lock already
	if err := errors.Join(first.release(), again.release()); err != nil {
		t.Fatal(err)
	}
	mustAcquire(t, p, "third", hold.Exclusive)
}

func TestHoldsOfOneProcessExcludeEachOtherUnlessAllShare(t *testing.T) {
	t.Parallel()
	p := connected(t, pgtest.New(t).Pool, Config{})
	for _, c := range []struct {
		name        string
		held, asked hold.Mode
		granted     bool
	}{
		{"exclusive, then exclusive", hold.Exclusive, hold.Exclusive, false},
		{"exclusive, then shared", hold.Exclusive, hold.Shared, false},
		{"shared, then exclusive", hold.Shared, hold.Exclusive, false},
		{"shared, then shared", hold.Shared, hold.Shared, true},
	} {
		mustAcquire(t, p, c.name, c.held)
		_, err := p.try(t.Context(), c.name, c.asked)
		if busy, isBusy := errors.AsType[*hold.Busy](err); c.granted != (err == nil) || !c.granted && (!isBusy || !busy.Here || busy.Holder == "") {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

func TestClosingEndsTheWaitForAnAnswer(t *testing.T) {
	t.Parallel()
	p := connected(t, pgtest.New(t).Pool, Config{})
	resume := stall(p.mux)
	waits := acquiring(context.Background(), p, "k", hold.Exclusive)
	queued(t, p.mux, 2)
	close(p.closing)
	select {
	case got := <-waits:
		if !errors.Is(got.err, lockerr.ErrClosed) {
			t.Errorf("%v, want ErrClosed", got.err)
		}
	case <-time.After(time.Minute):
		t.Error("it still waits")
	}
	resume()
	wantFree(t, p, "k")
}
