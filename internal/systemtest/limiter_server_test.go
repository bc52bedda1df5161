package systemtest_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
	"github.com/pgxlock/pgxlock/ratelimit"
)

// These tests are about what a Limiter does with its server.

// However many ask at once, of however many processes, no more is allowed than there
// is, and no less.
func TestConcurrentCallersAreAllowedExactlyTheBurst(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	var limiters []*ratelimit.Limiter
	for range 4 {
		limiters = append(limiters, newLimiter(t, db, hourly, 5))
	}
	rounds := 5
	if testing.Short() {
		rounds = 1
	}
	for round := range rounds {
		var granted [3]atomic.Int32
		var all sync.WaitGroup
		for i := range 200 {
			all.Go(func() {
				key := i / 4 % len(granted)
				ok, err := limiters[i%4].Allow(t.Context(), fmt.Sprint(round, " ", key))
				for locked(err) {
					ok, err = limiters[i%4].Allow(t.Context(), fmt.Sprint(round, " ", key))
				}
				if err != nil {
					t.Error(err)
				}
				if ok {
					granted[key].Add(1)
				}
			})
		}
		all.Wait()
		for key := range granted {
			if n := granted[key].Load(); n != 5 {
				t.Errorf("round %d, key %d: %d were allowed", round, key, n)
			}
		}
	}
}

// locked reports that somebody had the row of a key locked for too long, here one who
// stood still with it: nothing was counted then.
func locked(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && pgErr.Code == "55P03"
}

const limitSQL = "pgxlock_limit_batch"

// Who left before the answer has not done what was allowed.
func TestEventsAllowedToACallerThatLeftAreReturned(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	p, through := testkit.Proxied(t, db)
	l := newLimiter(t, through, hourly, 1)
	allows(t, l, "other", 1, true)
	isCounted := func() bool {
		return testkit.Query[bool](t, db, "select exists (select from pgxlock_limits where limit_key = 'k' and tat > pgxlock_limit_clock())")
	}
	if isCounted() {
		t.Error("it is counted before anybody asked")
	}
	held := p.Arm(t, testkit.HoldReply, limitSQL)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { _, err := l.Allow(ctx, "k"); ended <- err }()
	held.Happened(t)
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) || errors.Is(err, ratelimit.ErrLimited) {
		t.Errorf("%v", err)
	}
	if !isCounted() {
		t.Fatal("it was not counted")
	}
	held.Resume()
	pgtest.Until(t, "it is given back", func() bool { return !isCounted() })
	allows(t, l, "k", 1, true, false)

	// What was refused is not: it was another one's.
	held = p.Arm(t, testkit.HoldReply, limitSQL)
	ctx, cancel = context.WithCancel(t.Context())
	go func() { _, err := l.Allow(ctx, "k"); ended <- err }()
	held.Happened(t)
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	held.Resume()
	allows(t, l, "yet another", 1, true) // goes with what comes of it, or after that
	allows(t, l, "k", 1, false)
}

// Twice, when the connection breaks; but what is given back is given back once.
func TestLostReplyNeverAllowsMore(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	p, through := testkit.Proxied(t, db)
	l := newLimiter(t, through, hourly, 6)
	allows(t, l, "k", 6, true)
	r := reserves(t, l, "k", 2, 2*time.Hour)
	p.Arm(t, testkit.LoseReply, limitSQL)
	if err := r.Cancel(t.Context()); err != nil {
		t.Fatal(err)
	}
	reserves(t, l, "k", 2, 2*time.Hour) // those of the first call stay used
	p.Arm(t, testkit.LoseReply, limitSQL)
	allows(t, l, "other", 2, true)
	allows(t, l, "other", 3, false) // it counted 4
	allows(t, l, "other", 2, true)
	allows(t, l, "other", 1, false)
}

