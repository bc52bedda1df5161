package systemtest_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/pgxlock/pgxlock"
	"github.com/pgxlock/pgxlock/internal/pgtest"
	"github.com/pgxlock/pgxlock/internal/testkit"
)

// A leader whose lease is taken away campaigns again, and gets a greater token.
func TestFormerLeaderCampaignsAgain(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	locks := testkit.NewLocker(t, db, &pgxlock.LeaseConfig{TTL: time.Hour, Renew: 100 * time.Millisecond})
	var terms []int64
	done := errors.New("done")
	err := locks.Lead(t.Context(), "leader", func(ctx context.Context, term *pgxlock.Lock) error {
		terms = append(terms, term.Token())
		if len(terms) >= 3 {
			return done
		}
		db.Exec(t, "delete from distributed_locks")
		<-ctx.Done()
		if !errors.Is(context.Cause(ctx), pgxlock.ErrLost) {
			t.Errorf("term %d ended: %v", len(terms), context.Cause(ctx))
		}
		return errors.New("ignored")
	})
	if !errors.Is(err, done) || len(terms) < 3 || !slices.IsSorted(terms) || len(slices.Compact(slices.Clone(terms))) != len(terms) {
		t.Errorf("%v, terms %v", err, terms)
	}
}

func TestLeaderHearsWhoAskedItToStepDownAndWhy(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	locks := testkit.NewLocker(t, db, nil)
	leads := make(chan context.Context)
	ended := make(chan error, 1)
	go func() {
		ended <- locks.Lead(t.Context(), "leader", func(ctx context.Context, _ *pgxlock.Lock) error {
			leads <- ctx
			<-ctx.Done()
			if e := context.Cause(ctx); !errors.Is(e, pgxlock.ErrStepDown) {
				return e
			}
			return nil
		})
	}()
	ctx := <-leads
	if asked := testkit.Query[bool](t, db, "select ask_to_step_down('nobody', 'why not')"); asked {
		t.Error("nobody was asked")
	}
	if asked := testkit.Query[bool](t, db, "select ask_to_step_down('leader', 'this node is drained')"); !asked {
		t.Error("the leader was not asked")
	}
	<-ctx.Done()
	if why := context.Cause(ctx).Error(); !strings.Contains(why, "by postgres: this node is drained") {
		t.Errorf("it was told %q", why)
	}
	if again := <-leads; again.Err() != nil { // there is nobody else, and the request was for one term
		t.Errorf("its next term: %v", again.Err())
	}
	if err := locks.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if err := <-ended; !errors.Is(err, pgxlock.ErrClosed) {
		t.Errorf("Lead: %v", err)
	}
}

// A request is for the holder at that time, not for the next one.
func TestRequestToStepDownDoesNotMeetTheNextLeader(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	first, second := testkit.NewLocker(t, db, nil), testkit.NewLocker(t, db, nil)
	lock := testkit.Acquire(t, first, "leader") // not by Lead: it does not hear of it
	if err := second.AskToStepDown(t.Context(), "leader"); err != nil {
		t.Fatal(err)
	}
	testkit.Release(t, lock)
	done := errors.New("done")
	err := first.Lead(t.Context(), "leader", func(ctx context.Context, _ *pgxlock.Lock) error {
		// A later request is heard, so that the earlier one would have been.
		terms := 0
		err := first.Lead(t.Context(), "other", func(other context.Context, _ *pgxlock.Lock) error {
			if terms++; terms == 2 { // who was asked to step down campaigns again
				return done
			}
			if err := second.AskToStepDown(t.Context(), "other"); err != nil {
				return err
			}
			<-other.Done()
			return nil
		})
		if ctx.Err() != nil {
			t.Errorf("it was asked: %v", context.Cause(ctx))
		}
		return err
	})
	if !errors.Is(err, done) {
		t.Error(err)
	}
}

