package advisory

import (
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock/internal/hold"
	"github.com/pgxlock/pgxlock/internal/lockerr"
	"github.com/pgxlock/pgxlock/internal/pgtest"
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

// answeredLater reads the answer, 5 s after the message was sent, and hands the lead on.
func answeredLater(t *testing.T, p *process, clock *handClock) {
	t.Helper()
	clock.advance(5 * time.Second)
	receive(t, p.mux)
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
	send(t, p.mux)
	answeredLater(t, p, clock)
	got := <-granted
	if got.err != nil {
		t.Fatal(got.err)
	}
	wantDeadline(t, "a lock that the answer grants", got.lock.Hold, sent)
	wantDeadline(t, "a lock that was held before", before.Hold, sent)
}

func TestRenewCountsFromWhenItsMessageWasSent(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	p, clock := byHand(t, pgtest.New(t))
	lock := mustAcquire(t, p, "k", hold.Exclusive)
	_ = stall(p.mux)
	clock.advance(time.Second) // too little for the mux to move deadlines
	sent := clock.read()
	renewed := make(chan error, 1)
	go func() { renewed <- p.Renew(t.Context(), lock.Hold) }()
	queued(t, p.mux, 2)
	send(t, p.mux)
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
	send(t, p.mux)
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