// A key that somebody keeps locked is neither allowed nor refused, and is in nobody
// else's way for long.
func TestKeyThatIsLockedIsAnError(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	l := newLimiter(t, db, hourly, 10)
	allows(t, l, "new", 1, true)
	tx := testkit.Begin(t, db, pgx.TxOptions{})
	allows(t, l, "k", 1, true)
	for _, key := range []string{"k", "made by it"} {
		if _, err := tx.Exec(t.Context(), "select allow_rate($1, 1 / 3600.0, 10)", key); err != nil {
			t.Fatal(err)
		}
		var all sync.WaitGroup
		for i := range 20 {
			all.Go(func() {
				ok, err := l.Allow(t.Context(), key)
				wantServerError(t, err, "55P03")
				if ok || errors.Is(err, ratelimit.ErrLimited) || err != nil && !strings.Contains(err.Error(), "row locked") {
					t.Errorf("%t, %v", ok, err)
				}
			})
			all.Go(func() { allows(t, l, fmt.Sprint(key, i), 1, true) }) // in one batch with it
		}
		all.Wait()
		if key == "k" {
			testkit.Commit(t, tx)
			allows(t, l, "k", 10, false)
			allows(t, l, "k", 8, true)
			tx = testkit.Begin(t, db, pgx.TxOptions{})
		}
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	allows(t, l, "made by it", 10, true, false)
}

func TestServerThatIsAwayNeitherAllowsNorRefuses(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	p, through := testkit.Proxied(t, db)
	l := newLimiter(t, through, hourly, 5, "this one")
	allows(t, l, "k", 1, true)
	p.Refuse()
	p.Cut()
	ok, err := l.Allow(t.Context(), "k")
	if ok || err == nil || errors.Is(err, ratelimit.ErrLimited) {
		t.Errorf("%t, %v", ok, err)
	}
	if err := l.Wait(t.Context(), "k", pgxlock.MaxWait(time.Millisecond)); err == nil || errors.Is(err, ratelimit.ErrLimited) {
		t.Errorf("%v", err)
	}
	p.Heal()
	// What was abandoned may still be connecting, and those that ask meanwhile fail with it.
	pgtest.Until(t, "the server answers", func() bool {
		ok, err = l.Allow(t.Context(), "k")
		return err == nil
	})
	if !ok {
		t.Error("it refuses")
	}
	testkit.Terminate(t, db, "this one")
	allows(t, l, "k", 1, true)
}

// What is not answered within MaxWait is not waited for.
func TestAnswerIsNotWaitedForLongerThanMaxWait(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	p, through := testkit.Proxied(t, db)
	l := newLimiter(t, through, hourly, 5)
	allows(t, l, "other", 1, true)
	held := p.Arm(t, testkit.HoldReply, limitSQL)
	err := l.Wait(t.Context(), "k", pgxlock.MaxWait(time.Millisecond))
	if err == nil || errors.Is(err, ratelimit.ErrLimited) || strings.Contains(err.Error(), "(") { // what kept the server would stand in brackets
		t.Errorf("%v", err)
	}
	held.Resume()
	pgtest.Until(t, "it is given back", func() bool {
		ok, err := l.AllowN(t.Context(), "k", 5)
		return ok && err == nil
	})
}

func TestCancelIsNotWaitedForWhenItsContextEnds(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	p, through := testkit.Proxied(t, db)
	l := newLimiter(t, through, hourly, 2)
	allows(t, l, "k", 2, true)
	r := reserves(t, l, "k", 2, 2*time.Hour)
	held := p.Arm(t, testkit.HoldReply, limitSQL)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- r.Cancel(ctx) }()
	held.Happened(t)
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	held.Resume()
	reserves(t, l, "k", 2, 2*time.Hour) // it is given back all the same

	// Nor does it matter that it was not sent yet.
	allows(t, l, "other", 2, true)
	r = reserves(t, l, "other", 2, 2*time.Hour)
	held = p.Arm(t, testkit.HoldReply, limitSQL)
	asking := make(chan error, 1)
	go func() { asking <- second(l.Allow(t.Context(), "busy")) }()
	held.Happened(t)
	if err := r.Cancel(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	held.Resume()
	if err := <-asking; err != nil {
		t.Error(err)
	}
	reserves(t, l, "other", 2, 2*time.Hour)
}

func TestCloseOfALimiterIsNotWaitedForWhenItsContextEnds(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	p, through := testkit.Proxied(t, db)
	l := newLimiter(t, through, hourly, 1, "this one")
	allows(t, l, "other", 1, true)
	held := p.Arm(t, testkit.HoldReply, limitSQL)
	allowed := make(chan error, 1)
	go func() { allowed <- second(l.Allow(t.Context(), "k")) }()
	held.Happened(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := l.Close(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("while a call is under way: %v", err)
	}
	held.Resume()
	if err := <-allowed; err != nil { // it had begun
		t.Error(err)
	}
	if err := l.Close(t.Context()); err != nil {
		t.Error(err)
	}
	pgtest.Until(t, "its connection has gone", func() bool {
		return testkit.Query[int](t, db, "select count(*) from pg_stat_activity where datname = current_database() and application_name like '%this one%'") == 0
	})
}