// All advisory locks of a process have one session, so that a request of long ago looks like
// one of the current leader there.
func TestRequestToStepDownDoesNotMeetALaterTermOfItsSession(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	looks, watched := testkit.Counted(t, db, "pgxlock_step_downs")
	first, second := testkit.NewAdvisory(t, watched, nil), testkit.NewAdvisory(t, db, &pgxlock.AdvisoryConfig{Owner: "later"})
	lock := testkit.Acquire(t, first, "leader") // not by Lead: it does not hear of it
	if err := first.AskToStepDown(t.Context(), "leader"); err != nil {
		t.Fatal(err)
	}
	testkit.Release(t, lock)
	db.Exec(t, "update pgxlock_step_down set asked_at = asked_at - interval '1 minute'")
	done := errors.New("done")
	terms := 0
	err := first.Lead(t.Context(), "leader", func(ctx context.Context, _ *pgxlock.Lock) error {
		if terms++; terms == 2 {
			return done
		}
		pgtest.Until(t, "it has looked", func() bool {
			db.Exec(t, "notify pgxlock_step_down")
			n, _, _ := looks.Counts()
			return n > 1 || ctx.Err() != nil // the first look has its answer
		})
		if err := second.AskToStepDown(t.Context(), "leader"); err != nil {
			return err
		}
		<-ctx.Done()
		if why := context.Cause(ctx).Error(); !strings.Contains(why, "(later)") {
			t.Errorf("it was asked %q", why)
		}
		return nil
	})
	if !errors.Is(err, done) {
		t.Error(err)
	}
}

// It is made all the same.
func TestRequestIsNotWaitedForWhenItsContextEnds(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := testkit.Migrated(t)
	p, through := testkit.Proxied(t, db)
	locks := testkit.NewLocker(t, through, nil)
	testkit.Acquire(t, locks, "leader")
	held := p.Arm(t, testkit.HoldReply, "pgxlock_ask_to_step_down")
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- locks.AskToStepDown(ctx, "leader") }()
	held.Happened(t)
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	held.Resume()
	if n := testkit.Query[int](t, db, "select count(*) from pgxlock_step_down"); n != 1 {
		t.Errorf("%d requests", n)
	}
}

func TestWatchTellsWhoLeads(t *testing.T) {
	t.Parallel()
	db := testkit.Migrated(t)
	locks, observer := testkit.NewLocker(t, db, nil), testkit.NewLocker(t, db, nil)
	var lock *pgxlock.Lock
	var saw []string
	for holders, err := range observer.Watch(t.Context(), "leader") {
		if err != nil {
			t.Fatal(err)
		}
		switch len(saw) {
		case 0:
			lock = testkit.Acquire(t, locks, "leader", pgxlock.Metadata("10.0.0.7"))
		case 1:
			db.Exec(t, "update distributed_locks set expires_at = expires_at + interval '1 second'") // which is no change of leader
			testkit.Release(t, lock)
			lock = testkit.Acquire(t, locks, "leader")
		case 2:
			testkit.Release(t, lock)
		}
		who := "nobody"
		if len(holders) > 0 {
			who = "leader " + holders[0].Metadata
		}
		if saw = append(saw, who); len(saw) == 4 {
			break
		}
	}
	if got := strings.Join(saw, ", "); got != "nobody, leader 10.0.0.7, leader , nobody" {
		t.Errorf("it saw %s", got)
	}

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for _, err := range observer.Watch(ctx, "leader") {
		if err != nil {
			t.Error(err)
		}
		cancel() // ends it
	}
	if err := observer.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string]string{"leader": "closed", "": "empty"} {
		n := 0
		for holders, err := range observer.Watch(t.Context(), key) {
			if n++; holders != nil || err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("Watch of %q: %v %v, want an error that says %s", key, holders, err, want)
			}
		}
		if n != 1 {
			t.Errorf("Watch of %q told %d times that it cannot", key, n)
		}
	}
}
